"""The trees of one step and the distributions from which their nodes were drawn: a verifier's input.

Shape key: B trees, N nodes of all trees (tree after tree, each in its own node order), R draft distributions, V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property

import msgspec
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree


class Forest(msgspec.Struct, frozen=True, dict=True):
    """B token trees and the processed draft distributions.

    `draft_probs_RV` is float32. The children of node v of tree b were drawn from row `probs_rows[b][v]`; a leaf has None. Every
    row is exactly the distribution that was sampled, after temperature and truncation.
    """

    trees: tuple[TokenTree, ...]
    draft_probs_RV: Float[Tensor, "R V"]
    probs_rows: tuple[tuple[int | None, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First packed node of each tree, then the number of all nodes."""
        offsets = [0]
        for tree in self.trees:
            offsets.append(offsets[-1] + len(tree.parents))
        return tuple(offsets)

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, N."""
        return self.offsets[-1]

    def subset(self, indices: Sequence[int]) -> "Forest":
        """Return the forest of some of the trees; the distributions are shared, not copied."""
        return Forest(tuple(self.trees[i] for i in indices), self.draft_probs_RV, tuple(self.probs_rows[i] for i in indices))
