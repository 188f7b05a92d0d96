"""The network: untrained it counts, deeper and wider never bring less, and counting replaces what it cannot predict."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from engine.core.policy import DraftOutcome
from engine.core.tree import Expansion
from selector.acceptance import CountedAcceptance
from selector.menu import Menu, menu_for_all, menu_of
from selector.network.features import SCALARS
from selector.network.net import Inputs, NetShape, SelectorNet, increments_of
from selector.network.net_estimator import NetEstimator
from tests.selector.roots import MENU, WIDTHS, PaperRoots, examples, view

EXAMPLES = examples(num_prompts=3)
SMALL = menu_of(Expansion(4, 1, 0), "traversal", Expansion(2, 2, 2, "delayed_distinct"))


def net_of(menu: Menu = MENU, seed: int | None = None, objective="tokens", rules=("greedy", "traversal")) -> SelectorNet:
    """Return a network; with a seed, a random one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        net = SelectorNet(NetShape(*WIDTHS, rules, tuple(map(str, menu.entries)), objective))
        if seed is not None:
            for parameter in net.parameters():
                parameter.data.normal_(0.0, 1.0)
    return net.eval()


def tokens_of(net: SelectorNet) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(net(Inputs.of(EXAMPLES.features, [1] * len(EXAMPLES))).numpy())


def dominates(large: Expansion, small: Expansion) -> bool:
    """Return whether the larger tree holds the smaller one: the same trunk, or a chain within the path of any tree."""
    if small.branches == 1:
        return small.max_depth <= large.max_depth
    return large.trunk == small.trunk and large.branches >= small.branches and large.depth >= small.depth


DOMINATED = np.array(
    [
        (small, large)
        for small, one in enumerate(MENU.entries)
        for large, other in enumerate(MENU.entries)
        if dominates(other, one)
    ]
)


def check_monotone(tokens_BM: np.ndarray) -> None:
    small_P, large_P = DOMINATED.T
    assert (tokens_BM[:, large_P] >= tokens_BM[:, small_P] - 1e-5).all()


@given(st.integers(1, 10_000))
def test_larger_tree_never_brings_less(seed):
    tokens_BM = tokens_of(net_of(seed=seed))
    check_monotone(tokens_BM)
    assert (tokens_BM[:, 0] == 1.0).all()
    assert (tokens_BM <= np.array(MENU.depths) + 1).all()
    assert tokens_BM.std() > 0.1


def test_increments_of_any_sign_would_show(monkeypatch):
    monkeypatch.setattr("selector.network.net.functional.softplus", lambda x: x)
    with pytest.raises(AssertionError):
        check_monotone(tokens_of(net_of(seed=1)))


def test_a_network_that_has_learnt_nothing_counts():
    chains = [place for place, entry in enumerate(MENU.entries) if entry.branches == 1]
    assert tokens_of(net_of())[:, chains] == pytest.approx(EXAMPLES.counted_RM[:, chains], abs=0.02)
    assert tokens_of(net_of()) == pytest.approx(EXAMPLES.counted_RM, abs=0.1)


def test_own_shaped_trees_are_refused():
    with pytest.raises(ValueError, match="delayed trees only"):
        increments_of(menu_of(Expansion(0, 4, 8, "heap", 16), "traversal"))


def test_file_is_read_with_its_recipe(tmp_path):
    net = net_of(seed=3)
    net.standardise(EXAMPLES.scalars_RS)
    net.save(tmp_path / "net.safetensors", {"command": "made by hand"})
    again, recipe = SelectorNet.load(tmp_path / "net.safetensors")
    assert recipe == {"command": "made by hand"}
    assert again.shape == net.shape
    assert (tokens_of(again) == tokens_of(net)).all()


def test_file_of_another_format_is_refused(tmp_path):
    net = net_of()
    object.__setattr__(net.shape, "scalars", SCALARS[::-1])
    net.save(tmp_path / "other.safetensors", {})
    with pytest.raises(ValueError, match="other scalars"):
        SelectorNet.load(tmp_path / "other.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="no selector"):
        SelectorNet.load(tmp_path / "none.safetensors")


def test_a_damaged_file_is_refused_in_words(tmp_path):
    net_of(seed=1).save(tmp_path / "net.safetensors", {})
    with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in list(file.keys())[1:]}
    for shape in (metadata["shape"], "{}"):
        save_file(tensors, tmp_path / "net.safetensors", metadata={**metadata, "shape": shape})
        with pytest.raises(ValueError, match="damaged selector"):
            SelectorNet.load(tmp_path / "net.safetensors")


def test_unknown_roots_are_counted():
    roots = PaperRoots({"known": 0.9, "unknown": None, "other rule": 0.9})
    estimator, counting = NetEstimator(SMALL, net_of(seed=5), roots), CountedAcceptance(MENU)
    views = [view("known"), view("unknown"), view("other rule", temperature=0.0)]
    rule_less = NetEstimator(SMALL, net_of(seed=5, rules=("traversal",)), roots)
    tokens_BM, nodes_BM, _ = np.array(counting.estimate(views))[..., [MENU.index[entry] for entry in SMALL.entries]].tolist()
    for one in (estimator, rule_less):
        estimates = one.estimate(views)
        assert np.shape(estimates) == (3, 3, len(SMALL))
        assert estimates.nodes == nodes_BM
        assert estimates.tokens[1] == tokens_BM[1]
        assert estimates.tokens[0] != tokens_BM[0]
    part = Menu(SMALL.entries[::2])
    assert np.array_equal(estimator.estimate(views, part), np.array(estimator.estimate(views))[..., ::2])
    assert rule_less.estimate(views).tokens[2] == tokens_BM[2]
    assert estimator.estimate(views).tokens[2] != tokens_BM[2]
    assert roots.is_watched


def test_estimator_continues_counting():
    roots = PaperRoots({"r": 0.5})
    estimator = NetEstimator(MENU, net_of(), roots)
    chain = MENU.index[Expansion(4, 1, 0)]
    before = estimator.estimate([view("r")]).tokens[0][chain]
    for _ in range(60):
        estimator.observe([DraftOutcome("r", Expansion(4, 1, 0), 4, 4, 4)])
        estimator.estimate([view("r")])
    assert estimator.estimate([view("r")]).tokens[0][chain] > before + 1.0


@pytest.mark.parametrize("fault", ["nan", "error"])
def test_failing_network_is_replaced_by_counting(fault, caplog, monkeypatch):
    net = net_of(seed=5)
    estimator = NetEstimator(SMALL, net, PaperRoots({"r": 0.5}))
    if fault == "nan":
        torch.nn.init.constant_(net.get_parameter("heads.1.bias"), float("nan"))
    else:
        monkeypatch.setattr(net, "forward", lambda inputs: torch.zeros(2) @ torch.zeros(3))
    with caplog.at_level(logging.ERROR):
        estimates = [estimator.estimate([view("r")]) for _ in range(3)]
    places = [MENU.index[entry] for entry in SMALL.entries]
    counted_BM = np.array(CountedAcceptance(MENU).estimate([view("r")]).tokens)
    assert estimates[-1].tokens == counted_BM[:, places].tolist()
    assert len(caplog.records) == 1
    assert "counted" in caplog.text


def test_oldest_of_many_sequences_are_read():
    names = [f"r{index}" for index in range(12)]
    estimator = NetEstimator(MENU, net_of(seed=5), PaperRoots(dict.fromkeys(names, 0.9)))
    views = [view(name) for name in names]
    differs_BM = np.not_equal(estimator.estimate(views).tokens, CountedAcceptance(MENU).estimate(views).tokens)
    assert differs_BM.any(1).tolist() == [True] * 8 + [False] * 4


def test_noise_aware_rows_are_not_read():
    """Eight greedy rows beside a younger sampled one: the network has no prediction for their trees."""
    menu = menu_for_all(Expansion(4, 1, 0), "traversal")
    names = [f"r{index}" for index in range(9)]
    views = [view(name, temperature=float(name == "r8")) for name in names]
    net = net_of(Menu(tuple(entry for entry in menu.entries if entry.is_delayed)), seed=5)
    both, counting = NetEstimator(menu, net, PaperRoots(dict.fromkeys(names, 0.9))), CountedAcceptance(menu)
    differs_BM = np.not_equal(both.estimate(views).tokens, counting.estimate(views).tokens)
    assert differs_BM.any(1).tolist() == [False] * 8 + [True]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"not trained for .*, 2\.1\.0, .* and 42 more"):
        NetEstimator(MENU, net_of(Menu(MENU.entries[:3])), PaperRoots({}))
    with pytest.raises(ValueError, match="trained to choose"):
        NetEstimator(MENU, net_of(objective="policy"), PaperRoots({}))
    wide = SelectorNet(NetShape(7, 7, ("traversal",), tuple(map(str, MENU.entries))))
    with pytest.raises(ValueError, match="widths 7 and 7"):
        NetEstimator(MENU, wide, PaperRoots({}))
