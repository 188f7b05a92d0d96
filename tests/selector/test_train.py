"""Training and judging: the features of roots are used, held-out prompts stay so, scores count right."""

import numpy as np
import pytest

from engine.core.tree import Expansion
from selector.cost import CostModel
from selector.menu import Menu
from selector.network.evaluate import Chosen, baselines, calibration, chosen_by, scores, table
from selector.network.examples import ExampleFolder, Examples
from selector.network.replay import Totals, best_places, rows_by, seconds_of, static_place
from selector.network.train import SelectorTrainingPlan, split_of, train
from tests.selector.roots import MENU, examples

COSTS = CostModel((0.010, *(0.001,) * 14, 1e-9), (1e-9, 0.001, 1e-9, 1e-9))
EXAMPLES = examples(num_prompts=60)
SECONDS = seconds_of(EXAMPLES, COSTS)
PLAN = SelectorTrainingPlan(max_epochs=40, patience=8, rate=3e-3)


def aside(trained) -> tuple[Examples, np.ndarray, Examples, np.ndarray]:
    """Return what was kept aside and the rest, with their seconds."""
    wanted = set(trained.recipe["prompts"]["test"])
    held = [row for row, prompt in enumerate(EXAMPLES.prompts) if prompt in wanted]
    rest = [row for row, prompt in enumerate(EXAMPLES.prompts) if prompt not in wanted]
    return EXAMPLES.at(held), SECONDS[held], EXAMPLES.at(rest), SECONDS[rest]


@pytest.mark.parametrize("objective", ["tokens", "policy"])
def test_root_features_are_learnt(objective):
    """Counting knows the mean alone; the table knows a blurred entropy; the network reads the state, which determines it all."""
    trained = train(EXAMPLES, SECONDS, SelectorTrainingPlan(objective, max_epochs=60, patience=12, rate=3e-3, batch=32))
    held, held_s, rest, rest_s = aside(trained)
    chosen = [*baselines(rest, rest_s, held, held_s), chosen_by("net", trained.net, held, held_s)]
    closed = {score.name: score.gap_closed for score in scores(chosen, held, held_s) if score.group == "all"}
    assert closed["oracle"] == pytest.approx(1.0)
    assert closed["static"] == pytest.approx(0.0)
    assert closed["net"] > closed["table by entropy"] + 0.1
    assert closed["net"] > 0.7
    assert "| net |" in table(scores(chosen, held, held_s))


def test_the_same_seed_makes_the_same_network():
    plan = SelectorTrainingPlan(max_epochs=2)
    one, other = (train(EXAMPLES, SECONDS, plan) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert one.recipe == other.recipe


def test_parts_share_kinds_and_no_prompts():
    split = split_of(EXAMPLES, PLAN)
    parts = [set(split.train), set(split.stop), set(split.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    kinds = dict(zip(EXAMPLES.prompts, EXAMPLES.kinds, strict=True))
    assert all({kinds[prompt] for prompt in part} == {"even", "odd"} for part in parts)
    with pytest.raises(ValueError, match="too few"):
        split_of(examples(num_prompts=4), PLAN)


def test_folder_returns_the_added_examples(tmp_path):
    folder = ExampleFolder(tmp_path / "examples")
    with pytest.raises(ValueError, match="no examples"):
        folder.read()
    for prompt, rows in rows_by(EXAMPLES.prompts).items():
        folder.add(prompt, EXAMPLES.at(rows), {"command": "c"})
    assert folder.has("p-3")
    assert not folder.has("p-99")
    again, notes = folder.read()
    assert notes == {"command": "c"}
    order = sorted(range(len(EXAMPLES)), key=lambda row: f"roots-{EXAMPLES.prompts[row]}.safetensors")
    expected = EXAMPLES.at(order)
    assert (again.prompts, again.kinds, again.rules) == (expected.prompts, expected.kinds, expected.rules)
    assert (again.tokens_RM == expected.tokens_RM).all()
    assert (again.target_RD == expected.target_RD).all()
    other = examples(num_prompts=1, menu=Menu(MENU.entries[:4]))
    with pytest.raises(ValueError, match="different menus"):
        Examples.joined([EXAMPLES, other])


def test_folder_names_its_run(tmp_path):
    """One that was added to holds shards of several runs: of those of the same kinds the widest command alone makes them all."""
    folder = ExampleFolder(tmp_path)
    for prompt, num_prompts in (("p-0", 2), ("p-1", 6), ("p-2", 4)):
        rows = rows_by(EXAMPLES.prompts)[prompt]
        folder.add(prompt, EXAMPLES.at(rows), {"command": f"collect {num_prompts}", "num_prompts": num_prompts})
    assert folder.read()[1]["command"] == "collect 6"


def test_choice_costs_match_hand_computation():
    tokens_RM = np.array([[1.0, 1.5, 2.0], [1.0, 1.1, 1.2]])
    seconds_RM = np.array([[1.0, 1.2, 1.5], [1.0, 1.2, 1.5]])
    assert best_places(tokens_RM, seconds_RM).tolist() == [2, 0]
    assert static_place(tokens_RM, seconds_RM) == 1  # 2.6 / 2.4 beside 2 / 2 and 3.2 / 3
    assert Totals.of(np.array([2, 0]), tokens_RM, seconds_RM).rate == pytest.approx(3.0 / 2.5)


def test_a_calibration_is_the_distance_of_bins():
    tokens_RM = EXAMPLES.tokens_RM.astype(np.float64)
    places_R = np.full(len(EXAMPLES), 3)
    assert calibration(Chosen("true", places_R, tokens_RM), EXAMPLES).error == pytest.approx(0.0, abs=1e-6)
    off = calibration(Chosen("off", places_R, tokens_RM + 0.25), EXAMPLES)
    assert off.error == pytest.approx(0.25)
    assert list(off.expected) == sorted(off.expected)


def test_steps_cost_what_their_parts_cost():
    chain, place = Expansion(3, 1, 0), MENU.index[Expansion(3, 1, 0)]
    # 10 ms, three more tokens and a row, four drawn nodes, 0.2 thousand keys and 0.8 thousand scores at 1 ms each; 3 passes.
    expected = 0.010 + 0.003 + 0.001 + 0.004 + 0.0002 + 0.0008 + 0.003
    assert SECONDS[0, place] == pytest.approx(expected, rel=1e-4)
    assert chain.num_draft_tokens == 3
