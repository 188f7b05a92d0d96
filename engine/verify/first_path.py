"""The plan of rules for a single path: it uses the first draw after each node and ignores the others.

This module selects the nodes of the first path; WithoutReplacement verifies them. The first draw after a node has the draft
distribution, and later draws do not change this. So the plan is exact on trees whose children are draws.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from engine.core.tree import ROOT, TokenTree
from engine.verify.node_plans import AcceptanceSplit, NodeFamilies, WithoutReplacement


class FirstPath:
    """One child x ~ q: accept with min(1, a p(x) / q(x)), else continue with (a p - q)+ and refuse with 1 - a.

    Top-down it is naive speculative sampling (arXiv 2211.17192), bottom-up Block Verification (2403.10444).
    """

    reads_draft = True
    _one_try = WithoutReplacement()

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the first draw of every node on the first path, and no tries for other nodes."""
        firsts: list[tuple[int, ...]] = [()] * tree.num_nodes
        node = ROOT
        while tree.draws[node]:
            firsts[node] = tree.draws[node][:1]
            node = tree.draws[node][0]
        return firsts

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Try the one child."""
        return self._one_try.split(families)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return (a p - q)+. It may include a token of another branch; the path ends there nevertheless."""
        return self._one_try.residual(families)
