"""Estimates expected tokens, nodes and rounds of every tree on the menu, for each sequence, before anything is drafted.

An Estimator does not know seconds. The one here keeps decaying counts. Trees that are chosen whole count accepted tokens by
depth. Noise-aware trees add up the probabilities of their nodes by least chance. Every estimate is shrunk: the prior
of a depth is the depth above it, the prior of a sequence is its kind (temperature and verifier).

Shape key: B sequences, M entries of a menu, D depths, K entries with a least chance, T of them with evidence from a tree.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from math import log
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import DraftOutcome, NodeChances, SequenceView
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from selector.menu import Menu

Array = NDArray[np.float64]

_START_ACCEPTANCE = 0.5  # before any trial: high enough to be tried
_TYPICAL = 0.7  # acceptance for which shapes and tokens of trees that find their own shape are computed
_PRIOR_TRIALS = 3.0  # weight of a prior
_SIBLINGS = 0.4  # n siblings count as n ** 0.4 independent ones: those that follow the likeliest are accepted less
_BAND, _HOT = 0.5, 2.0  # width of a kind's temperatures, and the last kind
_KIND_DECAY, OWN_DECAY = 0.998, 0.96  # of counts, at each later tree
_EDGE = 1e-3  # least distance of a rate from 0 and 1
_LEAST_PRODUCT = np.finfo(np.float64).tiny


class Estimates(NamedTuple):
    """Expectations for each sequence and entry, float64 [B, M] each: E[tau + 1], drafted nodes, rounds of growth."""

    tokens: Array
    nodes: Array
    rounds: Array


class Estimator(Protocol):
    """Predicts the outcome of each expansion and learns from outcomes. An estimator is made for one menu.

    Sequences may be new or still feeding their prompts. If it raises an error or returns a number that is not finite, only the
    choice of that step is lost.
    """

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences, in order, over the estimator's menu or a part of it."""
        ...

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from the outcomes of a step."""
        ...


def kind_of(sampling: SamplingParams, verifier: str) -> str:
    """Return the name of a sequence's kind: greedy, or its verifier and the middle of its temperature band."""
    if sampling.is_greedy:
        return "greedy"
    return f"{verifier} {_BAND * round(min(sampling.temperature, _HOT) / _BAND):g}"


class _Counts:
    """Decaying counts of a sequence of a `kind`, or of a kind. `accepted_D` are the latest rates of acceptance that follow."""

    def __init__(self, accepted_D: list[float], num_chances: int, kind: "_Counts | None") -> None:
        self.accepted_D, self.kind, self._decay = accepted_D, kind or self, OWN_DECAY if kind else _KIND_DECAY
        self.by_depth = np.zeros((2, 2, len(accepted_D)))  # hits and trials of acceptance and of availability
        self.by_chance = np.zeros((4, num_chances))  # tokens, nodes, rounds, trees
        self._accepted = self._expected = 0.0  # accepted nodes of noise-aware trees, and the sum of their probabilities

    @property
    def reliability(self) -> float:
        """Accepted over expected nodes of noise-aware trees."""
        return (self._accepted + _PRIOR_TRIALS) / (self._expected + _PRIOR_TRIALS)

    def add_depths(self, counts_22D: Array) -> None:
        """Add a tree that was chosen whole."""
        self.by_depth *= self._decay
        self.by_depth += counts_22D

    def add_nodes(self, sums_4T: Array, num_accepted: int, expected: float) -> None:
        """Add a noise-aware tree. It has evidence for the first T least chances only."""
        part = self.by_chance[:, : sums_4T.shape[1]]
        part *= self._decay
        part += sums_4T
        self._accepted = self._decay * self._accepted + num_accepted
        self._expected = self._decay * self._expected + expected


def _rates(counts: Array, prior: Array) -> Array:
    """Return hits over trials by depth, shrunk towards a prior that is scaled by the depth above over its prior."""
    (hits, trials), above = counts, np.roll(prior, 1, axis=-1)
    above[..., 0] = 1.0
    rates = _followed(prior / above * _PRIOR_TRIALS / (trials + _PRIOR_TRIALS), hits / (trials + _PRIOR_TRIALS), 1.0)
    return np.clip(rates, _EDGE, [[1.0 - _EDGE], [1.0]])


def _sums(counts: Array, prior: Array) -> Array:
    """Return sums up to each least chance, shrunk towards a prior whose increments are scaled as the sum so far."""
    weights = 1.0 / (counts[:, 3:] + _PRIOR_TRIALS)
    before = np.full_like(prior, _EDGE)
    before[..., 1:] += prior[..., :-1]
    growth = 1.0 + ((prior + _EDGE) / before - 1.0) * _PRIOR_TRIALS * weights
    return _followed(growth, counts[:, :3] * weights, _EDGE) - _EDGE


def _followed(factors: Array, added: Array, first: float) -> Array:
    """Return x[i] = factors[i] x[i - 1] + added[i] along the last axis, with `first` before x[0]."""
    products = np.maximum(factors.cumprod(-1), _LEAST_PRODUCT)
    return np.asarray(products * (first + (added / products).cumsum(-1)))


class CountedAcceptance:
    """The estimator that counts. Keeps counts for each sequence that it recently estimated."""

    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        by_chance = [entry for entry in menu.entries if entry.least_chance]
        self._least = [entry.least_chance for entry in by_chance]
        if self._least != sorted(self._least, reverse=True):
            raise ValueError("the greatest least chance comes first")
        self._num_depths = max(1, menu.deepest)
        self._start_2D = np.repeat([[_START_ACCEPTANCE], [1.0]], self._num_depths, axis=1)
        self._start_3K = _start_of(by_chance)
        most = [(1.0 + one.max_depth, one.max_nodes, one.max_depth) for one in by_chance]
        self._most_3K = np.array(most, dtype=np.float64).reshape(-1, 3).T
        self._kinds: dict[str, _Counts] = {}
        self._own: dict[str, _Counts] = {}
        self._columns: dict[Menu, _MenuColumns] = {}

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the expectations for the sequences."""
        menu = menu or self._menu
        if menu not in self._columns:
            self._columns[menu] = _MenuColumns(menu, self._num_depths, self._least)
        columns, own = self._columns[menu], [self._counts_of(view) for view in views]
        if len(self._own) > 2 * len(views) + 8:  # finished sequences
            present = {view.request_id for view in views}
            self._own = {name: own for name, own in self._own.items() if name in present}
        found_3BM = np.zeros((3, len(views), len(menu)))
        found_3BM[0] = 1.0
        if len(columns.by_chance):
            of_kinds_B4K = np.array([one.kind.by_chance for one in own])
            of_kinds_B4K[:, 0] *= [[one.kind.reliability] for one in own]
            sums_B3K = _sums(np.array([one.by_chance for one in own]), _sums(of_kinds_B4K, self._start_3K))
            sums_B3K[:, ::2] += 1.0  # a tree without nodes still has the extra token, after a round
            found_3BM[:, :, columns.by_chance] = np.minimum(sums_B3K, self._most_3K).swapaxes(0, 1)[..., columns.chance_places]
        if len(columns.by_depth):
            rates_B2D = _rates(np.array([one.kind.by_depth for one in own]).swapaxes(0, 1), self._start_2D)
            rates_B2D = _rates(np.array([one.by_depth for one in own]).swapaxes(0, 1), rates_B2D)
            for one, accepted_D in zip(own, rates_B2D[:, 0].tolist(), strict=True):
                one.accepted_D = accepted_D
            found_3BM[:, :, columns.by_depth] = columns.expected(*rates_B2D.swapaxes(0, 1))
        return Estimates(*found_3BM)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Count the outcomes of trees. A row that decoded plainly has no evidence."""
        for outcome in outcomes:
            own = self._own.get(outcome.request_id)
            if own is None or outcome.expansion.is_plain:
                continue
            if outcome.nodes is None:
                self._observe_depths(own, outcome)
            elif self._least:
                self._observe_nodes(own, outcome, outcome.nodes)

    def _observe_depths(self, own: _Counts, outcome: DraftOutcome) -> None:
        """Count trials by depth. If all K siblings are rejected, that is K misses. If one is accepted, it is a part of a hit.

        The part keeps the rate: E[hits] = a E[trials] under P(any) = 1 - (1 - a)^K.
        """
        widths, accepted = _widths(outcome.expansion), outcome.accepted_depth
        requested = min(len(widths), self._num_depths)
        drafted = outcome.drafted_depth
        if not outcome.expansion.is_delayed and drafted < requested:
            drafted -= 1  # the last round found nothing
        counts_22D = np.zeros((2, 2, self._num_depths))
        for depth, width in enumerate(widths[: min(accepted + 1, requested)]):
            rate, is_hit = own.accepted_D[depth], depth < accepted
            part = width * rate * (1.0 - rate) ** (width - 1.0) / (1.0 - (1.0 - rate) ** width) if is_hit else width
            counts_22D[:, 0, depth] = part * is_hit, part
        counts_22D[0, 1, : max(0, min(drafted, requested))] = 1.0
        counts_22D[1, 1, : max(1, min(drafted + 1, requested))] = 1.0
        for counts in (own, own.kind):
            counts.add_depths(counts_22D)

    def _observe_nodes(self, own: _Counts, outcome: DraftOutcome, nodes: NodeChances) -> None:
        """Add up nodes between one least chance and the next. A tree has no evidence of nodes below its own bound.

        If a request's bound cut the tree, it is evidence for that sequence only, whose later trees are cut too.
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
        expected = sum(nodes.chances)
        for counts in (own,) if is_cut else (own, own.kind):
            counts.add_nodes(np.array(sums).T, len(nodes.accepted), expected)

    def _counts_of(self, view: SequenceView) -> _Counts:
        """Return a sequence's counts. A sequence that is new, or whose id is used again, begins with empty ones."""
        own, name = self._own.get(view.request_id), kind_of(view.sampling, view.verifier)
        if own is None or not view.num_generated or own.kind is not self._kinds.get(name):
            size = self._start_2D[0].tolist(), len(self._least)
            if name not in self._kinds:
                self._kinds[name] = _Counts(*size, None)
            own = self._own[view.request_id] = _Counts(*size, self._kinds[name])
        return own


class _MenuColumns:
    """The columns of a menu by estimation: by least chance for noise-aware trees, by depth for all others.

    `chance_places` are the places of the noise-aware trees among the estimator's. Each other tree has competing siblings, nodes,
    and whether a level follows, by depth, [M, D].
    """

    def __init__(self, menu: Menu, num_depths: int, least: list[float]) -> None:
        self.by_chance = np.flatnonzero(menu.least_chances)
        places = [least.index(menu.entries[place].least_chance) for place in self.by_chance.tolist()]
        self.chance_places = np.array(places, dtype=np.int64)
        self.by_depth = np.flatnonzero((menu.depths > 0) & (menu.least_chances == 0.0))
        self._widths_MD, self._nodes_MD, self._has_next_MD = np.zeros((3, len(self.by_depth), num_depths))
        for row, place in enumerate(self.by_depth.tolist()):
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


def _start_of(entries: Sequence[Expansion]) -> Array:
    """Return tokens, nodes and rounds up to each entry's least chance, without any evidence, [3, K].

    Nodes of any probability add as many tokens as nodes of half that probability, since there are twice as many of these.
    """
    least_K = np.array([entry.least_chance for entry in entries])
    tokens_K, nodes_K = -_TYPICAL * np.log(least_K), _TYPICAL * (1.0 / least_K - 1.0)
    return np.stack([tokens_K, nodes_K, 2.0 * tokens_K])
