"""Grows ranked trees with a pass for each level, all of whose nodes are chosen on the device: a step's trees take one wait.

The host gives the trees the nodes that it reads. A device that rounds otherwise may thus keep other nodes than a host would.
Shape key: B trees, R rounds, W lanes of a tree, Q numbers of a lane, N nodes of a tree without its root, P proposals, M the
drafter's tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.paged.completion import GrownNodes
from engine.attention.paged.graph_recorder import Recorder
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.table import Shape
from engine.core.step_plan import Row
from engine.core.tree import ROOT, TreeKind
from engine.draft.drafter import (
    FrontierNode,
    GrowingTree,
    LevelDrafter,
    LevelPasses,
    LevelProposal,
    ModelPasses,
    Proposal,
    RecordedDrafter,
    RecordedLevelDrafter,
)
from engine.draft.trees.best_first import ChosenNodes, NodeOfParent
from engine.draft.trees.device_plan import DevicePlan, PlannedTree, can_grow_on_device, power_of_two
from engine.draft.trees.device_ranking import RoundShape
from engine.draft.trees.device_rounds import NUM_FACTS, DeviceRounds, LevelRounds, PassRounds
from engine.draft.trees.sampling import ChildCandidates
from engine.utils.host_transfer import arrays, integers

_MOST_LANES = 256  # whose distributions are in memory together
MOST_RANKED = 256  # distributions of levels, which are too
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class _Recorded(NamedTuple):
    """Rounds of one shape, recorded."""

    rounds: DeviceRounds
    table_pass: TablePass
    begin: Callable[[], None]
    advance: Callable[[], None]
    finish: Callable[[], None]


class ReadTree(NamedTuple):
    """A tree as read from the device: the nodes of each round and the kept ones, and candidates by fed node."""

    chosen: ChosenNodes
    candidates: Mapping[int, ChildCandidates]


@dataclass(frozen=True)
class StartedRounds:
    """All rounds of some trees, started on the device, whose results are not read yet. Valid until the next rounds start."""

    plan: DevicePlan
    rounds: DeviceRounds
    fed: ModelPasses  # before the first round
    runs_passes: bool  # between rounds

    @property
    def nodes(self) -> GrownNodes:
        """The finished trees, on the device."""
        return self.rounds.nodes

    @property
    def results(self) -> list[Tensor]:
        """What `read` needs on the host."""
        return [self.rounds.found_BRWQ, self.rounds.is_node_BN, self.nodes.parents_BN, self.nodes.tokens_BN]

    def read(self, results: Sequence[Numbers]) -> tuple[list[ReadTree], ModelPasses]:
        """Return the planned trees and the passes. That all trees ended earlier was not known when passes were started."""
        found_BRWQ, is_node_BN, parents_BN, tokens_BN = results
        nodes_BLW = found_BRWQ[:, 1:, :, 1]
        num_fed = int(((nodes_BLW > 0) & (nodes_BLW <= self.plan.shape.num_nodes)).sum())
        trees = []
        for tree, found_RWQ, is_node_N, *node_N in zip(self.plan.trees, found_BRWQ, is_node_BN > 0, parents_BN, tokens_BN):
            kept = [NodeOfParent(int(parent), int(token_id)) for parent, token_id in zip(*(one[is_node_N] for one in node_N))]
            candidates = dict(_candidates(found_RWQ, tree.row, self.plan.shape))
            trees.append(ReadTree(ChosenNodes([*_rounds(found_RWQ, self.plan.shape)], kept), candidates))
        return trees, self.fed + (ModelPasses(self.plan.num_rounds - 1, num_fed) if self.runs_passes else ModelPasses())


class DeviceOffers:
    """Candidates of the nodes that the device has fed, for strategies that choose the same nodes."""

    def __init__(self, trees: Mapping[str, ReadTree], passes: ModelPasses) -> None:
        self._trees = trees
        self.probs: list[Tensor] = []  # nothing is sampled
        self.passes = passes

    def after(self, frontier: Sequence[FrontierNode]) -> list[tuple[FrontierNode, ChildCandidates]]:
        """Return the candidates of nodes that have any."""
        found = []
        for one in frontier:
            if (candidates := self._trees[one.tree.row.request_id].candidates.get(one.node)) is not None:
                one.tree.fed.add(one.node)
                found.append((one, candidates.first(one.num_draws)))
        return found


class DeviceGrowth:
    """Grows trees on a drafter's device. Owns the recordings of rounds, one for each shape of them."""

    def __init__(self, drafter: RecordedDrafter) -> None:
        self._drafter = drafter
        self._recorded: dict[tuple[RoundShape, Shape], _Recorded] = {}

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether the drafter's passes are recorded, and all trees of kinds that a device can grow."""
        drafting = (row for row in rows if row.is_drafting)
        return self._drafter.level_passes is not None and all(map(can_grow_on_device, drafting))

    def start(self, feeding: Sequence[Row], trees: Sequence[PlannedTree]) -> StartedRounds | None:
        """Feed the drafter and start to grow trees. If a recorded pass is too small for them, nothing runs: None."""
        passes = self._drafter.level_passes
        if passes is None or not trees:
            return None
        plan = DevicePlan.of(trees, passes.recordings.width)
        shape = plan.pass_shape(passes.recordings)
        if plan.num_lanes > _MOST_LANES or shape is None:
            return None
        proposal = self._drafter.feed(feeding, _roots(trees))
        with torch.inference_mode():
            rounds = self._run(plan, shape, passes, proposal)
        return StartedRounds(plan, rounds, proposal.passes, runs_passes=True)

    def _run(self, plan: DevicePlan, shape: Shape, passes: LevelPasses, proposal: Proposal) -> DeviceRounds:
        """Run all rounds without waiting for them."""
        recordings = passes.recordings
        recorded = self._recorded_for(plan.shape, shape, passes)
        batch = pack(plan.segments(passes), recordings.device)
        places = [range(plan.num_lanes), [passes.dummy_slot] * plan.num_lanes][: len(recordings.columns.outputs)]
        previous = [[0] * plan.num_lanes] * (len(recordings.columns.tokens) - len(batch.tokens_3T))
        fits = recordings.load(batch, shape, previous, places)
        assert fits
        numbers_BF = plan.numbers_of_pass(passes, batch, shape, proposal.indices)
        recorded.rounds.numbers_BF.copy_(arrays([numbers_BF], recordings.device)[0])
        recorded.begin()
        lanes_P = integers([plan.shape.width * index for index in proposal.indices], recordings.device)
        recorded.table_pass.rows_NM.index_copy_(0, lanes_P, proposal.logits_PM)
        recorded.advance()
        for _ in range(plan.num_rounds - 1):
            recorded.table_pass.run()
            recorded.advance()
        recorded.finish()
        return recorded.rounds

    def _recorded_for(self, shape: RoundShape, pass_shape: Shape, passes: LevelPasses) -> _Recorded:
        """Return rounds, recorded before a table is loaded: a recording runs once, over whichever table there is."""
        key = shape, pass_shape
        if key not in self._recorded:
            table_pass = passes.recordings.pass_of(pass_shape)
            ids_M = None if passes.vocab is None else passes.vocab.ids_M
            rounds = PassRounds(shape, table_pass, ids_M, passes.recordings.width, passes.dummy_slot)
            record = passes.recordings.recorder.record
            steps = map(record, (rounds.begin, rounds.advance, rounds.finish))
            self._recorded[key] = _Recorded(rounds, table_pass, *steps)
        return self._recorded[key]


class LevelGrowth:
    """Grows trees over levels that a drafter has predicted. Owns the recordings of all rounds, one for each shape of them."""

    def __init__(self, drafter: LevelDrafter) -> None:
        self._drafter = drafter
        self._logits_PM: Tensor | None = None  # of which each shape of rounds reads the first
        self._recorded: dict[tuple[RoundShape, int], tuple[LevelRounds, Callable[[], None]]] = {}

    @property
    def _recorder(self) -> Recorder | None:
        return self._drafter.recorder if isinstance(self._drafter, RecordedLevelDrafter) else None

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether rounds can be recorded, all trees are of kinds that a device can grow, and their levels are few."""
        drafting = [row for row in rows if row.is_drafting]
        if self._recorder is None or not drafting or not all(map(can_grow_on_device, drafting)):
            return False
        return power_of_two(len(drafting)) * max(row.expansion.max_depth for row in drafting) <= MOST_RANKED

    def start(self, feeding: Sequence[Row], trees: Sequence[PlannedTree]) -> StartedRounds:
        """Feed the drafter and start to grow trees."""
        levels = self._drafter.feed_levels(feeding, _roots(trees))
        plan = DevicePlan.of(trees, levels.logits_BLM.shape[2])
        with torch.inference_mode():
            rounds, run = self._recorded_for(plan.shape, levels)
            device = rounds.levels_BLM.device
            rounds.numbers_BF.copy_(arrays([plan.numbers(levels.indices)], device)[0])
            if levels.indices:
                rounds.levels_BLM.index_copy_(0, integers(levels.indices, device), levels.logits_BLM)
            run()
        return StartedRounds(plan, rounds, levels.passes, runs_passes=False)

    def _recorded_for(self, shape: RoundShape, levels: LevelProposal) -> tuple[LevelRounds, Callable[[], None]]:
        """Return rounds, and a function that runs all of them."""
        num_levels, num_known = max(1, levels.logits_BLM.shape[1]), levels.logits_BLM.shape[2]
        key, recorder = (shape, num_levels), self._recorder
        if key not in self._recorded:
            assert recorder is not None
            if self._logits_PM is None:
                self._logits_PM = levels.logits_BLM.new_zeros(MOST_RANKED, num_known)
            levels_BLM = self._logits_PM[: shape.num_trees * num_levels].view(shape.num_trees, num_levels, num_known)
            rounds = LevelRounds(shape, levels_BLM, None if levels.vocab is None else levels.vocab.ids_M)
            self._recorded[key] = rounds, recorder.record(rounds.run)
        return self._recorded[key]


def _roots(trees: Sequence[PlannedTree]) -> list[FrontierNode]:
    return [FrontierNode(GrowingTree(tree.row), ROOT, tree.num_scored) for tree in trees]


def _rounds(found_RWQ: Any, shape: RoundShape) -> Iterator[list[NodeOfParent]]:
    """Yield the nodes that each round but the first has fed, in order."""
    for _, node_W, parent_W, token_W in found_RWQ[1:, :, : NUM_FACTS - 1].transpose(0, 2, 1):
        is_fed_W = (node_W > 0) & (node_W <= shape.num_nodes)
        yield [NodeOfParent(int(parent), int(token_id)) for parent, token_id in zip(parent_W[is_fed_W], token_W[is_fed_W])]


def _candidates(found_RWQ: Any, row: Row, shape: RoundShape) -> Iterator[tuple[int, ChildCandidates]]:
    """Yield the nodes of a tree that have valid candidates."""
    count, has_noise = shape.num_kept, row.draw_kind is TreeKind.SHARED_NOISE
    for lane_Q in found_RWQ.reshape(-1, found_RWQ.shape[-1]):
        is_valid, node, _, _, squares = lane_Q[:NUM_FACTS].tolist()
        if is_valid:
            ids, probs, noise = lane_Q[NUM_FACTS:].reshape(3, count)
            end = int((probs > 0.0).sum())
            given = tuple(map(int, ids[:end].tolist())), tuple(probs[:end].tolist())
            yield int(node), ChildCandidates(*given, tuple(noise[:end].tolist()) if has_noise else (), squares)
