"""What noise-aware trees bring by the least chance of their nodes: told by what they thought their nodes were worth.

Such a tree knows of each of its nodes the chance to be accepted, so one that has grown says what every smaller one, of likelier
nodes alone, would have been: its nodes, its levels, and the tokens that it expects. These are summed by the least chance that
admits them, for each sequence and for its kind, towards which a sequence's are shrunk; what came of nodes of each chance corrects
them. A tree says nothing of nodes less likely than it was allowed.

Shape key: K least chances of a menu, the greatest first; B sequences; F sums (FEATURES).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.policy import DraftOutcome
from engine.tree import Expansion

Array = NDArray[np.float64]

FEATURES = ("chances", "nodes", "rounds", "fed")  # the root's own round aside
_CHANCES, _NODES, _ROUNDS, _FED = range(len(FEATURES))
# Before anything is known, for each factor of e between chances: tokens (worth a try, soon refuted), and rounds for each of them.
_START_TOKENS, _START_ROUNDS = 0.7, 2.0
_START_TREES, _KIND_TREES = 4.0, 5.0  # what the start weighs in a kind's mean, and a kind's mean in a sequence's, in trees
_EDGE = 1e-9  # so that nothing is divided by nothing
_KIND_MEMORY, _OWN_MEMORY = 0.995, 0.95  # of a tree, at each later one
_CAME_TOKENS = 4.0  # that are believed to have come as they were expected
_CAME_MEMORY = 0.998


class _Kind:
    """Sums of one kind of sequences, F by K, the trees that they are of, and what came of what was expected, both by K."""

    def __init__(self, start_FK: Array) -> None:
        num_chances = start_FK.shape[1]
        self._start_FK = start_FK
        self._begun_K = np.full(num_chances, _START_TREES)  # trees for which the start still stands
        self.sums_FK = np.zeros_like(start_FK)
        self.trees_K = np.zeros(num_chances)
        self.came_2K = np.full((2, num_chances), _CAME_TOKENS)
        self._means: tuple[Array, Array] | None = None

    @property
    def means(self) -> tuple[Array, Array]:
        """Of a tree, F by K, and the share of what is expected that comes, [K].

        The start stands for some trees. It is scaled by what trees bring of the nodes they tell of, over what it foretold of
        these: so much more or less is expected of others. The likeliest are left aside, of which sure texts have many.
        """
        if self._means is None:
            start_K, begun_K = self._start_FK[_CHANCES, 1:], self._begun_K
            begun = _START_TREES * float(start_K.sum()) + _EDGE
            scale = (float(self.sums_FK[_CHANCES, 1:].sum()) + begun) / (float(start_K @ self.trees_K[1:]) + begun)
            means_FK = (self.sums_FK + scale * begun_K * self._start_FK) / (self.trees_K + begun_K)
            self._means = means_FK, self.came_2K[0] / self.came_2K[1]
        return self._means

    def learn(self, sums_FK: Array, told_K: Array, came_K: Array, num_trees: int) -> None:
        """Add what some trees say."""
        stays_K, stays = _KIND_MEMORY**told_K, _CAME_MEMORY**num_trees
        self.sums_FK = stays_K * self.sums_FK + sums_FK
        self.trees_K = stays_K * self.trees_K + told_K
        self._begun_K = stays_K * self._begun_K
        self.came_2K = stays * self.came_2K + (1.0 - stays) * _CAME_TOKENS + np.stack([came_K, sums_FK[_CHANCES]])
        self._means = None


class WorthOfNodes:
    """Expectations of a menu's noise-aware trees, for sequences by seat. The kinds are the caller's names."""

    def __init__(self, entries: Sequence[Expansion], num_seats: int) -> None:
        self._entries = frozenset(entries)
        self._depth = max((entry.max_depth for entry in entries), default=0)
        self._least = [entry.least_chance for entry in entries]
        self._depth_K = np.array([entry.max_depth for entry in entries], dtype=np.float64)
        self._most_nodes_K = np.array([entry.max_nodes for entry in entries], dtype=np.float64)
        if self._least != sorted(self._least, reverse=True):
            raise ValueError("the greatest least chance comes first")
        self._start_FK = _start(entries)
        self._kinds: dict[str, _Kind] = {}
        self._sums = np.zeros((0, len(FEATURES), len(entries)))
        self._trees = np.zeros((0, len(entries)))
        self._came = np.zeros((0, 2))
        self.make_room(num_seats)

    def make_room(self, num_seats: int) -> None:
        """Have so many seats."""
        self._sums, self._trees, self._came = (
            np.concatenate([one, np.zeros((num_seats - len(one), *one.shape[1:]))])
            for one in (self._sums, self._trees, self._came)
        )

    def clear(self, seat: int) -> None:
        """Forget what is known of a sequence."""
        for one in (self._sums, self._trees, self._came):
            one[seat] = 0.0

    def kind(self, name: str) -> _Kind:
        """Return what is known of a kind."""
        if name not in self._kinds:
            self._kinds[name] = _Kind(self._start_FK)
        return self._kinds[name]

    def expect(self, seats: Sequence[int], kinds: Sequence[str]) -> tuple[Array, Array, Array, Array]:
        """Return expected tokens (the extra one included), nodes, rounds and nodes fed to the drafter, [B, K] each."""
        distinct = [*dict.fromkeys(kinds)]
        usual_GFK, comes_GK = (np.array(rows) for rows in zip(*(self.kind(name).means for name in distinct), strict=True))
        group_B = [distinct.index(name) for name in kinds]
        usual_BFK, comes_BK = usual_GFK[group_B], comes_GK[group_B]
        weights_BK = self._trees[seats] + _KIND_TREES
        sums_BFK = (self._sums[seats] + _KIND_TREES * usual_BFK) / weights_BK[:, None]
        sums_BFK[:, _CHANCES] *= comes_BK * self._own_share(seats)[:, None]
        up_to_BFK = sums_BFK.cumsum(2)
        tokens_BK = 1.0 + np.minimum(up_to_BFK[:, _CHANCES], self._depth_K)
        rounds_BK = np.minimum(1.0 + up_to_BFK[:, _ROUNDS], self._depth_K)
        nodes_BK, fed_BK = np.minimum(up_to_BFK[:, [_NODES, _FED]], self._most_nodes_K).swapaxes(0, 1)
        return tokens_BK, nodes_BK, rounds_BK, fed_BK

    def _own_share(self, seats: Sequence[int]) -> Array:
        """Return what came of what was expected of each sequence as one of its kind, [B]."""
        came_B2 = self._came[seats] + _CAME_TOKENS
        return np.asarray(came_B2[:, 0] / came_B2[:, 1])

    def observe(self, outcomes: Sequence[DraftOutcome], seats: Sequence[int], kinds: Sequence[str]) -> None:
        """Learn from noise-aware trees, of which each knows its nodes. Those of one call are equally recent.

        A tree that was cut, to its request's bound or to the room there was, tells its own sequence all that it may have, and the
        kind what it would have been whole.
        """
        trees: dict[int, list[DraftOutcome]] = {}
        for outcome, seat in zip(outcomes, seats, strict=True):
            trees.setdefault(seat, []).append(outcome)
        own = [*trees]
        found = [self._found(of_seat, _least_told) for of_seat in trees.values()]
        whole = [
            self._found(of_seat, self._least_whole) if any(map(self._is_cut, of_seat)) else told
            for of_seat, told in zip(trees.values(), found, strict=True)
        ]
        kind_of_seat = dict(zip(seats, kinds, strict=True))
        sums_BFK = np.array([one.sums for one in found])
        told_BK, came_BK = np.array([one.num_told for one in found]), np.array([one.came for one in found])
        comes_BK = np.stack([self.kind(kind_of_seat[seat]).means[1] for seat in own])
        expected_B = (sums_BFK[:, _CHANCES] * comes_BK).sum(1)
        stays_B1 = _OWN_MEMORY ** np.array([[float(one.num_trees)] for one in found])
        stays_BK = _OWN_MEMORY**told_BK
        self._came[own] = stays_B1 * self._came[own] + np.stack([came_BK.sum(1), expected_B], axis=1)
        self._sums[own] = stays_BK[:, None] * self._sums[own] + sums_BFK
        self._trees[own] = stays_BK * self._trees[own] + told_BK
        for name in dict.fromkeys(kind_of_seat.values()):
            of_kind = [one for seat, one in zip(own, whole, strict=True) if kind_of_seat[seat] == name]
            self.kind(name).learn(
                np.array([one.sums for one in of_kind]).sum(0),
                np.array([one.num_told for one in of_kind]).sum(0),
                np.array([one.came for one in of_kind]).sum(0),
                sum(one.num_trees for one in of_kind),
            )

    def _found(self, trees: Sequence[DraftOutcome], least_told: Callable[[DraftOutcome], float]) -> "NodeSums":
        found = NodeSums(self._least)
        for one in trees:
            found.add(one, least_told(one))
        return found

    def _is_cut(self, outcome: DraftOutcome) -> bool:
        return outcome.expansion not in self._entries

    def _least_whole(self, outcome: DraftOutcome) -> float:
        """Return the chance above which a tree has the nodes that it would have had uncut: children are no likelier."""
        expansion, nodes = outcome.expansion, outcome.nodes
        assert nodes is not None
        least = nodes.least
        if self._is_cut(outcome) and len(nodes.chances) >= expansion.max_nodes:
            least = max(least, min(nodes.chances))
        if expansion.max_depth < self._depth:
            last = [chance for chance, depth in zip(nodes.chances, nodes.depths, strict=True) if depth >= expansion.max_depth]
            least = max(least, *last, 0.0) + 1e-12 * bool(last)
        return least


def _least_told(outcome: DraftOutcome) -> float:
    """Return the chance above which a tree has all the nodes that it could have."""
    assert outcome.nodes is not None, "a tree that does not know its nodes"
    return outcome.nodes.least


class NodeSums:
    """What a sequence's trees say, added up by the least chance that admits a node: [F][K], trees that tell of it, what came.

    Numbers of Python: a step's trees are few and small.
    """

    def __init__(self, least: Sequence[float]) -> None:
        self._dearest_first = [-chance for chance in least]
        self.sums = [[0.0] * len(least) for _ in FEATURES]
        self.came = [0.0] * len(least)
        self.num_trees = 0
        self._num_telling = [0] * (len(least) + 1)  # trees by how many of the least chances they tell of

    @property
    def num_told(self) -> list[float]:
        """The trees that tell of nodes of each least chance."""
        return [float(count) for count in [*accumulate(reversed(self._num_telling))][-2::-1]]

    def add(self, outcome: DraftOutcome, least_told: float) -> None:
        """Add a tree, which tells of nodes of some chance at least."""
        nodes, num_rounds = outcome.nodes, outcome.drafted_depth
        assert nodes is not None, "a tree that does not know its nodes"
        dearest_first, came = self._dearest_first, self.came
        num_told = bisect_right(dearest_first, -least_told)
        self.num_trees += 1
        self._num_telling[num_told] += 1
        deepest = 0
        chances, counts, rounds, fed = self.sums
        for node in sorted(range(len(nodes.chances)), key=nodes.chances.__getitem__, reverse=True):
            chance, depth = nodes.chances[node], nodes.depths[node]
            place = bisect_left(dearest_first, -chance)
            if place >= num_told:
                break
            chances[place] += chance
            counts[place] += 1.0
            if node in nodes.accepted:
                came[place] += 1.0
            if depth < num_rounds:
                fed[place] += 1.0
                if depth > deepest:
                    rounds[place] += depth - deepest
                    deepest = depth


def _start(entries: Sequence[Expansion]) -> Array:
    """Return what is expected before any tree has grown, [F, K]: as many tokens of nodes of any chance as of half that.

    So trees are, where what a drafter is sure of differs from token to token: of half the chance there are twice as many nodes.
    """
    if not entries:
        return np.zeros((len(FEATURES), 0))
    least_K = np.array([entry.least_chance for entry in entries])
    tokens_K = -_START_TOKENS * np.log(least_K)
    nodes_K = np.minimum(_START_TOKENS * (1.0 / least_K - 1.0), [entry.max_nodes for entry in entries])
    depth_K = np.array([float(entry.max_depth) for entry in entries])
    rounds_K = np.minimum(_START_ROUNDS * tokens_K, depth_K - 1.0)
    up_to_FK = np.stack([np.minimum(tokens_K, depth_K), nodes_K, rounds_K, np.where(depth_K > 1.0, nodes_K, 0.0)])
    return np.diff(up_to_FK, axis=1, prepend=0.0)
