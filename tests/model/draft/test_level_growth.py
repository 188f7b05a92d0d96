"""Trees of drafters that predict all levels at once: those of rounds, grown with one read of numbers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from engine.attention.paged.graph_recorder import Unrecorded
from engine.core.policy import FixedExpansion
from engine.core.step_plan import Feeding, Row
from engine.core.tree import parse_expansion
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, GrowingTree, LevelProposal, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.trees import grow as growth
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.device_growth import LevelGrowth
from engine.draft.trees.device_rounds import LevelRounds
from engine.draft.trees.grow import LevelGrower, RoundGrower, growers_of
from engine.draft.trees.grower import Growth, UnreadGrowth
from engine.draft.trees.sampling import ChildCandidates
from engine.native import noise
from engine.utils.host_transfer import arrays_of
from tests.model.draft.test_checkpoint_drafters import REQUESTS, checkpoint_engine
from tests.model.driving import greedy, run, sampled
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.passes import CPU
from tests.model.rows import GREEDY, TableDrafter, decoding_row
from tests.model.utils.test_host_waits import READS

V, M = 20, 14
TREES = "3.1.0 0.2.4 2.3.2 beam.6.3.4 noise_aware.8.4.5 noise_aware.4.1.3 static.7.3.4 heap.6.3.3 calibrated.6.3.3"
EXPANSIONS = [*map(parse_expansion, TREES.split())]
SAMPLING = [
    (GREEDY, "coupled"),
    (SamplingParams(temperature=1.0), "coupled"),
    (SamplingParams(temperature=0.6), "coupled"),
    (SamplingParams(top_k=3), "coupled"),
]


class Levels:
    """Logits of some levels [L, M] for each request, the same for all nodes of a level. The first request of three has none."""

    name = "levels"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, seed: int, num_levels: int, is_trimmed: bool) -> None:
        self._seed, self._num_levels = seed, num_levels
        self._vocab = TrimmedVocabulary(torch.arange(0, M) + 3, V) if is_trimmed else None
        self._num_known = M if is_trimmed else V

    def _logits(self, row: Row) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + int(row.request_id))
        logits_LM = torch.randn(self._num_levels, self._num_known, generator=generator) * 2
        logits_LM[self._num_levels // 2, 0] = float("nan") if int(row.request_id) % 4 == 3 else 0.0
        return logits_LM

    def feed_levels(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> LevelProposal:
        indices = tuple(index for index, root in enumerate(roots) if int(root.tree.row.request_id) % 3 != 1)
        empty = torch.empty(0, 0, self._num_known)
        logits_BLM = torch.stack([self._logits(roots[index].tree.row) for index in indices]) if indices else empty
        return LevelProposal(indices, logits_BLM, ModelPasses(1, len(rows)), self._vocab)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        return replace(self.extend(roots), passes=ModelPasses(1, len(rows)))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        indices = [
            index
            for index, one in enumerate(frontier)
            if int(one.tree.row.request_id) % 3 != 1 and one.tree.depths[one.node] < self._num_levels
        ]
        found = [self._logits(frontier[index].tree.row)[frontier[index].tree.depths[frontier[index].node]] for index in indices]
        logits_PM = torch.stack(found) if found else torch.empty(0, self._num_known)
        return Proposal(tuple(indices), logits_PM, vocab=self._vocab)


def shape_of(grown: Growth) -> list[object]:
    """Return all of a growth but tensors and numbers that round by the batch."""
    rest = (grown.fed, grown.sources, grown.rounds, grown.num_rounds, grown.passes)
    tokens = [{node: one.token_ids for node, one in of_tree.items()} for of_tree in grown.candidates]
    return [grown.forest.trees, grown.forest.probs_rows, tokens, *rest]


def numbers_of(grown: Growth) -> list[float]:
    """Return the probabilities, noise and values of a growth."""
    offers = [one for of_tree in grown.candidates for one in of_tree.values() if isinstance(one, ChildCandidates)]
    values = [value for one in grown.node_values if one is not None for part in (one.chances, one.given_parent) for value in part]
    probs = [prob for of_tree in grown.draft_probs for prob in of_tree]
    return [*(number for one in offers for number in (*one.probs, *one.noise, one.collision)), *values, *probs]


def is_same(found: Growth, expected: Growth) -> bool:
    """Return whether both are one growth, up to rounding."""
    numbers = (numbers_of(found), numbers_of(expected))
    return shape_of(found) == shape_of(expected) and numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-7, nan_ok=True)


def rows_of(seed: int, count: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 100, (count, 2), generator=generator).tolist()
    made = []
    for index, (tree, kind) in enumerate(picks):
        sampling, verifier = SAMPLING[kind % len(SAMPLING)]
        expansion = EXPANSIONS[tree % len(EXPANSIONS)]
        row = decoding_row((5, 6, 7), expansion, sampling, verifier, seed=seed + index, request_id=str(index))
        made.append(structs.replace(row, is_traced=index % 2 == 0))
    return made


def grown_by(seed: int, num_levels: int, is_trimmed: bool, count: int) -> tuple[Growth, Growth]:
    """Return the growth by levels and by rounds."""
    drafter, rows = Levels(seed, num_levels, is_trimmed), rows_of(seed, count)
    growers = (LevelGrower(drafter, V, CPU), RoundGrower(drafter, V, CPU))
    assert growers[0].can_grow(rows)
    return tuple(one.grow(rows, Calibrations(), None) for one in growers)  # type: ignore[return-value]


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.integers(1, 6), st.booleans())
def test_levels_grow_the_trees_of_rounds(seed, num_levels, is_trimmed, count, has_library):
    """Of every ranked tree and sampling, where logits are invalid or missing, ranked by our library or by torch."""
    with pytest.MonkeyPatch.context() as patch:
        if not has_library:
            patch.setattr(noise, "can_choose", lambda _: False)
        found, expected = grown_by(seed, num_levels, is_trimmed, count)
    assert is_same(found, expected)


class RecordedLevels(Levels):
    """The same, over which rounds can be recorded."""

    recorder = Unrecorded()


def grown_on_device(seed: int, num_levels: int, is_trimmed: bool, count: int) -> tuple[Growth, Growth]:
    """Return the growth on the device, and by rounds."""
    drafter = RecordedLevels(seed, num_levels, is_trimmed)
    rows = [row for row in rows_of(seed, count) if row.expansion.tree not in ("heap", "calibrated")]
    grower = LevelGrower(drafter, V, CPU, LevelGrowth(drafter))
    started = grower.start(rows, Calibrations(), None)
    assert isinstance(started, UnreadGrowth) == bool(rows)
    found = started.read(arrays_of(started.results)) if isinstance(started, UnreadGrowth) else started
    return found, RoundGrower(drafter, V, CPU).grow(rows, Calibrations(), None)


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.integers(1, 6))
def test_devices_grow_the_trees_of_rounds(seed, num_levels, is_trimmed, count):
    """Also where a tree is deeper than the levels, and where the drafter proposes after no root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "can_choose", lambda _: False)
        found, expected = grown_on_device(seed, num_levels, is_trimmed, count)
    assert is_same(found, expected)


def of_first_level(rounds):
    rounds._lanes.depth.zero_()
    return ranked_of_levels(rounds)


def below_the_last_level(rounds):
    return ranked_of_levels(rounds)._replace(squares_P1=torch.ones(rounds._lanes.depth.numel(), 1, dtype=torch.float64))


ranked_of_levels = LevelRounds._ranked


@pytest.mark.parametrize("mutant", [of_first_level, below_the_last_level])
def test_wrong_levels_on_devices_are_detected(mutant, monkeypatch):
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(LevelRounds, "_ranked", mutant)
    assert any(not is_same(*grown_on_device(seed, 2, False, 6)) for seed in range(5))


@pytest.mark.parametrize("tree", ["heap.6.3.3", "33.1.0"])
def test_other_levels_are_grown_by_hosts(tree):
    """Trees whose shape depends on single tokens, and more levels than are ranked together."""
    drafter = RecordedLevels(0, 3, False)
    growth = LevelGrowth(drafter)
    row = decoding_row(sampling=GREEDY, verifier="coupled", request_id="0")
    others = [structs.replace(row, expansion=parse_expansion(tree))] * 5
    assert growth.can_grow([row] * 5)
    assert not growth.can_grow(others)
    assert not LevelGrowth(Levels(0, 3, False)).can_grow([row])
    grown = LevelGrower(drafter, V, CPU, growth).start(others, Calibrations(), None)
    assert isinstance(grown, Growth)


def with_one_noise(root, num_levels):
    return [next(level_nodes(root, num_levels))] * num_levels


def with_few_draws(root, num_levels):
    return [FrontierNode(node.tree, node.node, 2) for node in level_nodes(root, num_levels)]


def without_sharpness(root, num_levels):
    return list(level_nodes(replace(root, tree=GrowingTree(root.tree.row, 3.0)), num_levels))


level_nodes = growth._level_nodes


@pytest.mark.parametrize("mutant", [with_one_noise, with_few_draws, without_sharpness])
def test_wrong_levels_are_detected(mutant, monkeypatch):
    monkeypatch.setattr(growth, "_level_nodes", mutant)
    pairs = [grown_by(seed, 5, False, 6) for seed in range(5)]
    assert any(not is_same(found, expected) for found, expected in pairs)


def test_nodes_get_no_more_than_they_need(monkeypatch):
    monkeypatch.setattr("engine.draft.trees.sampling.ChildCandidates.first", lambda own, _: own)
    pairs = [grown_by(seed, 5, False, 6) for seed in range(5)]
    assert any(not is_same(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("change", [{"frequency_penalty": 0.5}, {"logit_bias": ((3, 1.0),)}])
def test_edited_rows_grow_in_rounds(change):
    """Edits depend on the tokens of a path; so does a sampled tree."""
    grower = LevelGrower(Levels(0, 3, False), V, CPU)
    row = decoding_row(sampling=replace(GREEDY, **change), verifier="coupled")
    assert not grower.can_grow([row])
    assert grower.can_grow([structs.replace(row, sampling=GREEDY)])
    assert not grower.can_grow([decoding_row(verifier="traversal")])
    assert grower.can_grow([structs.replace(row, expansion=parse_expansion("0.1.0"))])


def test_many_levels_grow_in_rounds():
    """All are in memory together: a distribution of 150,000 tokens takes several megabytes to rank."""
    grower, row = LevelGrower(Levels(0, 3, False), V, CPU), decoding_row(sampling=GREEDY, verifier="coupled")
    deep, plain = (structs.replace(row, expansion=parse_expansion(tree)) for tree in ("16.1.0", "0.1.0"))
    assert grower.can_grow([deep] * 16 + [plain] * 99)
    assert not grower.can_grow([deep] * 17)


@pytest.mark.parametrize("name", ["medusa", "dflash", "dflash of a window"])
def test_checkpoints_grow_by_levels(name, tmp_path):
    """Step by step over real drafters, whose growth by rounds is compared; prompts in chunks are fed too."""
    engine = checkpoint_engine(tmp_path, name, RandomExpansion(3))
    assert engine.drafter is not None
    vocab_size, num_compared = engine.info.vocab_size, 0
    by_level, by_round = (make(engine.drafter, vocab_size, CPU) for make in (LevelGrower, RoundGrower))  # type: ignore[arg-type]

    class Both:
        """Grows by levels and by rounds."""

        can_grow = staticmethod(by_level.can_grow)

        def grow(self, rows, calibrations, grammars):
            nonlocal num_compared
            expected = by_round.grow(rows, calibrations, grammars)
            found = by_level.grow(rows, calibrations, grammars)
            assert is_same(found, expected)
            num_compared += expected.num_rounds > 1
            return found

    engine._growers = (engine._growers[0], Both(), by_round)
    run(engine, [one for one in REQUESTS if one.sampling.is_greedy or one.speculation.verifier is None])
    assert num_compared > 3


@pytest.mark.parametrize("tree", ["3.1.0", "noise_aware.8.4.5"])
def test_growth_by_levels_reads_once(tree, tmp_path, monkeypatch):
    """A wait for each kind of ranking, whatever the depth; in rounds there is one for each level."""
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr("engine.draft.trees.sampling._possible_tokens", lambda probs_PM: torch.arange(probs_PM.shape[-1]))
    by_level, by_round = (reads_of_growth(tmp_path / way.__name__, way, tree) for way in (LevelGrower, RoundGrower))
    assert by_level.num_reads <= 2 * by_level.num_steps < by_level.num_rounds
    assert by_level.num_reads < by_round.num_reads


class Reads(NamedTuple):
    """What growth read in a run."""

    num_reads: int
    num_steps: int
    num_rounds: int


def reads_of_growth(folder: Path, way: type[LevelGrower] | type[RoundGrower], tree: str) -> Reads:
    """Run with Medusa heads, and count."""
    engine = checkpoint_engine(folder, "medusa", FixedExpansion(parse_expansion(tree)))
    assert engine.drafter is not None
    grower = way(engine.drafter, engine.info.vocab_size, CPU)  # type: ignore[arg-type]
    grown: list[Growth] = []
    num_reads = 0

    def counting(original):
        def read(*args, **kwargs):
            nonlocal num_reads
            num_reads += 1
            return original(*args, **kwargs)

        return read

    def grow(*given):
        with pytest.MonkeyPatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
            grown.append(grower.grow(*given))
        return grown[-1]

    engine._growers = (engine._growers[0], SimpleNamespace(can_grow=grower.can_grow, grow=grow))
    run(engine, [greedy("one", [5, 9, 33]), sampled("two", [7, 8], seed=1, max_tokens=9)])
    return Reads(num_reads, len(grown), sum(one.num_rounds for one in grown))


def test_only_devices_grow_by_levels():
    """A processor has nothing to wait for, and would rank levels that a tree does not reach."""
    drafter = Levels(0, 3, False)
    assert not any(isinstance(one, LevelGrower) for one in growers_of(drafter, V, CPU))
    assert isinstance(growers_of(drafter, V, torch.device("meta"))[1], LevelGrower)
    assert not any(isinstance(one, LevelGrower) for one in growers_of(TableDrafter(torch.zeros(V, V)), V, torch.device("meta")))
