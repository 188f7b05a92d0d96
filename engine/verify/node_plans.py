"""Node plans: how one node shares its mass among its drafted children, an extra token and refusal.

A family is a node, the target distribution after it, its children and the distribution from which they were drawn. Families are
processed in batches, without trees, depths or random numbers. A plan for a node of prefix mass a is lossless when, averaged over
the children X drawn from Q, sum_X Q(X) pi(y|X) = a p(y) for every token y: docs/verification.md.

Shape key: M families, A <= M of them with tries left, C tries, V vocabulary.
Formulas write p for the target distribution, q for the draft distribution and a for the prefix mass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.core.tree import TokenTree


@dataclass(frozen=True)
class NodeFamilies:
    """M nodes with their children. Distributions are copied only when a plan reads them.

    The first `num_tried[j]` families have more than j tries; `is_try_MC` has the same information by entry.
    """

    target_probs_NV: Float[Tensor, "N V"]
    draft_probs_RV: Float[Tensor, "R V"]
    nodes_M: Int[Tensor, " M"]
    probs_rows_M: Int[Tensor, " M"]
    tokens_MC: Int[Tensor, "M C"]
    is_try_MC: Bool[Tensor, "M C"]
    mass_M: Float[Tensor, " M"]
    num_tried: tuple[int, ...]

    @property
    def num_trying(self) -> int:
        """Families with tries; they come first."""
        return sum(self.num_tried[:1])

    @property
    def num_choosing(self) -> int:
        """Families with two tries or more; they come first."""
        return sum(self.num_tried[1:2])

    def target_MV(self) -> Float[Tensor, "M V"]:
        """Return a new copy of the target distribution after each node."""
        return self.target_probs_NV.index_select(0, self.nodes_M)

    def draft_AV(self) -> Float[Tensor, "A V"]:
        """Return a new copy of the draft distribution of each family with tries."""
        return self.draft_probs_RV.index_select(0, _first(self.probs_rows_M, self.num_trying))

    def tokens_A1(self, rank: int) -> Int[Tensor, "A 1"]:
        """Return try `rank` of the families that have one."""
        return _first(self.tokens_MC, self.num_tried[rank]).narrow(1, rank, 1)

    def first(self, count: int) -> "NodeFamilies":
        """Return the first `count` families, which have the most tries."""
        if count == len(self.nodes_M):
            return self
        return replace(
            self,
            nodes_M=self.nodes_M[:count],
            probs_rows_M=self.probs_rows_M[:count],
            tokens_MC=self.tokens_MC[:count],
            is_try_MC=self.is_try_MC[:count],
            mass_M=self.mass_M[:count],
            num_tried=tuple(min(count, num) for num in self.num_tried),
        )

    def trying(self) -> "NodeFamilies":
        """Return the families with tries."""
        return self.first(self.num_trying)

    def target_at_tries_MC(self) -> Float[Tensor, "M C"]:
        """Return the target probability of each try in float64, 0 for a missing try."""
        return self.target_probs_NV[self.nodes_M[:, None], self.tokens_MC].double() * self.is_try_MC


def _first(rows: Tensor, count: int) -> Tensor:
    """Return a view of the first rows, or the tensor itself if these are all."""
    return rows if count == len(rows) else rows[:count]


class AcceptanceSplit(NamedTuple):
    """Float64. `tried_MC`: probability that a try is accepted if all before it were refused; `final_M`: mass left after all."""

    tried_MC: Float[Tensor, "M C"]
    final_M: Float[Tensor, " M"]


class NodePlan(Protocol):
    """A lossless rule for one node."""

    reads_draft: bool

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return every node's children in the order in which they are tried, a child once for each try."""
        ...

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Return the acceptance probability of each try and the mass left for the node itself."""
        ...

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return unnormalised weights of the extra token after all tries are refused; all 0 if that cannot happen."""
        ...


class TargetDraw:
    """NSS: draw y from the target and descend if y is a child: pi(y|X) = a p(y) for every X. Exact on any tree."""

    reads_draft = False

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the distinct children."""
        return tree.children

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Give each child its own target probability."""
        return split_by_shares(families.mass_M[:, None] * families.target_at_tries_MC(), 1.0 - families.mass_M)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return the target's distribution outside the tree."""
        return clear_tries_(families.target_MV(), families)


def split_by_shares(shares_MC: Float[Tensor, "M C"], none_M: Float[Tensor, " M"]) -> AcceptanceSplit:
    """Return the sequential acceptance probabilities that give each try its share pi(x|X), and none pi(none|X), in float64."""
    left_MC = 1.0 - shares_MC.cumsum(-1)  # after each try
    before_MC = torch.cat([torch.ones_like(left_MC[:, :1]), left_MC[:, :-1]], -1)
    final_M = torch.where(none_M > 0.0, 1.0 - none_M / left_MC[:, -1], 1.0)
    return AcceptanceSplit((shares_MC / before_MC).nan_to_num(0.0).clamp(0.0, 1.0), final_M.clamp(0.0, 1.0))


def clear_tries_(weights_MV: Float[Tensor, "M V"], families: NodeFamilies) -> Float[Tensor, "M V"]:
    """Set the weights of the drafted tokens to 0 in place: they are children, not extra tokens."""
    for rank, count in enumerate(families.num_tried):
        _first(weights_MV, count).scatter_(1, families.tokens_A1(rank), 0.0)
    return weights_MV


class WithReplacement:
    """SpecInfer (arXiv 2305.09781): i.i.d. draws, each occurrence of a token tried, q the same every time."""

    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the draws with their multiplicity."""
        return tree.draws

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Try the draws in order against the same distribution."""
        return split_in_order(families, _keep)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return the residual of the target's distribution after the refused draws."""
        return residual_in_order(families, _keep)


class WithoutReplacement:
    """Distinct children in order of first appearance, each drawn from q without the siblings before it.

    Bottom-up it is Traversal Verification (arXiv 2505.12398), with one child Block Verification (2403.10444); top-down
    it is Sequoia's rule (2402.12374). i.i.d. draws with duplicates merged are such children too.
    """

    reads_draft = True

    def tries(self, tree: TokenTree) -> Sequence[Sequence[int]]:
        """Return the distinct children in order of first appearance."""
        return tree.children

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        """Try the children in order, each against q without the earlier children."""
        return split_in_order(families, _remove)

    def residual(self, families: NodeFamilies) -> Float[Tensor, "M V"]:
        """Return the residual of the target's distribution after the refused children."""
        return residual_in_order(families, _remove)


class _AfterRefusal(Protocol):
    """Updates in place the draft distribution of families whose child `tokens_A1` was refused."""

    def __call__(self, draft_AV: Tensor, tokens_A1: Tensor) -> None: ...


def _keep(draft_AV: Tensor, tokens_A1: Tensor) -> None:
    """Keep q: the next draw is independent of this one."""


def _remove(draft_AV: Tensor, tokens_A1: Tensor) -> None:
    """Set q to 0 at the token and renormalise by a new sum: 1 - q(x) would lose a small rest."""
    draft_AV.scatter_(1, tokens_A1, 0.0)
    draft_AV.div_(draft_AV.sum(-1, keepdim=True))


def split_in_order(families: NodeFamilies, after_refusal: _AfterRefusal) -> AcceptanceSplit:
    """Accept x with min(1, a p(x) / q(x)), else continue with the residual: rejection sampling, one try after another."""
    refusals = _Refusals(families, after_refusal)
    accept_probs = [refusals.accept_probs_A1(rank) for rank in refusals]
    return AcceptanceSplit(_table(accept_probs, families.tokens_MC), refusals.left(len(families.nodes_M)).mass_A)


def residual_in_order(families: NodeFamilies, after_refusal: _AfterRefusal) -> Float[Tensor, "M V"]:
    """Return the residual of the target's distribution if all tries of `split_in_order` are refused."""
    refusals = _Refusals(families, after_refusal)
    for _ in refusals:
        pass
    return refusals.weights_MV


class _Left(NamedTuple):
    """After a refusal: the total S + 1 - a, which divides the weights, and the new mass."""

    total_A: Tensor
    mass_A: Tensor


class _Refusals:
    """Families whose tries are refused one after another. Each refusal updates copies of p and q.

    The weights are w = a p, of total a. A refusal makes S = sum (w - q)+, w <- (w - q)+ / (S + 1 - a) and
    a <- S / (S + 1 - a). Scalars are float64 for rows of any dtype.
    """

    def __init__(self, families: NodeFamilies, after_refusal: _AfterRefusal) -> None:
        self._families, self._after_refusal = families, after_refusal
        self._mass_M = families.mass_M
        self.weights_MV = families.target_MV()
        self.weights_MV.mul_(self._mass_M[:, None].to(self.weights_MV.dtype))
        self._draft_AV = families.draft_AV()

    def __iter__(self) -> Iterator[int]:
        """Yield the ranks of the tries; each is refused when the next is requested."""
        for rank, count in enumerate(self._families.num_tried):
            if rank:
                self._go_on_to(rank)
            yield rank
            _first(self.weights_MV, count).sub_(_first(self._draft_AV, count)).clamp_(min=0.0)

    def accept_probs_A1(self, rank: int) -> Float[Tensor, "A 1"]:
        """Return the probability that the next try is accepted."""
        tokens_A1 = self._families.tokens_A1(rank)
        weights_A1 = _first(self.weights_MV, len(tokens_A1)).gather(1, tokens_A1).double()
        return (weights_A1 / _first(self._draft_AV, len(tokens_A1)).gather(1, tokens_A1)).clamp_(max=1.0)

    def left(self, count: int) -> _Left:
        """Return the totals after the last refusal for the first families; a family without tries has S = a."""
        rest_A, mass_A = _first(self.weights_MV, count).sum(-1).double(), _first(self._mass_M, count)
        total_A = rest_A + 1.0 - mass_A  # 0 only if a = 1 and p = q: then x was accepted with probability 1
        return _Left(total_A, torch.where(total_A > 0.0, rest_A / total_A, 1.0))

    def _go_on_to(self, rank: int) -> None:
        """Normalise the residuals of the families that have another try."""
        count = self._families.num_tried[rank]
        left = self.left(count)
        self._mass_M = torch.cat([left.mass_A, self._mass_M[count:]])
        scale_A = torch.where(left.total_A > 0.0, left.total_A, 1.0).to(self.weights_MV.dtype)
        _first(self.weights_MV, count).div_(scale_A[:, None])
        self._after_refusal(_first(self._draft_AV, count), _first(self._families.tokens_A1(rank - 1), count))


def _table(columns: Sequence[Tensor], like_MC: Tensor) -> Float[Tensor, "M C"]:
    """Return columns, each with a number for the first families, as a table with 0 elsewhere."""
    num_rows, width = like_MC.shape
    if len(columns) < width or any(len(column) < num_rows for column in columns):
        table_MC = torch.zeros_like(like_MC, dtype=torch.float64)
        for rank, column_A1 in enumerate(columns):
            table_MC[: len(column_A1), rank : rank + 1] = column_A1
        return table_MC
    return torch.cat([*columns], 1)
