"""The sizes and numbers of trees that grow on a device: what the host knows of a step before it. Shape key: F fields."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
from jaxtyping import Int

from engine.attention.packing import PackedBatch, Segment
from engine.attention.paged.graphs import GraphedFunction
from engine.attention.paged.levels import lane_segment
from engine.attention.paged.table import Shape, num_words, tail_places
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Row
from engine.core.tree import FREE_GROWTH, Expansion, TreeKind
from engine.draft.drafter import LevelPasses
from engine.draft.trees.calibration import RuleCalibration
from engine.draft.trees.device_ranking import FIRST_FLOAT, RoundShape, TreeNumbers, field_widths
from engine.draft.trees.sampling import RANKED_KINDS
from engine.draft.trees.strategies import num_draws
from engine.draft.trees.topology import Topology, best_topology
from engine.native.library import NUM_SCORES
from engine.sampling.distributions import is_typical, ranking_params, ranking_temperature, truncates
from engine.sampling.noise import signed

NumberTable = Int[np.ndarray[Any, np.dtype[np.int64]], "*B F"]
_BEST_FIRST = ("beam", "noise_aware", "greedy_sample")  # where children are ranked, greedy_sample is a beam
_FIXED = ("delayed", "delayed_distinct", "static")


def can_grow_on_device(row: Row) -> bool:
    """Return whether a row's tree ranks its children, by logits that depend on no earlier token, and is of a known kind."""
    is_edited = row.sampling.edits_logits or is_typical(ranking_params(row.sampling))
    return row.draw_kind in RANKED_KINDS and not is_edited and row.expansion.tree in (*_BEST_FIRST, *_FIXED)


@dataclass(frozen=True)
class PlannedTree:
    """A row's tree, with the calibration that values its nodes, before it grows."""

    row: Row
    calibration: RuleCalibration

    @cached_property
    def places(self) -> list[list[int]]:
        """The children of each place of a fixed shape, the root's first; empty if the shape depends on probabilities."""
        expansion = self.row.expansion
        if expansion.tree in _BEST_FIRST:
            return []
        if expansion.is_delayed:
            return _places(_delayed(expansion))
        return _places(best_topology(self.calibration.by_rank.chances(expansion.branches), expansion.max_nodes, expansion.depth))

    @property
    def is_valued(self) -> bool:
        """Whether nodes are valued by agreement."""
        return self.row.expansion.tree == "noise_aware"

    @property
    def num_rounds(self) -> int:
        """The most rounds of growth. Each but the first feeds at least one node."""
        expansion = self.row.expansion
        return expansion.max_depth if self.places else min(expansion.depth, 1 + expansion.max_nodes)

    @cached_property
    def width(self) -> int:
        """The most nodes that a round feeds."""
        if not self.places:
            return min(self.row.expansion.branches, self.row.expansion.max_nodes)
        level, most = [0], 1
        while level := [child for place in level for child in self.places[place]]:
            most = max(most, sum(bool(self.places[place]) for place in level))
        return most

    @property
    def num_scored(self) -> int:
        """The most children of a node."""
        return max(map(len, self.places)) if self.places else self.row.expansion.branches

    def numbers(self, shape: RoundShape) -> Mapping[str, Sequence[float]]:
        """Return its columns of TreeNumbers but places of slots. What is missing at the end of one is zero."""
        row, expansion = self.row, self.row.expansion
        params, agreement = ranking_params(row.sampling), self.calibration.agreement
        costs = row.growth_costs if self.is_valued else FREE_GROWTH
        count = expansion.num_draft_tokens
        thresholds = (0.0,) * count if self.places else costs.least_chances(expansion)
        of_places = ([*children, *[0] * shape.num_scored][: shape.num_scored] for children in self.places)
        keys = (stream_key(row.seed, row.root_position + 1 + depth, Stream.TOKEN) for depth in range(shape.num_rounds + 1))
        return {
            "is_noisy": [row.draw_kind is TreeKind.SHARED_NOISE],
            "is_valued": [self.is_valued],
            "is_fixed": [bool(self.places)],
            "is_truncated": [truncates(params)],
            "has_root": [1],
            "rounds": [self.num_rounds],
            "lanes": [self.width],
            "max_nodes": [count],
            "branches": [shape.num_scored if self.places else expansion.branches],
            "depth": [expansion.depth],
            "top_k": [params.top_k or 1 << 31],  # all
            "keys": [*map(signed, keys)],
            "num_children": [*map(len, self.places)],
            "places": [*chain.from_iterable(of_places)],
            "temperature": [ranking_temperature(row.sampling)],
            "sharpness": [agreement.sharpness],
            "log_prob_weight": [agreement.log_prob_weight],
            "noise_weight": [agreement.noise_weight],
            "level_cost": [costs.level],
            "top_p": [params.top_p],
            "min_p": [params.min_p],
            "shares": self.calibration.reliability.shares[0],
            "thresholds": [*thresholds, *[np.inf] * (shape.num_nodes - count)],
        }


def _delayed(expansion: Expansion) -> Topology:
    """Return the shape of a delayed tree whose siblings are distinct."""

    def below(depth: int) -> Topology:
        return Topology(tuple(below(depth + 1) for _ in range(num_draws(expansion, depth, 1))))

    return below(0)


def _places(shape: Topology) -> list[list[int]]:
    """Number the places of a shape level by level."""
    level, children, count = [shape], list[list[int]](), 1
    while level:
        for place in level:
            children.append([*range(count, count + len(place.children))])
            count += len(place.children)
        level = [child for place in level for child in place.children]
    return children


@dataclass(frozen=True)
class DevicePlan:
    """All trees of a step: their sizes together, padded so that few different ones occur."""

    trees: Sequence[PlannedTree]
    shape: RoundShape

    @classmethod
    def of(cls, trees: Sequence[PlannedTree], num_known: int) -> "DevicePlan":
        """Return the plan for trees over so many known tokens."""
        sampling = [tree.row.sampling for tree in trees]
        num_scored = min(num_known, power_of_two(max(tree.num_scored for tree in trees)))
        most_kept = max(num_scored, NUM_SCORES if any(tree.is_valued for tree in trees) else 0)
        shape = RoundShape(
            num_trees=power_of_two(len(trees)),
            width=power_of_two(max(tree.width for tree in trees)),
            num_nodes=power_of_two(max(tree.row.expansion.num_draft_tokens for tree in trees)),
            num_rounds=power_of_two(max(tree.num_rounds for tree in trees)),
            num_scored=num_scored,
            num_kept=min(num_known, most_kept),
            has_noise=any(tree.row.draw_kind is TreeKind.SHARED_NOISE for tree in trees),
            truncates=any(truncates(ranking_params(params)) for params in sampling),
        )
        return cls(trees, shape)

    @property
    def num_lanes(self) -> int:
        """Lanes of all trees, padding included."""
        return self.shape.num_trees * self.shape.width

    @property
    def num_rounds(self) -> int:
        """The most rounds that any of the trees can take."""
        return max(tree.num_rounds for tree in self.trees)

    def pass_shape(self, recordings: GraphedFunction) -> Shape | None:
        """Return the shape of its recorded passes, None if they cannot be recorded."""
        shape = recordings.shape_of(self.num_lanes, self.num_lanes)
        if shape is None or shape.is_by_row:  # such a table has a segment for each token, with the keys in its order
            return None
        end = self.shape.num_nodes + 1
        num_keys = sum(tree.row.root_position for tree in self.trees) + end * self.shape.num_trees
        length = recordings.columns.head_len(shape) + num_keys + self.shape.num_trees * end + self.num_lanes * num_words(end)
        return shape if length <= recordings.capacity else None

    def segments(self, passes: LevelPasses) -> list[Segment]:
        """Return the segments of a pass: lanes of padding, beside the keys of the trees' texts."""
        first, width, dummy = passes.first_position, self.shape.width, passes.dummy_slot
        segments = [
            lane_segment(tree.row.slots[first:root], root - first, self._slots(tree), width, dummy)
            for tree in self.trees
            for root in (tree.row.root_position,)
        ]
        nothing = lane_segment((), 0, [dummy] * (self.shape.num_nodes + 1), width, dummy)
        return segments + [nothing] * (self.shape.num_trees - len(segments))

    def _slots(self, tree: PlannedTree) -> list[int]:
        """Return the slots of a tree's nodes. Those that it cannot have are the root's."""
        own, end = tree.row.slots[tree.row.root_position :], self.shape.num_nodes + 1
        return [*own, *[own[0]] * end][:end]

    def numbers(self, known: Container[int]) -> NumberTable:
        """Return TreeNumbers as a table, without places of slots. Trees that are not in `known` and padding do not grow."""
        table_BF = np.zeros((self.shape.num_trees, sum(field_widths(self.shape).values())), dtype=np.int64)
        for index, tree in enumerate(self.trees):
            if index in known:
                self._write(table_BF[index], tree.numbers(self.shape))
        return table_BF

    def numbers_of_pass(self, passes: LevelPasses, batch: PackedBatch, shape: Shape, known: Container[int]) -> NumberTable:
        """Return the same table with the places of slots in a pass's table."""
        table_BF = self.numbers(known)
        for row_F, tails in zip(table_BF, tail_places(batch, shape, passes.recordings.columns).tolist(), strict=True):
            self._write(row_F, {"tails": tails})
        for row_F, tree in zip(table_BF, self.trees, strict=False):
            self._write(row_F, {"slots": self._slots(tree), "position": [tree.row.root_position - passes.first_position]})
        return table_BF

    def _write(self, row_F: NumberTable, numbers: Mapping[str, Sequence[float]]) -> None:
        """Write fields of a tree to its row of a table."""
        widths = field_widths(self.shape)
        starts = dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))
        for name, values in numbers.items():
            kind = np.float64 if TreeNumbers._fields.index(name) >= FIRST_FLOAT else np.int64
            row_F[starts[name] : starts[name] + len(values)] = np.array(values, dtype=kind).view(np.int64)


def power_of_two(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()
