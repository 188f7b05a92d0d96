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
Places = NDArray[np.int64]

FEATURES = ("chances", "nodes", "rounds", "fed")  # the root's own round aside
_CHANCES, _NODES, _ROUNDS, _FED = range(len(FEATURES))
# Before anything is known, for each factor of e between chances: tokens (worth a try, soon refuted), and rounds for each of them.
_START_TOKENS, _START_ROUNDS = 0.7, 2.0
START_TREES, KIND_TREES = 4.0, 5.0  # what the start weighs in a kind's mean, and a kind's mean in a sequence's, in trees
EDGE = 1e-9  # so that nothing is divided by nothing
KIND_MEMORY, OWN_MEMORY = 0.995, 0.95  # of a tree, at each later one
CAME_TOKENS = 4.0  # that are believed to have come as they were expected
CAME_MEMORY = 0.998


class WorthOfNodes:
    """Expectations of a menu's noise-aware trees, for sequences by seat. The kinds are the caller's names."""

    def __init__(self, entries: Sequence[Expansion], num_seats: int) -> None:
        self._entries, self._entry_ids = frozenset(entries), frozenset(map(id, entries))
        self._depth = max((entry.max_depth for entry in entries), default=0)
        self._least = [entry.least_chance for entry in entries]
        self._least_K = np.array(self._least)
        self._depth_K = np.array([entry.max_depth for entry in entries], dtype=np.float64)
        self._most_nodes_K = np.array([entry.max_nodes for entry in entries], dtype=np.float64)
        if self._least != sorted(self._least, reverse=True):
            raise ValueError("the greatest least chance comes first")
        self._start_FK = _start(entries)
        size = (len(FEATURES), len(entries))
        self._sums, self._trees, self._came = np.zeros((0, *size)), np.zeros((0, size[1])), np.zeros((0, 2))
        # Of each kind: sums, trees that they are of, trees for which the start still stands, what came of what was expected.
        self._kinds: dict[str, int] = {}
        self._kind_sums, self._kind_trees = np.zeros((0, *size)), np.zeros((0, size[1]))
        self._kind_begun, self._kind_came = np.zeros((0, size[1])), np.zeros((0, 2, size[1]))
        self.make_room(num_seats)

    def make_room(self, num_seats: int) -> None:
        """Have so many seats."""
        self._sums, self._trees, self._came = (_with_rows(one, num_seats) for one in (self._sums, self._trees, self._came))

    def clear(self, seat: int) -> None:
        """Forget what is known of a sequence."""
        for one in (self._sums, self._trees, self._came):
            one[seat] = 0.0

    def _kind(self, name: str) -> int:
        """Return where a kind's sums are kept."""
        kind = self._kinds.get(name)
        return self._new_kind(name) if kind is None else kind

    def _new_kind(self, name: str) -> int:
        kind = self._kinds[name] = len(self._kinds)
        self._kind_sums, self._kind_trees = _with_rows(self._kind_sums, kind + 1), _with_rows(self._kind_trees, kind + 1)
        self._kind_begun = _with_rows(self._kind_begun, kind + 1, START_TREES)
        self._kind_came = _with_rows(self._kind_came, kind + 1, CAME_TOKENS)
        return kind

    def _means(self, kind: int) -> Array:
        """Return what a tree of a kind brings on the mean, before what comes of it is known, F by K.

        The start stands for some trees. It is scaled by what trees bring of the nodes they tell of, over what it foretold of
        these: so much more or less is expected of others. The likeliest are left aside, of which sure texts have many.
        """
        start_K, begun_K, trees_K = self._start_FK[_CHANCES, 1:], self._kind_begun[kind], self._kind_trees[kind]
        begun = START_TREES * float(start_K.sum()) + EDGE
        scale = (float(self._kind_sums[kind, _CHANCES, 1:].sum()) + begun) / (float(start_K @ trees_K[1:]) + begun)
        return np.asarray((self._kind_sums[kind] + scale * begun_K * self._start_FK) / (trees_K + begun_K))

    def _comes(self, kind: int) -> Array:
        """Return the share of what is expected of a kind that comes, [K]."""
        return np.asarray(self._kind_came[kind, 0] / self._kind_came[kind, 1])

    def expect(self, seats: Sequence[int], kinds: Sequence[str]) -> Array:
        """Return expected tokens (the extra one included), nodes, rounds and nodes fed to the drafter, [4, B, K]."""
        told_4BK, places_K = np.empty((4, len(seats), len(self._least))), np.arange(len(self._least))
        self.tell(seats, kinds, told_4BK, places_K, places_K)
        return told_4BK

    def tell(self, seats: Sequence[int], kinds: Sequence[str], told_4BM: Array, columns_W: Places, places_W: Places) -> None:
        """Write the same of W of the entries, `places_W` in ascending order, into these columns."""
        kind_B = [self._kind(name) for name in kinds]
        usual_BFK, comes_BK = (np.array([of(kind) for kind in kind_B]) for of in (self._means, self._comes))
        weights_BK = self._trees[seats] + KIND_TREES
        sums_BFK = (self._sums[seats] + KIND_TREES * usual_BFK) / weights_BK[:, None]
        sums_BFK[:, _CHANCES] *= comes_BK * self._own_share(seats)[:, None]
        up_to_BFW = sums_BFK.cumsum(2)[:, :, places_W]
        depth_W, most_nodes_W = self._depth_K[places_W], self._most_nodes_K[places_W]
        told_4BM[0, :, columns_W] = (1.0 + np.minimum(up_to_BFW[:, _CHANCES], depth_W)).T
        told_4BM[1, :, columns_W] = np.minimum(up_to_BFW[:, _NODES], most_nodes_W).T
        told_4BM[2, :, columns_W] = np.minimum(1.0 + up_to_BFW[:, _ROUNDS], depth_W).T
        told_4BM[3, :, columns_W] = np.minimum(up_to_BFW[:, _FED], most_nodes_W).T

    def _own_share(self, seats: Sequence[int]) -> Array:
        """Return what came of what was expected of each sequence as one of its kind, [B]."""
        came_B2 = self._came[seats] + CAME_TOKENS
        return np.asarray(came_B2[:, 0] / came_B2[:, 1])

    def observe(self, outcomes: Sequence[DraftOutcome], seats: Sequence[int], kinds: Sequence[str]) -> None:
        """Learn from noise-aware trees, of which each knows its nodes. Those of one call are equally recent.

        A tree that was cut, to its request's bound or to the room there was, tells its own sequence all that it may have, and the
        kind what it would have been whole.
        """
        kind_of_seat = dict(zip(seats, (self._kind(name) for name in kinds), strict=True))
        trees: dict[int, list[DraftOutcome]] = {}
        for outcome, seat in zip(outcomes, seats, strict=True):
            trees.setdefault(seat, []).append(outcome)
        own = [*trees]
        found = [self._found(of_seat, _least_told) for of_seat in trees.values()]
        whole = [
            self._found(of_seat, self._least_whole) if any(map(self._is_cut, of_seat)) else told
            for of_seat, told in zip(trees.values(), found, strict=True)
        ]
        sums_BFK = np.array([one.sums for one in found])
        told_BK, came_BK = np.array([one.num_told for one in found]), np.array([one.came for one in found])
        comes_BK = np.stack([self._comes(kind_of_seat[seat]) for seat in own])
        expected_B = (sums_BFK[:, _CHANCES] * comes_BK).sum(1)
        stays_B1 = OWN_MEMORY ** np.array([[float(one.num_trees)] for one in found])
        stays_BK = OWN_MEMORY**told_BK
        self._came[own] = stays_B1 * self._came[own] + np.stack([came_BK.sum(1), expected_B], axis=1)
        self._sums[own] = stays_BK[:, None] * self._sums[own] + sums_BFK
        self._trees[own] = stays_BK * self._trees[own] + told_BK
        for kind in dict.fromkeys(kind_of_seat.values()):
            self._learn_of_kind(kind, [one for seat, one in zip(own, whole, strict=True) if kind_of_seat[seat] == kind])

    def _learn_of_kind(self, kind: int, found: Sequence["NodeSums"]) -> None:
        """Add what some trees say to what is known of their kind."""
        sums_FK, told_K, came_K = (
            np.array(rows).sum(0) for rows in zip(*((one.sums, one.num_told, one.came) for one in found), strict=True)
        )
        stays_K, stays = KIND_MEMORY**told_K, CAME_MEMORY ** sum(one.num_trees for one in found)
        self._kind_sums[kind] = stays_K * self._kind_sums[kind] + sums_FK
        self._kind_trees[kind] = stays_K * self._kind_trees[kind] + told_K
        self._kind_begun[kind] *= stays_K
        came_2K = np.stack([came_K, sums_FK[_CHANCES]])
        self._kind_came[kind] = stays * self._kind_came[kind] + (1.0 - stays) * CAME_TOKENS + came_2K

    def _found(self, trees: Sequence[DraftOutcome], least_told: Callable[[DraftOutcome], float]) -> "NodeSums":
        found = NodeSums(self._least)
        for one in trees:
            found.add(one, least_told(one))
        return found

    def _is_cut(self, outcome: DraftOutcome) -> bool:
        expansion = outcome.expansion  # mostly an entry itself, which is found sooner than one like it
        return id(expansion) not in self._entry_ids and expansion not in self._entries

    def _least_whole(self, outcome: DraftOutcome) -> float:
        """Return the chance above which a tree has the nodes that it would have had uncut: children are no likelier."""
        expansion, nodes = outcome.expansion, outcome.nodes
        assert nodes is not None
        least = nodes.least
        if not self._is_cut(outcome):
            return least
        if len(nodes.chances) >= expansion.max_nodes:
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


def _with_rows(array: Array, num_rows: int, value: float = 0.0) -> Array:
    """Return an array with rows of a value behind its own, so many in all."""
    return np.concatenate([array, np.full((num_rows - len(array), *array.shape[1:]), value)])


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
