"""The best fixed tree shape for acceptance probabilities by sibling rank: Sequoia's dynamic programme (arXiv 2402.12374)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache


@dataclass(frozen=True)
class Topology:
    """A node's place in a shape: the places of its children, first sibling first."""

    children: tuple["Topology", ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes of this subtree, its root included."""
        return 1 + sum(child.num_nodes for child in self.children)

    def expected_tokens(self, acceptance: tuple[float, ...]) -> float:
        """Return the expected tokens of a step from here, the extra token included, if `acceptance` holds at every node."""
        below = (chance * child.expected_tokens(acceptance) for chance, child in zip(acceptance, self.children, strict=False))
        return 1.0 + sum(below)


@dataclass(frozen=True, slots=True)
class _Family:
    """The best division of nodes among siblings: its expected tokens and the siblings' subtrees."""

    value: float
    members: tuple[Topology, ...]


def best_topology(acceptance: tuple[float, ...], num_nodes: int, max_depth: int) -> Topology:
    """Return the shape of at most `num_nodes` nodes below the root and `max_depth` levels with the most expected tokens.

    `acceptance[j]` is the probability that sibling j is accepted, given that the parent is.
    """
    return Topology(_programme(acceptance)(0, num_nodes, min(max_depth, num_nodes)).members)


@lru_cache(maxsize=32)
def _programme(acceptance: tuple[float, ...]) -> Callable[[int, int, int], _Family]:
    """Return the programme for these probabilities. It caches all smaller shapes: requests near their end use them."""

    @cache
    def family(rank: int, nodes: int, depth: int) -> _Family:
        """Divide `nodes` among the siblings from `rank` on, `depth` levels deep."""
        best = _Family(0.0, ())
        if not nodes or not depth or rank == len(acceptance):
            return best
        for size in range(1, nodes + 1):
            below = family(0, size - 1, min(depth - 1, size - 1))
            beside = family(rank + 1, nodes - size, min(depth, nodes - size))
            value = acceptance[rank] * (1.0 + below.value) + beside.value
            if value > best.value:
                best = _Family(value, (Topology(below.members), *beside.members))
        return best

    return family
