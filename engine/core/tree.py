"""Shapes of speculation: the Expansion a policy chooses and the TokenTree a drafter grows from it.

Knows parents, depths, orders and ancestor masks. Does not know models, laws or torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

ROOT = 0  # the index of a tree's root: the last committed token, whose keys and values are not cached yet


TreeName = Literal[
    "delayed", "delayed_distinct", "static", "heap", "threshold", "calibrated", "greedy_sample", "beam", "noise_aware"
]  # fmt: skip
TREE_NAMES: tuple[TreeName, ...] = get_args(TreeName)


class TreeKind(StrEnum):
    """How a tree's children are chosen; what a verifier is exact on depends on nothing else."""

    PATH = "path"  # one child a node, drawn from a known law
    IID = "iid"  # draws from one law, duplicates merged
    WITHOUT_REPLACEMENT = "without_replacement"  # distinct draws, each from what its elder siblings left
    FIXED_DISTINCT = "fixed_distinct"  # the same, and no token decides how many siblings it gets
    SET_PLUS_SAMPLE = "set_plus_sample"  # a fixed set and one draw off it
    DETERMINISTIC = "deterministic"  # chosen by value, no law: beams, look-ups
    SHARED_NOISE = "shared_noise"  # chosen by the very noise that decides the tokens


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
DEFAULT_SHAPE = (2, 2, 3)  # trunk, branches, depth of a delayed tree given by its name alone
DEFAULT_NODES, DEFAULT_DEPTH, DEFAULT_BRANCHES = 16, 8, 4  # of the other trees


@dataclass(frozen=True, slots=True, order=True)
class Expansion:
    """What tree to grow: which one, how deep, how wide, of how many nodes.

    Delayed trees are `trunk` single nodes, then `branches` paths of `depth` nodes each; `delayed` draws the branches i.i.d.,
    `delayed_distinct` makes them start differently:

        root - t1 - t2 -+- a1 - a2 - a3      trunk=2, branches=2, depth=3
                        +- b1 - b2 - b3

    `(0, 1, 0)` drafts nothing: plain decoding. `(n, 1, 0)` is a chain. `(0, k, d)` branches at the root. Their size follows from
    their shape, so `max_nodes` is 0. Source: Dynamic Delayed Tree Expansion (arXiv 2602.16994), where it is written (K, L1, L2).

    The other trees find their own shape: `max_nodes` drafted tokens at most, `depth` levels, `branches` children a node, no
    trunk. A noise-aware one knows what chance a node has to be accepted, and may leave out what has less than `least_chance`.
    Which is which: docs/verification.md.
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
        """How its children are chosen (for rows that draw; greedy and coupled rows rank, and every tree is exact there)."""
        return TreeKind.PATH if self.is_delayed and self.branches == 1 else _KINDS[self.tree]

    @property
    def max_depth(self) -> int:
        """Length in tokens of the longest path below the root."""
        return self.trunk + self.depth if self.is_delayed else min(self.depth, self.max_nodes)

    @property
    def num_draft_tokens(self) -> int:
        """Largest number of nodes below the root (merged duplicates and early ends can make it fewer)."""
        return self.trunk + self.branches * self.depth if self.is_delayed else self.max_nodes

    @property
    def label(self) -> str:
        """Its name among not too many others: a delayed tree's shape, another tree's name."""
        return str(self) if self.is_delayed else self.tree

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing: a delayed tree without trunk and depth. Other trees have depth."""
        return not (self.trunk or self.depth)

    def limited(self, max_depth: int, max_draft_tokens: int) -> "Expansion":
        """Return the nearest expansion with at most that depth and that many drafted tokens, itself if it is that.

        Depth is cut from the branches first, then the trunk; a branch is dropped before depth is lost to the budget.
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
        """Return how many sampled paths of a delayed tree pass through this depth (root is 0)."""
        if depth <= self.trunk:
            return 1
        return self.branches if depth <= self.max_depth else 0

    def __str__(self) -> str:
        """Return what `parse_expansion` reads: `2.2.3` for a delayed tree, else `name.max_nodes.depth.branches@least_chance`."""
        if not self.is_delayed:
            least = f"@{self.least_chance:.6f}".rstrip("0") if self.least_chance else ""
            return f"{self.tree}.{self.max_nodes}.{self.depth}.{self.branches}{least}"
        shape = f"{self.trunk}.{self.branches}.{self.depth}"
        return shape if self.tree == "delayed" else f"{self.tree}.{shape}"


def parse_expansion(text: str) -> Expansion:
    """Return the expansion written `trunk.branches.depth`, `delayed_distinct.trunk.branches.depth` or `tree.max_nodes`.

    The last can go on `.depth.branches`, and a noise-aware one end on `@least_chance`. ValueError says what is wrong.
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
    """What more of a tree costs the step, in tokens that its seconds would bring: another node, another level.

    A node pays if it is likelier than that to be accepted, a level if it brings more tokens than that. `node` is that of a node
    in a step as large as is expected; `nodes`, where they are known, are those of a tree's first node, its second and so on,
    none below the one before it: a step's seconds bend, and the first nodes may cost next to nothing, the last ones much.
    """

    node: float = 0.0
    level: float = 0.0
    nodes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if [*self.nodes] != sorted(self.nodes):
            raise ValueError("a tree's next node never costs less than the one before")

    def least_chances(self, expansion: Expansion) -> tuple[float, ...]:
        """Return the chance that each node of a noise-aware tree must have, the likeliest node first, [max_nodes].

        Where it is not known what each costs, that is the expansion's own least chance, if it has one.
        """
        most = expansion.num_draft_tokens
        if not self.nodes:
            return (self._least_chance(expansion, 0),) * most
        return self.nodes[:most] + self.nodes[-1:] * (most - len(self.nodes))

    def least_told(self, expansion: Expansion, chances: Sequence[float]) -> float:
        """Return the chance above which a tree with nodes of these chances has all that it could have: the cost of the next one.

        A full one has all that are as likely as its least likely node, or as it was asked for, if that is less likely.
        """
        most, count = expansion.num_draft_tokens, len(chances)
        least = self._least_chance(expansion, min(count, most - 1))
        return least if count < most else max(least, min(*chances, expansion.least_chance))

    def _least_chance(self, expansion: Expansion, place: int) -> float:
        """Return the chance that the node of a tree at this place must have, the likeliest being the first."""
        return self.nodes[min(place, len(self.nodes) - 1)] if self.nodes else expansion.least_chance or self.node


FREE_GROWTH = GrowthCosts()  # the whole expansion is grown


@dataclass(frozen=True)
class TokenTree:
    """A drafted token tree; nodes are numbered so that parents come before children, the root is node 0.

    `draws[v]` lists the children of node v in the order in which they were sampled, a child once for each time it was
    drawn: i.i.d. draws that coincide are one node listed twice. Verifiers need both the order and the multiplicity
    (docs/verification.md). A node with no draws is a leaf.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    draws: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.parents == (-1,) and self.draws == ((),) and len(self.token_ids) == 1:
            return  # a root alone, of which most trees of a busy server are
        if not len(self.parents) == len(self.token_ids) == len(self.draws) >= 1:
            raise ValueError("parents, token_ids and draws must have one entry for each node, and a root")
        if self.parents[ROOT] != -1 or any(not 0 <= p < v for v, p in enumerate(self.parents) if v != ROOT):
            raise ValueError(f"parents must precede their children: {self.parents}")
        children: list[set[int]] = [set() for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].add(node)
        if any(set(drawn) != kids for drawn, kids in zip(self.draws, children, strict=True)):
            raise ValueError("draws must name exactly the children of each node")
        if len({*zip(self.parents, self.token_ids)}) < self.num_nodes:
            raise ValueError("siblings must carry different tokens: a token drawn again is the same child, listed again in draws")

    @classmethod
    def single(cls, token_id: int) -> "TokenTree":
        """Return the tree of plain decoding: a root alone."""
        return cls((-1,), (token_id,), ((),))

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> "TokenTree":
        """Return a root and one node after the other; there is at least a root."""
        num_nodes = len(token_ids)
        draws = tuple((node + 1,) if node + 1 < num_nodes else () for node in range(num_nodes))
        return cls(tuple(range(-1, num_nodes - 1)), tuple(token_ids), draws)

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's is 0."""
        depths = [0] * self.num_nodes
        for node in range(1, self.num_nodes):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Distinct children of each node in order of first appearance."""
        return tuple(tuple(dict.fromkeys(drawn)) for drawn in self.draws)

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
        """Mask [N, N]: entry (v, w) says whether w is v or an ancestor of v."""
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parents):
            rows.append(bytearray(self.num_nodes) if parent < 0 else rows[parent][:])
            rows[node][node] = 1
        return np.frombuffer(bytearray().join(rows), dtype=np.bool_).reshape(self.num_nodes, self.num_nodes)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(self.parents[nodes[-1]])
        return tuple(reversed(nodes))
