"""Trees whose nodes are chosen on the device, level by level: those of rounds, grown with one read of numbers."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.attention.paged import levels
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.reference import attend
from engine.core.policy import ExpansionChoice, FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Row
from engine.core.tree import GrowthCosts, parse_expansion
from engine.core.types import SamplingParams
from engine.draft.checkpoints.chained import Eagle3Drafter
from engine.draft.drafter import RecordedDrafter
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.draft.trees import device_plan, device_rounds
from engine.draft.trees import sampling as children
from engine.draft.trees.grow import DeviceGrower, ModelAloneGrower, RoundGrower, growers_of
from engine.draft.trees.grower import Growth
from engine.engine import Engine
from engine.native import noise
from engine.sampling.noise import gumbels, gumbels_of, signed
from tests.model.attention.test_recordings import CONFIG, ENGINES, replayed, steps_of
from tests.model.draft.test_checkpoint_drafters import checkpoint_engine
from tests.model.draft.test_level_growth import is_same
from tests.model.driving import greedy, run, sampled
from tests.model.passes import CPU
from tests.model.rows import GREEDY, TableDrafter, decoding_row
from tests.model.utils.test_host_waits import READS

TREES = "3.1.0 0.2.4 2.3.2 delayed_distinct.1.3.2 beam.6.3.4 noise_aware.8.4.5 noise_aware.4.1.3 static.7.3.4 greedy_sample.5.3.2"
COSTS = (GrowthCosts(), GrowthCosts(node=0.01, level=0.03), GrowthCosts(nodes=(0.01, 0.02, 0.3)))
REQUESTS = [
    greedy("greedy", [5, 9, 33], max_tokens=16),
    greedy("other", [7, 8, 9, 5, 33, 2], max_tokens=9),
    sampled("seeded", [7, 8, 9, 11], seed=1, max_tokens=16, verifier="coupled"),
    sampled("truncated", [17, 8], seed=2, max_tokens=12, verifier="coupled", top_k=7, top_p=0.9),
]
DRAFTERS = [*ENGINES, "eagle3", "eagle3 of a window"]


class AnyTree:
    """A policy that chooses any tree that a device can grow, with costs of growth."""

    name = "any"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, views):
        trees = tuple(parse_expansion(self._rng.choice(TREES.split())) for _ in views)
        return ExpansionChoice(trees, growth_costs=self._rng.choice(COSTS))

    def observe(self, feedback):
        pass


def engine_of(drafter: str, folder: Path, policy: Any, steps: GraphResources | None = None) -> Engine:
    """Return an engine whose drafter's passes are recorded."""
    steps = steps or steps_of(64, 20_000)
    if drafter not in ENGINES:
        engine = checkpoint_engine(folder, drafter, config=CONFIG)
        engine.target.model.attend = attend
        assert isinstance(engine.drafter, Eagle3Drafter)
        engine.drafter.record(steps, attend, CONFIG.max_model_len).prepare()
    else:
        engine = replayed(ENGINES[drafter]("llama"), steps)
    return Engine(engine.info, CONFIG, engine.target, engine.drafter, policy)


class Compared:
    """Grows by rounds and on the device, and keeps both."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.drafter, RecordedDrafter)
        with_sizes = engine.drafter, engine.info.vocab_size, CPU
        self.by_device, self._by_round = DeviceGrower.of(*with_sizes), RoundGrower(*with_sizes)
        self.pairs: list[tuple[Growth, Growth]] = []
        engine._growers = (engine._growers[0], self, self._by_round)

    def can_grow(self, rows: Sequence[Row]) -> bool:
        return self.by_device.can_grow(rows)

    def grow(self, *given: Any) -> Growth:
        expected = self._by_round.grow(*given)
        found = self.by_device.grow(*given)
        self.pairs.append((found, expected))
        return found

    @property
    def num_different(self) -> int:
        """Steps in which the trees differ. Passes may go on after all trees have ended."""
        return sum(not is_same(structs.replace(found, passes=expected.passes), expected) for found, expected in self.pairs)


def compared(drafter: str, folder: Path, seed: int = 0) -> Compared:
    """Run requests with any trees."""
    engine = engine_of(drafter, folder, AnyTree(seed))
    both = Compared(engine)
    run(engine, REQUESTS)
    return both


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch rank the tokens of rounds, as it does on a device."""
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(children, "_possible_tokens", lambda probs_PM: torch.arange(probs_PM.shape[-1]))


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_devices_grow_the_trees_of_rounds(drafter, tmp_path):
    """Of every ranked kind, side by side, of greedy, seeded and truncated rows. Slots without keys are not read."""
    both = compared(drafter, tmp_path)
    assert sum(expected.num_rounds > 2 for _, expected in both.pairs) > 3
    assert both.num_different == 0
    for found, expected in both.pairs:
        assert found.passes.num_fed == expected.passes.num_fed
        assert found.passes.num_passes >= expected.passes.num_passes


def with_lanes(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutation of what is written to the table."""
    feed = levels.feed_lanes
    return lambda patch: patch.setattr(device_rounds, "feed_lanes", lambda one, lanes, places: feed(one, change(lanes), places))


def by_numbers(name: str, value: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutation of a field of the trees' numbers."""
    numbers = device_plan.PlannedTree.numbers

    def changed(tree, shape):
        found = dict(numbers(tree, shape))
        return {**found, name: [*map(value, found[name])]}

    return lambda patch: patch.setattr(device_plan.PlannedTree, "numbers", changed)


MUTANTS = {
    "tokens": with_lanes(lambda lanes: replace(lanes, ids_BW=lanes.ids_BW + 1)),
    "positions": with_lanes(lambda lanes: replace(lanes, positions_BW=lanes.positions_BW + 1)),
    "states": with_lanes(lambda lanes: replace(lanes, previous_BW=lanes.previous_BW[:, :1].expand_as(lanes.previous_BW))),
    "siblings are seen": with_lanes(lambda lanes: replace(lanes, seen_BWN=lanes.seen_BWN.any(1, keepdim=True) | lanes.seen_BWN)),
    "slots": with_lanes(lambda lanes: replace(lanes, node_slots_BN=lanes.node_slots_BN[:, :1].expand_as(lanes.node_slots_BN))),
    "noise of another position": by_numbers("keys", lambda key: key ^ 1),
    "temperature": by_numbers("temperature", lambda value: 2.0 * value),
    "sharpness": by_numbers("sharpness", lambda value: 5.0 * value),
    "weights": by_numbers("log_prob_weight", lambda value: 4.0 * value),
    "shares": by_numbers("shares", lambda value: 0.3 * value),
    "thresholds": by_numbers("thresholds", lambda value: value + 0.2),
    "cost of a level": by_numbers("level_cost", lambda value: 3.0 * value + 0.2),
    "depth": by_numbers("depth", lambda value: value - 1),
    "rounds": by_numbers("rounds", lambda value: value - 1),
    "lanes": by_numbers("lanes", lambda value: max(1, value - 1)),
    "branches": by_numbers("branches", lambda value: 1),
    "children": by_numbers("num_children", lambda value: min(1, value)),
    "places": by_numbers("places", lambda value: 0),
    "top-k": by_numbers("top_k", lambda value: 1),
    "roots": by_numbers("has_root", lambda value: 0),
    "continued": lambda patch: patch.setattr(device_rounds, "PRIOR_EXPANDED", 100.0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_rounds_are_detected(mutant, tmp_path, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    assert any(compared("head", tmp_path, seed).num_different for seed in range(4))


def test_other_rounding_leaves_texts_alone(tmp_path, monkeypatch):
    """A device with other values of nodes has other trees, which the host verifies as they are."""
    agreements: Any = vars(device_rounds)["agreements"]
    expected = run(engine_of("head", tmp_path, AnyTree(0)), REQUESTS).texts()
    monkeypatch.setattr(device_rounds, "agreements", lambda *given: agreements(*given).sqrt())
    engine = engine_of("head", tmp_path, AnyTree(0))
    both = Compared(engine)
    assert run(engine, REQUESTS).texts() == expected
    assert both.num_different > 0


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Count reads for which a host waits; the attention of tests reads tables, which a kernel does not."""
    reads: list[str] = []

    def counting(name: str, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.endswith("paged/reference.py"):
                reads.append(name)
            return original(*args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield reads


@pytest.mark.parametrize("tree", ["4.1.0", "noise_aware.8.4.5"])
@pytest.mark.parametrize("drafter", ["model", "head", "eagle3"])
def test_drafting_steps_read_once(drafter, tree, tmp_path):
    """Whatever the depth, and for greedy, seeded and truncated rows together. Rounds read at least once for each level."""
    engine = engine_of(drafter, tmp_path, FixedExpansion(parse_expansion(tree)))
    both, by_step = Compared(engine), []
    grow = both.by_device.grow

    def counted(*given: Any) -> Growth:
        with counted_reads() as reads:
            grown = grow(*given)
        by_step.append((reads, grown.num_rounds))
        return grown

    both.grow = counted  # type: ignore[method-assign]
    run(engine, REQUESTS)
    assert all(reads == ["numpy"] for reads, num_rounds in by_step if num_rounds)
    assert sum(num_rounds > 2 for _, num_rounds in by_step) >= 3


def test_noise_by_tensors_has_equal_bits():
    """Bit for bit, by keys in a tensor."""
    keys = [stream_key(seed, 5, Stream.TOKEN) for seed in (0, 7, 1 << 62)]
    ids_M = torch.tensor([3, 0, 59, 17])
    keys_K = torch.tensor([*map(signed, keys)])
    assert torch.equal(gumbels_of(keys_K, ids_M), gumbels(keys, 60)[:, ids_M])
    assert not torch.equal(gumbels_of(keys_K + 1, ids_M), gumbels(keys, 60)[:, ids_M])


@pytest.mark.parametrize(
    ("change", "tree"),
    [
        ({"frequency_penalty": 0.5}, "2.1.0"),
        ({"typical_p": 0.5, "temperature": 1.0}, "2.1.0"),
        ({}, "heap.6.3.3"),
        ({}, "calibrated.6.3.3"),
        ({}, "threshold.6.3.3"),
    ],
)
def test_other_trees_grow_in_rounds(change, tree, tmp_path):
    """Edits depend on the tokens of a path, and these shapes on single tokens."""
    engine = engine_of("model", tmp_path, AnyTree(0))
    grower = Compared(engine).by_device
    row = decoding_row(sampling=GREEDY, verifier="coupled", expansion=parse_expansion("2.1.0"))
    assert grower.can_grow(
        [row, structs.replace(row, expansion=parse_expansion("0.1.0"), sampling=SamplingParams(logit_bias=((3, 1.0),)))]
    )
    assert not grower.can_grow([row, structs.replace(row, sampling=replace(GREEDY, **change), expansion=parse_expansion(tree))])
    assert not grower.can_grow([structs.replace(row, sampling=SamplingParams(), verifier="traversal")])


@pytest.mark.parametrize("steps", [lambda: steps_of(4, 20_000), lambda: steps_of(64, 900)], ids=["tokens", "capacity"])
def test_steps_beyond_recordings_grow_in_rounds(steps, tmp_path):
    engine = engine_of("head", tmp_path, AnyTree(0), steps())
    both = Compared(engine)
    texts = run(engine, REQUESTS).texts()
    assert both.num_different == 0
    assert texts == run(engine_of("head", tmp_path, AnyTree(0)), REQUESTS).texts()


def test_tables_by_row_grow_in_rounds(tmp_path):
    """The keys of a token are in its own order there, which the host must know."""
    steps = steps_of(64, 20_000)
    by_row = GraphResources(steps.buffer, PaddingShapes(64, is_by_row=True), steps.recorder)
    engine = engine_of("head", tmp_path, AnyTree(0), by_row)
    both = Compared(engine)
    run(engine, REQUESTS[:2])
    assert all(found.passes == expected.passes for found, expected in both.pairs)


def test_devices_grow_levels_where_passes_are_recorded(tmp_path):
    engine, meta = engine_of("head", tmp_path, AnyTree(0)), torch.device("meta")
    assert not any(isinstance(one, DeviceGrower) for one in growers_of(engine.drafter, 61, CPU))
    growers = growers_of(engine.drafter, 61, meta)
    assert isinstance(growers[1], DeviceGrower)
    unrecorded = growers_of(ENGINES["head"]("llama").drafter, 61, meta)
    row = decoding_row(sampling=GREEDY)
    assert [growers[1].can_grow([row]), unrecorded[1].can_grow([row])] == [True, False]
    assert not any(isinstance(one, DeviceGrower) for one in growers_of(TableDrafter(torch.zeros(61, 61)), 61, meta))


class Noted:
    """A grower that notes whether it can grow each step."""

    def __init__(self, grower: Any, notes: list[bool]) -> None:
        self._grower, self._notes = grower, notes
        self.grow = grower.grow

    def can_grow(self, rows: Sequence[Row]) -> bool:
        self._notes.append(self._grower.can_grow(rows))
        return self._notes[-1]


@pytest.mark.parametrize("drafter", ["model", "head", "eagle3"])
def test_models_grow_alone_without_cached_text(drafter, tmp_path):
    """Served drafters are combined with cached text. Where it predicts nothing, one read grows the model's trees."""
    texts = {}
    for name in ("rounds", "device"):
        engine = engine_of(drafter, tmp_path / name, FixedExpansion(parse_expansion("2.2.2")))
        assert engine.drafter is not None
        combined = CombinedDrafter(engine.drafter, TextCache(min_tokens=2), 61, CPU)
        engine = Engine(engine.info, CONFIG, engine.target, combined, FixedExpansion(parse_expansion("2.2.2")))
        grown: list[bool] = []
        if name == "device":
            alone = growers_of(combined, 61, torch.device("meta"))[1]
            assert isinstance(alone, ModelAloneGrower)
            assert isinstance(alone.of_model, DeviceGrower)
            by_model = DeviceGrower.of(engine.drafter.model, 61, CPU)  # type: ignore[union-attr]
            alone = ModelAloneGrower(by_model, combined.texts)
            engine._growers = (engine._growers[0], Noted(alone, grown), engine._growers[-1])
        texts[name] = run(engine, [*REQUESTS, greedy("repeats", [5, 9, 33] * 4, max_tokens=16)]).texts()
    assert texts["rounds"] == texts["device"]
    assert {True, False} == set(grown)  # steps without cached text, and with
