"""The plan of rules for a single path: the first draw after each node counts, whatever else was drafted is ignored.

Knows which nodes lie on the first path; what is done with them is WithoutReplacement's. The first draw after a node has
the draft law whatever is drawn after it, so the plan is exact wherever children are draws.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from engine.core.tree import ROOT, TokenTree
from engine.verify.plans import Families, Split, WithoutReplacement


class FirstPath:
    """One child x ~ q: accept with min(1, a p(x) / q(x)), else go on with (a p - q)+ and refuse with 1 - a.

    Top-down it is naive speculative sampling (arXiv 2211.17192), bottom-up Block Verification (2403.10444).
    """

    reads_draft = True
    _one_try = WithoutReplacement()

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the first draw of every node on the first path, nothing elsewhere."""
        firsts: list[tuple[int, ...]] = [()] * tree.num_nodes
        node = ROOT
        while tree.draws[node]:
            firsts[node] = tree.draws[node][:1]
            node = tree.draws[node][0]
        return firsts

    def split(self, families: Families) -> Split:
        """Try the one child."""
        return self._one_try.split(families)

    def residual(self, families: Families) -> Float[Tensor, "M V"]:
        """Return (a p - q)+, which may name a token that another branch carries: the path ends there all the same."""
        return self._one_try.residual(families)
