"""Trees that select nodes by value and can drop nodes again, for rows whose children are top-ranked instead of sampled.

EAGLE-2's beam (arXiv 2406.16858) values a node by the draft probabilities on its path. The noise-aware tree values a node by the
probability that the target agrees with every token of its path under the same noise. A wide gap between the best two scores makes
a trunk, a narrow gap makes a branch. These trees are exact only under rules that need no draft distribution: NSS, the coupled
rule and greedy decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from engine.core.tree import FREE_GROWTH, ROOT, TokenTree
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.trees.calibration import RuleCalibration
from engine.draft.trees.grower import NodeValues, origins_of
from engine.draft.trees.sampling import ChildCandidates
from engine.draft.trees.strategies import FinishedTree
from engine.native.library import NUM_SCORES
from engine.sampling.distributions import ranking_temperature

# A prior: of PRIOR_EXPANDED accepted nodes with candidates, PRIOR_CONTINUED have a candidate that is accepted.
PRIOR_EXPANDED, PRIOR_CONTINUED = 1.0, 0.6


@dataclass(order=True)
class _ScoredNode:
    """A token that can become a node. Sorts by value, best first, then by age. `node` is its number once it has been fed."""

    sort_key: float  # -value
    age: int
    value: float = field(compare=False)
    given_parent: float = field(compare=False)  # acceptance probability if its parent is accepted, uncorrected
    parent: "_ScoredNode | None" = field(compare=False)
    token_id: int = field(compare=False)
    depth: int = field(compare=False)
    node: int | None = field(default=None, compare=False)


class BestFirst:
    """Expands the best few nodes each round and keeps the best `max_nodes` of all nodes at the end.

    A node's value never exceeds its parent's, so the kept nodes form a tree. At most `max_nodes` are fed: each needs a slot. A
    round expands only nodes above a minimum value, so that a confident drafter reaches deep. The minimum starts at an equal share
    and is lowered when no node is above it. Noise-aware values are acceptance probabilities and are compared with the row's
    costs. Nodes below their cost are left out. Growth ends when a round would gain less than a level costs.
    """

    def __init__(self, tree: GrowingTree, calibration: RuleCalibration | None) -> None:
        self.tree = tree
        self._calibration = calibration
        self._expansion = tree.row.expansion
        self._root = _ScoredNode(-1.0, 0, 1.0, 1.0, None, tree.token_ids[ROOT], 0, ROOT)
        self._fed = {ROOT: self._root}
        self._scored: list[_ScoredNode] = []
        self._candidates: dict[int, ChildCandidates] = {}
        self._num_rounds = 0
        self._min_value = 1.0 / (self._expansion.max_nodes + 1)
        self._growth_costs = FREE_GROWTH if calibration is None else tree.row.growth_costs
        self._thresholds = self._growth_costs.least_chances(self._expansion)
        self._num_continued = PRIOR_CONTINUED  # expected number of expanded nodes with an accepted child

    def frontier(self) -> list[FrontierNode]:
        """Return the best nodes that would be kept if growth ended now and that have not been fed."""
        self._num_rounds += 1
        if self._num_rounds == 1:
            return [self._frontier_node(ROOT)]
        if self._num_rounds > self._expansion.depth:
            return []
        unfed = [one for one in self._kept() if one.node is None and one.depth < self._expansion.depth]
        if unfed:
            self._min_value = min(self._min_value, unfed[0].value / 2)
        num_slots = self._expansion.max_nodes - (len(self._fed) - 1)
        chosen = [one for one in unfed if one.value > self._min_value][: min(self._expansion.branches, num_slots)]
        continued_share = self._num_continued / (PRIOR_EXPANDED + len(self._candidates))
        if sum(one.value for one in chosen) * continued_share < self._growth_costs.level:
            return []
        for scored in chosen:
            self._fed[self._add(scored)] = scored
        return [self._frontier_node(scored.node) for scored in chosen if scored.node is not None]

    def _add(self, scored: _ScoredNode) -> int:
        parent = scored.parent
        assert parent is not None
        assert parent.node is not None  # only fed nodes are expanded
        scored.node = self.tree.add(parent.node, scored.token_id)
        return scored.node

    def _frontier_node(self, node: int) -> FrontierNode:
        return FrontierNode(self.tree, node, self._expansion.branches if self._calibration is None else NUM_SCORES)

    def expand(self, node: int, candidates: ChildCandidates) -> None:
        """Score the candidate children."""
        parent = self._fed[node]
        self._candidates[node] = candidates
        scores = self._scores(node, candidates)
        self._num_continued += min(1.0, sum(corrected for _, _, corrected in scores))
        for token_id, chance, corrected in scores:
            value = parent.value * min(1.0, corrected)
            self._scored.append(_ScoredNode(-value, len(self._scored), value, chance, parent, token_id, parent.depth + 1))

    def _scores(self, node: int, candidates: ChildCandidates) -> list[tuple[int, float, float]]:
        """Return the best tokens with their acceptance probabilities, uncorrected and corrected."""
        token_ids = candidates.token_ids[: self._expansion.branches]
        if self._calibration is None:
            return [(token_id, prob, prob) for token_id, prob in zip(token_ids, candidates.probs, strict=False)]
        temperature, reliability = ranking_temperature(self.tree.row.sampling), self._calibration.reliability
        chances = self._calibration.agreement.chances(candidates.probs, candidates.noise, temperature).tolist()
        cached = self.tree.origins.get(self._frontier_node(node).sampling_context.path_ids, {}) if self.tree.origins else {}
        return [
            (token_id, chance, reliability.corrected(chance, token_id in cached and cached[token_id].is_rather_cached))
            for token_id, chance in zip(token_ids, chances, strict=False)
        ]

    def _kept(self) -> list[_ScoredNode]:
        """Return the best nodes that reach their thresholds. A parent is older than its children and at least as good."""
        best = zip(sorted(self._scored), self._thresholds, strict=False)
        return [one for one, _ in takewhile(lambda pair: pair[0].value >= pair[1], best)]

    def finish(self) -> FinishedTree:
        """Renumber the kept nodes: fed nodes first, in the order in which they were fed, so that most keep their slots.

        A fed node with a new number has its keys in another node's slot. It counts as not fed and is fed again if accepted.
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
        candidates = {
            number[id(one)]: self._candidates[one.node]
            for one in ordered
            if one.node is not None and one.node in self._candidates
        }
        values = None if self._calibration is None else self._node_values(tree, ordered[1:])
        return FinishedTree(tree, (None,) * tree.num_nodes, same, candidates, values)

    def _node_values(self, tree: TokenTree, nodes: Sequence[_ScoredNode]) -> NodeValues:
        values = tuple(one.value for one in nodes), tuple(one.given_parent for one in nodes)
        return NodeValues(*values, tuple(origin.is_rather_cached for origin in origins_of(tree, self.tree.origins)))


class NodeOfParent(NamedTuple):
    """A node by the number of its parent, which has an earlier number, and its token."""

    parent: int
    token_id: int


class ChosenNodes(NamedTuple):
    """The nodes of a tree that another chose: those that each round after the first feeds, and those that are kept.

    Parents of fed nodes have the numbers of fed nodes, those of kept nodes the numbers of the finished tree.
    """

    rounds: Sequence[Sequence[NodeOfParent]]
    kept: Sequence[NodeOfParent]


class ChosenBestFirst(BestFirst):
    """A best-first tree of the nodes that a device has chosen, whatever the host's values of them are."""

    def __init__(self, tree: GrowingTree, calibration: RuleCalibration | None, chosen: ChosenNodes) -> None:
        super().__init__(tree, calibration)
        self._rounds, self._chosen_kept = iter(chosen.rounds), chosen.kept

    def frontier(self) -> list[FrontierNode]:
        """Return the nodes that the device fed in this round."""
        self._num_rounds += 1
        if self._num_rounds == 1:
            return [self._frontier_node(ROOT)]
        scored = self._by_parent()
        chosen = [scored[id(self._fed[parent]), token_id] for parent, token_id in next(self._rounds, ())]
        nodes = [self._add(one) for one in chosen]
        self._fed.update(zip(nodes, chosen, strict=True))
        return [*map(self._frontier_node, nodes)]

    def _by_parent(self) -> dict[tuple[int, int], _ScoredNode]:
        return {(id(one.parent), one.token_id): one for one in self._scored}

    def _kept(self) -> list[_ScoredNode]:
        """Return the nodes that the device kept, in its order."""
        scored, kept = self._by_parent(), [self._root]
        for parent, token_id in self._chosen_kept:
            kept.append(scored[id(kept[parent]), token_id])
        return kept[1:]
