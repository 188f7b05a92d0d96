"""Expected tokens, nodes and rounds of every tree on the menu, for each sequence, before anything is drafted.

An Estimator knows nothing of seconds. The one here keeps decaying counts: of trees that are chosen whole, accepted tokens by
depth; of noise-aware trees, what their nodes were worth by the least chance that admits them. Everything is shrunk by one formula
(`_shrunk`): a depth is like the depth above it, a sequence is like its kind (temperature and verifier).

Shape key: B sequences, M entries of a menu, D depths, K entries that differ by the least chance of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, log
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import DraftOutcome, NodeChances, SequenceView
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from selector.menu import Menu

Array = NDArray[np.float64]

_START_ACCEPTANCE = 0.5  # before any trial: worth a try, soon refuted
_TYPICAL = 0.7  # acceptance, for which widths of trees that find their own shape are right
_START_TOKENS = 0.7  # of a noise-aware tree, for each factor of e between 1 and the least chance of its nodes
_PRIOR_TRIALS = 3.0  # that a prior weighs
_KIND_DECAY, _OWN_DECAY = 0.998, 0.96  # of counts, at each later tree
_EDGE = 1e-3  # no rate is closer to 0 or 1
_WITHOUT_NODES = np.array([[1.0], [0.0], [1.0]])  # tokens, nodes, rounds of a noise-aware tree without likely nodes


class Estimates(NamedTuple):
    """Expectations for each sequence and entry, float64 [B, M] each: E[tau + 1], drafted nodes, rounds of growth."""

    tokens: Array
    nodes: Array
    rounds: Array


class Estimator(Protocol):
    """Predicts what each expansion would bring and learns from what it brought: the seam between texts and seconds.

    Made for one menu (by counts, by a network). Sequences may be new or still feeding their prompts. A number that is not
    finite, or an error, costs the step its choice and nothing else.
    """

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences, in order, over a part of the estimator's menu, or all of it."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from what became of the sequences of a step."""
        ...


def kind_of(sampling: SamplingParams, verifier: str) -> str:
    """Return the name of a sequence's kind: greedy, or its verifier and how flat its distribution is."""
    if sampling.is_greedy:
        return "greedy"
    flatness = "cool" if sampling.temperature <= 0.5 else "warm" if sampling.temperature <= 1.0 else "hot"
    return f"{verifier} {flatness}"


class _Rates(NamedTuple):
    """Estimates of one sequence or kind: acceptance and offering by depth, [D]; tokens, nodes, rounds by least chance, [K]."""

    accepted: list[float]
    offered: list[float]
    by_chance: list[list[float]]


class _Counts:
    """Decaying counts of one sequence or one kind."""

    def __init__(self, num_depths: int, num_chances: int, decay: float) -> None:
        self._decay = decay
        self.by_depth = np.zeros((4, num_depths))  # accepted, tried, offered, asked
        self.by_chance = np.zeros((4, num_chances))  # tokens, nodes, rounds, trees
        self._came = self._expected = 0.0  # nodes of noise-aware trees that were accepted, and the sum of their chances

    def add_depths(self, counts_4D: Array) -> None:
        """Add a tree that was chosen whole."""
        self.by_depth *= self._decay
        self.by_depth += counts_4D

    def add_nodes(self, sums_4T: Array, num_accepted: int, expected: float) -> None:
        """Add a noise-aware tree: sums up to each of the first T least chances, the only ones that it has evidence of."""
        part = self.by_chance[:, : sums_4T.shape[1]]
        part *= self._decay
        part += sums_4T
        self._came, self._expected = self._decay * self._came + num_accepted, self._decay * self._expected + expected

    def rates(self, prior: _Rates, is_kind: bool) -> _Rates:
        """Return the estimates, shrunk towards `prior`; a kind's tokens are also corrected by how many were accepted."""
        accepted, tried, offered, asked = self.by_depth.tolist()
        tokens, nodes, rounds, trees = self.by_chance.tolist()
        share = (self._came + _PRIOR_TRIALS) / (self._expected + _PRIOR_TRIALS) if is_kind else 1.0
        return _Rates(
            _shrunk(accepted, tried, prior.accepted, 1.0 - _EDGE),
            _shrunk(offered, asked, prior.offered, 1.0),
            [
                _shrunk([share * one for one in tokens], trees, prior.by_chance[0]),
                _shrunk(nodes, trees, prior.by_chance[1]),
                _shrunk(rounds, trees, prior.by_chance[2]),
            ],
        )


def _shrunk(hits: list[float], trials: list[float], priors: list[float], most: float = inf) -> list[float]:
    """Return hits over trials at each place, shrunk towards its prior times what came before it over the prior of that.

    Before a depth (rates, at most `most`) came the one above it; before an increment of a sum, the sum so far.
    """
    found: list[float] = []
    total = before = _EDGE
    for hit, trial, prior in zip(hits, trials, priors, strict=True):
        rate = min(most, (hit + _PRIOR_TRIALS * min(most, prior * total / before)) / (trial + _PRIOR_TRIALS))
        found.append(rate)
        total, before = (total + rate, before + prior) if most == inf else (max(_EDGE, rate), prior)
    return found


@dataclass
class _Kind:
    """Counts of all sequences of a kind, and the estimates that follow from them until the next tree."""

    counts: _Counts
    rates: _Rates | None = None


@dataclass
class _Own:
    """Counts of one sequence, and the estimates that follow from them and its kind's `of_kind`."""

    counts: _Counts
    kind: _Kind
    sampling: SamplingParams
    verifier: str
    of_kind: _Rates | None = None
    rates: _Rates | None = None

    def is_of(self, view: SequenceView) -> bool:
        """Return whether a sequence of that id is still this one."""
        return self.verifier == view.verifier and (self.sampling is view.sampling or self.sampling == view.sampling)


class CountedAcceptance:
    """The estimator that counts. Keeps a little state for each sequence it was lately asked about."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._by_chance = [entry for entry in menu.entries if entry.least_chance]
        self._least = [entry.least_chance for entry in self._by_chance]
        if self._least != sorted(self._least, reverse=True):
            raise ValueError("the greatest least chance comes first")
        self._num_depths = max(1, menu.deepest)
        self._start = _Rates([_START_ACCEPTANCE] * self._num_depths, [1.0] * self._num_depths, _start_of(self._by_chance))
        most = [(1.0 + one.max_depth, one.max_nodes, one.max_depth) for one in self._by_chance]
        self._most_3K = np.array(most, dtype=np.float64).reshape(-1, 3).T
        self._kinds: dict[str, _Kind] = {}
        self._own: dict[str, _Own] = {}
        self._parts: dict[Menu, _Part] = {}

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences."""
        menu = menu or self._menu
        part = self._parts.get(menu) or self._parts.setdefault(menu, _Part.of(menu, self._num_depths, self._least))
        rates = [self._rates_of(view) for view in views]
        self._drop_absent(views)
        found_3BM = np.zeros((3, len(views), len(menu)))
        found_3BM[0] = 1.0
        if len(part.chance_columns):
            by_chance_B3K = np.array([one.by_chance for one in rates]).cumsum(2) + _WITHOUT_NODES
            by_chance_B3K = np.minimum(by_chance_B3K, self._most_3K)
            found_3BM[:, :, part.chance_columns] = by_chance_B3K.transpose(1, 0, 2)[:, :, part.chance_places]
        if len(part.depth_columns):
            accepted_BD, offered_BD = np.array([(one.accepted, one.offered) for one in rates]).swapaxes(0, 1)
            found_3BM[:, :, part.depth_columns] = part.by_depth(accepted_BD, offered_BD)
        return Estimates(*found_3BM)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from trees; a row that decoded plainly says nothing."""
        for outcome in outcomes:
            own = self._own.get(outcome.request_id)
            if own is None or outcome.expansion.is_plain:
                continue
            if outcome.nodes is None:
                self._observe_depths(own, outcome)
            elif self._by_chance:
                self._observe_nodes(own, outcome, outcome.nodes)

    def _observe_depths(self, own: _Own, outcome: DraftOutcome) -> None:
        """Count trials by depth. A refusal of K siblings is K misses; one accepted of K is the part of a hit that keeps the rate.

        E[hits] = a E[trials] under P(any) = 1 - (1 - a)^K.
        """
        widths, accepted = _widths(outcome.expansion), outcome.accepted_depth
        asked = min(len(widths), self._num_depths)
        drafted = outcome.drafted_depth
        if not outcome.expansion.is_delayed and drafted < asked:
            drafted -= 1  # the last round found nothing
        counts_4D = np.zeros((4, self._num_depths))
        rates = own.rates.accepted if own.rates else self._start.accepted
        for depth, width in enumerate(widths[: min(accepted + 1, asked)]):
            rate, is_hit = rates[depth], depth < accepted
            part = width * rate * (1.0 - rate) ** (width - 1.0) / (1.0 - (1.0 - rate) ** width) if is_hit else width
            counts_4D[:2, depth] = part * is_hit, part
        counts_4D[2, : max(0, min(drafted, asked))] = 1.0
        counts_4D[3, : max(1, min(drafted + 1, asked))] = 1.0
        for counts in (own.counts, own.kind.counts):
            counts.add_depths(counts_4D)
        own.kind.rates = None

    def _observe_nodes(self, own: _Own, outcome: DraftOutcome, nodes: NodeChances) -> None:
        """Add up what the nodes between one least chance and the next bring. A tree has no evidence of nodes below its own bound.

        A tree that was cut below the menu's has evidence for its own sequence alone, which all later ones are cut for too.
        """
        likeliest = sorted(zip(nodes.chances, nodes.depths, strict=True), reverse=True)
        is_cut = outcome.expansion not in self._menu.index
        least = min(nodes.chances) if is_cut and len(nodes.chances) >= outcome.expansion.max_nodes else nodes.least
        sums: list[tuple[float, float, float, float]] = []
        count, deepest = 0, 1
        for chance in self._least:
            if chance < least:
                break
            first, before, tokens = count, deepest, 0.0
            while count < len(likeliest) and likeliest[count][0] >= chance:
                tokens += likeliest[count][0]
                deepest = max(deepest, min(likeliest[count][1] + 1, outcome.drafted_depth))
                count += 1
            sums.append((tokens, count - first, deepest - before, 1.0))
        if not sums:
            return
        sums_4T = np.array(sums).T
        expected = sum(nodes.chances)
        for counts in (own.counts,) if is_cut else (own.counts, own.kind.counts):
            counts.add_nodes(sums_4T, len(nodes.accepted), expected)
        own.kind.rates = None

    def _rates_of(self, view: SequenceView) -> _Rates:
        """Return a sequence's estimates, made anew if a tree of its kind came since."""
        own = self._own.get(view.request_id)
        if own is None or not view.num_generated or not own.is_of(view):
            own = self._begin(view)
        kind = own.kind
        if kind.rates is None:
            kind.rates = kind.counts.rates(self._start, is_kind=True)
        if own.rates is None or own.of_kind is not kind.rates:
            own.rates, own.of_kind = own.counts.rates(kind.rates, is_kind=False), kind.rates
        return own.rates

    def _begin(self, view: SequenceView) -> _Own:
        """Return fresh counts for a sequence that was not seen before, or whose id begins anew."""
        size = self._num_depths, len(self._least)
        name = kind_of(view.sampling, view.verifier)
        kind = self._kinds.get(name) or self._kinds.setdefault(name, _Kind(_Counts(*size, _KIND_DECAY)))
        self._own[view.request_id] = own = _Own(_Counts(*size, _OWN_DECAY), kind, view.sampling, view.verifier)
        return own

    def _drop_absent(self, views: Sequence[SequenceView]) -> None:
        """Forget sequences that are gone, now and then."""
        if len(self._own) > 2 * len(views) + 8:
            present = {view.request_id for view in views}
            self._own = {name: own for name, own in self._own.items() if name in present}


@dataclass(frozen=True, eq=False)
class _Part:
    """Columns of a menu by how they are estimated: trees chosen whole, by depth; noise-aware ones, by their least chance.

    Of each tree chosen whole: how many siblings compete at each depth, the nodes there, and whether a level follows, [M, D].
    `chance_places` are the noise-aware trees' places among the estimator's.
    """

    depth_columns: NDArray[np.int64]
    widths_MD: Array
    nodes_MD: Array
    has_next_MD: Array
    chance_columns: NDArray[np.int64]
    chance_places: NDArray[np.int64]

    @classmethod
    def of(cls, menu: Menu, num_depths: int, least: list[float]) -> "_Part":
        """Return what is known of a menu beforehand."""
        whole = [place for place, entry in enumerate(menu.entries) if not (entry.is_plain or entry.least_chance)]
        by_chance = [place for place, entry in enumerate(menu.entries) if entry.least_chance]
        widths_MD, nodes_MD, has_next_MD = np.zeros((3, len(whole), num_depths))
        for row, place in enumerate(whole):
            entry = menu.entries[place]
            widths_MD[row, : entry.max_depth] = _widths(entry)
            nodes_MD[row, : entry.max_depth] = _nodes_by_depth(entry)
            has_next_MD[row, : entry.max_depth - 1] = 1.0
        chances = [least.index(menu.entries[place].least_chance) for place in by_chance]
        return cls(_places(whole), widths_MD, nodes_MD, has_next_MD, _places(by_chance), _places(chances))

    def by_depth(self, accepted_BD: Array, offered_BD: Array) -> Array:
        """Return expected tokens, nodes and rounds of trees chosen whole, [3, B, M]."""
        reached_BMD = np.cumprod(1.0 - (1.0 - accepted_BD[:, None]) ** self.widths_MD, axis=2)
        drafted_BD = np.cumprod(offered_BD, axis=1)
        return np.stack([1.0 + reached_BMD.sum(2), drafted_BD @ self.nodes_MD.T, 1.0 + drafted_BD @ self.has_next_MD.T])


def _places(places: list[int]) -> NDArray[np.int64]:
    return np.array(places, dtype=np.int64)


def _nodes_by_depth(entry: Expansion) -> list[float]:
    """Return the nodes at each depth; of a tree that finds its own shape, as many at each."""
    if not entry.is_delayed:
        return [entry.num_draft_tokens / entry.max_depth] * entry.max_depth
    return [1.0] * entry.trunk + [float(entry.branches)] * entry.depth


@cache
def _widths(entry: Expansion) -> tuple[float, ...]:
    """Return how many siblings compete for acceptance at each depth behind the accepted node: P(any) = 1 - (1 - a)^width.

    A delayed tree has branches at its fork alone. Of a tree that finds its own shape: as many as the best tree of its size has on
    the accepted path at a typical acceptance.
    """
    if entry.is_delayed:
        return (1.0,) * entry.trunk + ((float(entry.branches),) + (1.0,) * (entry.depth - 1) if entry.depth else ())
    reach = [1.0, *best_reach(entry, _TYPICAL)]
    chances = [max(_EDGE, min(1.0 - _EDGE, below / max(_EDGE, above))) for above, below in pairwise(reach)]
    return tuple(log(1.0 - chance) / log(1.0 - _TYPICAL) for chance in chances)


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


def _start_of(entries: Sequence[Expansion]) -> list[list[float]]:
    """Return tokens, nodes and rounds that each entry adds to the one before, before any noise-aware tree has grown, [3, K].

    As many tokens of nodes of any chance as of half of it, of which there are twice as many.
    """
    least_K = np.array([1.0, *(one.least_chance for one in entries)])
    tokens_K, nodes_K = -_START_TOKENS * np.log(least_K), _START_TOKENS * (1.0 / least_K - 1.0)
    return [np.diff(up_to_K).tolist() for up_to_K in (tokens_K, nodes_K, 2.0 * tokens_K)]
