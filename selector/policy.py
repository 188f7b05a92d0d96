"""The adaptive policy: chooses the trees with the most expected tokens a second over the batch. Plain decoding is a candidate.

An estimator predicts tokens, a cost model predicts seconds, and `Search` combines them. Drafting begins only if it is clearly
better than plain decoding. Probes gather evidence now and then. A choice with drafts is reused for a fixed number of steps
while the batch is the same (engine.choice_cache), plain decoding until its next probe. Measured steps are learned from at the
next choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from engine.core.policy import DraftOutcome, ExpansionChoice, Reason, SequenceView, StepFeedback, StepWork, composition_of
from engine.core.tree import PLAIN, Expansion
from selector.acceptance import OWN_DECAY, Estimates, Estimator
from selector.cost import CostModel
from selector.menu import Menu, fed_share
from selector.probes import REUSED_STEPS, Probes
from selector.search import BatchLoad, Search, Step

_MARGIN = 1.1  # to begin drafting: additional tokens over those of plain decoding in the same seconds; 1 to continue
_FIRST_CORRECTIONS = 48  # steps, all of which correct costs; later probes do, and a step of every second reused choice


@dataclass(frozen=True)
class _PolicyBatch:
    """The sequences that the policy chooses for, with their places in the step, their menu and the rest of the step's work."""

    free: Sequence[int]
    views: Sequence[SequenceView]
    menu: Menu
    is_allowed: Sequence[Sequence[bool]] | None  # [B][M], None: everything
    load: BatchLoad

    def probes_for(self, rows: Sequence[int], places: Sequence[int]) -> list[int]:
        """Return the entries with which these sequences may be probed: larger ones than their own."""
        entries = self.menu.informative if places[rows[0]] else self.menu.drafting
        largest = max([places[row] for row in rows])
        limits = [] if self.is_allowed is None else [self.is_allowed[row] for row in rows]
        return [entry for entry in entries if entry > largest and all(is_allowed[entry] for is_allowed in limits)]


class AdaptiveExpansion:
    """Chooses each step's expansions from a menu. Raises ArithmeticError if an estimate is not finite.

    The menu has trees on which the server's verifier is exact. A sequence with another verifier gets the entries on which that
    one is exact.
    """

    def __init__(self, menu: Menu, estimator: Estimator, costs: CostModel) -> None:
        self.name = f"adaptive up to {replace(menu.entries[-1], least_chance=0.0)}"
        self._menu, self._estimator, self._costs = menu, estimator, costs
        self._probes = Probes()
        self._reason = Reason.PLAIN_IS_BEST
        self._without_probe: Step | None = None  # the step under way without its probe
        self._probe_tokens = 0.0  # drafted tokens that the probed sequences were expected to gain without the probe
        self._unlearned: list[tuple[StepFeedback, bool]] = []  # since the last choice; whether each corrects costs
        self._num_steps = 0
        self._num_passes = self._num_rounds = 1.0  # moving averages: cached text answers rounds without a pass
        self._own_tokens: dict[str, float] = {}  # tokens a step of sequences with a tree of their own

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the best expansions found, with the expected seconds and speed-up of the step."""
        self._learn()
        if composition_of(views) is None and any(view.num_uncached > 1 for view in views):
            return ExpansionChoice((PLAIN,) * len(views), Reason.PLAIN_IS_BEST)  # a prompt fills the step, so nodes cost too much
        own = {one.request_id: tree for one in views if not (one.is_free or (tree := _own_tree(one)).is_plain)}
        self._own_tokens = {name: self._own_tokens.get(name, 1.0) for name in own}
        if not any(view.is_free for view in views):
            return ExpansionChoice((PLAIN,) * len(views), num_steps=REUSED_STEPS)
        batch = self._batch(views, own)
        estimates = _within_text(self._estimator.estimate(batch.views, batch.menu), batch)
        search = Search(batch.menu, estimates, batch.is_allowed, batch.load, self._costs)
        if not isfinite(sum([sum(map(sum, rows)) for rows in estimates]) + search.plain.rate):
            raise ArithmeticError("the expectation of a step is not a finite number")
        plain, best = search.plain, search.best()
        margin = 1.0 if self._reason is Reason.SPECULATION_PAYS else _MARGIN
        if best.tokens - plain.tokens <= margin * plain.rate * (best.seconds - plain.seconds):
            best = plain
        self._reason = Reason.SPECULATION_PAYS if any(best.places) else Reason.PLAIN_IS_BEST
        probe, num_steps = self._probe(batch, search, best)
        return self._choice(views, batch, search, probe or best, Reason.PROBE if probe else self._reason, num_steps)

    def observe(self, feedback: StepFeedback) -> None:
        """Record a step; the next choice learns from it."""
        self._num_steps += feedback.num_steps
        self._probes.save(feedback.num_steps * (feedback.draft_s + feedback.rest_s))
        is_probe = bool(self._probes.probed)
        corrects = is_probe or self._num_steps <= _FIRST_CORRECTIONS or self._num_steps % (2 * REUSED_STEPS) < feedback.num_steps
        if feedback.has_drafted or corrects:
            self._unlearned.append((feedback, corrects and not feedback.has_prefill))
        if is_probe:
            self._end_probe(feedback)

    def _learn(self) -> None:
        """Learn from the steps since the last choice."""
        unlearned, self._unlearned = self._unlearned, []
        outcomes: list[DraftOutcome] = []
        for feedback, corrects_costs in unlearned:
            if corrects_costs and feedback.outcomes:
                self._costs.observe(feedback.work, feedback.draft_s, feedback.rest_s)
            outcomes += feedback.outcomes if feedback.has_drafted else ()
            if feedback.has_drafted and not feedback.has_prefill and len(feedback.outcomes) == feedback.num_rows:
                self._num_passes = OWN_DECAY * self._num_passes + (1.0 - OWN_DECAY) * feedback.num_passes
                self._num_rounds = OWN_DECAY * self._num_rounds + (1.0 - OWN_DECAY) * feedback.num_rounds
        self._estimator.observe(outcomes)
        for one in outcomes if self._own_tokens else ():
            if (known := self._own_tokens.get(one.request_id)) is not None:
                self._own_tokens[one.request_id] = OWN_DECAY * known + (1.0 - OWN_DECAY) * (1.0 + one.accepted_depth)

    def _end_probe(self, feedback: StepFeedback) -> None:
        """Charge the probe under way. It costs nothing if cached text was drafted instead, or a prompt was fed."""
        without, lost_s = self._without_probe, 0.0
        probed = [one for one in feedback.outcomes if one.request_id in self._probes.probed]
        if without is not None and probed and not feedback.has_prefill:
            gained = sum(one.accepted_depth for one in probed) - self._probe_tokens
            lost_s = feedback.draft_s + feedback.rest_s - without.seconds - gained / without.rate
        self._probes.end(probed, lost_s)

    def _probe(self, batch: _PolicyBatch, search: Search, best: Step) -> tuple[Step | None, int]:
        """Return the step with a probe of the sequences that are due, or None, and the steps for which the choice is reused.

        Plain sequences get the tree with the least loss, drafting sequences the deepest affordable one. If a probe of all that
        are due is too expensive, only the first is probed. Without a probe, plain decoding is reused until the next one.
        """
        places = best.places
        due, next_due = self._probes.due(batch.views, [not place for place in places])
        is_plain = not any(places)
        self._probes.resize(search.plain.seconds)
        least_s = inf  # loss of the cheapest probe
        for rows in [due, due[:1]] if len(due) > 1 else [due] if due else []:
            trees = [search.with_tree(best, rows, entry) for entry in batch.probes_for(rows, places)]
            losses_s = [one.loss_s(best) for one in trees]
            payable = [one for one, loss_s in zip(trees, losses_s, strict=True) if self._probes.can_pay(loss_s)]
            least_s = min([least_s, *losses_s])
            if not payable and trees and is_plain and len(rows) == 1 and self._probes.is_full:
                payable = [trees[losses_s.index(min(losses_s))]]
            if payable:
                self._without_probe = best
                self._probe_tokens = sum(search.estimates.tokens[row][places[row]] - 1.0 for row in rows)
                self._probes.begin([batch.views[row] for row in rows])
                return payable[-1] if places[rows[0]] else min(payable, key=lambda one: one.loss_s(best)), 1
        if not is_plain:
            return None, REUSED_STEPS
        wait = self._probes.steps_to_save(least_s, best.seconds) if least_s < inf else next_due
        return None, max(REUSED_STEPS, wait)

    def _choice(
        self, views: Sequence[SequenceView], batch: _PolicyBatch, search: Search, step: Step, reason: Reason, num_steps: int
    ) -> ExpansionChoice:
        """Return a step as a choice. Sequences that the policy does not choose for are plain in it.

        A probe's trees end by their least chance alone, as node costs may be wrong. Its levels cost as if all sequences drafted.
        """
        expansions = [PLAIN] * len(views)
        for index, place in zip(batch.free, step.places, strict=True):
            expansions[index] = batch.menu.entries[place]
        num_sharing = len(step.places) if reason is Reason.PROBE else sum(map(bool, step.places))
        growth_costs = search.growth_costs(step, num_sharing)
        return ExpansionChoice(
            expansions=tuple(expansions),
            reason=reason,
            speedup=step.rate / search.plain.rate,
            step_s=step.seconds,
            growth_costs=replace(growth_costs, nodes=()) if reason is Reason.PROBE else growth_costs,
            keeps_up=False,  # a probe feeds what the drafter lacks
            num_steps=num_steps,
        )

    def _batch(self, views: Sequence[SequenceView], own: dict[str, Expansion]) -> _PolicyBatch:
        """Separate the sequences to choose for from the others, and add up the work that no choice changes.

        Every sequence counts as decoding: a prompt is fed once under any choice.
        """
        share = self._num_passes / self._num_rounds
        free = [index for index, view in enumerate(views) if view.is_free]
        chosen_for = [views[index] for index in free]
        draws, context = [float(not one.sampling.is_greedy) for one in views], [one.num_committed for one in views]
        trees = [(index, own[one.request_id]) for index, one in enumerate(views) if one.request_id in own] if own else []
        num_rounds = max([tree.max_depth for _, tree in trees], default=0)
        base = StepWork(
            num_rows=len(views),
            num_tokens=len(views) + sum([tree.num_draft_tokens for _, tree in trees]),
            num_drawn=int(sum(draws) + sum([draws[index] * tree.num_draft_tokens for index, tree in trees])),
            num_keys=sum(context),
            num_scores=sum(context) + sum([tree.num_draft_tokens * context[index] for index, tree in trees]),
            num_passes=share * num_rounds,
            num_draft_tokens=share * sum([1.0 + tree.num_draft_tokens * fed_share(tree) for _, tree in trees]),
            num_rounds=num_rounds,
        )
        load = BatchLoad(
            base,
            base_tokens=len(views) - len(free) + sum(self._own_tokens.values()) - len(own),
            context=[context[index] for index in free],
            draws=[draws[index] for index in free],
            model_share=share,
            runs_in_a_row=not (trees or any(view.needs_host for view in views)),
            drafts_run=all(one.sampling.is_greedy or one.verifier == "coupled" for one in chosen_for),
        )
        return _PolicyBatch(free, chosen_for, *self._menu.allowed_for(chosen_for), load)


def _within_text(estimates: Estimates, batch: _PolicyBatch) -> Estimates:
    """Limit the estimates to each request's bound on nodes and to the rest of its text.

    Only noise-aware trees need this: other trees are allowed only if they fit.
    """
    bounds = [inf if (most := one.speculation.max_nodes) is None else most for one in batch.views]
    most_B = [max(0.0, min(bound, one.num_remaining - 1.0)) for bound, one in zip(bounds, batch.views, strict=True)]
    if not batch.menu.least_chance or min(most_B) >= batch.menu.most_nodes:
        return estimates
    limits = zip(estimates, (1.0, 0.0, 0.0), strict=True)
    return Estimates(
        *([[min(one, extra + most) for one in row] for row, most in zip(rows, most_B, strict=True)] for rows, extra in limits)
    )


def _own_tree(view: SequenceView) -> Expansion:
    """Return the tree that the request configures itself, within its bounds, or plain decoding."""
    speculation = view.speculation
    if speculation.expansion is None or not speculation.is_enabled:
        return PLAIN
    tree = speculation.expansion
    most = tree.num_draft_tokens if speculation.max_nodes is None else speculation.max_nodes
    return tree.limited(max(0, view.num_remaining - 1), most)
