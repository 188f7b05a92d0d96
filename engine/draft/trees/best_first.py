"""Trees that choose their nodes by value, and may take a node back: for rows whose children are ranked and not drawn.

EAGLE-2's beam (arXiv 2406.16858) values a node by the draft probabilities on its path. The noise-aware tree values it by the
chance that the target, under the same noise, agrees at every token of the path: a wide gap between the best two scores
makes a trunk, a narrow one a branch. Only rules that need no draft law are exact here: NSS, the coupled rule, greedy decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine.core.tree import FREE_GROWTH, ROOT, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.calibration import Calibration
from engine.draft.trees.grown import Worth, origins_of
from engine.draft.trees.sampling import Offer
from engine.draft.trees.strategies import Grown
from engine.native.library import NUM_SCORES
from engine.sampling.distributions import ranking_temperature

START_OFFERED, START_CONTINUED = 1.0, 0.6  # a prior: of so many offers so many have a token that is accepted, given their node is


@dataclass(order=True)
class _Candidate:
    """A token that could be a node: best value first, then the older. `node` is its number once it has been fed."""

    rank: float
    age: int
    value: float = field(compare=False)
    chance: float = field(compare=False)  # given its parent, uncorrected
    parent: "_Candidate | None" = field(compare=False)
    token_id: int = field(compare=False)
    depth: int = field(compare=False)
    node: int | None = field(default=None, compare=False)


class BestFirst:
    """Feeds the best few candidates a round and keeps the best `max_nodes` of all in the end.

    A node is never worth more than its parent, so what is kept is a tree. At most `max_nodes` are fed: each needs a slot. So
    that they reach deep where the drafter is sure, a round feeds only what is worth more than an equal share of the nodes; that
    least worth sinks when nothing is above it. Where values are chances (noise-aware), a node less likely than its cost is left
    out, and so is a round that would bring less than a level costs.
    """

    def __init__(self, tree: GrowingTree, calibration: Calibration | None) -> None:
        self.tree = tree
        self._calibration = calibration
        self._expansion = tree.row.expansion
        self._root = _Candidate(-1.0, 0, 1.0, 1.0, None, tree.token_ids[ROOT], 0, ROOT)
        self._fed = {ROOT: self._root}
        self._candidates: list[_Candidate] = []
        self._offers: dict[int, Offer] = {}
        self._num_rounds = 0
        self._least = 1.0 / (self._expansion.max_nodes + 1)
        self._growth_costs = FREE_GROWTH if calibration is None else tree.row.growth_costs
        self._least_chances = self._growth_costs.least_chances(self._expansion)
        self._continued = START_CONTINUED  # chances that an offer has one that is accepted, added up

    def asks(self) -> list[FrontierNode]:
        """Return the best candidates that would be kept if this were the end and that have not been fed."""
        self._num_rounds += 1
        if self._num_rounds == 1:
            return [self._ask(ROOT)]
        if self._num_rounds > self._expansion.depth:
            return []
        unfed = [one for one in self._kept() if one.node is None and one.depth < self._expansion.depth]
        if unfed:
            self._least = min(self._least, unfed[0].value / 2)
        num_slots = self._expansion.max_nodes - (len(self._fed) - 1)
        chosen = [one for one in unfed if one.value > self._least][: min(self._expansion.branches, num_slots)]
        if sum(one.value for one in chosen) * self._continued / (START_OFFERED + len(self._offers)) < self._growth_costs.level:
            return []
        for candidate in chosen:
            self._fed[self._add(candidate)] = candidate
        return [self._ask(candidate.node) for candidate in chosen if candidate.node is not None]

    def _add(self, candidate: _Candidate) -> int:
        parent = candidate.parent
        assert parent is not None
        assert parent.node is not None  # only children of fed nodes are offered
        candidate.node = self.tree.add(parent.node, candidate.token_id)
        return candidate.node

    def _ask(self, node: int) -> FrontierNode:
        return FrontierNode(self.tree, node, self._expansion.branches if self._calibration is None else NUM_SCORES)

    def take(self, node: int, offer: Offer) -> None:
        """Make its children candidates."""
        parent = self._fed[node]
        self._offers[node] = offer
        chances = self._chances(node, offer)
        self._continued += min(1.0, sum(worth for _, _, worth in chances))
        for token_id, chance, worth in chances:
            value = parent.value * min(1.0, worth)
            self._candidates.append(_Candidate(-value, len(self._candidates), value, chance, parent, token_id, parent.depth + 1))

    def _chances(self, node: int, offer: Offer) -> list[tuple[int, float, float]]:
        """Return the best tokens, their chances and what those are worth."""
        token_ids = offer.token_ids[: self._expansion.branches]
        if self._calibration is None:
            return [(token_id, chance, chance) for token_id, chance in zip(token_ids, offer.odds, strict=False)]
        temperature, reliability = ranking_temperature(self.tree.row.sampling), self._calibration.reliability
        chances = self._calibration.agreement.chances(offer.odds, offer.noise, temperature).tolist()
        cached = self.tree.origins.get(self._ask(node).sampling_context.path_ids, {}) if self.tree.origins else {}
        return [
            (token_id, chance, reliability.corrected(chance, token_id in cached and cached[token_id].is_rather_cached))
            for token_id, chance in zip(token_ids, chances, strict=False)
        ]

    def _kept(self) -> list[_Candidate]:
        """Return the best candidates that are worth a node; a parent is always older than its children and at least as good."""
        best = zip(sorted(self._candidates), self._least_chances, strict=False)
        return [one for one, least in takewhile(lambda pair: pair[0].value >= pair[1], best)]

    def grown(self) -> Grown:
        """Renumber what is kept: fed nodes first, in the order in which they were fed, so that most keep their slots.

        A fed node whose number changed lies in another's slot: it counts as not fed and is fed again if it is accepted.
        """
        kept = self._kept()
        fed = sorted((one for one in kept if one.node is not None), key=lambda one: one.node or 0)
        ordered = [self._root, *fed, *(one for one in kept if one.node is None)]
        number = {id(one): index for index, one in enumerate(ordered)}
        parents = [-1, *(number[id(one.parent)] for one in ordered[1:])]
        draws: list[list[int]] = [[] for _ in ordered]
        for one in sorted(ordered[1:], key=lambda one: one.age):
            draws[number[id(one.parent)]].append(number[id(one)])
        tree = TokenTree(tuple(parents), tuple(one.token_id for one in ordered), tuple(map(tuple, draws)))
        same = frozenset(index for index, one in enumerate(ordered) if one.node == index and index in self.tree.fed)
        offers = {number[id(one)]: self._offers[one.node] for one in ordered if one.node is not None and one.node in self._offers}
        worth = None if self._calibration is None else self._worth(tree, ordered[1:])
        return Grown(tree, (None,) * tree.num_nodes, same, offers, worth)

    def _worth(self, tree: TokenTree, nodes: Sequence[_Candidate]) -> Worth:
        chances = tuple(one.value for one in nodes), tuple(one.chance for one in nodes)
        return Worth(*chances, tuple(origin.is_rather_cached for origin in origins_of(tree, self.tree.origins)))
