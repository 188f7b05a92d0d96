"""The adaptive policy on a machine on paper: near the best fixed choice where nothing changes, quick where something does.

Chance comes from seeds and time from arithmetic, so every number here is the same at every run. tests/selector/scores.py has the
settings.
"""

import logging
import math
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from engine.policy import Reason
from engine.tree import FREE_GROWTH, PLAIN, Expansion
from engine.types import Speculation
from selector.acceptance import CountedAcceptance, Estimates
from selector.cost import CostModel
from selector.menu import Menu, menu_for_all
from selector.policy import REUSED_STEPS, AdaptiveExpansion
from selector.probes import Probes
from selector.search import Search
from tests.selector import scores
from tests.selector.machine import Machine, Text, fixed_rate, flat, run
from tests.selector.scores import BY_CHANCE, CHAIN, CHEAP, DEAR, MENU, SURE_OR_NOT, USUAL, adaptive, texts_by_chance, texts_of


def nothing_due(probes, views, is_plain):
    return [], REUSED_STEPS


def test_it_comes_near_the_best_fixed_choice():
    shares = scores.near_best_fixed()
    assert min(shares.values()) > 0.94, shares
    assert mean(shares.values()) > 0.98, shares


def test_it_follows_a_text_that_changes():
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


def test_noise_aware_trees_beat_one_least_chance():
    assert mean(scores.noise_aware().values()) > 1.03


def test_trees_grown_whole_do_not(monkeypatch):
    monkeypatch.setattr(Search, "growth_prices", lambda *_: FREE_GROWTH)
    assert mean(scores.noise_aware().values()) < 1.02


def test_useless_drafter_costs_next_to_nothing():
    assert scores.useless_drafter() > 0.985


class ForgetsItsCosts(AdaptiveExpansion):
    """Probes whenever anything could be learnt, whatever it costs."""

    def _probe(self, batch, search, best):
        return search.with_tree(best, [0], self._menu.drafting)[0], 1


class DeafToOutcomes(AdaptiveExpansion):
    def observe(self, feedback):
        pass


@pytest.mark.parametrize("mutant", [ForgetsItsCosts, DeafToOutcomes])
def test_useless_drafter_kills(mutant):
    assert scores.useless_drafter(adaptive(DEAR, kind=mutant)) < 0.985


def test_wrong_profile_is_found_out():
    assert min(scores.wrong_profile().values()) > 0.95


@pytest.mark.parametrize(("where", "name", "value"), [(Probes, "is_full", False), (CostModel, "observe", lambda *_: None)])
def test_wrong_profile_kills(where, name, value, monkeypatch):
    monkeypatch.setattr(where, name, value)
    assert min(scores.wrong_profile().values()) < 0.6


def test_dear_drafter_costs_its_share():
    assert scores.dear_drafter() > 0.97


def test_choosing_costs_one_percent():
    """A choice takes a twenty-fifth of a step here."""
    rates = []
    for machine in (USUAL, replace(USUAL, choose_s=0.0004)):
        policy, texts = adaptive(machine), texts_of(0.7, 1)
        run(policy, machine, texts, 100)
        rates.append(run(policy, machine, texts, 300, seed=1).rate)
    assert rates[1] > 0.99 * rates[0]


def test_it_follows_the_load():
    policy, texts = adaptive(USUAL), texts_of(0.6, 32)
    alone = run(policy, USUAL, texts[:1], 150)
    crowd = run(policy, USUAL, texts, 100)
    again = run(policy, USUAL, texts[:1], 20)
    assert sum(expansion.num_draft_tokens for (expansion,) in alone.choices[-20:]) > 40
    assert crowd.rate > 0.97 * fixed_rate(USUAL, texts, PLAIN)
    assert sum(not choice[0].is_plain for choice in again.choices) >= 15


def test_silent_drafter_is_asked_where_cheap():
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


def test_requests_own_trees_are_left_alone():
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


def beside_an_own_tree(speculation: Speculation) -> float:
    """Return tokens a second of four whose drafts are poor, beside one that has a good tree of its own; nodes are dear."""
    machine = Machine(knee=1.0, blur=0.15, outliers=0.01)
    own = Text(flat(0.95), speculation=Speculation(expansion=Expansion(8, 1, 0)))
    texts = [own, *(Text(flat(0.25), speculation=speculation) for _ in range(4))]
    policy = adaptive(machine)
    run(policy, machine, texts, 100)
    return run(policy, machine, texts, 300, seed=1).rate


def test_own_trees_tokens_make_seconds_dear():
    assert beside_an_own_tree(Speculation()) > 0.97 * beside_an_own_tree(Speculation(is_enabled=False))


def test_nothing_is_drafted_beyond_the_end():
    text, policy = Text(flat(1.0), max_tokens=30), adaptive(CHEAP)
    while text.num_generated < 29:
        (expansion,) = policy.choose([text.view("r")]).expansions
        assert expansion.max_depth < 30 - text.num_generated
        run(policy, CHEAP, [text], 1)


def test_prompts_are_fed_beside_plain_decoding():
    texts = [Text(flat(0.9)), Text(flat(0.9), num_prompt=300)]
    policy = adaptive(CHEAP)
    run(policy, CHEAP, texts[:1], 100)
    ran = run(policy, CHEAP, texts, 3)
    assert set(ran.choices) == {(PLAIN, PLAIN)}


class Nonsense(CountedAcceptance):
    """An estimator that fails now and then."""

    value = math.nan

    def estimate(self, views, menu: Menu | None = None):
        good = super().estimate(views, menu)
        tokens = good.tokens.copy()
        tokens[0, 1] = self.value
        return Estimates(tokens, good.nodes, good.rounds)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonsense_falls_back_and_is_logged_once(value, caplog, monkeypatch):
    monkeypatch.setattr(Nonsense, "value", value)
    with caplog.at_level(logging.ERROR):
        ran = run(adaptive(USUAL, estimator=Nonsense(MENU)), USUAL, texts_of(0.5, 2), 5)
    assert set(ran.choices) == {(CHAIN, CHAIN)}
    assert set(ran.reasons) == {Reason.FALLBACK}
    assert len(caplog.records) == 1


class FailsToLearn(CountedAcceptance):
    def observe(self, outcomes):
        raise RuntimeError("no lesson")


def test_failed_lesson_costs_no_choice(caplog):
    with caplog.at_level(logging.ERROR):
        ran = run(adaptive(USUAL, estimator=FailsToLearn(MENU)), USUAL, texts_of(0.5, 1), 60)
    assert Reason.FALLBACK not in ran.reasons
    assert len(caplog.records) == 1


def test_it_says_why_and_what_it_expects():
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


def test_trees_end_where_they_stop_paying():
    ran = run(adaptive(USUAL), USUAL, texts_of(0.8, 2), 200)
    steps = list(zip(ran.reasons, ran.prices, strict=True))
    assert all(prices.node > 0.0 < prices.level for reason, prices in steps if reason == Reason.SPECULATION_PAYS)


def test_probe_levels_are_shared_by_all():
    """One of eight that is probed alone would pay a whole pass for each level."""
    ran = run(adaptive(DEAR), DEAR, texts_of(0.0, 8), 400)
    rate = fixed_rate(DEAR, texts_of(0.0, 8), PLAIN)
    levels = [prices.level for reason, prices in zip(ran.reasons, ran.prices, strict=True) if reason == Reason.PROBE]
    assert levels
    assert 0.0 < max(levels) < 0.4 * rate * DEAR.pass_s


def test_bounds_on_nodes_bound_expectations():
    policy, texts = adaptive(CHEAP, BY_CHANCE), texts_by_chance(SURE_OR_NOT, 2)
    texts[0].speculation = Speculation(max_nodes=1)
    ran = run(policy, CHEAP, texts, 100)
    batch = policy._batch([text.view(str(row)) for row, text in enumerate(texts)], {})
    estimates = policy._estimator.estimate(batch.views, batch.menu)
    assert np.isfinite(estimates.tokens).all()
    assert estimates.tokens[0].max() < estimates.tokens[1].max()
    assert ran.rate > 0.0


def test_probing_spends_no_more_than_its_share():
    probes, spent = Probes(), 0.0
    for _ in range(4000):
        probes.save(1.0)
        probes.resize(1.0)
        if probes.can_pay(0.4):
            probes.end([], 0.4)
            spent += 0.4
    assert spent < 4000 * 0.005 + 2.5


def test_long_step_is_charged_up_to_a_bound():
    probes = Probes()
    probes.resize(1.0)
    probes.end([], 1000.0)
    for _ in range(int(16.0 / 0.005) + 10):
        probes.save(1.0)
    assert probes.is_full
