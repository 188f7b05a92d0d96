"""The adaptive policy on a machine on paper: near the best fixed choice where nothing changes, quick where something does.

Chance comes from seeds and time from arithmetic, so every number here is the same at every run. tests/selector/scores.py has the
settings.
"""

import logging
import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from engine.choice_cache import CachedChoice
from engine.core.policy import ExpansionPolicy, Reason, SequenceView
from engine.core.tree import FREE_GROWTH, PLAIN, Expansion
from engine.core.types import Speculation
from selector.acceptance import CountedAcceptance, Estimates
from selector.cost import CostModel
from selector.guard import GuardedPolicy
from selector.menu import Menu, menu_for_all
from selector.policy import AdaptiveExpansion, _PolicyBatch
from selector.probes import REUSED_STEPS, Probes
from selector.search import Search
from tests.selector import scores
from tests.selector.machine import Machine, Text, fixed_rate, flat, run
from tests.selector.scores import (
    BY_CHANCE,
    CHAIN,
    CHEAP,
    DEAR,
    MENU,
    USUAL,
    adaptive,
    rate_by_chance,
    texts_by_chance,
    texts_of,
)
from tests.selector.test_search import AllOrNone


def nothing_due(probes, views, is_plain):
    return [], REUSED_STEPS


def check_near_best_fixed() -> None:
    shares = scores.near_best_fixed()
    assert min(shares.values()) > 0.94, shares
    assert mean(shares.values()) > 0.98, shares


def test_policy_nears_the_best_fixed_choice():
    check_near_best_fixed()


def test_without_lessons_it_does_not(monkeypatch):
    monkeypatch.setattr(AdaptiveExpansion, "observe", lambda *_: None)
    with pytest.raises(AssertionError):
        check_near_best_fixed()


def test_policy_follows_changing_text():
    assert mean(scores.after_changes().values()) > 0.975


def test_without_probes_it_never_drafts_again(monkeypatch):
    monkeypatch.setattr(Probes, "due", nothing_due)
    assert mean(scores.after_changes().values()) < 0.9


def test_nodes_go_where_they_are_accepted():
    policy, texts = adaptive(USUAL), scores.unlike_texts()
    run(policy, USUAL, texts, 200)
    ran = run(policy, USUAL, texts, 50, seed=1)
    spent = [sum(choice[index].num_draft_tokens for choice in ran.choices) for index in range(8)]
    assert min(spent[1::2]) > 5 * max(spent[::2])
    assert scores.unlike_sequences() > 1.1


def test_one_tree_for_all_is_detected(monkeypatch):
    monkeypatch.setattr("selector.policy.Search", AllOrNone)
    assert scores.unlike_sequences() < 1.0


def test_noise_aware_trees_beat_one_threshold():
    assert mean(scores.noise_aware().values()) > 1.03


def test_trees_grown_whole_do_not(monkeypatch):
    monkeypatch.setattr(Search, "growth_costs", lambda *_: FREE_GROWTH)
    assert mean(scores.noise_aware().values()) < 1.02


def test_useless_drafter_costs_next_to_nothing():
    assert scores.useless_drafter() > 0.985


class ForgetsItsCosts(AdaptiveExpansion):
    """Probes whenever anything could be learnt, whatever it costs."""

    def _probe(self, batch, search, best):
        return search.with_tree(best, [0], self._menu.drafting[0]), 1


class DeafToOutcomes(AdaptiveExpansion):
    def observe(self, feedback):
        pass


@pytest.mark.parametrize("mutant", [ForgetsItsCosts, DeafToOutcomes])
def test_useless_drafter_kills(mutant):
    assert scores.useless_drafter(adaptive(DEAR, kind=mutant)) < 0.985


def test_first_steps_with_it_are_few():
    ran = run(adaptive(DEAR), DEAR, texts_of(0.0, 1), 100)
    assert sum(not choice[0].is_plain for choice in ran.choices) <= REUSED_STEPS + 4


def test_unlikely_nodes_leave_plain_decoding():
    plain, policy = scores.Always(PLAIN), adaptive(DEAR, BY_CHANCE)
    assert rate_by_chance(DEAR, (0.02,), 4, policy) > 0.985 * rate_by_chance(DEAR, (0.02,), 4, plain)


def num_changes() -> int:
    """Return how often 200 choices change between shapes that are about as good."""
    ran = run(adaptive(USUAL), USUAL, texts_of(0.6, 4), 400)
    return sum(one != other for one, other in pairwise(ran.choices[200:]))


def test_policy_does_not_flap():
    assert num_changes() < 15


def test_choosing_each_step_would_flap(monkeypatch):
    monkeypatch.setattr("selector.policy.REUSED_STEPS", 1)
    assert num_changes() > 15


def test_wrong_profile_is_found_out():
    assert min(scores.wrong_profile().values()) > 0.96


def test_probes_of_smaller_trees_are_detected(monkeypatch):
    def others(batch, rows, places):
        return [entry for entry in batch.menu.informative if entry not in {places[row] for row in rows}]

    monkeypatch.setattr(_PolicyBatch, "probes_for", others)
    assert min(scores.wrong_profile().values()) < 0.96


@pytest.mark.parametrize(("where", "name", "value"), [(Probes, "is_full", False), (CostModel, "observe", lambda *_: None)])
def test_wrong_profile_kills(where, name, value, monkeypatch):
    monkeypatch.setattr(where, name, value)
    assert min(scores.wrong_profile().values()) < 0.6


def test_expensive_drafter_costs_its_share():
    assert scores.dear_drafter() > 0.97


@pytest.mark.parametrize(
    ("where", "name", "value"), [(Probes, "can_pay", lambda *_: True), (CostModel, "observe", lambda *_: None)]
)
def test_expensive_drafter_kills(where, name, value, monkeypatch):
    monkeypatch.setattr(where, name, value)
    assert scores.dear_drafter() < 0.9


def share_beside_choosing() -> float:
    """Return the share of the rate that remains where a choice takes a twenty-fifth of a step."""
    rates = []
    for machine in (USUAL, replace(USUAL, choose_s=0.0004)):
        policy, texts = adaptive(machine), texts_of(0.7, 1)
        run(policy, machine, texts, 100)
        rates.append(run(policy, machine, texts, 300, seed=1).rate)
    return rates[1] / rates[0]


def test_choosing_costs_one_percent():
    assert share_beside_choosing() > 0.99


class NeverReuses(CachedChoice):
    def choose(self, views):
        self._num_left = 0
        return super().choose(views)


def test_choosing_each_step_costs_more(monkeypatch):
    monkeypatch.setattr("tests.selector.machine.CachedChoice", NeverReuses)
    assert share_beside_choosing() < 0.98


def check_load(policy: ExpansionPolicy) -> None:
    texts = texts_of(0.6, 32)
    alone = run(policy, USUAL, texts[:1], 150)
    crowd = run(policy, USUAL, texts, 100)
    again = run(policy, USUAL, texts[:1], 20)
    assert sum(expansion.num_draft_tokens for (expansion,) in alone.choices[-20:]) > 40
    assert crowd.rate > 0.97 * fixed_rate(USUAL, texts, PLAIN)
    assert sum(not choice[0].is_plain for choice in again.choices) >= 15


def test_policy_follows_the_load():
    check_load(adaptive(USUAL))


@pytest.mark.parametrize("fixed", [PLAIN, CHAIN], ids=str)
def test_no_fixed_tree_follows_the_load(fixed):
    with pytest.raises(AssertionError):
        check_load(scores.Always(fixed))


def test_silent_drafter_is_used_where_cheap():
    text, policy = Text(flat(0.9), offers=0.2, context=100), adaptive(CHEAP)
    run(policy, CHEAP, [text], 150)
    assert run(policy, CHEAP, [text], 100, seed=1).rate > 1.2 * fixed_rate(CHEAP, [text], PLAIN)


def test_rows_that_rank_take_noise_aware_trees():
    menu = menu_for_all(CHAIN, "traversal", Expansion(4, 3, 4))
    texts = [Text(flat(0.7), temperature=temperature) for temperature in (0.0, 1.0)]
    ran = run(adaptive(USUAL, menu), USUAL, texts, 60)
    ranked, drawn = ({one.tree for one in of_row if not one.is_plain} for of_row in zip(*ran.choices, strict=True))
    assert ranked == {"noise_aware"}
    assert drawn
    assert drawn <= {"delayed", "delayed_distinct"}


def test_noise_aware_rows_draft_beside_others():
    menu = menu_for_all(CHAIN, "traversal", Expansion(4, 3, 4))
    texts = [*texts_by_chance((0.95,), 2), *texts_of(0.9, 2)]
    policy = adaptive(USUAL, menu)
    run(policy, USUAL, texts, 110)
    choices = run(policy, USUAL, texts, 10).choices
    assert not any(one.is_plain for choice in choices for one in choice)


def test_id_that_returns_has_its_rule():
    """A sequence that draws under the id of one that ranked takes what its own verifier is exact on."""
    policy = adaptive(CHEAP, menu_for_all(CHAIN, "traversal"))
    ranks, draws = Text(flat(0.9), temperature=0.0), Text(flat(0.9))
    run(policy, CHEAP, [ranks], 30)
    (last,) = policy.choose([ranks.view("0")]).expansions
    (now,) = policy.choose([draws.view("0")]).expansions
    assert not last.is_delayed
    assert now.is_delayed


def check_own_trees() -> None:
    texts = [
        Text(flat(1.0), speculation=Speculation(is_enabled=False)),
        Text(flat(1.0), speculation=Speculation(expansion=Expansion(0, 2, 2))),
        Text(flat(1.0), speculation=Speculation(max_nodes=2)),
        Text(flat(1.0), max_tokens=10**6),
    ]
    ran = run(adaptive(CHEAP), CHEAP, texts, 60)
    assert {choice[0] for choice in ran.choices} == {choice[1] for choice in ran.choices} == {PLAIN}
    assert max(choice[2].num_draft_tokens for choice in ran.choices) == 2
    assert max(choice[3].num_draft_tokens for choice in ran.choices) > 2
    assert set(run(adaptive(CHEAP), CHEAP, texts[:2], 5).choices) == {(PLAIN, PLAIN)}


def test_requests_own_trees_are_left_alone():
    check_own_trees()


def test_overruled_requests_are_detected(monkeypatch):
    monkeypatch.setattr(SequenceView, "is_free", True)
    with pytest.raises(AssertionError):
        check_own_trees()


def test_rows_that_need_host_share_no_call():
    """Neither do the others of their batch, nor those beside a tree of a request's own."""
    policy, view = adaptive(Machine()), Text(flat(0.5)).view("r")
    host, own = view._replace(needs_host=True), {"r": Expansion(2, 1, 0)}
    batches: list[tuple[list[SequenceView], dict[str, Expansion]]] = [([view] * 2, {}), ([view, host], {}), ([view], own)]
    found = [policy._batch(views, trees).load.runs_in_a_row for views, trees in batches]
    assert found == [True, False, False]


def beside_an_own_tree(speculation: Speculation, kind: type[AdaptiveExpansion] = AdaptiveExpansion) -> float:
    """Return tokens a second of four with poor drafts, beside one that has a good tree of its own; nodes are dear."""
    machine = Machine(knee=1.0, blur=0.15, outliers=0.01)
    own = Text(flat(0.95), speculation=Speculation(expansion=Expansion(8, 1, 0)))
    texts = [own, *(Text(flat(0.2), speculation=speculation) for _ in range(4))]
    policy = adaptive(machine, kind=kind)
    run(policy, machine, texts, 100)
    return run(policy, machine, texts, 300, seed=1).rate


class ForgetsOwnTrees(AdaptiveExpansion):
    """Takes a tree of a request's own fields to bring no more than plain decoding."""

    def _batch(self, views, own):
        self._own_tokens = dict.fromkeys(self._own_tokens, 1.0)
        return super()._batch(views, own)


@pytest.mark.parametrize(("kind", "is_right"), [(AdaptiveExpansion, True), (ForgetsOwnTrees, False)])
def test_own_tree_tokens_make_time_expensive(kind, is_right):
    share = beside_an_own_tree(Speculation(), kind) / beside_an_own_tree(Speculation(is_enabled=False))
    assert (share > 0.99) == is_right


def check_end() -> None:
    text, policy = Text(flat(1.0), max_tokens=30), adaptive(CHEAP)
    while text.num_generated < 29:
        (expansion,) = policy.choose([text.view("r")]).expansions
        assert expansion.max_depth < 30 - text.num_generated
        run(policy, CHEAP, [text], 1)


def test_nothing_is_drafted_beyond_the_end():
    check_end()


def test_drafts_beyond_the_end_are_detected(monkeypatch):
    monkeypatch.setattr(Menu, "allowed_for", lambda menu, views: (menu, None))
    with pytest.raises(AssertionError):
        check_end()


def test_rows_without_room_stay_plain():
    none = Text(flat(0.0), speculation=Speculation(max_nodes=0), odds=(0.98,), temperature=0.0)
    two_to_go, last = (replace(none, speculation=Speculation(), max_tokens=most, num_generated=98) for most in (100, 99))
    policy = adaptive(CHEAP, BY_CHANCE)
    run(policy, CHEAP, texts_by_chance((0.98,), 4), 50)
    texts = [none, two_to_go, last, *texts_by_chance((0.98,), 1)]
    choice = policy.choose([text.view(f"new {row}") for row, text in enumerate(texts)])
    assert [one.is_plain for one in choice.expansions] == [True, False, True, False]


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_drafters_of_plain_rows_are_not_fed(chance):
    """Steps that drafted nothing once fed a cheap drafter now and then: a plain step paid for drafts that it did not have."""
    text, policy = Text(flat(chance)), adaptive(CHEAP)
    run(policy, CHEAP, [text], 100)
    assert not policy.choose([text.view("0")]).keeps_up


PREDICTED = {
    "useless": [Text(flat(0.0))],
    "perfect": [Text(flat(1.0))],
    "batch": [Text(flat(0.3 + 0.1 * index), context=100 + 50 * index) for index in range(6)],
    "often silent": [Text(flat(0.9), offers=0.5), Text(flat(0.9), offers=0.5)],
    "cached": [Text(flat(0.9), cached=0.8)],
    "own tree": [Text(flat(0.6), speculation=Speculation(expansion=Expansion(2, 2, 2))), Text(flat(0.6))],
}


def predicted_share(name: str) -> float:
    """Return expected over true seconds of all steps, after a warm-up; a fifth of a step is drafting where that pays."""
    policy, texts = adaptive(USUAL), deepcopy(PREDICTED[name])
    run(policy, USUAL, texts, 80)
    return run(policy, USUAL, texts, 150, seed=1).predicted_share


@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_seconds_match_actual_seconds(name):
    assert predicted_share(name) == pytest.approx(1.0, abs=0.06)


class CountsEveryPass(AdaptiveExpansion):
    """Takes each round to run the model."""

    def _learn(self):
        super()._learn()
        self._num_passes = self._num_rounds


def test_passes_that_cached_text_spares_count():
    policy, texts = adaptive(USUAL, kind=CountsEveryPass), deepcopy(PREDICTED["cached"])
    run(policy, USUAL, texts, 80)
    assert run(policy, USUAL, texts, 150, seed=1).predicted_share > 1.06


def choices_beside_a_prompt() -> set[tuple[Expansion, ...]]:
    texts = [Text(flat(0.9)), Text(flat(0.9), num_prompt=300)]
    policy = adaptive(CHEAP)
    run(policy, CHEAP, texts[:1], 100)
    return set(run(policy, CHEAP, texts, 3).choices)


def test_prompts_are_fed_beside_plain_decoding():
    assert choices_beside_a_prompt() == {(PLAIN, PLAIN)}


def test_trees_beside_prompts_are_detected(monkeypatch):
    monkeypatch.setattr("selector.policy.composition_of", lambda views: 0)
    assert choices_beside_a_prompt() != {(PLAIN, PLAIN)}


class Nonsense(CountedAcceptance):
    """An estimator that fails now and then."""

    value = math.nan

    def estimate(self, views, menu: Menu | None = None):
        good = super().estimate(views, menu)
        tokens = [[*row] for row in good.tokens]
        tokens[0][1] = self.value
        return Estimates(tokens, good.nodes, good.rounds)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonsense_falls_back_and_is_logged_once(value, caplog, monkeypatch):
    monkeypatch.setattr(Nonsense, "value", value)
    policy = GuardedPolicy(adaptive(USUAL, estimator=Nonsense(MENU)), CHAIN)
    with caplog.at_level(logging.ERROR):
        ran = run(policy, USUAL, texts_of(0.5, 2), 5)
    assert set(ran.choices) == {(CHAIN, CHAIN)}
    assert set(ran.reasons) == {Reason.FALLBACK}
    assert len(caplog.records) == 1


class FailsToLearnOnce(CountedAcceptance):
    has_failed = False

    def observe(self, outcomes):
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("no lesson")
        super().observe(outcomes)


def test_failed_lesson_costs_one_choice(caplog):
    policy = GuardedPolicy(adaptive(USUAL, estimator=FailsToLearnOnce(MENU)), CHAIN)
    with caplog.at_level(logging.ERROR):
        ran = run(policy, USUAL, texts_of(0.5, 1), 60)
    assert ran.reasons.count(Reason.FALLBACK) == 1
    assert "no lesson" in caplog.text


def test_choice_reports_reason_and_expected_rate():
    policy, texts = adaptive(USUAL), texts_of(0.8, 1)
    reasons = run(policy, USUAL, texts, 200).reasons
    assert reasons.count(Reason.SPECULATION_PAYS) > 150
    assert 0 < reasons.count(Reason.PROBE) < 30
    choice = policy.choose([texts[0].view("0")])
    assert choice.step_s is not None
    truth = fixed_rate(USUAL, texts, choice.expansions[0])
    assert texts[0].expected_tokens(choice.expansions[0]) / choice.step_s == pytest.approx(truth, rel=0.15)
    assert choice.speedup == pytest.approx(truth / fixed_rate(USUAL, texts, PLAIN), rel=0.2)
    assert run(adaptive(DEAR), DEAR, texts_of(0.0, 1), 60).reasons[-1] is Reason.PLAIN_IS_BEST


def check_growth_costs() -> None:
    ran = run(adaptive(USUAL), USUAL, texts_of(0.8, 2), 200)
    steps = list(zip(ran.reasons, ran.growth_costs, strict=True))
    assert all(
        growth_costs.node > 0.0 < growth_costs.level for reason, growth_costs in steps if reason == Reason.SPECULATION_PAYS
    )


def test_trees_end_where_they_stop_paying():
    check_growth_costs()


def test_free_growth_is_detected(monkeypatch):
    monkeypatch.setattr(Search, "growth_costs", lambda *_: FREE_GROWTH)
    with pytest.raises(AssertionError):
        check_growth_costs()


def check_probe_levels() -> None:
    """One of eight that is probed alone would pay a whole pass for each level."""
    ran = run(adaptive(DEAR), DEAR, texts_of(0.0, 8), 600)
    rate = fixed_rate(DEAR, texts_of(0.0, 8), PLAIN)
    levels = [
        growth_costs.level for reason, growth_costs in zip(ran.reasons, ran.growth_costs, strict=True) if reason == Reason.PROBE
    ]
    assert levels
    assert 0.0 < max(levels) < 0.4 * rate * DEAR.pass_s


def test_probe_levels_are_shared_by_all():
    check_probe_levels()


def test_probe_levels_paid_alone_are_detected(monkeypatch):
    shared = Search.growth_costs
    monkeypatch.setattr(Search, "growth_costs", lambda self, step, _: shared(self, step, sum(map(bool, step.places))))
    with pytest.raises(AssertionError):
        check_probe_levels()


def bounded_share(machine: Machine, odds: float) -> float:
    """Return the share of the best rate that eight requests of one node at most come to.

    The best is plain decoding or a tree that admits what comes of nine in ten.
    """
    policies: list[ExpansionPolicy] = [adaptive(machine, BY_CHANCE), *map(scores.Always, BY_CHANCE.entries[:2])]
    rates = []
    for policy in policies:
        texts = [replace(one, speculation=Speculation(max_nodes=1)) for one in texts_by_chance((odds,), 8)]
        run(policy, machine, texts, 100)
        rates.append(run(policy, machine, texts, 100, seed=1).rate)
    return rates[0] / max(rates[1:])


def worst_bounded_share() -> float:
    return min(bounded_share(machine, odds) for machine in scores.MACHINES.values() for odds in (0.1, 0.95))


def test_bounds_on_nodes_bound_expectations():
    assert worst_bounded_share() > 0.95


def test_forgotten_bounds_cost_tokens(monkeypatch):
    monkeypatch.setattr("selector.policy._within_text", lambda estimates, batch: estimates)
    assert worst_bounded_share() < 0.93


def test_steps_beside_prompts_do_not_pile_up():
    """A long prompt is fed beside a request that drafts by its own tree."""
    own = Text(flat(0.9), speculation=Speculation(expansion=Expansion(4, 1, 0)))
    policy = adaptive(CHEAP)
    run(policy, CHEAP, [own, Text(flat(0.9), num_prompt=10**6)], 300)
    assert len(policy._unlearned) <= 1
