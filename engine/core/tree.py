"""Shapes of speculation: the Expansion a policy chooses and the TokenTree a drafter grows from it.

Knows parents, depths, orders and ancestor masks. Does not know models, distributions or torch.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

ROOT = 0  # the index of a tree's root: the last committed token, whose keys and values are not cached yet


TreeName = Literal[
    "delayed", "delayed_distinct", "static", "heap", "threshold", "calibrated", "greedy_sample", "beam", "noise_aware"
]  # fmt: skip
TREE_NAMES: tuple[TreeName, ...] = get_args(TreeName)


class TreeKind(StrEnum):
    """How a tree's children are chosen. Whether a verifier is exact depends on nothing else."""

    PATH = "path"  # one child per node, sampled from a known distribution
    IID = "iid"  # samples from one distribution, duplicates merged
    WITHOUT_REPLACEMENT = "without_replacement"  # distinct samples, each from the residual of the earlier samples
    FIXED_DISTINCT = "fixed_distinct"  # the same, and the number of siblings does not depend on their tokens
    SET_PLUS_SAMPLE = "set_plus_sample"  # a fixed set and one sample outside it
    DETERMINISTIC = "deterministic"  # chosen by value without sampling: beams, look-ups
    SHARED_NOISE = "shared_noise"  # chosen by the same noise that decides the tokens


_KINDS: dict[TreeName, TreeKind] = {
    "delayed": TreeKind.IID,
    "delayed_distinct": TreeKind.FIXED_DISTINCT,
    "static": TreeKind.FIXED_DISTINCT,
    "heap": TreeKind.WITHOUT_REPLACEMENT,
    "threshold": TreeKind.WITHOUT_REPLACEMENT,
    "calibrated": TreeKind.WITHOUT_REPLACEMENT,
    "greedy_sample": TreeKind.SET_PLUS_SAMPLE,
    "beam": TreeKind.DETERMINISTIC,
    "noise_aware": TreeKind.SHARED_NOISE,
}
DELAYED_TREES: tuple[TreeName, ...] = ("delayed", "delayed_distinct")
DEFAULT_SHAPE = (2, 2, 3)  # trunk, branches and depth of a delayed tree without numbers
DEFAULT_NODES, DEFAULT_DEPTH, DEFAULT_BRANCHES = 16, 8, 4  # of the other trees


@dataclass(frozen=True, slots=True, order=True)
class Expansion:
    """The tree to grow: its kind, depth, width and number of nodes.

    Delayed trees have `trunk` single nodes, then `branches` paths of `depth` nodes each. `delayed` samples the branches i.i.d.,
    `delayed_distinct` gives them different first tokens:

        root - t1 - t2 -+- a1 - a2 - a3      trunk=2, branches=2, depth=3
                        +- b1 - b2 - b3

    `(0, 1, 0)` drafts nothing: plain decoding. `(n, 1, 0)` is a chain. `(0, k, d)` branches at the root. Their size follows from
    their shape, so `max_nodes` is 0. Source: Dynamic Delayed Tree Expansion (arXiv 2602.16994), written there (K, L1, L2).

    For other trees the drafter chooses the shape within bounds: at most `max_nodes` drafted tokens, `depth` levels and `branches`
    children per node, without a trunk. A noise-aware tree leaves out nodes whose acceptance probability is below the threshold
    `least_chance`. docs/verification.md describes each tree.
    """

    trunk: int
    branches: int
    depth: int
    tree: TreeName = "delayed"
    max_nodes: int = 0
    least_chance: float = 0.0

    def __post_init__(self) -> None:
        if self.tree not in TREE_NAMES:
            raise ValueError(f"no tree is named {self.tree!r}; there are {', '.join(TREE_NAMES)}")
        if self.trunk < 0 or self.branches < 1 or self.depth < 0:
            raise ValueError(f"an expansion needs trunk >= 0, branches >= 1 and depth >= 0, not {self}")
        if self.is_delayed and self.max_nodes:
            raise ValueError(f"the nodes of a {self.tree} tree follow from trunk, branches and depth; max_nodes cannot be given")
        if not self.is_delayed and (self.trunk or self.depth < 1 or self.max_nodes < 1):
            raise ValueError(f"a {self.tree} tree has no trunk and needs depth and max_nodes of at least 1")
        if not 0.0 <= self.least_chance < 1.0:
            raise ValueError(f"the least chance of a node is from 0 to below 1, not {self.least_chance}")
        if round(self.least_chance, 6) != self.least_chance:
            raise ValueError(f"the least chance of a node has six decimals at most, not {self.least_chance}")
        if self.least_chance and self.tree != "noise_aware":
            raise ValueError(f"the chances of a {self.tree} tree's nodes are not known, so that none can be the least")

    @property
    def is_delayed(self) -> bool:
        """Whether the shape is fixed by trunk, branches and depth."""
        return self.tree in DELAYED_TREES

    @property
    def kind(self) -> TreeKind:
        """How its children are chosen in sampled rows. Greedy and coupled rows rank; every tree is exact there."""
        return TreeKind.PATH if self.is_delayed and self.branches == 1 else _KINDS[self.tree]

    @property
    def max_depth(self) -> int:
        """Length in tokens of the longest path below the root."""
        return self.trunk + self.depth if self.is_delayed else min(self.depth, self.max_nodes)

    @property
    def num_draft_tokens(self) -> int:
        """The maximum number of nodes below the root. Merged duplicates and early ends can make it fewer."""
        return self.trunk + self.branches * self.depth if self.is_delayed else self.max_nodes

    @property
    def label(self) -> str:
        """A label of low cardinality for metrics: a delayed tree's shape, another tree's name."""
        return str(self) if self.is_delayed else self.tree

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing: a delayed tree without trunk and depth. Other trees have depth."""
        return not (self.trunk or self.depth)

    def limited(self, max_depth: int, max_draft_tokens: int) -> "Expansion":
        """Return the nearest expansion within both limits, or this one if it is within them.

        `max_depth` shortens the branches first, then the trunk. `max_draft_tokens` removes branches before depth.
        """
        is_chain = not self.depth and self.branches == 1
        if (self.depth or is_chain) and self.max_depth <= max_depth and self.num_draft_tokens <= max_draft_tokens:
            return self
        if not self.is_delayed:
            depth, max_nodes = min(self.depth, max_depth), min(self.max_nodes, max_draft_tokens)
            return replace(self, depth=depth, max_nodes=max_nodes) if depth and max_nodes else PLAIN
        trunk = min(self.trunk, max_depth, max_draft_tokens)
        depth = min(self.depth, max_depth - trunk)
        branches = self.branches
        while branches > 1 and trunk + branches * depth > max_draft_tokens:
            branches -= 1
        depth = min(depth, max_draft_tokens - trunk)
        return Expansion(trunk, branches if depth else 1, depth, self.tree)

    def width_at(self, depth: int) -> int:
        """Return how many sampled paths of a delayed tree pass through this depth; the root's is 0."""
        if depth <= self.trunk:
            return 1
        return self.branches if depth <= self.max_depth else 0

    def __str__(self) -> str:
        """Return the text that `parse_expansion` reads: `2.2.3`, or `name.max_nodes.depth.branches@least_chance`."""
        if not self.is_delayed:
            least = f"@{self.least_chance:.6f}".rstrip("0") if self.least_chance else ""
            return f"{self.tree}.{self.max_nodes}.{self.depth}.{self.branches}{least}"
        shape = f"{self.trunk}.{self.branches}.{self.depth}"
        return shape if self.tree == "delayed" else f"{self.tree}.{shape}"


def parse_expansion(text: str) -> Expansion:
    """Parse `trunk.branches.depth`, `delayed_distinct.trunk.branches.depth` or `tree.max_nodes[.depth[.branches]]`.

    A noise-aware tree may end with `@least_chance`. Raises ValueError with the reason.
    """
    shape, at, least = text.partition("@")
    name, *numbers = shape.split(".") if text[:1].isalpha() else ["delayed", *shape.split(".")]
    tree = next((known for known in TREE_NAMES if known == name), None)
    if tree is None:
        raise ValueError(f"the tree of an expansion is one of {', '.join(TREE_NAMES)}, not {name!r}")
    sizes = (3,) if tree in DELAYED_TREES else (1, 2, 3)
    if len(numbers) not in sizes or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ValueError(f"an expansion is written like 4.1.0 (trunk.branches.depth) or heap.16 (tree.max_nodes), not {text!r}")
    if at and not (tree == "noise_aware" and re.fullmatch(r"0\.[0-9]{1,6}", least)):
        raise ValueError(f"only a noise_aware tree may end on its nodes' least chance, written like @0.2, not {text!r}")
    counts = [int(number) for number in numbers]
    if tree in DELAYED_TREES:
        trunk, branches, depth = counts
        return Expansion(trunk, branches, depth, tree)
    max_nodes, depth, branches = [*counts, *(DEFAULT_DEPTH, DEFAULT_BRANCHES)[len(counts) - 1 :]]
    return Expansion(0, branches, depth, tree, max_nodes, float(least or 0.0))


PLAIN = Expansion(0, 1, 0)


@dataclass(frozen=True, slots=True)
class GrowthCosts:
    """The marginal cost of a further node and of a further level, in tokens: its seconds times the tokens per second.

    A node pays if its acceptance probability exceeds its cost, a level if its expected tokens do. `node` is the cost of a node in
    a step of the expected size. `nodes`, if known, are the costs of a tree's first node, second node and so on, in ascending
    order. A step's duration is convex, so the first nodes can be almost free and the last nodes expensive.
    """

    node: float = 0.0
    level: float = 0.0
    nodes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if [*self.nodes] != sorted(self.nodes):
            raise ValueError("node costs must be in ascending order")

    def least_chances(self, expansion: Expansion) -> tuple[float, ...]:
        """Return the acceptance thresholds of a noise-aware tree's nodes, most likely node first, [max_nodes].

        If the costs of the nodes are not known, the threshold is the expansion's `least_chance`, or `node` if that is 0.
        """
        most = expansion.num_draft_tokens
        if not self.nodes:
            return (self._least_chance(expansion, 0),) * most
        return self.nodes[:most] + self.nodes[-1:] * (most - len(self.nodes))

    def complete_above(self, expansion: Expansion, chances: Sequence[float]) -> float:
        """Return the probability above which a tree with nodes of these `chances` is complete.

        That is the acceptance threshold of the next node. A tree with `max_nodes` nodes is complete above its least likely node
        only, or above `least_chance` if that is lower.
        """
        most, count = expansion.num_draft_tokens, len(chances)
        least = self._least_chance(expansion, min(count, most - 1))
        return least if count < most else max(least, min(*chances, expansion.least_chance))

    def _least_chance(self, expansion: Expansion, place: int) -> float:
        """Return the acceptance threshold of the node at this place, most likely node first."""
        return self.nodes[min(place, len(self.nodes) - 1)] if self.nodes else expansion.least_chance or self.node


FREE_GROWTH = GrowthCosts()  # the whole expansion is grown


@cache
def _chain_shape(num_nodes: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the parents and the draws of a tree without branches."""
    return tuple(range(-1, num_nodes - 1)), (*((node,) for node in range(1, num_nodes)), ())


class TokenTree(msgspec.Struct, frozen=True, dict=True):
    """A drafted token tree. Parents come before their children; the root is node 0.

    `draws[v]` lists the children of node v in sampling order, a child once for each time it was sampled. So i.i.d. samples that
    coincide are one node listed twice. Verifiers need order and multiplicity (docs/verification.md). A leaf has no draws.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    draws: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        parents, count = self.parents, len(self.token_ids)
        if count and (parents, self.draws) == _chain_shape(count):
            return  # one of the trees of plain decoding, which are many
        if not len(parents) == count == len(self.draws) >= 1:
            raise ValueError("parents, token_ids and draws must have one entry for each node, and a root")
        if parents[ROOT] != -1 or min(parents[1:], default=0) < 0 or any(map(operator.ge, parents, range(count))):
            raise ValueError(f"parents must precede their children: {parents}")
        children = {(node, child) for node, drawn in enumerate(self.draws) for child in drawn}
        if children != {*zip(parents[1:], range(1, count))}:
            raise ValueError("draws must name exactly the children of each node")
        if len({*zip(parents, self.token_ids)}) < count:
            raise ValueError(
                "siblings must have different tokens: a token sampled again is the same child, listed again in draws"
            )

    @classmethod
    def single(cls, token_id: int) -> "TokenTree":
        """Return a root without children: the tree of plain decoding."""
        return cls((-1,), (token_id,), ((),))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> "TokenTree":
        """Return a tree without branches. The first token is the root's."""
        parents, draws = _chain_shape(len(token_ids))
        return cls(parents, tuple(token_ids), draws)

    @classmethod
    def star(cls, root_id: int, num_leaves: int) -> "TokenTree":
        """Return a root with leaves, whose tokens are their places."""
        leaves = tuple(range(1, num_leaves + 1))
        return cls((-1, *(0 for _ in leaves)), (root_id, *leaves), (leaves, *(() for _ in leaves)))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's is 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Distinct children of each node in order of first appearance."""
        if sum(map(len, self.draws)) < len(self.parents):
            return self.draws  # no child is listed twice
        return tuple([tuple(dict.fromkeys(drawn)) for drawn in self.draws])

    @cached_property
    def post_order(self) -> tuple[int, ...]:
        """Children in sampling order, then the node: the order in which bottom-up verification tries nodes."""
        order: list[int] = []
        stack = [(ROOT, False)]
        while stack:
            node, is_expanded = stack.pop()
            if is_expanded:
                order.append(node)
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(self.children[node]))
        return tuple(order)

    @cached_property
    def ancestors_NN(self) -> NDArray[np.bool_]:
        """Mask [N, N]: entry (v, w) is true if w is v or an ancestor of v."""
        count = len(self.parents)
        rows = [bytearray(count)]
        rows[ROOT][ROOT] = 1
        for node, parent in enumerate(self.parents[1:], start=1):
            rows.append(row := rows[parent][:])
            row[node] = 1
        return np.frombuffer(bytearray().join(rows), dtype=np.bool_).reshape(count, count)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(self.parents[nodes[-1]])
        return tuple(reversed(nodes))
