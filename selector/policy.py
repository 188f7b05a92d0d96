"""The adaptive policy: the batch's expected tokens over its step's seconds, as large as can be, and never knowingly below plain.

Meets an estimator (what the text allows), the cost model (what the machine charges) and the allocation of nodes among sequences.
Stays with the last choice unless another is clearly better; probes when plain decoding looks best; says why.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from engine.pairs import is_exact
from engine.policy import Choice, Reason, SequenceView, StepFeedback, composition_of
from engine.tree import PLAIN, Expansion, GrowthPrices
from selector.allocation import Allocation, Allocator, BatchLoad
from selector.cost import CostModel, StageSeconds, Works
from selector.estimators import Estimates, Estimator
from selector.menu import Menu, fed_share
from selector.model_share import ModelShare
from selector.native.allocators import allocator_of
from selector.probing import Probes

_logger = logging.getLogger(__name__)

# Steps for which a choice stands while the batch stays as it is: twice as many each time that it is confirmed, up to the most
# where somebody drafts, and where nobody does. Where nobody does, all are divided by what is at stake.
_SETTLED_STEPS, _MOST_SETTLED, _MOST_SETTLED_PLAIN = 4, 16, 32
_MOST_UNPROBED = 64  # steps for which plain decoding stands, however little is at stake, while no probe can be made
_SETTLED_BY_CHANCE = 2  # times as long: such trees find their size at each step themselves
_LEAST_STAKE = 1 / 16  # of plain decoding's rate, the least that is thought at stake: prices may be what is wrong
_CONFIRMED = 4  # steps with drafts, that must have taught prices before those are believed to leave little to win
_PRICED_ALWAYS = 48  # first steps that all teach prices; of later ones probes do, and one of so many:
_PRICED_EVERY = 4  # of those in which somebody drafts
_PRICED_EVERY_PLAIN = 15  # of those in which nobody does; texts are followed in every eighth, and these fall on all of its places
_FIRST_PLAIN, _PLAIN_EVERY = 8, 128  # steps in a row in which somebody drafts, before plain decoding is measured again
_MOST_UNLEARNT = 16  # steps that wait for the next choice to be learnt from
_OWN_SHARE = 0.1  # of what a step says, in what is known of a tree that a request asks for
_BESIDE_PROMPTS = 4  # nodes of a tree that ends by their chances, while prompts are fed: what it may have is kept for it
_USUAL_UNFED = 4  # tokens that a drafter is behind from one tree to the next: the root, and accepted ones of the last
_CATCH_UP_STEPS = 32  # over which feeding a drafter that lags farther behind is written off
_NEARLY = 0.01  # of a step's seconds, by which steps are not told apart
_CHEAP_FEEDING = 0.002  # of a plain step's seconds, for which drafters are kept up with sequences that are plain
_FEEDING_STEPS = 32  # plain steps from one pass that does to the next (engine.scheduler)
_MOST_TRIED = 3  # sequences that are due for a probe, of which the first that can be paid is asked
_IS_NEWS = 0.7  # times what its seconds are worth, from which on what a probe brought is: they feed a drafter that was behind too
# Times what their seconds are worth, that trees must bring, and must go on to bring once they do: the best of many estimates is
# rarely as good as it looks.
_PAYS, _GOES_ON_PAYING = 1.1, 1.0
_CLEARLY_BETTER = 1.01  # times the rate of the last choice, before it is given up


@dataclass(frozen=True)
class _Batch:
    """The views of a step: those the policy may choose for, by place, the menu that is open to them, and what the others run."""

    free: tuple[int, ...]
    views: tuple[SequenceView, ...]
    menu: Menu
    is_allowed_BM: NDArray[np.bool_] | None  # all of it, if None
    load: BatchLoad

    def can_probe(self, places: Sequence[int]) -> list[bool]:
        """Return whether there is something that each sequence may be probed with in the place of what was chosen for it."""
        allowed_BM = self.is_allowed_BM
        return [
            any(entry != place and (allowed_BM is None or allowed_BM[row, entry]) for entry in self._telling_beside(place))
            for row, place in enumerate(places)
        ]

    def probes_open(self, places: Sequence[int], indices: Sequence[int]) -> list[int]:
        """Return what of the menu all of these sequences, who all draft or none, may be probed with in the place of theirs."""
        chosen = {places[index] for index in indices}
        telling = [entry for entry in self._telling_beside(places[indices[0]]) if entry not in chosen]
        if self.is_allowed_BM is None:
            return telling
        is_open_M = np.asarray(self.is_allowed_BM[[*indices]].all(0)).tolist()
        return [entry for entry in telling if is_open_M[entry]]

    def _telling_beside(self, place: int) -> tuple[int, ...]:
        """Return what says something beside a choice: any tree where that is plain, else those that tell most."""
        return self.menu.telling if place else self.menu.drafting


@dataclass(frozen=True)
class _Standing:
    """A choice that stands for some steps: the tree of each sequence, and what was expected of the batch.

    It stands for `num_settled` steps. The choice's seconds are those of a step after its own: no drafter is behind by more than
    one is expected to bring, or hardly. `composition` tells whose the choice's expansions are; `trees` are of all `num_rows` that
    it was made for, but those whose prompt was being fed. One that `reads_roots` rests on what they said: it is no news of later
    ones.
    """

    trees: dict[str, Expansion]
    choice: Choice
    num_rows: int = 0
    num_settled: int = 0
    composition: int | None = None
    reads_roots: bool = False


class AdaptiveExpansion:
    """Chooses each step's expansions from a menu. `fallback` is what runs where the estimator has no number to give.

    A token that the drafter is merely fed costs `unasked_share` of one that it is asked about.
    The menu holds what the server's verifier is exact on; a sequence with another verifier gets what that is exact on too.
    """

    def __init__(
        self,
        menu: Menu,
        estimator: Estimator,
        costs: CostModel,
        fallback: Expansion,
        settled_steps: int = _SETTLED_STEPS,
        unasked_share: float = 1.0,
    ) -> None:
        self.name = f"adaptive up to {replace(menu.entries[-1], least_chance=0.0)}"
        self._menu = menu
        self._estimator = estimator
        self._costs = costs
        self._fallback = fallback
        self._settled_steps = settled_steps
        self._unasked_share = unasked_share
        self._probes = Probes()
        self._model_share = ModelShare()
        self._probe_s: float | None = None  # foretold of the step under way, if it is a probe that was paid for
        self._probe_tokens = 0.0  # the same, more than without it
        self._is_plain_probe = False  # whether the step under way is plain so that it may be measured
        self._num_unsaved = 0  # steps that the probes' account does not know of yet
        self._num_since_choice = 0  # steps since the last choice was made
        self._standing = _Standing({}, Choice(()))
        self._num_standing = 0  # steps for which it goes on standing
        self._num_since_plain, self._plain_every = 0, _FIRST_PLAIN
        self._num_priced = 0
        self._unlearnt: list[tuple[StepFeedback, bool]] = []  # of steps that wait to be learnt, and whether each teaches prices
        self._has_failed_to_learn = False
        self._own_tokens: dict[str, float | None] = {}  # a step, of sequences whose requests ask for trees; None: not known yet
        self._plain_s, self._plain_rate = 0.0, 0.0  # plain decoding's, foretold when last chosen
        self._stake = 1.0  # what perfect drafts would win, as a share of that rate, up to 1; where somebody drafts, 1
        self._num_confirming = 0  # steps with drafts that have taught prices
        self._is_exact: dict[str, NDArray[np.bool_]] = {}
        self._menus: dict[str, Menu] = {}
        self._has_failed = False

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return the expansions with the most expected tokens a second, or nearly so, and what is expected of them.

        Not asked in steps for which the last choice is held, which are counted by what is observed of them.
        """
        self._probe_s, self._is_plain_probe = None, False
        self._count_held()
        composition = composition_of(views)
        if self._num_standing and composition is not None and composition == self._standing.composition:
            return self._stood_alike()
        choice = self._stood(views)
        if choice is None:
            choice = self._chosen(views)
        choice = choice if _all_decode(views) else _beside_prompts(choice)
        is_plain = all(expansion.is_plain for expansion in choice.expansions)
        self._num_since_plain = 0 if is_plain else self._num_since_plain + 1
        return choice

    def _count_held(self) -> None:
        """Count the steps in which the last choice was held: those that ran since, but the first."""
        held, self._num_since_choice = max(0, self._num_since_choice - 1), 0
        if held:
            self._count_stood(held)

    def _stood_alike(self) -> Choice:
        """Return the last choice as that of the same sequences, all of which decode and which are not looked at."""
        self._count_stood(1)
        return self._held(self._standing.choice)

    def _held(self, choice: Choice) -> Choice:
        """Return a choice as one that is held while it stands; where nobody drafts those steps are told that teach prices.

        Where a request has a tree of its own, which may find no room, it is not known which those are.
        """
        num_steps = 1 + self._num_standing
        if choice.reason is not Reason.PLAIN_IS_BEST or self._own_tokens or self._num_priced < _PRICED_ALWAYS:
            return replace(choice, num_steps=num_steps)
        until = _PRICED_EVERY_PLAIN - self._num_priced % _PRICED_EVERY_PLAIN
        return replace(choice, num_steps=num_steps, plain_told=range(until - 1, num_steps, _PRICED_EVERY_PLAIN))

    def _count_stood(self, num_steps: int) -> None:
        """Count steps of the same sequences in which the last choice stands."""
        self._num_unsaved += num_steps
        self._num_standing = max(0, self._num_standing - num_steps)
        is_plain = all(expansion.is_plain for expansion in self._standing.choice.expansions)
        self._num_since_plain = 0 if is_plain else self._num_since_plain + num_steps

    def _stood(self, views: Sequence[SequenceView]) -> Choice | None:
        """Return the last choice while it stands: for a few steps, in which few sequences came or went; who came is plain.

        Where there is little to win it matters how many they are, and less who.
        """
        last = self._standing
        decoding = {view.request_id for view in views if _decodes(view)}
        num_changed = len(decoding ^ last.trees.keys())
        if not self._num_standing or max(abs(len(views) - last.num_rows), self._stake * num_changed) * 4 > len(views):
            return None
        self._num_unsaved += 1
        # Who came in between is plain, and not for long where there is much to win.
        most = self._num_standing if decoding <= last.trees.keys() else int(self._settled_steps / self._stake)
        self._num_standing = max(0, min(self._num_standing, most) - 1)
        choice = replace(last.choice, expansions=tuple(last.trees.get(view.request_id, PLAIN) for view in views))
        if num_changed or not _all_decode(views):
            choice = replace(choice, speedup=1.0, step_s=None)  # of others nothing was foretold
        trees = last.trees
        if choice.reason is Reason.PLAIN_IS_BEST and choice.step_s is None:  # it becomes theirs
            trees = {view.request_id: PLAIN for view in views if _decodes(view)}
        composition = composition_of(views)
        if trees is not last.trees or composition is not None:
            self._standing = replace(last, trees=trees, choice=choice, composition=composition)
        return choice

    def _chosen(self, views: Sequence[SequenceView]) -> Choice:
        own = [(view, tree) for view in views if not (tree := _own_tree(view)).is_plain]
        self._own_tokens = {view.request_id: self._own_tokens.get(view.request_id) for view, _ in own}
        if not any(view.is_free for view in views):
            return Choice((PLAIN,) * len(views))
        self._learn_unlearnt()
        batch = self._batch(views, own)
        estimates = _within_bounds(self._estimator.estimate(batch.views, batch.menu), batch)
        allocator = allocator_of(batch.menu, estimates, batch.is_allowed_BM, batch.load, self._costs)
        if not allocator.is_finite:
            return self._without_numbers(views)
        plain = allocator.plain()
        if not isfinite(plain.rate):
            return self._without_numbers(views)
        best = allocator.best(plain)
        margin = _GOES_ON_PAYING if self._standing.choice.reason is Reason.SPECULATION_PAYS else _PAYS
        best = self._clearly_better(batch, allocator, best if _pays(best, plain, margin) else plain)
        best = best if _pays(best, plain, _GOES_ON_PAYING) else plain
        reason = Reason.SPECULATION_PAYS if any(best.places) else Reason.PLAIN_IS_BEST
        choice = self._choice(batch, allocator, best, plain, reason, views)
        trees = {view.request_id: tree for view, tree in zip(views, choice.expansions, strict=True) if _decodes(view)}
        self._save()
        self._plain_s, self._plain_rate = plain.seconds, plain.rate
        self._stake = self._at_stake(allocator, plain) if reason is Reason.PLAIN_IS_BEST else 1.0
        self._probes.save(self._plain_s, self._stake)
        num_settled = self._num_settled(trees, reason, batch.menu, estimates.reads_roots)
        later = self._of_later_steps(choice, best, views)
        self._standing = _Standing(trees, later, len(views), num_settled, composition_of(views), estimates.reads_roots)
        self._num_standing = num_settled if reason is Reason.PLAIN_IS_BEST or _all_decode(views) else 0
        if self._num_since_plain >= self._plain_every:
            self._plain_every = min(_PLAIN_EVERY, 2 * self._plain_every)
            self._is_plain_probe = True
            return self._choice(batch, allocator, plain, plain, Reason.PROBE, views)
        probing = self._probe(batch, allocator, best)
        if probing is None:
            self._stand_unprobed()
            return self._held(choice) if choice is later and _all_decode(views) else choice
        choice = self._choice(batch, allocator, probing, plain, Reason.PROBE, views)
        self._probe_s, self._probe_tokens = choice.step_s, probing.tokens - best.tokens
        return choice

    def _of_later_steps(self, choice: Choice, chosen: Allocation, views: Sequence[SequenceView]) -> Choice:
        """Return a choice with the seconds of later steps: no drafter is behind by more than one is expected to bring.

        The choice itself where that is next to nothing.
        """
        drafting = _drafting(views, choice.expansions)
        if choice.step_s is None or not drafting:
            return choice
        most = (chosen.tokens - (len(views) - len(drafting))) / len(drafting)
        caught_up = sum(max(0.0, one.num_unfed - most) for one in drafting)
        sooner_s = self._feed_s * caught_up
        return choice if sooner_s <= _NEARLY * choice.step_s else replace(choice, step_s=choice.step_s - sooner_s)

    def _at_stake(self, allocator: Allocator, plain: Allocation) -> float:
        """Return what thinking and probing may win while plain decoding stands: no more than perfect drafts would."""
        if self._num_confirming < _CONFIRMED:
            return 1.0
        return min(1.0, max(_LEAST_STAKE, allocator.ceiling() / plain.rate - 1.0))

    def _save(self) -> None:
        """Save for probes from the steps for which the last choice stood, as far as there was anything to win."""
        if self._num_unsaved:
            self._probes.save(self._plain_s, self._stake, self._num_unsaved)
            self._num_unsaved = 0

    def _num_settled(self, trees: dict[str, Expansion], reason: Reason, menu: Menu, reads_roots: bool) -> int:
        """Return for how many steps a choice stands: longer each time that thinking again has led to the same.

        As long as before where it is the same for those who have stayed, if those of them who draft are half of those who decode
        or more: of who comes most is known from them. What roots said confirms nothing: later ones may say something else.
        """
        last, times = self._standing, _SETTLED_BY_CHANCE if menu.is_by_chance else 1
        least, most = times * self._settled_steps, times * _MOST_SETTLED
        if reason is Reason.PLAIN_IS_BEST:
            least, most = int(least / self._stake), int(_MOST_SETTLED_PLAIN / self._stake)
        staying = trees.keys() & last.trees.keys()
        is_same = last.choice.reason is reason and all(last.trees[name] == trees[name] for name in staying)
        if reads_roots or not is_same:
            return least
        if len(staying) == len(trees):
            return max(least, min(most, 2 * last.num_settled))
        num_drafting = sum(not trees[name].is_plain for name in staying)
        return max(least, min(most, last.num_settled)) if 2 * num_drafting >= len(trees) else least

    def _stand_unprobed(self) -> None:
        """Let plain decoding stand until a probe can be made, once prices are known: before that nothing is learnt of texts.

        Not where roots are read: the next ones may be those of text that is easily foretold.
        """
        last = self._standing
        if last.choice.reason is Reason.PLAIN_IS_BEST and not last.reads_roots and self._num_confirming >= _CONFIRMED:
            self._num_standing = max(self._num_standing, int(min(_MOST_UNPROBED, self._probes.wait)))

    @property
    def _feed_s(self) -> float:
        """Seconds of a token that a drafter must be fed before it drafts, if a model drafts."""
        return self._model_share.share * self._unasked_share * self._costs.prices["draft_token"]

    def _choice(
        self,
        batch: _Batch,
        allocator: Allocator,
        chosen: Allocation,
        plain: Allocation,
        reason: Reason,
        views: Sequence[SequenceView],
    ) -> Choice:
        """Return an allocation as an expansion for every view; whoever chose for itself is not asked.

        The seconds foretold are this step's own, with all that drafters are behind. None are foretold of a step that feeds a
        prompt: it was priced without. A probe's trees take levels as if all drafted, as they will if it finds that it pays.
        """
        expansions = [PLAIN] * len(views)
        for index, place in zip(batch.free, chosen.places, strict=True):
            expansions[index] = batch.menu.entries[place]
        drafting = _drafting(views, expansions)
        charged = sum(_catch_up(one) for one in drafting)
        step_s = chosen.seconds + self._feed_s * (_num_unfed(drafting) - charged)
        return Choice(
            expansions=tuple(expansions),
            reason=reason,
            speedup=chosen.rate / plain.rate,
            step_s=step_s if _all_decode(views) else None,
            prices=self._prices(allocator, chosen, reason),
            keeps_up=self._is_feeding_cheap(batch.load, plain),
        )

    @staticmethod
    def _prices(allocator: Allocator, chosen: Allocation, reason: Reason) -> GrowthPrices:
        """Return what trees are told to end by; a probe's by their least chance, whatever the nodes are thought to cost."""
        if reason is Reason.PROBE:
            return replace(allocator.prices(chosen, len(chosen.places)), nodes=())
        return allocator.prices(chosen, sum(map(bool, chosen.places)))

    def _is_feeding_cheap(self, load: BatchLoad, plain: Allocation) -> bool:
        """Return whether keeping drafters up with plain sequences costs next to nothing: a token of each, and seldom a pass."""
        fed_s = float(load.base.num_rows) * self._unasked_share * self._costs.prices["draft_token"]
        return fed_s + float(self._costs.pass_s(load.base.num_keys)) / _FEEDING_STEPS <= _CHEAP_FEEDING * plain.seconds

    def observe(self, feedback: StepFeedback) -> None:
        """Learn what the step cost (of steps without prompt chunks, which need fewer logits) and what its trees brought.

        That can wait for the next choice, which is the first to need it: what learning takes has left the processor's caches
        after each step, and is brought there once for several. It does not wait for a probe while plain decoding stands: what it
        says may end that.
        """
        self._num_since_choice += feedback.num_steps
        is_probe = self._is_plain_probe or self._probes.is_asking
        is_priced = self._prices_are_due(feedback, is_probe)
        if is_priced or feedback.has_drafted:
            self._unlearnt.append((feedback, is_priced))
        is_news = is_probe and self._standing.choice.reason is Reason.PLAIN_IS_BEST
        if is_news or len(self._unlearnt) >= _MOST_UNLEARNT:  # each keeps what its step was made of
            self._learn_unlearnt()
        if is_probe:
            self._judge_probe(feedback)

    def _judge_probe(self, feedback: StepFeedback) -> None:
        """Charge a probe, if it was one with a tree, and hear what it says."""
        if not self._probes.is_asking:
            return
        self._settle(feedback)
        if self._probe_s is not None and not feedback.has_prefill:
            self._hear(feedback)
        self._probes.observe(feedback.outcomes if feedback.has_drafted else ())

    def _learn_unlearnt(self) -> None:
        """Learn from the steps since the last choice. A lesson that fails is lost, and costs no choice."""
        lessons, self._unlearnt = self._unlearnt, []
        for feedback, is_priced in lessons:
            try:
                self._learn(feedback, is_priced)
            except Exception:
                _logger.log(logging.DEBUG if self._has_failed_to_learn else logging.ERROR, "a step taught nothing", exc_info=True)
                self._has_failed_to_learn = True

    def _prices_are_due(self, feedback: StepFeedback, is_probe: bool) -> bool:
        """Return whether a step is one of those that teach prices."""
        if feedback.has_prefill:
            return False
        before, self._num_priced = self._num_priced, self._num_priced + feedback.num_steps
        every = _PRICED_EVERY if feedback.has_drafted else _PRICED_EVERY_PLAIN
        return before < _PRICED_ALWAYS or is_probe or before // every < self._num_priced // every

    def _learn(self, feedback: StepFeedback, is_priced: bool) -> None:
        outcomes = feedback.outcomes
        if is_priced and outcomes:
            self._costs.observe(feedback.work, StageSeconds(feedback.draft_s, feedback.rest_s))
            self._num_confirming += feedback.has_drafted
        if feedback.has_drafted:
            if not feedback.has_prefill:
                self._model_share.observe(feedback)
            self._estimator.observe(outcomes)
            for one in outcomes if self._own_tokens else ():
                if one.request_id in self._own_tokens:
                    tokens, known = 1.0 + one.accepted_depth, self._own_tokens[one.request_id]
                    self._own_tokens[one.request_id] = tokens if known is None else known + _OWN_SHARE * (tokens - known)

    def _settle(self, feedback: StepFeedback) -> None:
        """Charge a probe with what it lost beyond what was foretold; with nothing if it was not made.

        Where plain decoding stands the tokens that came of it count with those that were expected: a tree that ends at once is a
        short step, and brings nothing. Where others draft theirs would drown them. Of a step in which somebody else's chain of
        cached text was drafted, or a prompt fed, what was foretold stands.
        """
        asked = [one for one in feedback.outcomes if self._probes.has_asked(one.request_id)]
        if not asked:  # cached text was drafted instead, or they have ended
            self._probes.cancel()
        elif self._probe_s is None or feedback.has_prefill or len(feedback.outcomes) < feedback.num_rows:
            self._probes.keep()
        else:
            overrun_s = feedback.draft_s + feedback.rest_s - self._probe_s
            hoped = self._probe_tokens - sum(one.accepted_depth for one in asked)
            is_plain_beside = self._standing.choice.reason is Reason.PLAIN_IS_BEST
            self._probes.settle(overrun_s, hoped / self._plain_rate if is_plain_beside else None)

    def _hear(self, feedback: StepFeedback) -> None:
        """Think again soon, and more often, where a probe brought most of what its seconds are worth."""
        tokens = sum(one.accepted_depth for one in feedback.outcomes if self._probes.has_asked(one.request_id))
        longer_s = feedback.draft_s + feedback.rest_s - self._plain_s
        is_good = tokens > _IS_NEWS * self._plain_rate * max(0.0, longer_s)
        if self._standing.choice.reason is not Reason.PLAIN_IS_BEST:
            return
        self._stand_unprobed()
        if is_good:
            self._num_standing = min(self._settled_steps, self._num_standing)
            self._standing = replace(self._standing, num_settled=0)

    def _batch(self, views: Sequence[SequenceView], own: Sequence[tuple[SequenceView, Expansion]]) -> _Batch:
        """Tell the sequences that leave the choice to the policy from those whose request has made it, `own` with their trees.

        Every sequence is priced as one that decodes: a prompt is fed once, whatever is chosen, and the choice outlives it.
        """
        share = self._model_share.share
        num_drafted = sum(tree.num_draft_tokens for _, tree in own)
        num_rounds = max((tree.max_depth for _, tree in own), default=0)
        num_fed = sum(self._fed_for_tree(_catch_up(one)) + tree.num_draft_tokens * fed_share(tree) for one, tree in own)
        num_drawn = sum(tree.num_draft_tokens for one, tree in own if not one.sampling.is_greedy)
        num_scores = sum(tree.num_draft_tokens * one.num_committed for one, tree in own)
        free: list[int] = []
        context_B, unfed_B, lag_B, draws_B = [], [], [], []
        num_keys = 0
        for index, one in enumerate(views):  # once through, for what it looks at lies anywhere
            draws = not one.sampling.is_greedy
            num_keys += one.num_committed
            num_drawn += draws
            if one.is_free:
                caught_up = _catch_up(one)
                free.append(index)
                context_B.append(one.num_committed)
                unfed_B.append(self._fed_for_tree(caught_up))
                lag_B.append(self._unasked_share * (one.num_unfed - caught_up))
                draws_B.append(draws)
        base = Works(
            num_rows=len(views),
            num_tokens=len(views) + num_drafted,
            num_drawn=num_drawn,
            num_keys=num_keys,
            num_scores=num_keys + num_scores,
            num_passes=share * num_rounds,
            num_draft_tokens=share * num_fed,
            num_rounds=num_rounds,
        )
        base_tokens = len(views) - len(free) + sum(known - 1.0 for known in self._own_tokens.values() if known is not None)
        load = BatchLoad(base, base_tokens, context_B, unfed_B, lag_B, draws_B, model_share=share)
        chosen_for = tuple([views[index] for index in free])
        menu, is_allowed_BM = self._allowed(chosen_for)
        return _Batch(tuple(free), chosen_for, menu, is_allowed_BM, load)

    def _fed_for_tree(self, num_fed: float) -> float:
        """Return the tokens that a tree costs beside its nodes, of so many to be fed: the root, and shares of the others."""
        return 1.0 + self._unasked_share * (num_fed - 1.0)

    def _allowed(self, views: Sequence[SequenceView]) -> tuple[Menu, NDArray[np.bool_] | None]:
        """Return the menu that is open to the sequences, and which of it each may have, [B, M]; None if that is all of it.

        That is what its verifier is exact on, within its bound on nodes, no longer than what remains of its text; none while its
        prompt is fed. The coupled rule stands for all rows that rank their tokens, greedy ones too.
        """
        verifiers = ["coupled" if one.sampling.is_greedy else one.verifier for one in views]
        are_alike = len(set(verifiers)) == 1
        menu = self._menu_for(verifiers[0]) if are_alike else self._menu
        bounds = [0 if one.num_uncached > 1 else one.speculation.max_nodes for one in views]
        most_nodes_B = [inf if bound is None else bound for bound in bounds]
        remaining_B = [max(1, one.num_remaining) for one in views]
        most_needed, deepest = menu.room_for_all
        if are_alike and min(most_nodes_B) >= most_needed and min(remaining_B) > deepest:
            return menu, None
        least_nodes_M, least_depths_M = menu.least_room
        allowed_BM = least_nodes_M <= np.array(most_nodes_B)[:, None]
        allowed_BM &= least_depths_M < np.array(remaining_B)[:, None]
        if not are_alike:
            allowed_BM &= np.stack([self._exact_for(verifier) for verifier in verifiers])
        return menu, allowed_BM

    def _menu_for(self, verifier: str) -> Menu:
        """Return that part of the menu which a verifier's sequences may have."""
        if verifier not in self._menus:
            rows = zip(self._menu.entries, self._exact_for(verifier).tolist(), strict=True)
            self._menus[verifier] = Menu(tuple(entry for entry, is_open in rows if is_open))
        return self._menus[verifier]

    def _exact_for(self, verifier: str) -> NDArray[np.bool_]:
        """Return what of the menu a verifier is exact on, [M]: if there are trees that find their own shape, those alone."""
        if verifier not in self._is_exact:
            is_exact_M = np.array([one.is_plain or is_exact(one.kind, verifier) for one in self._menu.entries])
            is_own_M = np.array([one.is_plain or not one.is_delayed for one in self._menu.entries])
            own_M = is_exact_M & is_own_M
            self._is_exact[verifier] = own_M if own_M.sum() > 1 else is_exact_M
        return self._is_exact[verifier]

    def _clearly_better(self, batch: _Batch, allocator: Allocator, best: Allocation) -> Allocation:
        """Return the best allocation, or the last choice if it is still allowed and about as good."""
        index, trees, kept = batch.menu.index, self._standing.trees, [*best.places]
        for row, one in enumerate(batch.views):
            last = index.get(trees[one.request_id]) if one.request_id in trees else None
            if last is not None and (batch.is_allowed_BM is None or batch.is_allowed_BM[row, last]):
                kept[row] = last
        if (*kept,) == best.places:
            return best
        standing = allocator.of(kept)
        return standing if best.rate < standing.rate * _CLEARLY_BETTER else best

    def _probe(self, batch: _Batch, allocator: Allocator, chosen: Allocation) -> Allocation | None:
        """Return the choice with a tree to learn from for the sequences that are due, or one of the first, if it can be paid.

        For those that are plain that is the tree that loses least, for others the deepest that can be paid. One that is plain may
        be asked on credit, that whose drafter is least behind: else what looks too dear would never be seen again.
        """
        places = chosen.places
        due = self._probes.due(batch.views, [not place for place in places], batch.can_probe(places))
        if not due or self._probes.is_short:
            return None
        asked = [due] if len(due) > 1 else []
        asked.extend([index] for index in due[:_MOST_TRIED])
        is_drafting = bool(places[due[0]])
        on_credit = None
        if not is_drafting and self._probes.is_full:
            on_credit = [min(due, key=lambda index: batch.views[index].num_unfed)]
            asked.append(on_credit)
        trials = allocator.trials(chosen, [(indices, batch.probes_open(places, indices)) for indices in asked])
        for indices, tried in zip(asked, trials, strict=True):
            losses_s = tried.losses_s
            affordable = [entry for entry, loss_s in enumerate(losses_s) if loss_s <= self._probes.saved_s]
            if affordable or (indices is on_credit and losses_s):
                best = affordable[-1] if is_drafting else min(range(len(losses_s)), key=losses_s.__getitem__)
                # Where others draft what a probe brings is not known (_settle), and a gain that is hoped for is none.
                least_s = 0.0 if any(places) else -inf
                self._probes.pay([batch.views[index] for index in indices], max(least_s, losses_s[best]))
                return tried.of(best)
        self._probes.put_off(min(min(tried.losses_s, default=inf) for tried in trials))
        return None

    def _without_numbers(self, views: Sequence[SequenceView]) -> Choice:
        if not self._has_failed:
            _logger.error("what to expect of a step is not a finite number; %s is drafted instead", self._fallback)
            self._has_failed = True
        return Choice((self._fallback,) * len(views), Reason.FALLBACK)


def _pays(best: Allocation, plain: Allocation, margin: float) -> bool:
    """Return whether an allocation brings that many times the tokens that plain decoding would in the seconds it takes longer."""
    return best.tokens - plain.tokens > margin * plain.rate * (best.seconds - plain.seconds)


def _within_bounds(estimates: Estimates, batch: _Batch) -> Estimates:
    """Return what trees that end by their nodes' chances bring within each sequence's bound and what remains of its text."""
    menu = batch.menu
    if not menu.least_chance:
        return estimates
    remaining = [max(0, one.num_remaining - 1) for one in batch.views]
    most_nodes = [inf if (most := one.speculation.max_nodes) is None else most for one in batch.views]
    if min(most_nodes) >= menu.most_nodes and min(remaining) >= menu.deepest:
        return estimates
    is_cut_M = menu.least_chances > 0.0
    most_nodes_B, remaining_B = np.array(most_nodes, dtype=np.float64), np.array(remaining, dtype=np.float64)
    most_depth_B = np.minimum(remaining_B, most_nodes_B)
    # What is too deep is left out level by level. Levels are taken to come with one chance each, given the one before: that of
    # which so many tokens would be expected if there were no end. Who has a bound on nodes tells of trees within it.
    more_BM, depths_M = estimates.tokens - 1.0, np.maximum(menu.depths, 1)
    chance_BM = more_BM / (1.0 + more_BM)
    share_BM = (1.0 - chance_BM ** np.minimum(remaining_B[:, None], depths_M)) / (1.0 - chance_BM**depths_M)
    bounded = (
        1.0 + np.minimum(more_BM * share_BM, most_depth_B[:, None]),
        np.minimum(estimates.nodes * share_BM, most_nodes_B[:, None]),
        np.minimum(estimates.passes * share_BM, most_depth_B[:, None]),
        np.minimum(estimates.fed * share_BM, np.maximum(0.0, most_nodes_B - 1.0)[:, None]),
    )
    whole = (estimates.tokens, estimates.nodes, estimates.passes, estimates.fed)
    tokens, nodes, passes, fed = (np.where(is_cut_M, *pair) for pair in zip(bounded, whole, strict=True))
    return Estimates.of(tokens, nodes, passes, fed, estimates.reads_roots)


def _beside_prompts(choice: Choice) -> Choice:
    """Return a choice whose trees leave a step's room to prompts: what a tree may have is kept for it, and most have less.

    Beside a prompt no node is hidden by what is read: they end by the least chance that was chosen.
    """
    small = (one.limited(one.max_depth, _BESIDE_PROMPTS) if one.least_chance else one for one in choice.expansions)
    return replace(choice, expansions=tuple(small), prices=replace(choice.prices, nodes=()))


def _catch_up(view: SequenceView) -> float:
    """Return the tokens fed to a drafter for a tree, its root included: what it lags far behind is spread over steps to come."""
    usual = min(view.num_unfed, _USUAL_UNFED)
    return usual + (view.num_unfed - usual) / min(_CATCH_UP_STEPS, max(1, view.num_remaining))


def _own_tree(view: SequenceView) -> Expansion:
    """Return the tree that the request asks for itself, plain if it asks for none; no larger than it allows."""
    speculation = view.speculation
    if speculation.expansion is None or not speculation.is_enabled:
        return PLAIN
    tree = speculation.expansion
    most = tree.num_draft_tokens if speculation.max_nodes is None else speculation.max_nodes
    return tree.limited(max(0, view.num_remaining - 1), most)


def _drafting(views: Sequence[SequenceView], expansions: Sequence[Expansion]) -> list[SequenceView]:
    """Return the sequences that draft, by these expansions or their own."""
    return [one for one, tree in zip(views, expansions, strict=True) if not (tree.is_plain and _own_tree(one).is_plain)]


def _num_unfed(drafting: Sequence[SequenceView]) -> int:
    """Return the tokens that drafters must be fed before they draft for these sequences."""
    return sum(one.num_unfed for one in drafting)


def _all_decode(views: Sequence[SequenceView]) -> bool:
    """Return whether no prompt is being fed."""
    return composition_of(views) is not None or all(map(_decodes, views))


def _decodes(view: SequenceView) -> bool:
    """Return whether its prompt has been fed."""
    return view.num_uncached == 1
