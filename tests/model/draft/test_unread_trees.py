"""Steps whose trees the host reads with the target's choices: the trees and texts of steps that read trees first, by one read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.paged.completion import GrownNodes
from engine.attention.paged.graphs import GraphedFunction
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.reference import _seen, attend
from engine.attention.paged.table import NUM_TILE_FIELDS, PagedBatch, Shape, num_words
from engine.attention.scoring import Scoring
from engine.core.policy import ExpansionChoice, FixedExpansion
from engine.core.tree import GrowthCosts, parse_expansion
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.draft.trees.device_growth import LevelGrowth
from engine.draft.trees.grow import DeviceGrower, LevelGrower, ModelAloneGrower, RoundGrower
from engine.draft.trees.grower import Growth, UnreadGrowth
from engine.engine import Engine
from engine.model import passes, target
from engine.model.passes import RecordedPasses
from engine.native import distributions, noise
from engine.sampling import choice_reference, device_choice
from engine.utils.device_clock import DeviceClock
from tests.model.attention.test_recordings import CONFIG, steps_of
from tests.model.draft.test_checkpoint_drafters import checkpoint_engine
from tests.model.draft.test_device_growth import REQUESTS, AnyTree, counted_reads, engine_of
from tests.model.draft.test_level_growth import numbers_of, shape_of
from tests.model.driving import Outcome, greedy, run, sampled
from tests.model.passes import CPU

LEVELS = ("medusa", "dflash")
LONG = [3 + (5 * place) % 50 for place in range(40)]  # more than a step's tokens
CROWD = [
    *REQUESTS,
    greedy("long", LONG, max_tokens=7),
    sampled("late", LONG[:9], seed=7, max_tokens=9, verifier="coupled", temperature=0.6),
]


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a processor for a GPU whose kernels are their references."""
    monkeypatch.setattr(distributions, "can_read", lambda _: False)
    monkeypatch.setattr(noise, "can_choose", lambda _: False)
    monkeypatch.setattr(device_choice, "can_choose_on", lambda _: True)
    monkeypatch.setattr(device_choice, "chosen", choice_reference.chosen)


@dataclass
class Watched:
    """An engine whose trees grow on the device, and its steps: plans, trees, results, and whether trees filled their room."""

    engine: Engine
    steps: list[SimpleNamespace] = field(default_factory=list)

    @classmethod
    def of(
        cls, drafter: str, folder: Path, policy: Any, reads_first: bool = False, num_slots: int = CONFIG.num_slots
    ) -> "Watched":
        steps, config = steps_of(64, 20_000), replace(CONFIG, num_slots=num_slots)
        if drafter in LEVELS:
            engine = checkpoint_engine(folder, drafter, config=CONFIG)
            engine.target.model.attend = attend
            engine.drafter.recorder = steps.recorder  # type: ignore[union-attr]
        else:
            engine = engine_of(drafter, folder, policy, steps)
        if not isinstance(engine.target._passes, passes.RecordedPasses):
            engine.target.record(steps)
        engine = Engine(engine.info, config, engine.target, engine.drafter, policy)
        sizes = engine.drafter, engine.info.vocab_size, CPU
        by_device: Any = LevelGrower(*sizes, LevelGrowth(engine.drafter)) if drafter in LEVELS else DeviceGrower.of(*sizes)  # type: ignore[arg-type]
        engine._growers = (engine._growers[0], by_device, RoundGrower(*sizes))  # type: ignore[arg-type]
        return cls._watching(engine, reads_first)

    @classmethod
    def with_text(cls, drafter: str, folder: Path, policy: Any, reads_first: bool) -> "Watched":
        """Return an engine whose drafter is combined with cached text, as it is served."""
        own = cls.of(drafter, folder, policy).engine
        assert own.drafter is not None
        combined = CombinedDrafter(own.drafter, TextCache(min_tokens=2), own.info.vocab_size, CPU)
        engine = Engine(own.info, CONFIG, own.target, combined, policy)
        alone = ModelAloneGrower(own._growers[1], combined.texts)
        engine._growers = (engine._growers[0], alone, engine._growers[-1])
        return cls._watching(engine, reads_first)

    @classmethod
    def _watching(cls, engine: Engine, reads_first: bool) -> "Watched":
        watched = cls(engine)
        forward = engine._forward

        def noted(plan: Any, grown: Growth | UnreadGrowth) -> Any:
            growth, passed = forward(plan, grown)
            if not watched.steps or watched.steps[-1].plan is not plan:  # else it has read first, and called itself
                trees = grown.trees if isinstance(grown, UnreadGrowth) else growth.forest.trees
                sizes = zip(trees, growth.forest.trees, strict=True)
                is_full = all(tree.num_nodes == room.num_nodes for room, tree in sizes)
                watched.steps.append(SimpleNamespace(plan=plan, is_full=is_full, growth=growth, passed=passed))
            return growth, passed

        engine._forward = noted  # type: ignore[method-assign]
        if reads_first:
            engine.target.forward_unread = lambda *_: None  # type: ignore[method-assign]
        return watched

    @property
    def unread(self) -> list[SimpleNamespace]:
        return [step for step in self.steps if step.passed.choices]


def both_ways(drafter: str, folder: Path, seed: int = 0, num_slots: int = CONFIG.num_slots) -> tuple[Watched, bool]:
    """Run requests with any trees in both ways; return whether texts, trees and logits are equal, up to rounding."""
    ways = [Watched.of(drafter, folder / str(reads), AnyTree(seed), reads, num_slots) for reads in (False, True)]
    texts = [run(one.engine, CROWD).texts() for one in ways]
    assert not ways[1].unread
    pairs = [*zip(*(one.steps for one in ways), strict=False)]
    return ways[0], texts[0] == texts[1] and all(is_same_step(found, expected) for found, expected in pairs)


def is_same_step(found: SimpleNamespace, expected: SimpleNamespace) -> bool:
    logits = found.passed.nodes_NV, expected.passed.nodes_NV
    numbers, shapes = ([of(one.growth) for one in (found, expected)] for of in (numbers_of, shape_of))
    is_near = numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6, nan_ok=True)
    return shapes[0] == shapes[1] and is_near and torch.allclose(*logits, atol=1e-4)


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("drafter", ["model", "repadded", "head", "eagle3", "eagle3 of a window", *LEVELS])
@pytest.mark.parametrize("num_slots", [64, 90])
def test_unread_trees_are_those_read_first(drafter, num_slots, tmp_path):
    """Also beside prompt chunks, for trees that end early, and with so few slots that trees are cut and requests preempted."""
    num_smaller = num_full = num_with_chunk = 0
    for seed in range(4):
        found, are_equal = both_ways(drafter, tmp_path, seed, num_slots)
        assert are_equal
        num_smaller += sum(not step.is_full for step in found.unread)
        num_full += sum(step.is_full for step in found.unread)
        num_with_chunk += sum(not all(row.is_decoding for row in step.plan.rows) for step in found.unread)
    assert min(num_smaller, num_full, num_with_chunk) >= 4


def attend_by_query(query_THGK: Tensor, keys_SHK: Tensor, values_SHV: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    """Return what the reference does, where each query adds up the keys that it sees and no zeros of others."""
    out = query_THGK.new_zeros(*query_THGK.shape[:3], values_SHV.shape[-1])
    tiles = batch.table[batch.first_tile :][: batch.shape.num_tokens * NUM_TILE_FIELDS].view(-1, NUM_TILE_FIELDS).tolist()
    for first, num_queries, first_key, num_keys, _, num_tail, first_word, first_query in tiles:
        if not first_query and num_keys and num_queries:
            words = batch.table[first_word : first_word + num_queries * num_words(num_tail)].view(num_queries, -1)
            for token, seen_L in enumerate(_seen(words, num_keys, num_tail), start=first):
                slots_L = batch.table[first_key : first_key + num_keys].long()[seen_L]
                scores = torch.einsum("hgk,lhk->hgl", query_THGK[token], keys_SHK[slots_L]) * scoring.scale
                out[token] = torch.einsum("hgl,lhv->hgv", scoring.weights(scores), values_SHV[slots_L])
    return out


@pytest.mark.parametrize("drafter", ["model", "head", "eagle3"])
def test_absent_nodes_change_no_bit(drafter, tmp_path, monkeypatch):
    """Of any logit, in passes that are padded to the same shape."""
    monkeypatch.setattr(PaddingShapes, "shape_of", lambda *_: Shape(64, 64))
    num_smaller = 0
    for seed in range(3):
        ways = [Watched.of(drafter, tmp_path / f"{seed}{reads}", AnyTree(seed), reads) for reads in (False, True)]
        for one in ways:
            one.engine.target.model.attend = attend_by_query
            run(one.engine, CROWD)
        for found, expected in zip(*(one.steps for one in ways), strict=True):
            assert torch.equal(found.passed.nodes_NV, expected.passed.nodes_NV)
            num_smaller += not found.is_full
    assert num_smaller >= 3


def reads_by_step(one: Watched, requests: Sequence[Any]) -> list[tuple[list[str], list[str]]]:
    """Return the reads of each step, and the decoding rows' kinds of it."""
    step, found = one.engine.step, []

    def counted() -> Any:
        with counted_reads() as reads:
            output = step()
        rows = one.steps[-1].plan.decoding
        found.append((reads, ["plain" if row.expansion.is_plain else row.verifier for row in rows]))
        return output

    one.engine.step = counted  # type: ignore[method-assign]
    run(one.engine, requests)
    return found


@pytest.mark.parametrize("tree", ["4.1.0", "noise_aware.8.4.5", "0.1.0"])
@pytest.mark.parametrize("drafter", ["model", "head", "eagle3", "medusa"])
def test_steps_read_once(drafter, tree, tmp_path):
    """Of drafting rows, greedy and coupled together, and of plain ones. A step that reads trees first reads twice."""
    requests = [one for one in CROWD if one.request_id != "truncated"]  # which is verified level by level
    reads = {}
    for reads_first in (False, True):
        one = Watched.of(drafter, tmp_path / str(reads_first), FixedExpansion(parse_expansion(tree)), reads_first)
        reads[reads_first] = reads_by_step(one, requests)
    steps = [*zip(*reads.values(), strict=True)]
    drafting = [(found, expected) for (found, kinds), (expected, _) in steps if {*kinds} - {"plain"}]
    plain = [(found, expected) for (found, kinds), (expected, _) in steps if {*kinds} == {"plain"}]
    assert all(found == ["numpy"] and expected == ["numpy", "tolist"] for found, expected in drafting)
    assert all(found == expected == ["tolist"] for found, expected in plain)
    assert (len(drafting) > 3) != (tree == "0.1.0")
    assert plain


def test_cached_text_is_read_first(tmp_path):
    """Other steps of the same drafter are read once."""
    repeating, policy = greedy("repeats", [5, 9, 33] * 4, max_tokens=16), FixedExpansion(parse_expansion("2.2.2"))
    ways = [Watched.with_text("head", tmp_path / str(reads), policy, reads) for reads in (False, True)]
    texts = [run(one.engine, [*CROWD, repeating]).texts() for one in ways]
    assert texts[0] == texts[1]
    drafting = [step for step in ways[0].steps if any(row.is_drafting for row in step.plan.decoding)]
    assert 3 < len(ways[0].unread) < len(drafting)
    assert not ways[1].unread


def test_mixed_steps_read_as_before(tmp_path):
    """A sampled tree beside: all trees of the step grow in rounds."""
    requests = [*REQUESTS[:2], sampled("drawn", [7, 8, 9], seed=3, max_tokens=30, verifier="traversal")]
    ways = [Watched.of("head", tmp_path / str(reads), FixedExpansion(parse_expansion("2.2.1")), reads) for reads in (False, True)]
    reads = [reads_by_step(one, requests) for one in ways]
    assert reads[0] == reads[1]
    assert not ways[0].unread


FOUR_NODES = parse_expansion("noise_aware.4.3.3")


def small_table(patch: pytest.MonkeyPatch) -> None:
    load = GraphedFunction.load

    def loaded(recordings: GraphedFunction, batch: Any, *others: Any, **outputs: Any) -> bool:
        is_large = len(recordings.columns.outputs) == 5 and batch.num_tokens > 2  # of a target that chooses
        return not is_large and load(recordings, batch, *others, **outputs)

    patch.setattr(GraphedFunction, "load", loaded)


KEPT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "room": lambda patch: patch.setattr(target, "_MOST_ROOM", 0),
    "choices": lambda patch: patch.setattr(device_choice, "can_choose_on", lambda _: False),
    "table": small_table,
}


@pytest.mark.parametrize("why", KEPT_OUT)
def test_other_steps_read_trees_first(why, tmp_path, monkeypatch):
    """Where trees may be large, passes do not choose, or the table is too small for the room."""
    texts = []
    for name in ("all", why):
        KEPT_OUT.get(name, lambda _: None)(monkeypatch)
        one = Watched.of("head", tmp_path / name, FixedExpansion(FOUR_NODES))
        texts.append(run(one.engine, CROWD).texts())
        assert bool(one.unread) == (name == "all")
    assert texts[0] == texts[1]


def test_tables_by_row_read_trees_first(tmp_path):
    """Each node has its own keys there, which the host must know."""
    one = Watched.of("head", tmp_path, FixedExpansion(FOUR_NODES))
    passes = one.engine.target._passes
    assert isinstance(passes, RecordedPasses)
    recordings = passes.recordings
    recordings._steps = replace(recordings._steps, shapes=PaddingShapes(64, is_by_row=True))
    texts = run(one.engine, CROWD).texts()
    assert not one.unread
    assert texts == run(Watched.of("head", tmp_path, FixedExpansion(FOUR_NODES)).engine, CROWD).texts()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: sampled("edited", [7, 8], 1, frequency_penalty=0.5),
        lambda: sampled("drawn", [7, 8, 9], seed=3, verifier="traversal"),
    ],
)
def test_sampled_and_edited_trees_are_read_first(request_of, tmp_path):
    one = Watched.of("head", tmp_path, FixedExpansion(parse_expansion("2.2.1")))
    run(one.engine, [request_of(), greedy("shorter", [5, 6], max_tokens=4)])
    assert not any(len(step.plan.decoding) > 1 for step in one.unread)


def with_logprobs(one: Any, **counts: int) -> Any:
    return replace(one, sampling=replace(one.sampling, **counts))


def test_unread_trees_have_equal_log_probabilities(tmp_path):
    """Of emitted tokens and of prompts, whose places follow the nodes."""
    requests = [with_logprobs(one, num_logprobs=2, num_prompt_logprobs=1) for one in CROWD]
    ways = [Watched.of("head", tmp_path / str(reads), SmallTrees(), reads) for reads in (False, True)]
    found, expected = (run(one.engine, requests) for one in ways)
    assert found.texts() == expected.texts()
    for name, outcome in expected.outcomes.items():
        assert_close(found.outcomes[name].logprobs, outcome.logprobs)
        assert_close(*(prompt_logprobs(one.outcomes[name]) for one in (found, expected)))
    assert any(len(step.passed.all_NV) > len(step.passed.nodes_NV) for step in ways[0].unread if not step.is_full)


class SmallTrees:
    """A policy whose trees are seldom as large as they may be: unlikely nodes are left out."""

    name = "small"

    def choose(self, views):
        return ExpansionChoice((parse_expansion("noise_aware.4.3.3"),) * len(views), growth_costs=GrowthCosts(node=0.3))

    def observe(self, feedback):
        pass


def prompt_logprobs(outcome: Outcome) -> list[Any]:
    return [one for event in outcome.events for one in event.prompt_logprobs]


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.top_ids == other.top_ids


def facts_of(engine: Engine) -> list[Any]:
    """Run requests and return the features of their roots after each step."""
    facts: list[Any] = []
    engine.roots.watch()
    run(engine, CROWD, lambda _: facts.append(engine.roots.facts([one.request_id for one in CROWD])))
    return facts


def test_unread_trees_have_equal_root_features(tmp_path):
    """A policy's inputs are of the nodes at which the trees ended."""
    ways = [Watched.of("head", tmp_path / str(reads), AnyTree(1), reads) for reads in (False, True)]
    facts = [facts_of(one.engine) for one in ways]
    assert len(facts[0]) > 5
    for found, expected in zip(*facts, strict=True):
        for name in ("is_known_B", "target_BD", "draft_BW", "scalars_BS"):
            assert np.allclose(getattr(found, name), getattr(expected, name), atol=1e-4)
    assert not all(step.is_full for step in ways[0].unread)


def with_nodes(change: Callable[[GrownNodes], GrownNodes]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutation of the nodes that are written to the target's table."""
    complete: Any = vars(passes)["complete"]
    return lambda patch: patch.setattr(passes, "complete", lambda one, nodes, rooms: complete(one, change(nodes), rooms))


def with_rooms(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutation of the places to which nodes are written."""
    rooms_of: Any = vars(passes)["rooms_of"]
    return lambda patch: patch.setattr(passes, "rooms_of", lambda *given: change(rooms_of(*given)))


def padding_is_seen(nodes: GrownNodes) -> GrownNodes:
    """The first node's children have the node after it as their parent."""
    return nodes._replace(parents_BN=torch.where(nodes.parents_BN == 1, 2, nodes.parents_BN))


def rows_in_order_of_room(patch: pytest.MonkeyPatch) -> None:
    """Logits of nodes that are absent in place of the next tree's."""
    patch.setattr(passes.UnreadPass, "logits", lambda one, places: one.recordings.rows_at(range(len(places))))


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "ancestors": with_nodes(lambda nodes: nodes._replace(parents_BN=torch.zeros_like(nodes.parents_BN))),
    "siblings": with_nodes(padding_is_seen),
    "positions": with_nodes(lambda nodes: nodes._replace(depths_BN=nodes.depths_BN + 1)),
    "tokens": with_nodes(lambda nodes: nodes._replace(tokens_BN=(nodes.tokens_BN + 1) % 60)),
    "keys": with_nodes(lambda nodes: nodes._replace(keys_BN=nodes.keys_BN ^ 1)),
    "levels": with_nodes(lambda nodes: nodes._replace(most_depth=2)),
    "rooms of other rows": with_rooms(lambda rooms: np.concatenate([rooms[1:], rooms[:1]])),
    "trees of other rows": with_nodes(lambda nodes: GrownNodes._make([*(one.flip(0) for one in nodes[:4]), nodes.most_depth])),
    "rows": rows_in_order_of_room,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_tables_are_detected(mutant, tmp_path, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    assert not both_ways("head", tmp_path)[1]


def test_device_seconds_count_as_drafting(tmp_path, monkeypatch):
    """The host waits for growth in the target's time. Policies learn the costs of both from their own seconds."""
    monkeypatch.setattr(DeviceClock, "seconds", 1e6)
    one = Watched.of("head", tmp_path, FixedExpansion(FOUR_NODES))
    stats = run(one.engine, CROWD).stats
    unread = {step.plan.step for step in one.unread}
    assert all((step.verify_s == 0.0) == (step.step in unread) for step in stats)
    assert all(step.draft_s < step.step_s < 1e3 for step in stats)
