"""The adaptive policy: most expected tokens a second for the batch, and never knowingly fewer than plain decoding.

Asks an estimator what the text allows and a cost model what the machine charges, and has `Search` find the step. Stays plain
unless drafts bring clearly more; probes now and then; says why. A choice is reused for a fixed number of steps while the batch is
the same (engine.choice_cache), plain decoding until its next probe. Steps are learnt from when the next choice is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import ExpansionChoice, Reason, SequenceView, StepFeedback, StepWork, composition_of
from engine.core.tree import PLAIN, Expansion
from selector.acceptance import Estimates, Estimator
from selector.cost import CostModel, StageSeconds
from selector.menu import Menu, fed_share
from selector.probes import Probes
from selector.search import BatchLoad, Search, Step

REUSED_STEPS = 8  # for which a choice stands while the batch is the same
_BEGINS_TO_PAY = 1.1  # times what their seconds are worth, that trees must bring before they are drafted; later once
_PRICED_ALWAYS = 48  # first steps that all correct prices; later probes do, and:
_PRICED_EVERY = 16  # of all steps
_KEEPS_UP_SHARE = 0.002  # of a plain step's seconds, for which drafters are kept up with sequences that decode plainly
_KEEPS_UP_STEPS = 32  # plain steps from one pass that does to the next (engine.scheduler.scheduler)
_MEMORY = 0.95  # of what own trees brought and of the model's share of rounds, at each later step


@dataclass(frozen=True)
class _Batch:
    """A step's sequences that the policy may choose for, by place among all, the menu open to them, and what the step runs."""

    free: tuple[int, ...]
    views: tuple[SequenceView, ...]
    menu: Menu
    is_allowed_BM: NDArray[np.bool_] | None  # all of it, if None
    load: BatchLoad

    def probes_for(self, rows: Sequence[int], places: Sequence[int]) -> list[int]:
        """Return the entries that all of these sequences may be probed with in place of their own."""
        entries = self.menu.telling if places[rows[0]] else self.menu.drafting
        chosen = {places[row] for row in rows}
        allowed_M = None if self.is_allowed_BM is None else np.asarray(self.is_allowed_BM[[*rows]].all(0))
        return [entry for entry in entries if entry not in chosen and (allowed_M is None or allowed_M[entry])]


class AdaptiveExpansion:
    """Chooses each step's expansions from a menu. Raises ArithmeticError where the estimator has no number to give.

    A token that the drafter is merely fed costs `unasked_share` of one that it is asked about. The menu holds what the server's
    verifier is exact on; a sequence with another verifier gets what that is exact on too.
    """

    def __init__(self, menu: Menu, estimator: Estimator, costs: CostModel, unqueried_share: float = 1.0) -> None:
        self.name = f"adaptive up to {replace(menu.entries[-1], least_chance=0.0)}"
        self._menu, self._estimator, self._costs = menu, estimator, costs
        self._unasked_share = unqueried_share
        self._probes = Probes()
        self._reason = Reason.PLAIN_IS_BEST
        self._without_probe: Step | None = None  # what the step under way would be without its probe
        self._probe_tokens = 0.0  # beside it, of the sequences that are probed
        self._unlearnt: list[tuple[StepFeedback, bool]] = []  # since the last choice, and whether each corrects prices
        self._num_steps = 0
        self._num_passes = self._num_rounds = 1.0  # of drafting, decaying: cached text spares rounds their pass of the model
        self._own_tokens: dict[str, float] = {}  # a step, of sequences whose requests ask for trees

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the expansions with the most expected tokens a second that were found, and what is expected of them."""
        self._learn()
        if composition_of(views) is None and any(view.num_uncached > 1 for view in views):
            return ExpansionChoice((PLAIN,) * len(views), Reason.PLAIN_IS_BEST)  # nodes are dear where a prompt fills the step
        own = {one.request_id: tree for one in views if not (tree := _own_tree(one)).is_plain}
        self._own_tokens = {name: self._own_tokens.get(name, 1.0) for name in own}
        if not any(view.is_free for view in views):
            return ExpansionChoice((PLAIN,) * len(views), num_steps=REUSED_STEPS)
        batch = self._batch(views, own)
        estimates = _within_text(self._estimator.estimate(batch.views, batch.menu), batch)
        search = Search(batch.menu, estimates, batch.is_allowed_BM, batch.load, self._costs)
        if not isfinite(float(np.sum(estimates)) + search.plain.rate):
            raise ArithmeticError("what to expect of a step is not a finite number")
        plain, best = search.plain, search.best()
        margin = 1.0 if self._reason is Reason.SPECULATION_PAYS else _BEGINS_TO_PAY
        if best.tokens - plain.tokens <= margin * plain.rate * (best.seconds - plain.seconds):
            best = plain
        self._reason = Reason.SPECULATION_PAYS if any(best.places) else Reason.PLAIN_IS_BEST
        probing, num_steps = self._probe(batch, search, best)
        reason = Reason.PROBE if probing else self._reason
        return self._choice(views, batch, search, probing or best, reason, num_steps)

    def observe(self, feedback: StepFeedback) -> None:
        """Note a step: what it cost and brought is learnt when the next choice is made."""
        self._num_steps += 1
        self._probes.save(feedback.draft_s + feedback.rest_s)
        is_probe = bool(self._probes.asked)
        is_priced = is_probe or self._num_steps <= _PRICED_ALWAYS or self._num_steps % _PRICED_EVERY == 0
        if feedback.has_drafted or is_priced:
            self._unlearnt.append((feedback, is_priced and not feedback.has_prefill))
        if is_probe:
            self._end_probe(feedback)

    def _learn(self) -> None:
        """Learn from the steps since the last choice."""
        unlearnt, self._unlearnt = self._unlearnt, []
        for feedback, is_priced in unlearnt:
            self._learn_from(feedback, is_priced)

    def _learn_from(self, feedback: StepFeedback, is_priced: bool) -> None:
        outcomes = feedback.outcomes
        if is_priced and outcomes:
            self._costs.observe(feedback.work, StageSeconds(feedback.draft_s, feedback.rest_s))
        if not feedback.has_drafted:
            return
        if not feedback.has_prefill and len(outcomes) == feedback.num_rows:
            self._num_passes = _MEMORY * self._num_passes + (1.0 - _MEMORY) * feedback.num_passes
            self._num_rounds = _MEMORY * self._num_rounds + (1.0 - _MEMORY) * feedback.num_rounds
        self._estimator.observe(outcomes)
        for one in outcomes if self._own_tokens else ():
            if (known := self._own_tokens.get(one.request_id)) is not None:
                self._own_tokens[one.request_id] = _MEMORY * known + (1.0 - _MEMORY) * (1.0 + one.accepted_depth)

    def _end_probe(self, feedback: StepFeedback) -> None:
        """Charge the probe under way; with nothing where cached text was drafted instead, or a prompt was fed."""
        without, lost_s = self._without_probe, 0.0
        asked = [one for one in feedback.outcomes if one.request_id in self._probes.asked]
        if without is not None and asked and not feedback.has_prefill:
            brought = sum(one.accepted_depth for one in asked) - self._probe_tokens
            lost_s = feedback.draft_s + feedback.rest_s - without.seconds - brought / without.rate
        self._probes.end(asked, lost_s)

    def _probe(self, batch: _Batch, search: Search, best: Step) -> tuple[Step | None, int]:
        """Return the step with a tree to learn from for the sequences that are due, if that can be paid, and the steps it is for.

        Plain sequences get the tree that loses least, drafting ones the deepest that can be paid; all that are due, or the first.
        Where nothing is probed, plain decoding goes on until the next probe.
        """
        places = best.places
        due, next_due = self._probes.due(batch.views, [not place for place in places])
        is_plain = not any(places)
        self._probes.resize(search.plain.seconds)
        least_s = inf  # lost by the cheapest probe of a sequence that is due
        for rows in [due, due[:1]] if len(due) > 1 else [due] if due else []:
            trees = search.with_tree(best, rows, entries) if (entries := batch.probes_for(rows, places)) else []
            losses_s = [one.loss_s(best) for one in trees]
            payable = [one for one, loss_s in zip(trees, losses_s, strict=True) if self._probes.can_pay(loss_s)]
            least_s = min([least_s, *losses_s])
            if not payable and trees and is_plain and len(rows) == 1 and self._probes.is_full:
                payable = [trees[losses_s.index(min(losses_s))]]
            if payable:
                found = payable[-1] if places[rows[0]] else min(payable, key=lambda one: one.loss_s(best))
                self._without_probe = best
                self._probe_tokens = sum(search.tokens_of(row, places[row]) - 1.0 for row in rows)
                self._probes.begin([batch.views[row] for row in rows])
                return found, 1
        if not is_plain:
            return None, REUSED_STEPS
        wait = self._probes.steps_to_save(least_s, best.seconds) if least_s < inf else next_due
        return None, max(REUSED_STEPS, wait)

    def _choice(
        self, views: Sequence[SequenceView], batch: _Batch, search: Search, step: Step, reason: Reason, num_steps: int
    ) -> ExpansionChoice:
        """Return a step as an expansion for every view; a request that asks for its own tree, or none, is not chosen for.

        A probe's trees end by their least chance alone, whatever nodes are thought to cost; their levels cost as if all drafted.
        """
        expansions = [PLAIN] * len(views)
        for index, place in zip(batch.free, step.places, strict=True):
            expansions[index] = batch.menu.entries[place]
        num_sharing = len(step.places) if reason is Reason.PROBE else sum(map(bool, step.places))
        prices = search.growth_prices(step, num_sharing)
        fed_s = len(views) * self._unasked_share * self._costs.prices["draft_token"]
        keeps_up_s = fed_s + self._costs.pass_s(batch.load.base.num_keys) / _KEEPS_UP_STEPS
        return ExpansionChoice(
            expansions=tuple(expansions),
            reason=reason,
            speedup=step.rate / search.plain.rate,
            step_s=step.seconds,
            prices=replace(prices, nodes=()) if reason is Reason.PROBE else prices,
            keeps_up=keeps_up_s <= _KEEPS_UP_SHARE * search.plain.seconds,
            num_steps=num_steps,
        )

    def _batch(self, views: Sequence[SequenceView], own: dict[str, Expansion]) -> _Batch:
        """Split the sequences to choose for from the others, and add up what the step runs whatever is chosen.

        Every sequence is priced as one that decodes: a prompt is fed once, whatever is chosen.
        """
        share = self._num_passes / self._num_rounds
        free = tuple(index for index, view in enumerate(views) if view.is_free)
        chosen_for = tuple(views[index] for index in free)
        trees = [(one, own[one.request_id]) for one in views if one.request_id in own]
        num_keys = sum(view.num_committed for view in views)
        num_rounds = max((tree.max_depth for _, tree in trees), default=0)
        num_fed = sum(1.0 + tree.num_draft_tokens * fed_share(tree) for _, tree in trees)
        base = StepWork(
            num_rows=len(views),
            num_tokens=len(views) + sum(tree.num_draft_tokens for _, tree in trees),
            num_drawn=sum(not one.sampling.is_greedy for one in views)
            + sum(tree.num_draft_tokens for one, tree in trees if not one.sampling.is_greedy),
            num_keys=num_keys,
            num_scores=num_keys + sum(tree.num_draft_tokens * one.num_committed for one, tree in trees),
            num_passes=share * num_rounds,
            num_draft_tokens=share * num_fed,
            num_rounds=num_rounds,
        )
        load = BatchLoad(
            base,
            base_tokens=len(views) - len(free) + sum(self._own_tokens.values()) - len(own),
            context=[one.num_committed for one in chosen_for],
            draws=[float(not one.sampling.is_greedy) for one in chosen_for],
            model_share=share,
        )
        menu, is_allowed_BM = self._menu.allowed_for(chosen_for)
        return _Batch(free, chosen_for, menu, is_allowed_BM, load)


def _within_text(estimates: Estimates, batch: _Batch) -> Estimates:
    """Return what noise-aware trees bring within each request's bound on nodes and what remains of its text.

    Entries of other shapes are allowed only where they fit.
    """
    most_B = [min(inf if (most := one.speculation.max_nodes) is None else most, one.num_remaining - 1) for one in batch.views]
    if not batch.menu.least_chance or min(most_B) >= batch.menu.most_nodes:
        return estimates
    most_B1 = np.maximum(0.0, np.array(most_B, dtype=np.float64))[:, None]
    tokens, nodes, rounds = estimates
    return Estimates(np.minimum(tokens, 1.0 + most_B1), np.minimum(nodes, most_B1), np.minimum(rounds, most_B1))


def _own_tree(view: SequenceView) -> Expansion:
    """Return the tree that the request asks for itself, plain if it asks for none; no larger than it allows."""
    speculation = view.speculation
    if speculation.expansion is None or not speculation.is_enabled:
        return PLAIN
    tree = speculation.expansion
    most = tree.num_draft_tokens if speculation.max_nodes is None else speculation.max_nodes
    return tree.limited(max(0, view.num_remaining - 1), most)
