"""The adaptive policy: the batch's expected tokens over its step's seconds, as large as can be, and never knowingly below plain.

Meets an estimator (what the text allows), the cost model (what the machine charges) and the allocation of nodes among sequences.
Stays with the last choice unless another is clearly better; probes when plain decoding looks best; says why.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.pairs import is_exact
from engine.policy import Choice, Reason, SequenceView, StepFeedback
from engine.tree import PLAIN, Expansion
from selector.allocation import Allocation, Allocator, BatchLoad
from selector.cost import CostModel, StageSeconds, Works
from selector.estimators import Estimator
from selector.menu import Menu
from selector.probing import Probes

_logger = logging.getLogger(__name__)

_SETTLED_STEPS = 4  # for which a choice stands while the batch stays as it is
_FIRST_PLAIN, _PLAIN_EVERY = 8, 128  # steps in a row in which somebody drafts, before plain decoding is measured again
_CATCH_UP_STEPS = 32  # over which feeding a drafter that lags behind is written off
_CLEARLY_BETTER = 1.01  # times the rate of the last choice, before it is given up


@dataclass(frozen=True)
class _Batch:
    """The views of a step: those the policy may choose for, by place, and what the others run."""

    free: tuple[int, ...]
    views: tuple[SequenceView, ...]
    is_allowed_BM: NDArray[np.bool_]
    load: BatchLoad


@dataclass(frozen=True)
class _Standing:
    """A choice that stands for some steps: the place of each sequence, and what was expected of the batch."""

    places: dict[str, int]
    choice: Choice
    num_steps: int


class AdaptiveExpansion:
    """Chooses each step's expansions from a menu. `fallback` is what runs where the estimator has no number to give.

    The menu holds what the server's verifier is exact on; a sequence with another verifier gets what that is exact on too.
    """

    def __init__(
        self, menu: Menu, estimator: Estimator, costs: CostModel, fallback: Expansion, settled_steps: int = _SETTLED_STEPS
    ) -> None:
        self.name = f"adaptive up to {menu.entries[-1]}"
        self._menu = menu
        self._estimator = estimator
        self._costs = costs
        self._fallback = fallback
        self._settled_steps = settled_steps
        self._probes = Probes()
        self._standing = _Standing({}, Choice(()), 0)
        self._num_since_plain, self._plain_every = 0, _FIRST_PLAIN
        self._is_exact: dict[str, NDArray[np.bool_]] = {}
        self._has_failed = False

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return the expansions with the most expected tokens a second, or nearly so, and what is expected of them."""
        choice = self._stood(views) or self._chosen(views)
        is_plain = all(expansion.is_plain for expansion in choice.expansions)
        self._num_since_plain = 0 if is_plain else self._num_since_plain + 1
        return choice

    def _stood(self, views: Sequence[SequenceView]) -> Choice | None:
        """Return the last choice while it stands: for a few steps, in which few sequences came or went; who came is plain."""
        last = self._standing
        num_new = sum(view.request_id not in last.places for view in views)
        num_changed = num_new + len(last.places) - (len(views) - num_new)
        if not last.num_steps or num_changed * 4 > len(views):
            return None
        self._standing = replace(last, num_steps=last.num_steps - 1)
        places = (last.places.get(view.request_id, 0) for view in views)
        expansions = tuple(self._menu.entries[place] for place in places)
        if num_changed:
            return Choice(expansions, last.choice.reason)
        return replace(last.choice, expansions=expansions)

    def _chosen(self, views: Sequence[SequenceView]) -> Choice:
        if not any(_is_free(view) for view in views):
            return Choice((PLAIN,) * len(views))
        batch = self._batch(views)
        estimates = self._estimator.estimate(batch.views)
        if not all(np.isfinite(part).all() for part in (estimates.tokens, estimates.nodes, estimates.passes)):
            return self._without_numbers(views)
        allocator = Allocator(self._menu, estimates, batch.is_allowed_BM, batch.load, self._costs)
        plain = allocator.plain()
        num_settled = self._settled_steps if _all_decode(views) else 0
        self._probes.save(plain.seconds, 1 + num_settled)
        best = self._clearly_better(batch, allocator, allocator.best(plain))
        reason = Reason.SPECULATION_PAYS if best.places_B.any() else Reason.PLAIN_IS_BEST
        choice = self._choice(batch, best, plain, reason, views)
        places = dict.fromkeys((view.request_id for view in views), 0)
        places.update((one.request_id, int(place)) for one, place in zip(batch.views, best.places_B, strict=True))
        self._standing = _Standing(places, choice, num_settled)
        if self._num_since_plain >= self._plain_every:
            self._plain_every = min(_PLAIN_EVERY, 2 * self._plain_every)
            return self._choice(batch, plain, plain, Reason.PROBE, views)
        probing = self._probe(batch, allocator, best)
        return self._choice(batch, probing, plain, Reason.PROBE, views) if probing else choice

    def _choice(
        self, batch: _Batch, chosen: Allocation, plain: Allocation, reason: Reason, views: Sequence[SequenceView]
    ) -> Choice:
        """Return an allocation as an expansion for every view; whoever chose for itself is not asked.

        No seconds are foretold of a step that feeds a prompt: it was priced without.
        """
        expansions = [PLAIN] * len(views)
        for index, place in zip(batch.free, chosen.places_B.tolist(), strict=True):
            expansions[index] = self._menu.entries[place]
        return Choice(tuple(expansions), reason, chosen.rate / plain.rate, chosen.seconds if _all_decode(views) else None)

    def observe(self, feedback: StepFeedback) -> None:
        """Learn what the step cost (of steps without prompt chunks, which need fewer logits) and what its trees brought."""
        if feedback.outcomes and not feedback.has_prefill:
            self._costs.observe(feedback.work, StageSeconds(feedback.draft_s, feedback.rest_s))
        self._estimator.observe(feedback.outcomes)
        self._probes.observe(feedback.outcomes)

    def _batch(self, views: Sequence[SequenceView]) -> _Batch:
        """Tell the sequences that leave the choice to the policy from those whose request has made it.

        Every sequence is priced as one that decodes: a prompt is fed once, whatever is chosen, and the choice outlives it.
        """
        free = tuple(index for index, view in enumerate(views) if _is_free(view))
        chosen_for = tuple(views[i] for i in free)
        trees = [one.speculation.expansion or PLAIN if one.speculation.is_enabled else PLAIN for one in views]
        rows = list(zip(views, trees, strict=True))
        tokens = [1 + tree.num_draft_tokens for _, tree in rows]
        base = Works(
            num_rows=len(views),
            num_tokens=sum(tokens),
            num_drawn=sum(1 + tree.num_draft_tokens for one, tree in rows if not one.sampling.is_greedy),
            num_keys=sum(one.num_committed for one in views),
            num_scores=sum(count * one.num_committed for count, one in zip(tokens, views, strict=True)),
            num_passes=max((tree.max_depth for tree in trees), default=0),
            num_draft_tokens=sum(_catch_up(one) + tree.num_draft_tokens for one, tree in rows if not tree.is_plain),
        )
        load = BatchLoad(
            base=base,
            base_tokens=float(len(views) - len(free)),
            context_B=np.array([one.num_committed for one in chosen_for], dtype=np.float64),
            unfed_B=np.array([_catch_up(one) for one in chosen_for], dtype=np.float64),
            draws_B=np.array([not one.sampling.is_greedy for one in chosen_for], dtype=np.float64),
        )
        return _Batch(free, chosen_for, self._allowed(chosen_for), load)

    def _allowed(self, views: Sequence[SequenceView]) -> NDArray[np.bool_]:
        """Return which entries each sequence may have, [B, M]: exact, within its bound on nodes, no longer than what remains."""
        bounds = [one.speculation.max_nodes for one in views]
        most_nodes_B = np.array([np.inf if bound is None else bound for bound in bounds])
        num_remaining_B = np.array([max(1, one.num_remaining) for one in views])
        allowed_BM = np.array([self._exact_for(one) for one in views])
        is_prompt_B = np.array([one.num_uncached > 1 for one in views])
        allowed_BM &= ~is_prompt_B[:, None] | (self._menu.num_nodes == 0)
        allowed_BM &= self._menu.num_nodes <= most_nodes_B[:, None]
        allowed_BM &= self._menu.depths < num_remaining_B[:, None]
        return allowed_BM

    def _exact_for(self, view: SequenceView) -> NDArray[np.bool_]:
        if view.verifier not in self._is_exact:
            exact = [one.is_plain or is_exact(one.kind, view.verifier) for one in self._menu.entries]
            self._is_exact[view.verifier] = np.array(exact)
        return self._is_exact[view.verifier]

    def _clearly_better(self, batch: _Batch, allocator: Allocator, best: Allocation) -> Allocation:
        """Return the best allocation, or the last choice if it is still allowed and about as good."""
        last_B = np.array([self._standing.places.get(one.request_id, -1) for one in batch.views])
        is_kept_B = (last_B >= 0) & batch.is_allowed_BM[np.arange(len(last_B)), last_B]
        kept = allocator.of(np.where(is_kept_B, last_B, best.places_B))
        return kept if best.rate < kept.rate * _CLEARLY_BETTER else best

    def _probe(self, batch: _Batch, allocator: Allocator, chosen: Allocation) -> Allocation | None:
        """Return the choice with a tree to learn from for the sequences that are due, or the first of them, if it can be paid.

        For those that are plain that is the tree that loses least, for others the deepest that can be paid.
        """
        due = self._probes.due(batch.views, [place == 0 for place in chosen.places_B.tolist()])
        for indices in (due, due[:1])[len(due) < 2 :]:
            if indices and (probing := self._paid_probe(batch, allocator, chosen, indices)):
                return probing
        return None

    def _paid_probe(self, batch: _Batch, allocator: Allocator, chosen: Allocation, indices: list[int]) -> Allocation | None:
        place = int(chosen.places_B[indices[0]])
        is_open_M = batch.is_allowed_BM[indices].all(0) & (self._menu.tells_most if place else self._menu.num_nodes > 0)
        entries = np.flatnonzero(is_open_M)
        entries = entries[entries != place]
        if not len(entries):
            return None
        probing, loss_C = allocator.losses(chosen, indices, entries)
        affordable = np.flatnonzero(loss_C <= self._probes.saved_s)
        if not len(affordable):
            return None
        best = int(affordable[-1] if place else loss_C.argmin())
        self._probes.pay([batch.views[index] for index in indices], float(loss_C[best]))
        return probing[best]

    def _without_numbers(self, views: Sequence[SequenceView]) -> Choice:
        if not self._has_failed:
            _logger.error("the estimator gave numbers that are not finite; %s is drafted instead", self._fallback)
            self._has_failed = True
        return Choice((self._fallback,) * len(views), Reason.FALLBACK)


def _catch_up(view: SequenceView) -> float:
    """Return the tokens that a tree now costs the drafter beside its nodes: what it lags behind, spread over steps to come."""
    return view.num_unfed / min(_CATCH_UP_STEPS, max(1, view.num_remaining))


def _all_decode(views: Sequence[SequenceView]) -> bool:
    """Return whether no prompt is being fed."""
    return all(view.num_uncached == 1 for view in views)


def _is_free(view: SequenceView) -> bool:
    """Return whether the request leaves the choice to the policy."""
    return view.speculation.is_enabled and view.speculation.expansion is None
