"""What the text allows: the expected tokens of every expansion on the menu, for each sequence, before anything is drafted.

An Estimator knows nothing of seconds. The one here counts: per depth, how often a drafted token was accepted given that its
parent was, each sequence's own counts shrunk towards those of all sequences of its kind (temperature and verifier), and those
towards the depth above. Of noise-aware trees it keeps what their nodes were worth (selector.worth). Of others that find their own
shape it believes an acceptance, by how far their paths came. Shape key: B sequences, M entries of the menu, D depths, K branches,
S entries that find their own shape, W noise-aware ones, G points of a grid, or groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.policy import DraftOutcome, SequenceView
from engine.tree import Expansion
from engine.types import SamplingParams
from selector.menu import Menu
from selector.native.worths import worth_of_nodes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimates:
    """Expectations for each sequence and entry, side by side: tokens, nodes, passes and nodes fed, float64 [4, B, M].

    `reads_roots` says that the roots themselves were asked about some sequences: a few tokens on they may say something else,
    though nothing was learnt in between.
    """

    told_4BM: Array
    reads_roots: bool = False

    @classmethod
    def of(cls, tokens: Array, nodes: Array, passes: Array, fed: Array, reads_roots: bool = False) -> "Estimates":
        """Return these expectations, [B, M] each."""
        return cls(np.array((tokens, nodes, passes, fed), dtype=np.float64), reads_roots)

    @property
    def tokens(self) -> Array:
        """E[tau + 1], the extra token included."""
        return np.asarray(self.told_4BM[0])

    @property
    def nodes(self) -> Array:
        """Drafted nodes that will be there to verify: a drafter may have nothing to say."""
        return np.asarray(self.told_4BM[1])

    @property
    def passes(self) -> Array:
        """Draft passes that they take where no cached text spares the model any."""
        return np.asarray(self.told_4BM[2])

    @property
    def fed(self) -> Array:
        """Nodes that are fed to the drafter."""
        return np.asarray(self.told_4BM[3])


class Estimator(Protocol):
    """Tells what each expansion would bring, and learns from what it brought: the seam between texts and seconds.

    Whatever tells this can stand behind the policy (counts, a network), made for one menu. It is asked every few steps, about
    sequences that may be new or still be feeding their prompts, and told of every step with trees, in which may be some
    that it was never asked about. A number that is not finite, or an error, costs the step its choice and nothing else.
    """

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences, in order, over a part of the estimator's menu, or all of it."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from what became of the sequences of a step."""
        ...


_START_ACCEPTANCE = 0.5  # before anything is known: worth a try, soon refuted
_GROUP_TRIALS, _OWN_TRIALS = 4.0, 6.0  # what a prior weighs, in trials
_GROUP_MEMORY, _OWN_MEMORY = 0.998, 0.98  # what a count keeps of itself at each of its outcomes
_RATIO_TRIALS, _RATIO_MEMORY = 30.0, 0.998  # seen over expected: what a ratio of 1 weighs, how slowly it returns there
_EDGE = 1e-3
_MAX_BRANCHES = 16
_MOST_UNTOLD = 256  # noise-aware trees that wait for the next estimate
_GRID = np.linspace(0.0, 0.99, 34)  # of acceptance, of which trees of their own shape have one
_STAYS = 0.97  # chance that a sequence's acceptance is what it was a tree ago; else it is any that its kind has
_FROM_ONE = 0.02  # of what is believed of a kind, that comes from each tree of one of its sequences
_UNLIKE_ALL = 0.05  # chance that a sequence is like none of its kind before it: nothing is ruled out by what never came
_UNEXPLAINED = 0.1  # chance that a path ends anywhere, whatever the acceptance
_WEIGHT = 0.7  # of a path, in paths: one step's is like the next one's, and texts are not of one acceptance throughout

_START_G = _GRID * (1.0 - _GRID) + _EDGE  # belief before anything is known
_START_G /= _START_G.sum()

# Rows of the counts of one sequence or kind, each by depth.
_ACCEPTED, _TRIED, _OFFERED, _ASKED = range(4)
_NUM_COUNTS = 4


def kind_of(sampling: SamplingParams, verifier: str) -> str:
    """Return which sequences are alike: greedy ones, others by verifier and how flat their law is."""
    if sampling.is_greedy:
        return "greedy"
    flatness = "cool" if sampling.temperature <= 0.5 else "warm" if sampling.temperature <= 1.0 else "hot"
    return f"{verifier} {flatness}"


class _Group:
    """What is known of one kind of sequences."""

    def __init__(self, num_depths: int, menu: Menu) -> None:
        self.counts = np.zeros((_NUM_COUNTS, num_depths))
        # Of K branches, and of each entry: what was seen over what was expected, as two sums.
        widths = [_MAX_BRANCHES + 1] * 2 + [len(menu)] * 3
        self._ratios = np.full((2, sum(widths)), _RATIO_TRIALS)
        self.forks, self.merged, self.entries, self.fill, self.reach = np.split(self._ratios, np.cumsum(widths)[:-1], axis=1)
        self.belief_G = _START_G
        self._laws: Array | None = None
        self._sized: dict[_Part, tuple[Array, Array, Array]] = {}

    def forget(self) -> None:
        self.counts *= _GROUP_MEMORY
        self._laws = None
        self._sized.clear()
        self._ratios *= _RATIO_MEMORY
        self._ratios += (1.0 - _RATIO_MEMORY) * _RATIO_TRIALS

    @property
    def pooled(self) -> tuple[float, float]:
        """Acceptance and offering whatever the depth."""
        hits, trials, offers, asks = self.counts.sum(1).tolist()
        accepted = (hits + _GROUP_TRIALS * _START_ACCEPTANCE) / (trials + _GROUP_TRIALS)
        return min(accepted, 1.0 - _EDGE), min((offers + _GROUP_TRIALS) / (asks + _GROUP_TRIALS), 1.0 - _EDGE)

    def sized(self, part: "_Part") -> tuple[Array, Array, Array]:
        """Of a part's trees that find their own shape what came over what was expected, nodes and levels, [S] each."""
        if part not in self._sized:
            ratio_S, fill_S, reach_S = (
                one[0, part.places_S] / one[1, part.places_S] for one in (self.entries, self.fill, self.reach)
            )
            self._sized[part] = ratio_S, part.sizes_S * np.minimum(fill_S, 1.0), part.depths_S * np.minimum(reach_S, 1.0)
        return self._sized[part]

    @property
    def laws(self) -> Array:
        """Acceptance and offering by depth, [2, D]: each depth's counts, shrunk to the depth above, the first's to all depths."""
        if self._laws is None:
            accepted, offered = self.pooled
            laws = np.empty((2, self.counts.shape[1]))
            for depth, (hits, trials, offers, asks) in enumerate(self.counts.T.tolist()):
                accepted = (hits + _GROUP_TRIALS * accepted) / (trials + _GROUP_TRIALS)
                offered = (offers + _GROUP_TRIALS * offered) / (asks + _GROUP_TRIALS)
                laws[:, depth] = accepted, offered
            self._laws = np.clip(laws, _EDGE, 1.0 - _EDGE)
        return self._laws


class CountedAcceptance:
    """The estimator that counts. Keeps a little state for each sequence it has lately been asked about."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._num_depths = max(1, int(menu.depths.max()))
        self._worth = worth_of_nodes([entry for entry in menu.entries if entry.least_chance], 0)
        reach = [_reach(entry) for entry in menu.entries if _is_sized(entry)]
        table_SG = np.array([1.0 + reach_DG.sum(0) for reach_DG in reach])
        self._whole = _part_of(menu, menu, table_SG)
        self._endings = [_endings(reach_DG) for reach_DG in reach]
        self._parts = {menu: self._whole}
        self._known_sizes: dict[tuple[int, int], _Neighbours] = {}
        self._groups: dict[str, _Group] = {}
        self._seats: dict[str, int] = {}
        self._free: list[int] = []
        self._knowing: list[DraftOutcome] = []
        self._make_room(16)

    def _make_room(self, num_seats: int) -> None:
        """Have seats for so many sequences."""
        old = len(self._free) + len(self._seats)
        depths = self._num_depths
        self._worth.make_room(num_seats)
        self._free.extend(range(num_seats - 1, old - 1, -1))
        if not old:
            self._counts = np.zeros((num_seats, _NUM_COUNTS, depths))
            self._accept = np.full((num_seats, depths), _START_ACCEPTANCE)
            self._beliefs = np.zeros((num_seats, len(_GRID)))
            self._kind_of_seat = [""] * num_seats
            self._begun_as: list[tuple[SamplingParams, str] | None] = [None] * num_seats
            return
        more = num_seats - old
        self._counts = np.concatenate([self._counts, np.zeros((more, _NUM_COUNTS, depths))])
        self._accept = np.concatenate([self._accept, np.full((more, depths), _START_ACCEPTANCE)])
        self._beliefs = np.concatenate([self._beliefs, np.zeros((more, len(_GRID)))])
        self._kind_of_seat += [""] * more
        self._begun_as += [None] * more

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences."""
        menu = menu or self._menu
        part = self._part(menu)
        self._tell_of_nodes()
        seats = [self._seat(view) for view in views]
        self._leave(views)
        kinds = [self._kind_of_seat[seat] for seat in seats]
        if menu.is_by_chance:
            told_4BM = np.zeros((4, len(seats), len(menu)))
            told_4BM[0] = 1.0
            self._worth.tell(seats, kinds, told_4BM, part.columns_W, part.places_W)
            return Estimates(told_4BM)
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        groups, group_B = [self._groups[kind] for kind in places], np.array([places[kind] for kind in kinds])
        if part.has_delayed:
            laws_2BD = np.stack([group.laws for group in groups], axis=1)[:, group_B]
            pooled_2B = np.array([group.pooled for group in groups]).T[:, group_B]
            accept_BD, offer_BD = _shrunk(self._counts[seats], laws_2BD, pooled_2B)
            self._accept[seats] = accept_BD
            tokens_BM = _tokens(part, accept_BD, _ratios([group.forks for group in groups])[group_B])
            nodes_BM, passes_BM = _nodes(part, offer_BD, _ratios([group.merged for group in groups])[group_B])
        else:
            size = (len(seats), len(part.trunk_M))
            tokens_BM, nodes_BM, passes_BM = np.ones(size), np.zeros(size), np.zeros(size)
        if len(part.columns_S):
            ratio_GS, nodes_GS, passes_GS = (
                np.stack(rows) for rows in zip(*(group.sized(part) for group in groups), strict=True)
            )
            tokens_BM[:, part.columns_S] = _sized_tokens(part, self._beliefs[seats], ratio_GS[group_B])
            nodes_BM[:, part.columns_S] = nodes_GS[group_B]
            passes_BM[:, part.columns_S] = passes_GS[group_B]
        fed_BM = nodes_BM * menu.fed_share
        told_4BM = np.array((tokens_BM, nodes_BM, passes_BM, fed_BM))
        if len(part.columns_W):
            self._worth.tell(seats, kinds, told_4BM, part.columns_W, part.places_W)
        return Estimates(told_4BM)

    def _part(self, menu: Menu) -> "_Part":
        """Return what is known of the trees of a part of the menu."""
        part = self._parts.get(menu)
        if part is None:
            part = self._parts[menu] = _part_of(menu, self._menu, self._whole.table_SG)
        return part

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from trees; a row that was plain says nothing."""
        by_group: dict[int, tuple[_Group, list[DraftOutcome]]] = {}
        for outcome in outcomes:
            if outcome.expansion.is_plain or outcome.request_id not in self._seats:
                continue
            if outcome.nodes is not None and len(self._whole.columns_W):  # the tree's own chances are what is learnt of it
                self._knowing.append(outcome)
            else:
                group = self._group_of(outcome)
                by_group.setdefault(id(group), (group, []))[1].append(outcome)
        for group, of_group in by_group.values():
            group.forget()
            for outcome in of_group:
                if outcome.expansion.is_delayed:
                    self._count(self._seats[outcome.request_id], group, outcome)
            if len(self._whole.places_S):
                self._learn_shapes(group, [one for one in of_group if not one.expansion.is_delayed])
        if len(self._knowing) > _MOST_UNTOLD:
            self._tell_of_nodes()

    def _tell_of_nodes(self) -> None:
        """Learn from noise-aware trees since the last estimate: from many takes as long as from one."""
        if self._knowing:
            knowing, self._knowing = self._knowing, []
            seats = [self._seats[one.request_id] for one in knowing]
            self._worth.observe(knowing, seats, [self._kind_of_seat[seat] for seat in seats])

    def _group_of(self, outcome: DraftOutcome) -> _Group:
        return self._groups[self._kind_of_seat[self._seats[outcome.request_id]]]

    def _count(self, seat: int, group: _Group, outcome: DraftOutcome) -> None:
        """Count a delayed tree's trials by depth, and what its branches brought."""
        expansion, accepted, drafted = outcome.expansion, outcome.accepted_depth, outcome.drafted_depth
        asked = min(expansion.max_depth, self._num_depths)
        hits = np.zeros((_NUM_COUNTS, self._num_depths))
        hits[_ACCEPTED, :accepted] = 1.0
        hits[_TRIED, : min(accepted + 1, asked)] = 1.0
        hits[_OFFERED, :drafted] = 1.0
        hits[_ASKED, : min(drafted + 1, asked)] = 1.0
        fork, branches = expansion.trunk, min(expansion.branches, _MAX_BRANCHES)
        if branches > 1 and expansion.depth and fork < self._num_depths:
            if accepted >= fork:
                hits[[_ACCEPTED, _TRIED], fork] = self._of_fork(seat, group, fork, branches, accepted > fork)
            wished = branches * max(0, drafted - fork)
            if wished:
                below = outcome.num_nodes - min(drafted, fork)
                group.merged[:, branches] += (below / branches, wished / branches)
        self._counts[seat] *= _OWN_MEMORY
        self._counts[seat] += hits
        group.counts += hits

    def _of_fork(self, seat: int, group: _Group, fork: int, branches: int, is_accepted: bool) -> tuple[float, float]:
        """Return what a trial of K branches says of a single one, as hits of trials; learn what branches bring.

        Refused, they are K misses. Accepted, they are that part of a hit which leaves the ratio where it is if it is right:
        E[hits] = a E[trials] under P(any) = 1 - (1 - a)^K. Many branches are accepted so often that this is next to nothing.
        """
        single = float(self._accept[seat, fork])
        of_any = 1.0 - (1.0 - single) ** branches
        group.forks[:, branches] += (is_accepted, of_any)
        if not is_accepted:
            return 0.0, float(branches)
        part = branches * single * (1.0 - single) ** (branches - 1) / of_any
        return part, part

    def _learn_shapes(self, group: _Group, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from trees that found their own shapes: what acceptance explains how far their paths came.

        A sequence's acceptance is believed by how likely each makes its outcomes, the oldest forgotten: a chance is left that it
        has become another. A kind's is what its sequences' lately are, and what the next one begins with. What a tree left out,
        because it cost more than it would have brought, counts as refused: what is foretold is what a wish brings at the prices
        of the hour. The ratios of sizes are left aside: if they took the blame for a drafter that is never right, every size
        would have to be refuted by itself.
        """
        believed = []
        for one in outcomes:
            seat, size, depth = self._seats[one.request_id], one.expansion.num_draft_tokens, one.expansion.max_depth
            place, belief_G = self._among(size, depth), self._beliefs[seat]
            expected = float(belief_G @ self._usual_tokens(place)) - 1.0
            endings_DG = self._endings[place.nearest]
            explained_G = endings_DG[min(one.accepted_depth, len(endings_DG) - 1)]
            self._beliefs[seat] = _normed((_STAYS * belief_G + (1.0 - _STAYS) * group.belief_G) * explained_G)
            believed.append(self._beliefs[seat])
            nearest = self._whole.places_S[place.nearest]
            group.entries[:, nearest] += (one.accepted_depth, expected)
            group.fill[:, nearest] += (one.num_nodes / size, 1.0)
            group.reach[:, nearest] += (min(1.0, one.drafted_depth / depth), 1.0)
        if believed:
            stays = (1.0 - _FROM_ONE) ** len(believed)
            found_G = (1.0 - _UNLIKE_ALL) * np.mean(believed, axis=0) + _UNLIKE_ALL * _START_G
            group.belief_G = stays * group.belief_G + (1.0 - stays) * found_G

    def _usual_tokens(self, place: "_Neighbours") -> Array:
        """Return what a tree brings by its acceptance alone, between its neighbours in size, [G]."""
        below_G, above_G = self._whole.table_SG[place.low], self._whole.table_SG[place.high]
        return np.asarray(below_G + place.share * (above_G - below_G))

    def _among(self, size: int, depth: int) -> "_Neighbours":
        """Return where a tree that finds its own shape lies among those of like depth.

        One of a size between the menu's (there was no room for more) is foretold from its neighbours, and counts for the nearest.
        """
        if (size, depth) not in self._known_sizes:
            whole = self._whole
            alike = min(whole.alike, key=lambda known: abs(int(whole.depths_S[known[0]]) - depth))
            sizes = whole.sizes_S[alike]
            above = int(np.searchsorted(sizes, size).clip(0, len(sizes) - 1))
            below = max(above - 1, 0) if sizes[above] > size else above
            width = sizes[above] - sizes[below]
            share = min(1.0, (size - sizes[below]) / width) if width else 0.0
            nearest = np.abs(np.log(sizes / size)).argmin()
            self._known_sizes[size, depth] = _Neighbours(int(alike[below]), int(alike[above]), float(share), int(alike[nearest]))
        return self._known_sizes[size, depth]

    def _seat(self, view: SequenceView) -> int:
        """Return where a sequence's state is kept; one not seen before (or whose id begins anew) starts as its kind."""
        seat = self._seats.get(view.request_id)
        if seat is not None and view.num_generated and (begun_as := self._begun_as[seat]) is not None:
            sampling, verifier = begun_as
            if sampling is view.sampling and verifier == view.verifier:
                return seat
        kind = kind_of(view.sampling, view.verifier)
        if seat is not None and self._kind_of_seat[seat] == kind and view.num_generated:
            return seat
        if seat is None:
            if not self._free:
                self._make_room(2 * len(self._seats))
            seat = self._seats[view.request_id] = self._free.pop()
        if kind not in self._groups:
            self._groups[kind] = _Group(self._num_depths, self._menu)
        self._kind_of_seat[seat], self._begun_as[seat] = kind, (view.sampling, view.verifier)
        self._worth.clear(seat)
        self._counts[seat] = 0.0
        self._accept[seat] = _START_ACCEPTANCE
        self._beliefs[seat] = self._groups[kind].belief_G
        return seat

    def _leave(self, views: Sequence[SequenceView]) -> None:
        """Give up the seats of sequences that are gone, now and then."""
        if len(self._seats) <= 2 * len(views) + 8:
            return
        present = {view.request_id for view in views}
        for request_id in [one for one in self._seats if one not in present]:
            self._free.append(self._seats.pop(request_id))


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Columns of a tree's neighbours in size among trees of their own shape, how far it lies from the lower, and the nearest."""

    low: int
    high: int
    share: float
    nearest: int


def _ratios(sums: Sequence[Array]) -> Array:
    """Return what was seen beside what was expected, a row for each pair of sums."""
    return np.stack([seen / expected for seen, expected in sums])


def _shrunk(counts_B4D: Array, laws_2BD: Array, pooled_2B: Array) -> Array:
    """Return each depth's ratios, [2, B, D], shrunk towards the kind's with the odds that the depth above has beside its kind's.

    The first depth takes those of all depths together for the depth above.
    """
    hits_D2B = counts_B4D[:, (_ACCEPTED, _OFFERED)].transpose(2, 1, 0)
    trials_D2B = counts_B4D[:, (_TRIED, _ASKED)].transpose(2, 1, 0)
    odds_D2B = (laws_2BD / (1.0 - laws_2BD)).transpose(2, 0, 1)
    ratios_D2B = np.empty(hits_D2B.shape)
    ratio_2B = (hits_D2B.sum(0) + _OWN_TRIALS * pooled_2B) / (trials_D2B.sum(0) + _OWN_TRIALS)
    above_2B = pooled_2B / (1.0 + _EDGE - pooled_2B)
    for depth in range(len(ratios_D2B)):
        # The square root: half of what is special about a sequence at one depth carries over to the next.
        tilted_2B = odds_D2B[depth] * np.sqrt(ratio_2B / ((1.0 + _EDGE - ratio_2B) * above_2B))
        ratio_2B = (hits_D2B[depth] + _OWN_TRIALS * tilted_2B / (1.0 + tilted_2B)) / (trials_D2B[depth] + _OWN_TRIALS)
        ratio_2B = np.minimum(np.maximum(ratio_2B, _EDGE), 1.0 - _EDGE)
        ratios_D2B[depth], above_2B = ratio_2B, odds_D2B[depth]
    return ratios_D2B.transpose(1, 2, 0)


@dataclass(frozen=True, eq=False)
class _Part:
    """Of each entry of a menu that delays its branches: where its trunk ends, where it ends, the depth behind the fork, branches.

    Trees that find their own shape, S of them, are plain there and have columns of their own: their places in this menu and in
    the estimator's, what they bring by acceptance, sizes and depths, and which of them are alike in depth, smallest first. So do
    the W of those whose nodes have a least chance: places in this menu, and among the estimator's of that kind.
    """

    trunk_M: NDArray[np.int64]
    end_M: NDArray[np.int64]
    fork_M: NDArray[np.int64]
    branches_M: NDArray[np.int64]
    columns_S: NDArray[np.int64]
    places_S: NDArray[np.int64]
    table_SG: Array
    sizes_S: NDArray[np.int64]
    depths_S: NDArray[np.int64]
    alike: tuple[NDArray[np.int64], ...]
    columns_W: NDArray[np.int64]
    places_W: NDArray[np.int64]

    @cached_property
    def has_delayed(self) -> bool:
        """Whether there is one beside plain decoding."""
        return bool((self.end_M > 0).any())

    @cached_property
    def is_forked(self) -> bool:
        """Whether any of them branches."""
        return bool((self.branches_M > 1).any())


def _part_of(menu: Menu, whole: Menu, table_SG: Array) -> _Part:
    """Return what is known of `menu`, a part of `whole`, whose trees of their own shape bring `table_SG`, in their order."""
    delayed = [entry if entry.is_delayed else Expansion(0, 1, 0) for entry in menu.entries]
    last = max(1, int(whole.depths.max())) - 1
    columns, sized = (
        np.array([place for place, entry in enumerate(one.entries) if _is_sized(entry)], dtype=np.int64) for one in (menu, whole)
    )
    places = np.array([whole.index[menu.entries[place]] for place in columns], dtype=np.int64)
    depths = menu.depths[columns]
    knowing = [entry for entry in whole.entries if entry.least_chance]
    of_menu = [place for place, entry in enumerate(menu.entries) if entry.least_chance]
    return _Part(
        trunk_M=np.array([entry.trunk for entry in delayed]),
        end_M=np.array([entry.max_depth for entry in delayed]),
        fork_M=np.array([min(entry.trunk, last) for entry in delayed]),
        branches_M=np.array([min(entry.branches, _MAX_BRANCHES) for entry in delayed]),
        columns_S=columns,
        places_S=places,
        table_SG=table_SG[np.searchsorted(sized, places)],
        sizes_S=menu.num_nodes[columns],
        depths_S=depths,
        alike=tuple(np.flatnonzero(depths == depth) for depth in np.unique(depths)),
        columns_W=np.array(of_menu, dtype=np.int64),
        places_W=np.array([knowing.index(menu.entries[place]) for place in of_menu], dtype=np.int64),
    )


def _is_sized(entry: Expansion) -> bool:
    """Return whether a tree finds its own shape up to a size, and is not ended by the chances of its nodes."""
    return not (entry.is_delayed or entry.least_chance)


def _tokens(part: _Part, accept_BD: Array, forks_BK: Array) -> Array:
    """Return expected tokens: the trunk's reach, and what lies behind the fork times what branches add to its chance."""
    reach_BD = np.concatenate([np.ones((len(accept_BD), 1)), np.cumprod(accept_BD, axis=1)], axis=1)
    up_to_BD = np.cumsum(reach_BD, axis=1)
    trunk_BM = up_to_BD[:, part.trunk_M]
    behind_BM = up_to_BD[:, part.end_M] - trunk_BM
    if part.is_forked:
        single_BM = accept_BD[:, part.fork_M]
        chance_BM = forks_BK[:, part.branches_M] * (1.0 - (1.0 - single_BM) ** part.branches_M)
        behind_BM = behind_BM * np.clip(chance_BM, single_BM, 1.0) / single_BM
    return np.asarray(trunk_BM + behind_BM)


def _nodes(part: _Part, offer_BD: Array, merged_BK: Array) -> tuple[Array, Array]:
    """Return expected nodes and draft passes: a level is drafted if the one above it was and the drafter goes on."""
    alive_BD = np.concatenate([np.zeros((len(offer_BD), 1)), np.cumprod(offer_BD, axis=1)], axis=1)
    up_to_BD = np.cumsum(alive_BD, axis=1)
    trunk_BM = up_to_BD[:, part.trunk_M]
    nodes_BM = trunk_BM + (up_to_BD[:, part.end_M] - trunk_BM) * part.branches_M * merged_BK[:, part.branches_M]
    passes_BM = np.where(part.end_M > 0, 1.0 + up_to_BD[:, np.maximum(part.end_M - 1, 0)], 0.0)
    return nodes_BM, passes_BM


def _sized_tokens(part: _Part, beliefs_BG: Array, ratio_BS: Array) -> Array:
    """Return what trees of their own shape bring: at most their depth and the extra token, no less than smaller ones."""
    tokens_BS = np.minimum(1.0 + (beliefs_BG @ part.table_SG.T - 1.0) * ratio_BS, 1.0 + part.depths_S)
    for alike in part.alike:
        tokens_BS[:, alike] = np.maximum.accumulate(tokens_BS[:, alike], axis=1)
    return np.asarray(tokens_BS)


def _normed(weights_G: Array) -> Array:
    return np.asarray(weights_G / weights_G.sum())


def best_reach(expansion: Expansion, acceptance: float) -> list[float]:
    """Return the chances that a path through the best tree of that size comes to each depth below the root.

    Every node is accepted with one chance given its parent. Places are filled most valuable first, a sibling's after its elder's.
    """
    places, reach = [(-acceptance, 1, 0)], [0.0] * expansion.max_depth  # (-chance to be accepted, depth, rank)
    for _ in range(expansion.max_nodes):
        if not places:
            break
        value, depth, rank = heappop(places)
        reach[depth - 1] -= value
        if depth < expansion.max_depth:
            heappush(places, (value * acceptance, depth + 1, 0))
        if rank + 1 < expansion.branches:
            heappush(places, (value * (1.0 - acceptance), depth, rank + 1))
    return reach


def _reach(expansion: Expansion) -> Array:
    """Return those chances at each acceptance of the grid, [D, G]."""
    return np.array([best_reach(expansion, float(acceptance)) for acceptance in _GRID]).T


def _endings(reach_DG: Array) -> Array:
    """Return how likely each acceptance makes it that a path of that reach ends at each depth, the root's first, [D + 1, G]."""
    alive_DG = np.pad(reach_DG, ((1, 1), (0, 0)), constant_values=0.0)
    alive_DG[0] = 1.0
    ends_DG = alive_DG[:-1] - alive_DG[1:]
    return np.asarray(((1.0 - _UNEXPLAINED) * ends_DG + _UNEXPLAINED / len(ends_DG)) ** _WEIGHT)
