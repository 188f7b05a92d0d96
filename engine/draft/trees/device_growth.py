"""Grows ranked trees with a pass for each level, all of whose nodes are chosen on the device: a step's trees take one wait.

The host repeats the choices with the candidates that it has read. So a tree is always what its strategy makes of them. A node
that the device has not fed stays a leaf, as may happen where its arithmetic rounds otherwise.
Shape key: B trees, R rounds, W lanes of a tree, Q numbers of a lane, P proposals, M the drafter's tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.paged.graphs import TablePass
from engine.attention.paged.table import Shape
from engine.core.step_plan import Row
from engine.core.tree import ROOT, TreeKind
from engine.draft.drafter import FrontierNode, LevelPasses, ModelPasses, Proposal, RecordedDrafter
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.device_plan import DevicePlan, PlannedTree, can_grow_on_device
from engine.draft.trees.device_ranking import RoundShape
from engine.draft.trees.device_rounds import NUM_FACTS, DeviceRounds
from engine.draft.trees.sampling import ChildCandidates
from engine.utils.host_transfer import array_of, arrays, integers

_MOST_LANES = 256  # whose distributions are in memory together
Results = Float[np.ndarray[Any, np.dtype[np.float64]], "B R W Q"]


class _FedNode(NamedTuple):
    """A node that the device has fed, and its candidates."""

    parent: int
    token_id: int
    candidates: ChildCandidates


class _Recorded(NamedTuple):
    """Rounds of one shape, recorded."""

    rounds: DeviceRounds
    table_pass: TablePass
    begin: Callable[[], None]
    advance: Callable[[], None]


class DeviceOffers:
    """Candidates of the nodes that the device has chosen and fed, for the strategies of the same trees."""

    def __init__(self, growth: "DeviceGrowth", feeding: Sequence[Row], calibrations: Calibrations) -> None:
        self._growth, self._feeding, self._calibrations = growth, feeding, calibrations
        self.probs: list[Tensor] = []  # nothing is sampled
        self.passes = ModelPasses()
        self._of_tree: dict[int, dict[int, _FedNode]] | None = None

    def after(self, frontier: Sequence[FrontierNode]) -> list[tuple[FrontierNode, ChildCandidates]]:
        """Return the candidates of nodes that the device has fed as the same nodes."""
        if self._of_tree is None:
            self._of_tree, self.passes = self._growth.grown(self._feeding, frontier, self._calibrations)
        found = []
        for one in frontier:
            fed, tree = self._of_tree.get(id(one.tree), {}).get(one.node), one.tree
            is_same = one.node == ROOT or (
                fed is not None and (fed.parent, fed.token_id) == (tree.parents[one.node], tree.token_ids[one.node])
            )
            if fed is not None and is_same:
                tree.fed.add(one.node)
                found.append((one, fed.candidates.first(one.num_draws)))
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

    def fits(self, rows: Sequence[Row], calibrations: Calibrations) -> bool:
        """Return whether a recorded pass is large enough for all trees."""
        drafting = [row for row in rows if row.is_drafting]
        passes = self._drafter.level_passes
        if passes is None or not drafting:
            return passes is not None
        plan = DevicePlan.of([PlannedTree(row, calibrations.of(row)) for row in drafting], passes.recordings.width)
        return plan.num_lanes <= _MOST_LANES and plan.pass_shape(passes.recordings) is not None

    def grown(
        self, feeding: Sequence[Row], roots: Sequence[FrontierNode], calibrations: Calibrations
    ) -> tuple[dict[int, dict[int, _FedNode]], ModelPasses]:
        """Feed the drafter and grow the trees of roots. Return the fed nodes by the tree's identity, and the passes."""
        if not (roots or feeding):
            return {}, ModelPasses()
        proposal, passes = self._drafter.feed(feeding, roots), self._drafter.level_passes
        if not proposal.indices or passes is None:
            return {}, proposal.passes
        known = [roots[index] for index in proposal.indices]
        trees = [PlannedTree(root.tree.row, calibrations.of(root.tree.row)) for root in known]
        plan = DevicePlan.of(trees, proposal.logits_PM.shape[1])
        with torch.inference_mode():
            found_BRWQ = self._run(plan, passes, proposal)
        nodes_BLW = found_BRWQ[:, 1:, :, 1]
        num_fed = int(((nodes_BLW > 0) & (nodes_BLW <= plan.shape.num_nodes)).sum())
        pairs = zip(known, found_BRWQ, strict=False)
        of_trees = {id(one.tree): dict(_fed_nodes(found_RWQ, one, plan.shape)) for one, found_RWQ in pairs}
        return of_trees, proposal.passes + ModelPasses(plan.num_rounds - 1, num_fed)

    def _run(self, plan: DevicePlan, passes: LevelPasses, proposal: Proposal) -> Results:
        """Run all rounds, and read their results: the one wait. That all trees have ended earlier is not known here."""
        shape, recordings = plan.pass_shape(passes.recordings), passes.recordings
        assert shape is not None
        recorded = self._recorded_for(plan.shape, shape, passes, proposal.logits_PM.shape[1])
        batch = pack(plan.segments(passes), recordings.device)
        places = [range(plan.num_lanes), [passes.dummy_slot] * plan.num_lanes][: len(recordings.columns.outputs)]
        previous = [[0] * plan.num_lanes] * (len(recordings.columns.tokens) - len(batch.tokens_3T))
        fits = recordings.load(batch, shape, previous, places)
        assert fits
        recorded.rounds.numbers_BF.copy_(arrays([plan.numbers(passes, batch, shape)], recordings.device)[0])
        recorded.begin()
        lanes_P = integers(range(0, plan.shape.width * len(proposal.indices), plan.shape.width), recordings.device)
        recorded.table_pass.rows_NM.index_copy_(0, lanes_P, proposal.logits_PM)
        recorded.advance()
        for _ in range(plan.num_rounds - 1):
            recorded.table_pass.run()
            recorded.advance()
        return array_of(recorded.rounds.found_BRWQ)

    def _recorded_for(self, shape: RoundShape, pass_shape: Shape, passes: LevelPasses, num_known: int) -> _Recorded:
        """Return rounds, recorded before a table is loaded: a recording runs once, over whichever table there is."""
        key = shape, pass_shape
        if key not in self._recorded:
            table_pass = passes.recordings.pass_of(pass_shape)
            ids_M = None if passes.vocab is None else passes.vocab.ids_M
            rounds = DeviceRounds(shape, table_pass, ids_M, num_known, passes.dummy_slot)
            record = passes.recordings.recorder.record
            self._recorded[key] = _Recorded(rounds, table_pass, record(rounds.begin), record(rounds.advance))
        return self._recorded[key]


def _fed_nodes(found_RWQ: Any, root: FrontierNode, shape: RoundShape) -> Iterator[tuple[int, _FedNode]]:
    """Yield the nodes of a tree that have valid candidates."""
    count, has_noise = shape.num_kept, root.tree.row.draw_kind is TreeKind.SHARED_NOISE
    for lane_Q in found_RWQ.reshape(-1, found_RWQ.shape[-1]):
        is_valid, node, parent, token_id, squares = lane_Q[:NUM_FACTS].tolist()
        if is_valid:
            ids, probs, noise = lane_Q[NUM_FACTS:].reshape(3, count)
            end = int((probs > 0.0).sum())
            given = tuple(map(int, ids[:end].tolist())), tuple(probs[:end].tolist())
            candidates = ChildCandidates(*given, tuple(noise[:end].tolist()) if has_noise else (), squares)
            yield int(node), _FedNode(int(parent), int(token_id), candidates)
