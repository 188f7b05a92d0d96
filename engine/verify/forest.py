"""The trees of one step together with the laws their nodes were drawn from: what a verifier reads.

Shape key: B trees, N nodes of all trees (tree after tree, each in its own node order), R draft laws, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree


@dataclass(frozen=True)
class Forest:
    """B token trees and the processed draft laws.

    `draft_laws_RV` float32; `law_rows[b][v]` is the row of the law from which the children of node v of tree b were drawn,
    None for a leaf. Every row is exactly the law that was sampled, after temperature and truncation.
    """

    trees: tuple[TokenTree, ...]
    draft_probs_RV: Float[Tensor, "R V"]
    probs_rows: tuple[tuple[int | None, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First packed node of each tree, and one past the last node of all."""
        offsets = [0]
        for tree in self.trees:
            offsets.append(offsets[-1] + tree.num_nodes)
        return tuple(offsets)

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, N."""
        return self.offsets[-1]

    def subset(self, indices: Sequence[int]) -> "Forest":
        """Return the forest of some of the trees; the laws are shared, not copied."""
        return Forest(tuple(self.trees[i] for i in indices), self.draft_probs_RV, tuple(self.probs_rows[i] for i in indices))
