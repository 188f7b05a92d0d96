"""Shapes of speculation: the Expansion a policy chooses and the TokenTree a drafter grows from it.

Knows parents, depths, orders and ancestor masks. Does not know models, laws or torch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ROOT = 0  # the index of a tree's root: the last committed token, whose keys and values are not cached yet


@dataclass(frozen=True, slots=True, order=True)
class Expansion:
    """A delayed tree's shape: `trunk` single nodes, then `branches` paths of `depth` nodes each.

        root - t1 - t2 -+- a1 - a2 - a3      trunk=2, branches=2, depth=3
                        +- b1 - b2 - b3

    `(0, 1, 0)` drafts nothing: plain decoding. `(n, 1, 0)` is a chain. `(0, k, d)` branches at the root.
    Source: Dynamic Delayed Tree Expansion (arXiv 2602.16994), where it is written (K, L1, L2).
    """

    trunk: int
    branches: int
    depth: int

    def __post_init__(self) -> None:
        if self.trunk < 0 or self.branches < 1 or self.depth < 0:
            raise ValueError(f"an expansion needs trunk >= 0, branches >= 1 and depth >= 0, not {self}")

    @property
    def max_depth(self) -> int:
        """Length in tokens of the longest path below the root."""
        return self.trunk + self.depth

    @property
    def num_draft_tokens(self) -> int:
        """Largest number of nodes below the root (merged duplicates can make it fewer)."""
        return self.trunk + self.branches * self.depth

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing."""
        return self.num_draft_tokens == 0

    def limited(self, max_depth: int, max_draft_tokens: int) -> "Expansion":
        """Return the nearest expansion with at most that depth and that many drafted tokens.

        Depth is cut from the branches first, then the trunk; a branch is dropped before depth is lost to the budget.
        """
        trunk = min(self.trunk, max_depth, max_draft_tokens)
        depth = min(self.depth, max_depth - trunk)
        branches = self.branches
        while branches > 1 and trunk + branches * depth > max_draft_tokens:
            branches -= 1
        depth = min(depth, max_draft_tokens - trunk)
        return Expansion(trunk, branches if depth else 1, depth)

    def width_at(self, depth: int) -> int:
        """Return how many sampled paths pass through this depth (root is 0)."""
        if depth <= self.trunk:
            return 1
        return self.branches if depth <= self.max_depth else 0

    def __str__(self) -> str:
        return f"{self.trunk}.{self.branches}.{self.depth}"


PLAIN = Expansion(0, 1, 0)


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
        mask_NN = np.eye(self.num_nodes, dtype=np.bool_)
        for node in range(1, self.num_nodes):
            mask_NN[node] |= mask_NN[self.parents[node]]
        return mask_NN

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(self.parents[nodes[-1]])
        return tuple(reversed(nodes))
