"""Estimates expected tokens, nodes and rounds of every tree on the menu, for each sequence, before anything is drafted.

An Estimator does not know seconds. The one here keeps decaying counts. Trees that are chosen whole count accepted tokens by
depth. Noise-aware trees add up the probabilities of their nodes by least chance. Every estimate is shrunk: the prior
of a depth is the depth above it, the prior of a sequence is its kind (temperature and verifier).
Numbers are in lists: a choice has few, and after a pass of a model numpy's code is not in the processor's caches.

Shape key: B sequences, M entries of a menu, D depths, K entries with a least chance.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import log
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import DraftOutcome, NodeChances, SequenceView
from engine.core.tree import PLAIN, Expansion
from engine.core.types import SamplingParams
from selector.menu import Menu

Array = NDArray[np.float64]
Rows = Sequence[Sequence[float]]

_START_ACCEPTANCE = 0.5  # before any trial: high enough to be tried
_TYPICAL = 0.7  # acceptance for which shapes and tokens of trees that find their own shape are computed
_PRIOR_TRIALS = 3.0  # weight of a prior
_SIBLINGS = 0.4  # n siblings count as n ** 0.4 independent ones: those that follow the likeliest are accepted less
_BAND, _HOT = 0.5, 2.0  # width of a kind's temperatures, and the last kind
_KIND_DECAY, OWN_DECAY = 0.998, 0.96  # of counts, at each later tree
_EDGE = 1e-3  # least distance of a rate from 0 and 1


class Estimates(NamedTuple):
    """Expectations for each sequence and entry, [B][M] each: E[tau + 1], drafted nodes, rounds of growth."""

    tokens: Rows
    nodes: Rows
    rounds: Rows


class Estimator(Protocol):
    """Predicts the outcome of each expansion and learns from outcomes. An estimator is made for one menu.

    Sequences may be new or still feeding their prompts. If it raises an error or returns a number that is not finite, only the
    choice of that step is lost.
    """

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences, in order, over the estimator's menu or a part of it."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from the outcomes of one step or several, oldest first."""
        ...


def kind_of(sampling: SamplingParams, verifier: str) -> str:
    """Return the name of a sequence's kind: greedy, or its verifier and the middle of its temperature band."""
    if sampling.is_greedy:
        return "greedy"
    return f"{verifier} {_BAND * round(min(sampling.temperature, _HOT) / _BAND):g}"


class _Counts:
    """Decaying counts of a sequence of a `kind`, or of a kind. `accepted_D` are the latest rates of acceptance that follow."""

    def __init__(self, accepted_D: list[float], num_chances: int, kind: "_Counts | None" = None, rule: object = None) -> None:
        self.accepted_D, self.kind, self.rule, self._decay = accepted_D, kind or self, rule, OWN_DECAY if kind else _KIND_DECAY
        self.by_depth = [[0.0] * len(accepted_D)] * 4  # hits and trials of acceptance, then of availability
        self.by_chance = [[0.0] * num_chances] * 4  # tokens, nodes, rounds, trees
        self._accepted = self._expected = 0.0  # accepted nodes of noise-aware trees, and the sum of their probabilities
        self._sums: tuple[Rows, Rows] | None = None  # a prior, and the sums for it

    def sums(self, prior_3K: Rows) -> Rows:
        """Return the sums up to each least chance, which begin at _EDGE, [3][K].

        The tokens of a kind are multiplied by accepted over expected nodes.
        """
        if not self.by_chance[3][0]:
            return prior_3K
        if self._sums is None or self._sums[0] is not prior_3K:
            tokens, nodes, rounds, trees = self.by_chance
            if self.kind is self:
                reliability = (self._accepted + _PRIOR_TRIALS) / (self._expected + _PRIOR_TRIALS)
                tokens = [reliability * one for one in tokens]
            counts_3K = zip((tokens, nodes, rounds), prior_3K, strict=True)
            self._sums = prior_3K, [_shrunk(one, trees, prior, _EDGE, 1.0) for one, prior in counts_3K]
        return self._sums[1]

    def add_depths(self, counts_4D: Rows) -> None:
        """Add a tree that was chosen whole."""
        decay = self._decay
        self.by_depth = [[decay * old + new for old, new in zip(*of)] for of in zip(self.by_depth, counts_4D)]

    def add_trees(self, trees: "_Trees") -> None:
        """Add noise-aware trees. Counts decay by the trees that have evidence for their least chance."""
        num_known = [*accumulate(trees.num_known[:0:-1])][::-1]  # trees with evidence for each least chance
        self._sums, decays = None, [self._decay**number for number in num_known]
        counts = zip(self.by_chance, (trees.tokens, trees.nodes, trees.rounds, num_known), strict=True)
        self.by_chance = [[decay * old + new for decay, old, new in zip(decays, *of)] for of in counts]
        self._accepted = decays[0] * self._accepted + trees.num_accepted
        self._expected = decays[0] * self._expected + trees.expected


class _Trees:
    """Sums over noise-aware trees of a sequence, all of which count alike: between one least chance and the next.

    `num_known` are trees by the number of least chances for which they have evidence. `most_nodes` is None if no bound cut them.
    """

    def __init__(self, least: Sequence[float], most_nodes: int | None) -> None:
        self.most_nodes = most_nodes
        self._opposite = [-one for one in least]  # ascending
        self.tokens, self.nodes, self.rounds, self.num_known = ([0.0] * (1 + len(least)) for _ in range(4))
        self.num_accepted, self.expected = 0, 0.0

    def add(self, nodes: NodeChances, num_rounds: int) -> None:
        """Add a tree that took these rounds. A tree has no evidence of nodes that are less likely than its own bound."""
        is_cut = self.most_nodes is not None and len(nodes.chances) >= self.most_nodes
        num_known, deepest = bisect_right(self._opposite, -(min(nodes.chances) if is_cut else nodes.least)), 1
        if not num_known:
            return
        self.num_known[num_known] += 1.0
        for chance, depth in sorted(zip(nodes.chances, nodes.depths), reverse=True):
            if (place := bisect_left(self._opposite, -chance)) >= num_known:
                break
            self.tokens[place] += chance
            self.nodes[place] += 1.0
            if (deeper := min(depth + 1, num_rounds)) > deepest:
                self.rounds[place] += deeper - deepest
                deepest = deeper
        self.num_accepted += len(nodes.accepted)
        self.expected += sum(nodes.chances)


def _shrunk(hits: Sequence[float], trials: Sequence[float], prior: Sequence[float], first: float, kept: float) -> list[float]:
    """Return x[i] = kept x[i - 1] + hits over trials, shrunk towards a prior: as x[i - 1] changes where x is the prior's.

    `first` comes before x[0] and before the prior. `kept` is 1 for sums and 0 for rates.
    """
    value, before, found = first, first, []
    for hit, trial, now in zip(hits, trials, prior):
        value = kept * value + (hit + _PRIOR_TRIALS * value * (now / before - kept)) / (trial + _PRIOR_TRIALS)
        before = now
        found.append(value)
    return found


def _rates(counts_4D: Rows, prior_2D: Rows) -> list[list[float]]:
    """Return the rates of acceptance and of availability by depth, each shrunk towards the depth above, [2][D]."""
    hits, trials, offers, queries = counts_4D
    accepted_D, offered_D = _shrunk(hits, trials, prior_2D[0], 1.0, 0.0), _shrunk(offers, queries, prior_2D[1], 1.0, 0.0)
    return [[max(_EDGE, min(1.0 - _EDGE, one)) for one in accepted_D], [max(_EDGE, min(1.0, one)) for one in offered_D]]


class CountedAcceptance:
    """The estimator that counts. Keeps counts for each sequence that it recently estimated."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._by_chance = [entry for entry in menu.entries if entry.least_chance]
        self._least = [entry.least_chance for entry in self._by_chance]
        if self._least != sorted(self._least, reverse=True):
            raise ValueError("the greatest least chance comes first")
        self._num_depths = max(1, menu.deepest)
        self._start_2D = [[_START_ACCEPTANCE] * self._num_depths, [1.0] * self._num_depths]
        self._start_3K = _start_of(self._least)
        depths = [float(one.max_depth) for one in self._by_chance]
        self._most_3K = [[1.0 + one for one in depths], [float(one.max_nodes) for one in self._by_chance], depths]
        self._kinds: dict[str, _Counts] = {}
        self._own: dict[str, _Counts] = {}
        self._columns: dict[Menu, _MenuColumns] = {}

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences."""
        menu = menu or self._menu
        if menu not in self._columns:
            self._columns[menu] = _MenuColumns(menu, self._num_depths, self._by_chance)
        columns, own = self._columns[menu], [self._counts_of(view) for view in views]
        if len(self._own) > 2 * len(views) + 8:  # finished sequences
            present = {view.request_id for view in views}
            self._own = {name: own for name, own in self._own.items() if name in present}
        found_B3 = [[[1.0], [0.0], [0.0]] for _ in views]  # of plain decoding; trees are added
        if columns.has_chances:
            for one, found in zip(own, found_B3, strict=True):
                sums_3K = one.sums(one.kind.sums(self._start_3K))
                # A tree without nodes still has the extra token, after a round.
                for values, sums, extra, most in zip(found, sums_3K, (1.0, 0.0, 1.0), self._most_3K, strict=True):
                    values += [min(total - _EDGE + extra, bound) for total, bound in zip(sums, most)]
        if columns.by_depth:
            rates_of = {kind: _rates(kind.by_depth, self._start_2D) for kind in {one.kind for one in own}}
            rates_B2D = [_rates(one.by_depth, rates_of[one.kind]) for one in own]
            expected_B3M = columns.expected(*np.array(rates_B2D).swapaxes(0, 1)).swapaxes(0, 1).tolist()
            for one, rates_2D, found, expected_3M in zip(own, rates_B2D, found_B3, expected_B3M, strict=True):
                one.accepted_D = rates_2D[0]
                for values, expected in zip(found, expected_3M, strict=True):
                    values += expected
        return Estimates(*([[found[place] for place in columns.places] for found in of_all] for of_all in zip(*found_B3)))

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Count the outcomes of trees, of one step or several. A row that decoded plainly has no evidence."""
        trees_of: dict[tuple[_Counts, Expansion], _Trees] = {}
        for outcome in outcomes:
            own, nodes, tree = self._own.get(outcome.request_id), outcome.nodes, outcome.expansion
            if own is None or tree.is_plain:
                continue
            if nodes is None:
                self._observe_depths(own, outcome)
            elif self._least:
                if (trees := trees_of.get((own, tree))) is None:
                    trees = trees_of[own, tree] = _Trees(self._least, None if tree in self._menu.index else tree.max_nodes)
                trees.add(nodes, outcome.drafted_depth)
        for (own, _), trees in trees_of.items():
            # Trees that a request's bound cut are evidence for that sequence only, whose later trees are cut too.
            for counts in (own, own.kind) if trees.most_nodes is None else (own,):
                counts.add_trees(trees)

    def _observe_depths(self, own: _Counts, outcome: DraftOutcome) -> None:
        """Count trials by depth. If all K siblings are rejected, that is K misses. If one is accepted, it is a part of a hit.

        The part keeps the rate: E[hits] = a E[trials] under P(any) = 1 - (1 - a)^K.
        """
        widths, accepted = _widths(outcome.expansion), outcome.accepted_depth
        requested, drafted = min(len(widths), self._num_depths), outcome.drafted_depth
        if not outcome.expansion.is_delayed and drafted < requested:
            drafted -= 1  # the last round found nothing
        hits, trials, offers, queries = counts_4D = [[0.0] * self._num_depths for _ in range(4)]
        for depth, width in enumerate(widths[: min(accepted + 1, requested)]):
            rate, is_hit = own.accepted_D[depth], depth < accepted
            part = width * rate * (1.0 - rate) ** (width - 1.0) / (1.0 - (1.0 - rate) ** width) if is_hit else width
            hits[depth], trials[depth] = part * is_hit, part
        for depth in range(max(1, min(drafted + 1, requested))):
            queries[depth], offers[depth] = 1.0, float(depth < min(drafted, requested))
        for counts in (own, own.kind):
            counts.add_depths(counts_4D)

    def _counts_of(self, view: SequenceView) -> _Counts:
        """Return a sequence's counts. A sequence that is new, or whose id is used again, begins with empty ones."""
        own, rule = self._own.get(view.request_id), (view.sampling.temperature, view.verifier)
        if own is None or not view.num_generated or own.rule != rule:
            size, name = (self._start_2D[0], len(self._least)), kind_of(view.sampling, view.verifier)
            if name not in self._kinds:
                self._kinds[name] = _Counts(*size)
            own = self._own[view.request_id] = _Counts(*size, self._kinds[name], rule)
        return own


class _MenuColumns:
    """The columns of a menu by estimation: by least chance for noise-aware trees, by depth for all others.

    `places` are those of the entries among all that are estimated: plain decoding, noise-aware trees if it `has_chances`, and the
    others. Each of these has competing siblings, nodes, and whether a level follows, by depth, [M, D].
    """

    def __init__(self, menu: Menu, num_depths: int, by_chance: Sequence[Expansion]) -> None:
        self.has_chances = any(menu.least_chances)
        self.by_depth = [place for place in menu.drafting if not menu.least_chances[place]]
        trees = [PLAIN, *(by_chance if self.has_chances else ()), *(menu.entries[place] for place in self.by_depth)]
        self.places = [trees.index(entry) for entry in menu.entries]
        self._widths_MD, self._nodes_MD, self._has_next_MD = np.zeros((3, len(self.by_depth), num_depths))
        for row, place in enumerate(self.by_depth):
            entry = menu.entries[place]
            self._widths_MD[row, : entry.max_depth] = _widths(entry)
            self._nodes_MD[row, : entry.max_depth] = _nodes_by_depth(entry)
            self._has_next_MD[row, : entry.max_depth - 1] = 1.0

    def expected(self, accepted_BD: Array, offered_BD: Array) -> Array:
        """Return expected tokens, nodes and rounds of trees without a least chance, [3, B, M]."""
        reached_BMD = np.cumprod(1.0 - (1.0 - accepted_BD[:, None]) ** self._widths_MD, axis=2)
        drafted_BD = np.cumprod(offered_BD, axis=1)
        return np.stack([1.0 + reached_BMD.sum(2), drafted_BD @ self._nodes_MD.T, 1.0 + drafted_BD @ self._has_next_MD.T])


def _nodes_by_depth(entry: Expansion) -> list[float]:
    """Return the nodes at each depth. A tree of its own shape is taken to have the same number at each."""
    if not entry.is_delayed:
        return [entry.num_draft_tokens / entry.max_depth] * entry.max_depth
    return [1.0] * entry.trunk + [float(entry.branches)] * entry.depth


@cache
def _widths(entry: Expansion) -> tuple[float, ...]:
    """Return how many siblings compete for acceptance at each depth of the accepted path: P(any) = 1 - (1 - a)^width.

    A delayed tree has siblings at its fork only. A tree of its own shape is taken to be the best of its size at a typical
    acceptance.
    """
    if entry.is_delayed:
        return (1.0,) * entry.trunk + ((entry.branches**_SIBLINGS,) + (1.0,) * (entry.depth - 1) if entry.depth else ())
    reach = [1.0, *best_reach(entry, _TYPICAL)]
    chances = [max(_EDGE, min(1.0 - _EDGE, below / max(_EDGE, above))) for above, below in pairwise(reach)]
    return tuple(log(1.0 - chance) / log(1.0 - _TYPICAL) for chance in chances)


def best_reach(expansion: Expansion, acceptance: float) -> list[float]:
    """Return the probability that the accepted path of the best tree of that size reaches each depth below the root.

    Every node is accepted with the same probability given its parent. The tree takes the likeliest nodes, siblings in order.
    """
    places, reach = [(-acceptance, 1, 0)], [0.0] * expansion.max_depth  # (-probability, depth, rank)
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


def _start_of(least_K: Sequence[float]) -> list[list[float]]:
    """Return tokens, nodes and rounds up to each least chance, without any evidence, as sums that begin at _EDGE, [3][K].

    Nodes of any probability add as many tokens as nodes of half that probability, since there are twice as many of these.
    """
    tokens_K, nodes_K = [-_TYPICAL * log(one) for one in least_K], [_TYPICAL * (1.0 / one - 1.0) for one in least_K]
    return [[_EDGE + one for one in row] for row in (tokens_K, nodes_K, [2.0 * one for one in tokens_K])]
