"""The adaptive policy on a machine on paper: near the best fixed choice where nothing changes, quick where something does.

Chance comes from seeds and time from arithmetic, so every number here is the same at every run.
"""

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from engine.held import HeldChoice
from selector.allocation import Allocation, Allocator
from selector.model_share import ModelShare
from selector.native.costs import cost_model
from selector.probing import Probes

from engine.policy import (
    BatchViews,
    Choice,
    DraftOutcome,
    ExpansionPolicy,
    Reason,
    SequenceView,
    StepFeedback,
    StepWork,
)
from engine.tree import PLAIN, Expansion
from engine.types import Speculation
from selector.acceptance import CountedAcceptance, Estimates, Estimator
from selector.cost import DRAFT_PRICES, KNOTS, CostModel
from selector.menu import Menu, menu_for_all, menu_of
from selector.policy import _LEAST_STAKE, _MOST_UNLEARNT, AdaptiveExpansion, _pays, _within_bounds
from tests.selector.machine import Machine, Ran, Text, feedback, fixed_rate, flat, run

CHAIN = Expansion(4, 1, 0)
NOISY = {"blur": 0.15, "outliers": 0.01}
CHEAP, USUAL, DEAR = Machine(pass_s=0.0001, **NOISY), Machine(**NOISY), Machine(pass_s=0.004, **NOISY)
MENU = menu_of(CHAIN, "traversal", Expansion(4, 3, 4))


def profiled(machine: Machine) -> CostModel:
    """Return the machine's costs as a profile would have them, wrong by up to 8 % here and there."""

    def target_s(tokens: float) -> float:
        return machine.base_s + machine.token_s * tokens + machine.beyond_s * max(0.0, tokens - machine.knee)

    ends = (*KNOTS[1:], 1024)
    slopes = [(target_s(end) - target_s(start)) / (end - start) for start, end in zip(KNOTS, ends, strict=True)]
    rest = [target_s(1.0), *slopes, machine.row_s, 1e-7, 1e-7, max(1e-9, 1000 * machine.key_s)]
    wrong = [1.0 + 0.08 * (place * 7 % 13 - 6) / 6 for place in range(len(rest))]
    return cost_model(
        [price * factor for price, factor in zip(rest, wrong, strict=True)], [1e-7, machine.pass_s, machine.draft_token_s, 1e-7]
    )


def adaptive(
    machine: Machine, menu: Menu = MENU, kind: type[AdaptiveExpansion] = AdaptiveExpansion, unasked_share: float = 1.0
) -> AdaptiveExpansion:
    return kind(menu, CountedAcceptance(menu), profiled(machine), CHAIN, unasked_share=unasked_share)


def texts_of(chance: float, num_texts: int) -> list[Text]:
    return [Text(flat(chance), context=100 + 10 * index) for index in range(num_texts)]


def settled_share(machine: Machine, num_texts: int, chance: float) -> float:
    """Return the policy's tokens a second after a while, as a share of the best fixed choice's."""
    policy, texts = adaptive(machine), texts_of(chance, num_texts)
    warm_up, steps = (100, 150) if num_texts < 32 else (40, 60)
    run(policy, machine, texts, warm_up)
    best = max(fixed_rate(machine, texts, entry) for entry in MENU.entries)
    return run(policy, machine, texts, steps, seed=1).rate / best


@pytest.mark.parametrize("machine", [CHEAP, USUAL, DEAR], ids=["cheap", "usual", "dear"])
def test_it_comes_near_the_best_fixed_choice(machine):
    """Of 1 to 32 sequences whose drafts are useless, poor, good or perfect, with probes and plain steps paid for."""
    shares = {(n, chance): settled_share(machine, n, chance) for n in (1, 4, 32) for chance in (0.0, 0.3, 0.7, 1.0)}
    assert min(shares.values()) > 0.94, shares
    assert sum(shares.values()) / len(shares) > 0.98, shares


def test_rows_that_rank_take_trees_of_their_own_shape_and_those_that_draw_the_family():
    menu = menu_for_all(CHAIN, "traversal", Expansion(4, 3, 4))
    texts = [Text(flat(0.7), temperature=temperature) for temperature in (0.0, 1.0)]
    ran = run(adaptive(USUAL, menu), USUAL, texts, 60)
    ranked, drawn = ({one.tree for one in of_row if not one.is_plain} for of_row in zip(*ran.choices, strict=True))
    assert ranked == {"noise_aware"}
    assert drawn
    assert drawn <= {"delayed", "delayed_distinct"}


def test_an_id_that_comes_again_under_another_rule_has_what_that_may_have():
    policy = adaptive(CHEAP, menu_for_all(CHAIN, "traversal"))
    ranks, draws = Text(flat(0.9), temperature=0.0), Text(flat(0.9))
    run(policy, CHEAP, [ranks], 30)
    (last,) = policy.choose([ranks.view("0")]).expansions
    assert not last.is_delayed
    policy._num_standing = 0  # it thinks again
    (now,) = policy.choose([draws.view("0")]).expansions
    assert now.is_delayed


def late_share(policy: AdaptiveExpansion) -> float:
    """Return the rate beside plain decoding's of a useless drafter, after a warm-up of 50 steps."""
    texts = texts_of(0.0, 1)
    run(policy, DEAR, texts, 50)
    return run(policy, DEAR, texts, 400, seed=1).rate / fixed_rate(DEAR, texts, PLAIN)


def test_a_useless_drafter_costs_next_to_nothing():
    assert late_share(adaptive(DEAR)) > 0.985


def test_even_its_first_steps_are_few():
    texts = texts_of(0.0, 1)
    ran = run(adaptive(DEAR), DEAR, texts, 100)
    assert sum(not choice[0].is_plain for choice in ran.choices) <= 12


class ForgetsItsCosts(AdaptiveExpansion):
    """Probes whenever anything could be learnt, whatever it costs."""

    def _probe(self, batch, allocator, chosen):
        return allocator.trials(chosen, [([0], self._menu.drafting)])[0].of(0)


class DeafToOutcomes(AdaptiveExpansion):
    def observe(self, feedback):
        pass


@pytest.mark.parametrize("mutant", [ForgetsItsCosts, DeafToOutcomes])
def test_uselessness_kills(mutant):
    assert late_share(adaptive(DEAR, kind=mutant)) < 0.985


def rates_around_a_change(before: float, after: float, num_steps: int = 300) -> Ran:
    """Return what ran at the end of a text whose acceptance changes in the middle."""
    text = Text(lambda depth, num_generated: before if num_generated < 400 else after, context=100)
    policy = adaptive(USUAL)
    while text.num_generated < 400:
        run(policy, USUAL, [text], 1)
    run(policy, USUAL, [text], 100, seed=1)
    return run(policy, USUAL, [text], num_steps, seed=2)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9), (0.3, 0.9), (0.9, 0.3)])
def test_it_follows_a_text_that_changes(before, after):
    best = max(fixed_rate(USUAL, texts_of(after, 1), entry) for entry in MENU.entries)
    assert rates_around_a_change(before, after).rate > 0.93 * best


class NeverProbes(AdaptiveExpansion):
    def _probe(self, batch, allocator, chosen):
        return None


def test_without_probes_it_would_not_come_back():
    text = Text(lambda depth, num_generated: 0.0 if num_generated < 100 else 0.9)
    ran = run(adaptive(USUAL, kind=NeverProbes), USUAL, [text], 600)
    assert all(choice[0].is_plain for choice in ran.choices[-100:])


def test_it_follows_the_load():
    """One sequence speculates, 32 do not, and the one that is left does again at once: what text allows is not forgotten."""
    policy, texts = adaptive(USUAL), texts_of(0.6, 32)
    alone = run(policy, USUAL, texts[:1], 150)
    crowd = run(policy, USUAL, texts, 100)
    again = run(policy, USUAL, texts[:1], 20)
    assert sum(expansion.num_draft_tokens for (expansion,) in alone.choices[-20:]) > 40
    plain = fixed_rate(USUAL, texts, PLAIN)
    assert crowd.rate > 0.97 * plain
    assert sum(not choice[0].is_plain for choice in again.choices) >= 15


def test_nodes_go_where_they_are_accepted():
    """Half of the batch is worth drafting for; equal shares for all would waste half."""
    texts = [Text(flat(0.9 if index % 2 else 0.05), context=100) for index in range(8)]
    policy = adaptive(USUAL)
    run(policy, USUAL, texts, 200)
    ran = run(policy, USUAL, texts, 50, seed=1)
    spent = [sum(choice[index].num_draft_tokens for choice in ran.choices) for index in range(8)]
    assert min(spent[1::2]) > 5 * max(spent[::2])
    best = max(fixed_rate(USUAL, texts, entry) for entry in MENU.entries)
    assert ran.rate > 1.05 * best


def test_a_drafter_that_is_often_silent_is_asked_if_silence_is_cheap():
    text = Text(flat(0.9), offers=0.2, context=100)
    policy = adaptive(CHEAP)
    run(policy, CHEAP, [text], 150)
    ran = run(policy, CHEAP, [text], 100, seed=1)
    assert ran.rate > 1.2 * fixed_rate(CHEAP, [text], PLAIN)


def test_requests_that_chose_for_themselves_are_left_alone():
    own = Expansion(0, 2, 2)
    texts = [
        Text(flat(1.0), speculation=Speculation(is_enabled=False)),
        Text(flat(1.0), speculation=Speculation(expansion=own)),
        Text(flat(1.0), speculation=Speculation(max_nodes=2)),
        Text(flat(1.0), max_tokens=10**6),
    ]
    ran = run(adaptive(CHEAP), CHEAP, texts, 60)
    assert {choice[0] for choice in ran.choices} == {choice[1] for choice in ran.choices} == {PLAIN}
    assert max(choice[2].num_draft_tokens for choice in ran.choices) == 2
    assert max(choice[3].num_draft_tokens for choice in ran.choices) > 2
    alone = run(adaptive(CHEAP), CHEAP, texts[:2], 5)
    assert set(alone.choices) == {(PLAIN, PLAIN)}


def beside_an_own_tree(policy: AdaptiveExpansion | None) -> float:
    """Return tokens a second of four whose drafts are poor, beside one that has a good tree of its own; nodes are dear."""
    machine = Machine(knee=1.0, **NOISY)
    speculation = Speculation() if policy else Speculation(is_enabled=False)
    own = Text(flat(0.95), speculation=Speculation(expansion=Expansion(8, 1, 0)))
    texts = [own, *(Text(flat(0.25), speculation=speculation) for _ in range(4))]
    policy = policy or adaptive(machine)
    run(policy, machine, texts, 100)
    return run(policy, machine, texts, 300, seed=1).rate


def test_seconds_are_worth_what_trees_of_requests_own_bring_in_them():
    assert beside_an_own_tree(adaptive(Machine(knee=1.0))) > 0.98 * beside_an_own_tree(None)


def test_nothing_is_drafted_beyond_the_end():
    text = Text(flat(1.0), max_tokens=30)
    policy = adaptive(CHEAP)
    while text.num_generated < 29:
        (expansion,) = policy.choose([text.view("r")]).expansions
        assert expansion.max_depth < 30 - text.num_generated or text.num_generated < 20
        run(policy, CHEAP, [text], 1)


class Nonsense:
    """An estimator that fails now and then."""

    def __init__(self, menu: Menu, value: float) -> None:
        self._counted = CountedAcceptance(menu)
        self._value = value

    def estimate(self, views, menu=None):
        good = self._counted.estimate(views, menu)
        tokens = good.tokens.copy()
        tokens[0, 1] = self._value
        return Estimates.of(tokens, good.nodes, good.passes, good.fed)

    def observe(self, outcomes):
        self._counted.observe(outcomes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_fall_back_to_the_fixed_expansion_and_say_so_once(value, caplog):
    policy = AdaptiveExpansion(MENU, Nonsense(MENU, value), profiled(USUAL), CHAIN)
    with caplog.at_level(logging.ERROR):
        ran = run(policy, USUAL, texts_of(0.5, 2), 5)
    assert set(ran.choices) == {(CHAIN, CHAIN)}
    assert set(ran.reasons) == {Reason.FALLBACK}
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
    useless = adaptive(DEAR)
    assert run(useless, DEAR, texts_of(0.0, 1), 60).reasons[-1] is Reason.PLAIN_IS_BEST


def test_trees_end_where_they_stop_paying():
    ran = run(adaptive(USUAL), USUAL, texts_of(0.8, 2), 200)
    steps = list(zip(ran.reasons, ran.prices, strict=True))
    assert all(prices.node > 0.0 < prices.level for reason, prices in steps if reason == Reason.SPECULATION_PAYS)


def test_a_probe_s_levels_cost_what_they_would_if_all_drafted():
    """One of eight that is asked alone would pay a whole pass for each level."""
    ran = run(adaptive(DEAR), DEAR, texts_of(0.0, 8), 400)
    rate = fixed_rate(DEAR, texts_of(0.0, 8), PLAIN)
    levels = [prices.level for reason, prices in zip(ran.reasons, ran.prices, strict=True) if reason == Reason.PROBE]
    assert levels
    assert 0.0 < max(levels) < 0.4 * rate * DEAR.pass_s


# Trees that end by the chances of their nodes.

BY_CHANCE = menu_of(Expansion(0, 4, 8, "noise_aware", 32), "coupled")
SURE_OR_NOT = (0.98, 0.98, 0.9, 0.3, 0.1)  # known as soon as a token is drafted, and not before


class Always:
    """The same tree for all, its levels for nothing."""

    def __init__(self, expansion: Expansion) -> None:
        self.name, self._expansion = "always", expansion

    def choose(self, views):
        return Choice((self._expansion,) * len(views))

    def observe(self, feedback):
        pass


def texts_by_chance(odds: tuple[float, ...], num_texts: int) -> list[Text]:
    return [Text(flat(0.0), odds=odds, context=100, temperature=0.0) for _ in range(num_texts)]


def rates_by_chance(machine: Machine, odds: tuple[float, ...], num_texts: int, policy: ExpansionPolicy) -> float:
    texts = texts_by_chance(odds, num_texts)
    run(policy, machine, texts, 100)
    return run(policy, machine, texts, 300, seed=1).rate


def share_by_chance(machine: Machine, num_texts: int, estimator: Estimator) -> float:
    """Return the policy's tokens a second as a share of those with the best least chance."""
    policy = AdaptiveExpansion(BY_CHANCE, estimator, profiled(machine), CHAIN)
    best = max(rates_by_chance(machine, SURE_OR_NOT, num_texts, Always(entry)) for entry in BY_CHANCE.entries)
    return rates_by_chance(machine, SURE_OR_NOT, num_texts, policy) / best


class DeafToChances(CountedAcceptance):
    def _tell_of_nodes(self):
        self._knowing.clear()


@pytest.mark.parametrize("machine", [CHEAP, USUAL, DEAR], ids=["cheap", "usual", "dear"])
def test_it_finds_the_least_chance_that_pays(machine):
    shares = [share_by_chance(machine, num_texts, CountedAcceptance(BY_CHANCE)) for num_texts in (1, 4, 16)]
    assert min(shares) > 0.95, shares


def test_without_the_chances_it_does_not():
    shares = [share_by_chance(machine, 1, DeafToChances(BY_CHANCE)) for machine in (CHEAP, USUAL, DEAR)]
    assert min(shares) < 0.9, shares


def test_chances_that_are_never_good_leave_plain_decoding():
    plain = rates_by_chance(DEAR, (0.02,), 4, Always(PLAIN))
    assert rates_by_chance(DEAR, (0.02,), 4, adaptive(DEAR, BY_CHANCE)) > 0.985 * plain


def bounded_share(machine: Machine, odds: float) -> float:
    """Return the share of the best choice's tokens a second that eight requests of one node at most come to.

    That is plain decoding, or a tree that admits what comes of nine in ten.
    """
    one_node, rates = Speculation(max_nodes=1), []
    policies: list[ExpansionPolicy] = [adaptive(machine, BY_CHANCE), *map(Always, BY_CHANCE.entries[:2])]
    for policy in policies:
        texts = [replace(one, speculation=one_node) for one in texts_by_chance((odds,), 8)]
        run(policy, machine, texts, 100)
        rates.append(run(policy, machine, texts, 100, seed=1).rate)
    return rates[0] / max(rates[1:])


@pytest.mark.parametrize("machine", [CHEAP, USUAL, DEAR], ids=["cheap", "usual", "dear"])
def test_bounded_requests_are_chosen_for_within_their_bounds(machine):
    assert min(bounded_share(machine, odds) for odds in (0.1, 0.95)) > 0.95


def unbounded(estimates, batch):
    return estimates


def test_bounds_that_are_forgotten_are_noticed(monkeypatch):
    monkeypatch.setattr("selector.policy._within_bounds", unbounded)
    assert min(bounded_share(machine, odds) for machine in (CHEAP, USUAL, DEAR) for odds in (0.1, 0.95)) < 0.93


def tokens_of_the_last(num_tokens: int) -> np.ndarray:
    """Return the tokens, the extra one aside, that are expected of each tree by a text that has so many to go.

    Its like have come whole, and another that ends with the next token is chosen for beside it.
    """
    policy = adaptive(CHEAP, BY_CHANCE)
    run(policy, CHEAP, texts_by_chance((0.9, 0.6), 2), 100)
    text, ending = Text(flat(0.0), max_tokens=num_tokens, temperature=0.0), Text(flat(0.0), max_tokens=1, temperature=0.0)
    batch = policy._batch([text.view("late"), ending.view("ending")], [])
    estimates = policy._estimator.estimate(batch.views, batch.menu)
    return np.asarray(_within_bounds(estimates, batch).tokens[0] - 1.0)


def test_the_end_of_a_text_cuts_levels_off_and_the_tokens_that_they_would_bring():
    """Levels that there is room for are left as they are; the first ones bring more than the later ones."""
    whole = tokens_of_the_last(10**6)
    many = whole > 2.0
    assert many.any()
    assert tokens_of_the_last(BY_CHANCE.entries[-1].max_depth + 1) == pytest.approx(whole)
    before = whole
    for levels in (7, 5, 3, 1):
        cut = tokens_of_the_last(levels + 1)
        assert (cut[many] < 0.99 * before[many]).all()
        assert (cut[many] > levels / BY_CHANCE.entries[-1].max_depth * whole[many]).all()
        before = cut


def test_what_is_cut_was_read_off_roots_if_it_was_before():
    policy = adaptive(CHEAP, BY_CHANCE)
    batch = policy._batch([Text(flat(0.5), max_tokens=3, temperature=0.0).view("late")], [])
    estimates = policy._estimator.estimate(batch.views, batch.menu)
    for reads_roots in (False, True):
        cut = _within_bounds(replace(estimates, reads_roots=reads_roots), batch)
        assert (cut.tokens < estimates.tokens).any()
        assert cut.reads_roots is reads_roots


def test_who_may_have_no_node_or_has_no_room_for_one_is_plain():
    odds: dict[str, Any] = {"odds": (0.98,), "temperature": 0.0}
    none = Text(flat(0.0), speculation=Speculation(max_nodes=0), **odds)
    two_to_go = Text(flat(0.0), max_tokens=100, num_generated=98, **odds)
    last = Text(flat(0.0), max_tokens=100, num_generated=99, **odds)
    policy = adaptive(CHEAP, BY_CHANCE)
    run(policy, CHEAP, texts_by_chance((0.98,), 4), 50)
    choice = policy.choose([text.view(name) for name, text in zip("abcd", [none, two_to_go, last, *texts_by_chance((0.98,), 1)])])
    assert choice.reason is Reason.SPECULATION_PAYS
    assert [one.is_plain for one in choice.expansions] == [True, False, True, False]


def test_beside_prompts_a_tree_claims_little_room():
    roomy = replace(CHEAP, knee=300.0)
    policy, texts = adaptive(roomy, BY_CHANCE), texts_by_chance((0.98,), 4)
    alone = run(policy, roomy, texts, 60).choices[-20:]
    assert any(min(one.max_nodes for one in choice) > 4 for choice in alone)
    beside = run(policy, roomy, [*texts, Text(flat(0.0), temperature=0.0, num_prompt=1000, name="new")], 3).choices
    assert {one.max_nodes for choice in beside for one in choice[:4]} <= {0, 4}
    assert any(not one.is_plain for choice in beside for one in choice)


def test_rows_of_trees_by_chance_draft_beside_rows_of_others():
    menu = menu_for_all(CHAIN, "traversal", Expansion(4, 3, 4))
    ranked = [Text(flat(0.0), odds=(0.95,), temperature=0.0, name=f"ranked {index}") for index in range(2)]
    drawn = [Text(flat(0.9), name=f"drawn {index}") for index in range(2)]
    ran = run(adaptive(USUAL, menu), USUAL, [*ranked, *drawn], 120)
    assert not any(one.is_plain for one in ran.choices[-1])


def test_it_does_not_flap():
    """Between two shapes that are about as good, noise alone changes nothing."""
    ran = run(adaptive(USUAL), USUAL, texts_of(0.6, 4), 400)
    changes = sum(one != other for one, other in zip(ran.choices[200:], ran.choices[201:], strict=False))
    assert changes < 80


@pytest.mark.parametrize("stakes", [(1.0,), (0.5, 1.0)], ids=["all at stake", "now less, now more"])
def test_probing_never_spends_more_than_its_share(stakes):
    probes = Probes()
    spent_s, step_s, num_probes = 0.0, 0.01, 0
    for step in range(5000):
        probes.save(step_s, stakes[step // 100 % len(stakes)])
        one = Text(flat(0.0), num_generated=step).view("r")
        if probes.due([one], [True], [True]) and probes.saved_s >= 0.006:
            probes.pay([one], 0.006)
            spent_s, num_probes = spent_s + 0.006, num_probes + 1
    assert num_probes > 5
    assert spent_s <= (0.005 * 5000 + 2.0) * step_s


def test_a_probe_that_found_no_room_says_nothing():
    """Only a tree that grew and was refused makes a sequence wait longer for its next probe."""
    intervals = []
    for expansion in (PLAIN, Expansion(4, 1, 0)):
        probes, view = Probes(), Text(flat(0.0)).view("r")
        probes.save(1.0)
        probes.due([view], [True], [True])
        probes.pay([view], 0.1)
        before = probes._patience["r"].interval
        probes.observe([DraftOutcome("r", expansion, 0, 0, 0)])
        intervals.append(probes._patience["r"].interval > before)
    assert intervals == [False, True]


def test_a_probe_pays_what_its_step_took():
    """On credit once the account is full, and less or more than was foretold when that was wrong."""
    probes, view = Probes(), Text(flat(0.0)).view("r")
    probes.save(1.0)
    is_full = [probes.is_full]
    probes.due([view], [True], [True])
    probes.pay([view], 50.0)
    is_full.append(probes.is_full)
    assert is_full == [True, False]
    assert probes.saved_s == pytest.approx(-48.0)
    probes.settle(-49.0, None)  # it was foretold far too dear
    assert probes.saved_s == pytest.approx(1.0)
    probes.pay([view], 0.5)
    probes.settle(1000.0, 0.0)  # something else ran meanwhile
    assert probes.saved_s == pytest.approx(0.5 - 2.0)


def test_what_nobody_could_pay_is_priced_again_once_as_much_is_saved_or_others_are_due():
    probes, views = Probes(), [Text(flat(0.0)).view(name) for name in "ab"]
    probes.save(1.0)
    probes.due(views, [True] * 2, [True] * 2)
    probes.pay(views[:1], 1.9)
    probes.observe([])
    late = [one._replace(num_generated=500) for one in views]

    def is_short(*which: int, is_plain: bool = True) -> bool:
        assert sorted(probes.due(late, [is_plain] * 2, [index in which for index in range(2)])) == sorted(which)
        return probes.is_short

    assert not is_short(0)
    probes.put_off(0.5)
    assert is_short(0)
    probes.save(1.0, num_steps=100)
    assert not is_short(0)
    probes.put_off(5.0)  # more than is ever saved
    assert is_short(0)
    assert not is_short(0, 1), "another may be cheaper"
    probes.put_off(5.0)
    assert is_short(1, 0)
    assert not is_short(0, 1, is_plain=False), "they draft now"
    probes.put_off(5.0)
    assert is_short(0, 1, is_plain=False)
    probes.save(1.0, num_steps=1000)
    assert not is_short(0, 1, is_plain=False), "a full account buys anything"


def test_what_is_saved_is_worth_more_where_more_is_at_stake():
    """As full as the account was it stays; and it never owes less for what other programs took."""
    probes, view = Probes(), Text(flat(0.0)).view("r")
    saved = []
    for stake in (1.0, 0.25, 1.0):
        probes.save(1.0, stake)
        saved.append((probes.saved_s, probes.is_full))
    assert saved == [(2.0, True), (0.5, True), (2.0, True)]
    probes.save(1.0, 0.25)
    probes.due([view], [True], [True])
    probes.pay([view], 0.5)
    probes.settle(1000.0, None)
    assert probes.saved_s == pytest.approx(-2.0)
    probes.save(1.0, 1.0)
    assert probes.saved_s == pytest.approx(-2.0 + 0.005)


def misjudged(machine: Machine, kind: type[AdaptiveExpansion] = AdaptiveExpansion) -> AdaptiveExpansion:
    """Return a policy whose profile was taken in a disturbed moment: drafting and tokens are a hundred times too dear."""
    prices = list(profiled(machine).prices.values())
    rest, draft = prices[: -len(DRAFT_PRICES)], prices[-len(DRAFT_PRICES) :]
    rest[1 : 1 + len(KNOTS)] = [100.0 * price for price in rest[1 : 1 + len(KNOTS)]]
    return kind(MENU, CountedAcceptance(MENU), cost_model(rest, [100.0 * price for price in draft]), CHAIN)


@pytest.mark.parametrize("num_texts", [1, 4])
def test_a_bad_measurement_does_not_shut_the_drafter_out(num_texts):
    policy, texts = misjudged(USUAL), texts_of(0.9, num_texts)
    run(policy, USUAL, texts, 800)
    best = max(fixed_rate(USUAL, texts, entry) for entry in MENU.entries)
    assert run(policy, USUAL, texts, 100, seed=1).rate > 0.9 * best


def test_if_prices_that_nothing_has_confirmed_were_believed_it_would_be(monkeypatch):
    """By such prices there is nothing to win, and so hardly anything is worth a probe."""
    monkeypatch.setattr("selector.policy._CONFIRMED", 0)
    policy, texts = misjudged(USUAL), texts_of(0.9, 1)
    run(policy, USUAL, texts, 800)
    assert all(choice[0].is_plain for choice in run(policy, USUAL, texts, 100, seed=1).choices)


def test_believed_prices_that_leave_nothing_to_win_are_doubted_now_and_then(monkeypatch):
    monkeypatch.setattr("selector.policy._CONFIRMED", 0)
    policy, texts = misjudged(USUAL), texts_of(0.9, 1)
    run(policy, USUAL, texts, 100)
    assert policy._stake == _LEAST_STAKE
    assert Reason.PROBE in run(policy, USUAL, texts, 2000, seed=1).reasons


def test_without_credit_it_would(monkeypatch):
    monkeypatch.setattr(Probes, "is_full", False)
    policy, texts = misjudged(USUAL), texts_of(0.9, 1)
    assert all(choice[0].is_plain for choice in run(policy, USUAL, texts, 800).choices)


def test_a_drafter_that_is_far_too_dear_costs_its_share_all_the_same():
    """Each pass takes as long as thirty steps, and the profile has it for cheap."""
    truly = Machine(pass_s=0.3)
    policy, texts = adaptive(USUAL), texts_of(0.9, 1)
    run(policy, truly, texts, 100)
    assert run(policy, truly, texts, 3000).rate > 0.97 * fixed_rate(truly, texts, PLAIN)


SLOW_FEED = Machine(draft_token_s=0.002)


class FeedsForNothing(Allocator):
    def trials(self, chosen, asked):
        self._load = replace(self._load, lag_B=[0.0] * len(self._load.lag_B))
        return super().trials(chosen, asked)


def rate_far_behind() -> float:
    """Return the rate beside plain decoding's of useless drafts by a drafter that is fed as slowly as the target."""
    policy, texts = adaptive(SLOW_FEED), [Text(flat(0.0), context=900, num_unfed=900)]
    while Reason.PROBE not in run(policy, SLOW_FEED, texts, 10).reasons:
        pass
    texts[0].num_unfed = 900
    return run(policy, SLOW_FEED, texts, 300, seed=1).rate / fixed_rate(SLOW_FEED, texts, PLAIN)


def test_what_a_drafter_is_behind_is_paid_for_by_the_probe_that_feeds_it():
    assert rate_far_behind() > 0.95


def test_written_off_it_would_cost_more(monkeypatch):
    monkeypatch.setattr("selector.policy.allocator_of", FeedsForNothing)
    assert rate_far_behind() < 0.9


@pytest.mark.parametrize("unasked_share", [0.1, 1.0])
def test_what_a_drafter_is_behind_weighs_as_much_as_feeding_it_costs(unasked_share):
    """Half of it is more than is spread over the steps of a choice: a probe pays for that."""
    policy = adaptive(SLOW_FEED, unasked_share=unasked_share)
    load = policy._batch([Text(flat(0.5), context=900, num_unfed=901).view("0")], []).load
    assert load.unfed_B[0] + load.lag_B[0] == pytest.approx(1.0 + 900 * unasked_share)
    assert load.lag_B[0] > 0.5 * 900 * unasked_share


def test_requests_own_trees_are_learnt_from_some_steps_at_a_time():
    policy, text = adaptive(USUAL), Text(flat(0.9), speculation=Speculation(expansion=CHAIN))
    run(policy, USUAL, [text], _MOST_UNLEARNT - 1)
    assert len(policy._unlearnt) == _MOST_UNLEARNT - 1
    run(policy, USUAL, [text], 1)
    assert not policy._unlearnt
    run(policy, USUAL, [text], 3)
    policy.choose([text.view("0"), Text(flat(0.9)).view("1")])
    assert not policy._unlearnt, "who may be chosen for is chosen for by all that is known"
    assert policy._own_tokens["0"] is not None


def foretold_of_what_is_seen(unasked_share: float) -> float:
    """Return which share of a step's seconds was foretold whose drafter is merely fed 39 tokens, for a tenth of their price."""
    policy, text = adaptive(SLOW_FEED, unasked_share=unasked_share), Text(flat(0.9), unasked_share=0.1)
    run(policy, SLOW_FEED, [text], 200)
    text.num_unfed, policy._num_standing = 40, 0
    ((foretold_s, seen_s),) = run(policy, SLOW_FEED, [text], 1).foretold
    return foretold_s / seen_s


def test_tokens_that_a_drafter_is_merely_fed_are_foretold_at_their_own_price():
    assert foretold_of_what_is_seen(0.1) == pytest.approx(1.0, rel=0.1)


def test_at_the_price_of_those_that_it_is_asked_about_they_would_not_be():
    assert foretold_of_what_is_seen(1.0) > 1.5


@pytest.mark.parametrize(
    ("machine", "unasked_share", "is_kept_up"), [(CHEAP, 0.2, True), (CHEAP, 1.0, False), (SLOW_FEED, 0.2, False)]
)
def test_a_drafter_is_kept_up_where_that_is_cheap(machine, unasked_share, is_kept_up):
    text, policy = Text(flat(0.0), unasked_share=unasked_share), adaptive(machine, unasked_share=unasked_share)
    run(policy, machine, [text], 100)
    assert policy.choose([text.view("0")]).keeps_up == is_kept_up


def test_a_prompt_is_fed_before_anything_is_drafted_and_foretold_of():
    text = Text(flat(0.9), context=700, num_prompt=600, num_unfed=601)
    policy = adaptive(USUAL)
    first = run(policy, USUAL, [text], 5)
    assert set(first.choices) == {(PLAIN,)}
    assert not first.foretold
    after = run(policy, USUAL, [text], 60)
    assert sum(not choice[0].is_plain for choice in after.choices) > 50
    assert len(after.foretold) == 60


def drafted_share_beside_barred_ones() -> float:
    """Return in what share of steps a text drafts that is worth it after its hundredth token, with five that may not.

    Those that may draft nothing are for ever overdue. Over four texts, 600 steps each.
    """
    drafted = 0
    for seed in range(4):
        barred = [Text(flat(0.9), speculation=Speculation(max_nodes=0)) for _ in range(5)]
        other = Text(lambda depth, num_generated: 0.0 if num_generated < 100 else 0.9)
        ran = run(adaptive(USUAL), USUAL, [*barred, other], 600, seed=seed)
        assert {choice[0] for choice in ran.choices} == {PLAIN}
        drafted += sum(not choice[-1].is_plain for choice in ran.choices)
    return drafted / (4 * 600)


def test_those_that_can_only_be_plain_do_not_stand_in_the_way_of_probes():
    assert drafted_share_beside_barred_ones() > 0.25


def test_asked_all_the_same_they_would(monkeypatch):
    due = Probes.due
    monkeypatch.setattr(Probes, "due", lambda self, views, is_plain, can_probe: due(self, views, is_plain, [True] * len(views)))
    assert drafted_share_beside_barred_ones() < 0.1


TOLD = {
    "useless": [Text(flat(0.0))],
    "perfect": [Text(flat(1.0))],
    "batch": [Text(flat(0.3 + 0.1 * index), context=100 + 50 * index) for index in range(6)],
    "often silent": [Text(flat(0.9), offers=0.5), Text(flat(0.9), offers=0.5)],
    "cached": [Text(flat(0.9), cached=0.8)],
    "own tree": [Text(flat(0.6), speculation=Speculation(expansion=Expansion(2, 2, 2))), Text(flat(0.6))],
}


def foretold_share(name: str) -> float:
    """Return expected over true seconds of all steps, after a warm-up; a fifth of a step is drafting where that pays."""
    policy, texts = adaptive(USUAL), deepcopy(TOLD[name])
    run(policy, USUAL, texts, 80)
    return run(policy, USUAL, texts, 150, seed=1).foretold_share


@pytest.mark.parametrize("name", TOLD)
def test_seconds_foretold_are_those_taken(name):
    """In the sum over steps, probes and what drafters are behind included; one percent of the times taught is five-fold.

    Where a drafter says something or nothing, less is foretold: what is expected of rounds is not what comes of each.
    """
    assert foretold_share(name) == pytest.approx(1.0, abs=0.1 if name == "often silent" else 0.06)


def test_passes_that_cached_text_spares_would_be_foretold(monkeypatch):
    monkeypatch.setattr(ModelShare, "share", 1.0)
    assert foretold_share("cached") > 1.06


class Thinks(AdaptiveExpansion):
    """Notes in which steps a choice is thought over."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.num_steps, self.thought = 0, list[int]()

    def choose(self, views):
        self.num_steps += 1
        return super().choose(views)

    def _chosen(self, views):
        self.thought.append(self.num_steps)
        return super()._chosen(views)

    def gaps(self) -> list[int]:
        return [later - earlier for earlier, later in zip(self.thought, self.thought[1:], strict=False)]


class NeverStandsLonger(Thinks):
    def _num_settled(self, trees, reason, menu, reads_roots):
        return self._settled_steps

    def _stand_unprobed(self):
        pass


class NeverHears(Thinks):
    def _hear(self, feedback):
        pass


def thinker(machine: Machine, kind: type[Thinks] = Thinks) -> Thinks:
    return kind(MENU, CountedAcceptance(MENU), profiled(machine), CHAIN)


def thinking(kind: type[Thinks], machine: Machine, chance: float, num_steps: int = 400) -> list[int]:
    """Return after how many steps each choice was thought over again, once things have settled."""
    policy, texts = thinker(machine, kind), texts_of(chance, 1)
    run(policy, machine, texts, num_steps)
    return policy.gaps()


def test_a_choice_that_is_confirmed_stands_twice_as_long():
    gaps = thinking(Thinks, DEAR, 0.0)
    assert list(dict.fromkeys(gaps))[:4] == [5, 9, 17, 33]
    assert max(gaps) == 65  # while no probe can be paid
    assert max(thinking(Thinks, CHEAP, 1.0)) == 17
    assert max(thinking(NeverStandsLonger, DEAR, 0.0)) == 5


def times_thought_over(machine: Machine) -> int:
    """Return how often a choice of plain decoding was thought over in 40 texts of 50 tokens, none of which can be drafted."""
    policy, names = thinker(machine), count()
    run(policy, machine, texts_of(0.0, 1), 400)
    policy.thought.clear()
    for seed in range(40):
        run(policy, machine, [Text(flat(0.0), context=100, name=f"later {next(names)}")], 50, seed=seed)
    return len(policy.thought)


def test_plain_decoding_stands_until_a_probe_can_be_made(monkeypatch):
    """Thought over for who comes, when that one's first probe is due, and seldom else."""
    num_thought = times_thought_over(DEAR)
    assert num_thought < 2.5 * 40
    monkeypatch.setattr("selector.policy._MOST_UNPROBED", 0)
    assert times_thought_over(DEAR) > 1.5 * num_thought


def test_no_choice_stands_for_good():
    """Each token more takes two steps' seconds: nothing is to be won, and in 512 steps one looks again."""
    gaps = thinking(Thinks, Machine(knee=1.0, beyond_s=0.02, **NOISY), 0.9, 3000)
    assert list(dict.fromkeys(gaps)) == [5, 9, 17, 33, 65, 129, 257, 513]


def watched(views: list[SequenceView], composition: int | None, looked: list[int | None]) -> BatchViews:
    """Return views that note each time that they are made."""

    def look() -> list[SequenceView]:
        looked.append(composition)
        return views

    return BatchViews(look, len(views), composition)


CROWD = 16  # sequences, that leave a step nothing to spare: perfect drafts would win a fifth


class HopesAlways(Thinks):
    def _at_stake(self, *args):
        return 1.0


def in_a_crowd(kind: type[Thinks]) -> tuple[int, float]:
    """Return how often a choice was thought over in 1600 steps, and the share of them that were probes."""
    policy, texts = thinker(USUAL, kind), texts_of(0.5, CROWD)
    run(policy, USUAL, texts, 2000)
    policy.thought.clear()
    ran = run(policy, USUAL, texts, 1600, seed=1)
    return len(policy.thought), sum(reason is Reason.PROBE for reason in ran.reasons) / len(ran.reasons)


def test_where_there_is_little_to_win_little_is_thought_and_probed():
    (num_thought, probed), (num_always, probed_always) = in_a_crowd(Thinks), in_a_crowd(HopesAlways)
    assert num_thought < num_always / 2
    assert num_thought < 1600 / 128
    assert probed < probed_always / 2


def test_where_there_is_little_to_win_who_comes_is_not_thought_over_at_once():
    """Of 16 sequences three end and three come, again and again; who stays plain is not looked at in between."""
    looked: list[int | None] = []
    policy = thinker(USUAL)
    run(policy, USUAL, texts_of(0.5, CROWD), 2000)
    policy.thought.clear()
    for turn in range(1, 21):
        texts = [Text(flat(0.5), context=100, name=str(3 * turn + place)) for place in range(CROWD)]
        run(policy, USUAL, texts, 8, shown=partial(watched, composition=turn, looked=looked))
    assert min(policy.gaps()) >= 24  # three times that three have changed are more than a quarter
    assert len(looked) <= 20 + len(policy.thought)


def test_a_prompt_beside_plain_sequences_is_not_thought_over_at_each_step():
    """But soon after it has been fed, in six steps, where there is something to win."""
    policy = thinker(USUAL)
    texts = texts_of(0.0, 5)
    run(policy, USUAL, texts, 300)
    policy.thought.clear()
    policy._num_standing = 0
    run(policy, USUAL, [*texts, Text(flat(0.0), context=800, num_prompt=768, name="late")], 12)
    assert policy.thought == [301, 311]


def test_who_comes_with_a_prompt_beside_a_choice_that_stands_is_thought_over_soon_after_it():
    """The prompt takes two steps; a choice that has become the batch's in those is not of who had none by it."""
    policy, texts = thinker(USUAL), texts_of(0.0, 5)
    run(policy, USUAL, texts, 300)
    while policy._num_standing < 20:
        run(policy, USUAL, texts, 1)
    policy.thought.clear()
    begun = policy.num_steps
    run(policy, USUAL, [*texts, Text(flat(0.0), context=300, num_prompt=256, name="late")], 12)
    assert policy.thought[:1] == [begun + 7]


def test_what_stands_for_many_does_not_for_few():
    """Where sequences leave one by one, drafting is found to pay as soon as it does."""
    policy = adaptive(USUAL)
    run(policy, USUAL, texts_of(0.9, CROWD), 400)
    while policy._num_standing <= CROWD:
        run(policy, USUAL, texts_of(0.9, CROWD), 1)
    for num_texts in range(CROWD - 1, 1, -1):
        ran = run(policy, USUAL, texts_of(0.9, num_texts), 1, seed=num_texts)
    assert not ran.choices[-1][0].is_plain


def test_many_that_leave_one_by_one_are_thought_over_when_a_quarter_has_left():
    """Though each step is like the one before."""
    policy = thinker(USUAL)
    run(policy, USUAL, texts_of(0.5, CROWD), 2000)
    while policy._num_standing <= CROWD:
        run(policy, USUAL, texts_of(0.5, CROWD), 1)
    policy.thought.clear()
    begun = policy.num_steps
    for num_texts in range(CROWD - 1, CROWD - 6, -1):
        run(policy, USUAL, texts_of(0.5, num_texts), 1)
    assert policy.thought[:1] == [begun + 4]


class NotesCharges(AdaptiveExpansion):
    """Notes the seconds that each probe lost, and what it was charged with."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.lost, self.charged = list[float](), list[float]()

    def choose(self, views):
        self._save()
        self._before_s = self._probes.saved_s
        return super().choose(views)

    def observe(self, feedback):
        is_probe = self._probe_s is not None and self._standing.choice.reason is Reason.PLAIN_IS_BEST
        if is_probe:
            extra = sum(one.accepted_depth for one in feedback.outcomes if self._probes.has_asked(one.request_id))
            self.lost.append(feedback.draft_s + feedback.rest_s - self._plain_s - extra / self._plain_rate)
        super().observe(feedback)
        if is_probe:
            self.charged.append(self._before_s - self._probes.saved_s)


class ChargesForSecondsAlone(NotesCharges):
    def _settle(self, feedback):
        self._probes.settle(feedback.draft_s + feedback.rest_s - self._probe_s, None)


def charges(kind: type[NotesCharges], odds: float, num_others: int) -> tuple[list[float], list[float]]:
    """Return what probes of a sequence beside some that draw trees of their own lost, and what they were charged with."""
    machine = Machine(pass_s=0.004, draft_token_s=0.0002)
    policy = kind(BY_CHANCE, CountedAcceptance(BY_CHANCE), profiled(machine), CHAIN)
    texts = [Text(flat(0.5), speculation=Speculation(expansion=CHAIN), temperature=0.0) for _ in range(num_others)]
    run(policy, machine, [*texts_by_chance((odds,), 1), *texts], 3000)
    return policy.lost, policy.charged


@pytest.mark.parametrize("odds", [0.02, 0.15], ids=["trees end at once", "trees bring something"])
def test_a_probe_is_charged_with_what_it_lost(odds):
    lost, charged = charges(NotesCharges, odds, 2)
    assert len(lost) > 1
    assert charged == pytest.approx(lost, rel=0.1, abs=5e-4)


def test_charged_with_its_seconds_alone_it_would_have_them_back():
    lost, charged = charges(ChargesForSecondsAlone, 0.02, 0)
    assert sum(charged[:2]) < sum(lost[:2]) / 2


def probing_in(num_texts: int) -> tuple[AdaptiveExpansion, list[SequenceView], float]:
    """Return a policy whose probe is under way while plain decoding stands, what it saw, and what it had saved before."""
    policy, texts = adaptive(DEAR), texts_of(0.0, num_texts)
    run(policy, DEAR, texts, 60)
    for _ in range(2000):
        policy._save()
        views, saved_s = [text.view(str(place)) for place, text in enumerate(texts)], policy._probes.saved_s
        if policy.choose(views).reason is Reason.PROBE:
            return policy, views, saved_s
        outcomes = tuple(DraftOutcome(view.request_id, PLAIN, 0, 0, 0, None) for view in views)
        policy.observe(feedback(StepWork(num_texts, num_texts, num_texts, 200, 200, 0, 0, 0), outcomes, 0.0, 0.01))
        for text in texts:
            text.num_generated += 1
    raise AssertionError("no probe")


def test_luck_beside_a_chain_or_a_prompt_is_no_probes():
    """What was foretold stands: nothing is gained, and no more is charged than an account holds."""
    policy, views, saved_s = probing_in(3)
    paid_s = saved_s - policy._probes.saved_s
    outcomes = tuple(DraftOutcome(view.request_id, CHAIN, 4, 4, 4, None) for view in views[1:])  # one had a chain instead
    policy.observe(feedback(StepWork(3, 26, 26, 200, 1800, 4, 20, 8), outcomes, 0.5, 0.5))
    assert policy._probes.saved_s == pytest.approx(saved_s - max(0.0, paid_s))


def test_a_probe_that_was_not_made_costs_nothing():
    """Cached text was drafted in its place, and what came of it is kept from the policy."""
    policy, _, saved_s = probing_in(1)
    assert policy._probes.saved_s != saved_s
    policy.observe(feedback(StepWork(1, 9, 9, 200, 1800, 0, 0, 8), (), 0.001, 0.02))
    assert policy._probes.saved_s == pytest.approx(saved_s, abs=1e-4)  # a step's share came in
    assert not policy._probes.is_asking


def test_where_what_came_is_not_known_no_more_is_given_back_than_was_paid():
    probes, view = Probes(), Text(flat(0.0)).view("r")
    probes.save(1.0)
    probes.due([view], [True], [True])
    probes.pay([view], 0.5)
    probes.settle(-3.0, None)
    assert probes.saved_s == pytest.approx(2.0)
    probes.pay([view], 0.5)
    probes.settle(-3.0, 2.5)  # all that was hoped for is lost, of two steps' worth at most
    assert probes.saved_s == pytest.approx(2.0 - 0.5 + 3.0 - 2.0)


def after_a_crowd(kind: type[AdaptiveExpansion], seed: int) -> list[bool]:
    """Return in which steps two sequences draft, after 16 whose drafts were useless, and who came and went, have gone."""
    policy, names = adaptive(USUAL, kind=kind), count()
    texts: list[Text] = []
    for turn in range(80):
        texts += [Text(flat(0.0), context=100, name=str(next(names))) for _ in range(CROWD - len(texts))]
        run(policy, USUAL, texts, 8, seed=seed + turn)
        del texts[:2]
    ran = run(policy, USUAL, [Text(flat(0.9), context=100, name=name) for name in ("one", "other")], 150, seed=seed)
    return [not choice[0].is_plain for choice in ran.choices]


class NeverProbesFew(AdaptiveExpansion):
    def _probe(self, batch, allocator, chosen):
        return super()._probe(batch, allocator, chosen) if len(batch.views) == CROWD else None


def test_few_that_remain_of_many_draft_soon():
    """They are probed, whatever the many before them brought."""
    assert sum(after_a_crowd(AdaptiveExpansion, 100)[100:]) > 45
    assert sum(after_a_crowd(NeverProbesFew, 100)) < 5


def cached_late(kind: type[AdaptiveExpansion]) -> int:
    """Return in how many of a hundred steps a text drafts that is all copied, after one that was useless; passes are dear."""
    machine = Machine(pass_s=0.01, **NOISY)
    policy = adaptive(machine, kind=kind)
    run(policy, machine, texts_of(0.0, 1), 400)
    text = Text(flat(0.9), cached=1.0, name="late")
    run(policy, machine, [text], 400, seed=9)
    return sum(not choice[0].is_plain for choice in run(policy, machine, [text], 100, seed=10).choices)


class ChargesPasses(AdaptiveExpansion):
    def _at_stake(self, allocator, plain):
        return min(1.0, max(_LEAST_STAKE, allocator.of(np.full(1, len(MENU) - 1)).rate / plain.rate - 1.0))


def test_copied_text_is_found_where_a_model_is_too_dear_to_draft():
    """Cached text costs no pass, so there is as much at stake as if passes cost nothing."""
    assert cached_late(AdaptiveExpansion) > 80
    assert cached_late(ChargesPasses) < 20


def seen_by(policy: AdaptiveExpansion, num_steps: int, composition: Callable[[int], int | None]) -> tuple[Ran, int]:
    """Return a run over texts of which one comes in between, and in how many steps the policy looked at them."""
    looked: list[int | None] = []
    steps = count()

    def shown(views: list[SequenceView]) -> BatchViews:
        step = next(steps)
        return watched(views, composition(step), looked)

    texts = texts_of(0.0, 3)
    ran = run(policy, USUAL, texts, num_steps // 2, seed=1, shown=shown)
    late = run(policy, USUAL, [*texts, Text(flat(0.0), context=50, name="late")], num_steps // 2, seed=2, shown=shown)
    return replace(ran, choices=ran.choices + late.choices, reasons=ran.reasons + late.reasons), len(looked)


def test_who_stays_plain_is_not_looked_at_and_chosen_for_as_if_looked_at():
    """Before somebody comes and after are two compositions."""
    seldom, num_seen = seen_by(adaptive(USUAL), 400, lambda step: step // 200)
    always, num_all = seen_by(adaptive(USUAL), 400, lambda step: None)
    assert (seldom.choices, seldom.reasons) == (always.choices, always.reasons)
    assert num_all == 400
    assert num_seen < 80
    with pytest.raises(ValueError, match="zip"):
        seen_by(adaptive(USUAL), 380, lambda step: 0)  # who comes is not seen


def test_who_drafts_by_a_choice_that_stands_is_chosen_for_as_if_looked_at():
    def ran(composition: Callable[[int], int | None]) -> Ran:
        policy, steps = adaptive(USUAL), count()
        return run(policy, USUAL, texts_of(0.8, 3), 300, shown=lambda views: watched(views, composition(next(steps)), []))

    seldom, always = ran(lambda step: 0), ran(lambda step: None)
    assert (seldom.choices, seldom.reasons, seldom.foretold) == (always.choices, always.reasons, always.foretold)
    assert sum(not choice[0].is_plain for choice in seldom.choices) > 150


def standing_after_a_lag(odds: float, lag: int) -> tuple[float, float]:
    """Return the seconds foretold of a step whose drafter is so many tokens behind, and of the next, for which the choice stands.

    That draws a request's own tree, of which tokens are accepted with those odds.
    """
    own = Speculation(expansion=CHAIN)
    texts = [*texts_of(0.0, 2), Text(flat(odds), context=100, name="own", speculation=own)]
    policy = adaptive(USUAL)
    run(policy, USUAL, texts, 60)
    texts[-1].num_unfed = lag
    views = [text.view(text.name or str(index)) for index, text in enumerate(texts)]

    def foretold() -> float:
        choice = policy.choose(BatchViews(lambda: views, len(views), 5))
        assert choice.step_s is not None
        return choice.step_s

    policy._num_standing = 0  # it thinks again
    first = foretold()
    assert policy._num_standing > 2
    assert policy._standing.choice.reason is Reason.PLAIN_IS_BEST
    return first, foretold()


def test_the_seconds_of_a_choice_that_stands_are_those_of_drafters_behind_by_no_more_than_a_step_brings():
    """One token, where nothing is ever accepted."""
    first, later = standing_after_a_lag(0.0, 41)
    assert first - later == pytest.approx(40 * USUAL.draft_token_s, rel=0.3)


def test_drafters_that_are_behind_by_less_than_a_step_brings_are_taken_to_stay_so():
    """Two tokens, where three and more are expected of a step."""
    first, later = standing_after_a_lag(0.9, 2)
    assert first == later


def test_seconds_that_stand_as_they_were_chosen_have_a_lag_that_is_gone(monkeypatch):
    monkeypatch.setattr(AdaptiveExpansion, "_of_later_steps", lambda self, choice, chosen, views: choice)
    first, later = standing_after_a_lag(0.0, 41)
    assert first == later


def steps_until_it_drafts(kind: type[Thinks]) -> int:
    """Return after how many steps a text is drafted for again that has become worth it, in the mean."""
    waited = []
    for seed in range(6):
        text = Text(lambda depth, num_generated: 0.0 if num_generated < 200 else 0.9, context=100)
        policy = thinker(USUAL, kind)
        while text.num_generated < 200:
            run(policy, USUAL, [text], 1, seed=seed)
        ran = run(policy, USUAL, [text], 600, seed=seed)
        waited.append(next(step for step in range(600) if all(not one[0].is_plain for one in ran.choices[step : step + 3])))
    return sum(waited) // len(waited)


def test_a_probe_that_was_about_as_good_has_the_choice_thought_over_soon():
    assert steps_until_it_drafts(Thinks) < 0.8 * steps_until_it_drafts(NeverHears)


@pytest.mark.parametrize(("machine", "num_texts", "chance"), [(USUAL, 8, 0.9), (CHEAP, CROWD, 1.0)], ids=["few", "many"])
def test_who_comes_in_between_is_not_plain_for_long(machine, num_texts, chance):
    """Where others draft, however little that wins."""
    policy, texts = adaptive(machine), texts_of(chance, num_texts)
    run(policy, machine, texts, 200)
    late = [Text(flat(chance), context=100, name=f"late {index}") for index in range(2)]
    ran = run(policy, machine, [*texts, *late], 12, seed=1)
    assert any(not choice[-1].is_plain for choice in ran.choices[:6])


def test_who_stays_when_others_have_gone_is_looked_at_once_while_the_choice_stands():
    """And keeps the tree that was chosen for it."""
    policy, texts = adaptive(USUAL), texts_of(0.9, 8)
    run(policy, USUAL, texts, 200)
    while policy._num_standing < 6:
        run(policy, USUAL, texts, 1)
    looked = list[int | None]()
    trees = [policy._standing.trees[str(index)] for index in range(7)]
    ran = run(policy, USUAL, texts[:7], 5, shown=partial(watched, composition=9, looked=looked))
    assert [[*choice] for choice in ran.choices] == [trees] * 5
    assert len(looked) == 1


def test_where_all_who_drafted_have_gone_plain_decoding_is_being_measured():
    """However the choice came about that stands."""
    policy, texts = adaptive(USUAL), [Text(flat(0.95), context=100), *texts_of(0.0, 4)]
    names = [text.name or str(index) for index, text in enumerate(texts)]
    run(policy, USUAL, texts, 200)
    while policy._num_standing < 6 or policy._standing.choice.reason is not Reason.SPECULATION_PAYS:
        run(policy, USUAL, texts, 1)
    assert [not policy._standing.trees[name].is_plain for name in names] == [True, False, False, False, False]
    for index, text in enumerate(texts):
        text.name = names[index]
    run(policy, USUAL, texts[1:], 4, shown=partial(watched, composition=9, looked=[]))
    assert policy._num_standing > 0
    assert policy._num_since_plain == 0


def test_who_comes_beside_drafts_has_no_last_tree_to_stay_with():
    """Being plain in between was nobody's choice: else what one more brings would have to be clearly better."""
    policy, texts = adaptive(USUAL), texts_of(0.9, 8)
    run(policy, USUAL, texts, 200)
    while policy._num_standing < 2:
        run(policy, USUAL, texts, 1)
    run(policy, USUAL, [*texts, Text(flat(0.9), context=100, name="late")], 1)
    assert policy._standing.choice.reason is Reason.SPECULATION_PAYS
    assert "late" not in policy._standing.trees


def test_plain_steps_are_seldom_asked_what_they_were(monkeypatch):
    """It takes time to tell, of every step, and says nothing of a drafter."""
    told: list[StepFeedback] = []

    def listened(*args, **kwargs):
        told.append(feedback(*args, **kwargs))
        return told[-1]

    policy, texts = adaptive(DEAR), texts_of(0.0, 4)
    run(policy, DEAR, texts, 400)
    monkeypatch.setattr("tests.selector.machine.feedback", listened)
    run(policy, DEAR, texts, 400)
    plain = [one for one in told if not one.has_drafted]
    assert len(plain) > 350
    assert sum(one._outcomes is not None for one in plain) < len(plain) / 10
    assert all(one._outcomes for one in told if one.has_drafted)


def test_trees_must_bring_more_than_their_seconds_are_worth():
    plain = Allocation((0,), 2.0, 1.0)
    tree = Allocation((1,), 3.0, 1.4)  # 0.4 seconds more, worth 0.8 tokens
    assert _pays(tree, plain, 1.15)
    assert not _pays(replace(tree, tokens=2.9), plain, 1.15)
    assert not _pays(replace(tree, tokens=2.0), plain, 1.0)


class LearnsAtOnce(AdaptiveExpansion):
    """As if every step were followed by a choice."""

    def observe(self, feedback):
        super().observe(feedback)
        self._learn_unlearnt()


class ForgetsWhatWaits(AdaptiveExpansion):
    def _learn_unlearnt(self):
        self._unlearnt.clear()


def ran_by(kind: type[AdaptiveExpansion], num_texts: int) -> Ran:
    """Return 400 steps in which speculation pays for a while."""
    texts = [Text(lambda depth, num_generated: 0.8 if num_generated < 300 else 0.02) for _ in range(num_texts)]
    return run(adaptive(USUAL, kind=kind), USUAL, texts, 400)


@pytest.mark.parametrize("num_texts", [1, 6])
def test_what_is_learnt_late_is_learnt_before_it_is_needed(num_texts):
    ran = ran_by(AdaptiveExpansion, num_texts)
    assert {*ran.reasons} >= {Reason.SPECULATION_PAYS, Reason.PLAIN_IS_BEST, Reason.PROBE}
    assert ran == ran_by(LearnsAtOnce, num_texts) != ran_by(ForgetsWhatWaits, num_texts)


STRETCH = 24  # tokens that are hardly foretold, and then as many that are


class ReadsRoots:
    """An estimator that reads off a root what its text is like there, as a network does, and says so or not."""

    def __init__(self, text: Text, says_so: bool = True) -> None:
        self._text, self._says_so = text, says_so
        self._counted = CountedAcceptance(MENU)

    def estimate(self, views, menu=None):
        told = self._counted.estimate(views, menu)
        tokens_BM = np.array([[self._text.expected_tokens(entry) for entry in (menu or MENU).entries] for _ in views])
        return Estimates.of(tokens_BM, told.nodes, told.passes, told.fed, self._says_so)

    def observe(self, outcomes):
        self._counted.observe(outcomes)


def rate_where_roots_are_read(says_so: bool) -> float:
    """Return the tokens a second over plain decoding's of a text in stretches, each of which its roots tell of."""
    text = Text(lambda depth, num_generated: 0.9 if num_generated // STRETCH % 2 else 0.05)
    policy = AdaptiveExpansion(MENU, ReadsRoots(text, says_so), profiled(USUAL), CHAIN)
    run(policy, USUAL, [text], 200)
    return run(policy, USUAL, [text], 600, seed=1).rate / fixed_rate(USUAL, [text], PLAIN)


def test_where_roots_are_read_a_choice_is_news_of_no_other_root():
    """Plain decoding waited for a probe, as where texts are counted alone: stretches that roots tell of went by undrafted."""
    assert rate_where_roots_are_read(says_so=True) > 1.2
    assert rate_where_roots_are_read(says_so=False) < rate_where_roots_are_read(says_so=True) - 0.1


@pytest.mark.parametrize(("machine", "chance"), [(DEAR, 0.0), (CHEAP, 1.0)])
def test_where_roots_are_read_no_choice_stands_longer_for_being_confirmed(machine, chance):
    """Neither plain decoding nor trees: both are thought over every fifth step, where a step may win as much as it takes."""
    (text,) = texts_of(chance, 1)
    policy = Thinks(MENU, ReadsRoots(text), profiled(machine), CHAIN)
    run(policy, machine, [text], 200)
    assert set(policy.gaps()[4:]) == {5}


class FailsNowAndThen(CountedAcceptance):
    """Every fifth lesson fails."""

    num_asked = num_learnt = 0

    def observe(self, outcomes):
        self.num_asked += 1
        if self.num_asked % 5 == 0:
            raise RuntimeError("no")
        self.num_learnt += 1
        super().observe(outcomes)


def test_a_lesson_that_fails_costs_that_lesson_and_no_choice(caplog):
    estimator = FailsNowAndThen(MENU)
    policy = AdaptiveExpansion(MENU, estimator, profiled(USUAL), CHAIN)
    ran = run(policy, USUAL, texts_of(0.8, 2), 200)
    assert ran.rate > 1.2 * fixed_rate(USUAL, texts_of(0.8, 2), PLAIN)
    assert estimator.num_learnt >= 4 * (estimator.num_asked // 5) > 0
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == ["a step taught nothing"]


def test_a_probe_beside_a_prompt_is_over_with_its_step():
    """Of such a step no seconds were foretold."""
    policy = adaptive(USUAL)
    policy.choose([Text(flat(0.5)).view("r")])
    policy._probes.pay([], 0.0)
    policy._probes._asked.add("r")
    policy._probe_s, policy._is_plain_probe = None, False
    work = StepWork(1, 1, 0, 10, 10, 0, 0, 0)
    policy.observe(feedback(work, (), 0.0, 0.01, has_prefill=True))
    assert not policy._probes.has_asked("r")


class Asked:
    """A policy that counts how often it is asked."""

    def __init__(self, policy: AdaptiveExpansion) -> None:
        self.name, self._policy, self.num_asked = policy.name, policy, 0
        self.observe = policy.observe

    def choose(self, views):
        self.num_asked += 1
        return self._policy.choose(views)


def told_for(feedback: StepFeedback, num_steps: int) -> StepFeedback:
    """Return what is told of so many steps by the last of them."""
    return replace(feedback, num_steps=num_steps)


class Held:
    """A policy whose choices an engine holds while it runs the same sequences, or is asked for in every step of theirs."""

    def __init__(self, policy: Asked, is_held: bool) -> None:
        self.name, self._policy = policy.name, policy
        self._held = HeldChoice(policy) if is_held else None
        self._compositions: dict[tuple[str, ...], int] = {}

    def choose(self, views):
        names = tuple(view.request_id for view in views)
        composition = self._compositions.setdefault(names, len(self._compositions))
        is_calm = all(view.num_uncached == 1 for view in views)
        together = BatchViews(lambda: [*views], len(views), composition if is_calm else None)
        return self._held.choose(together, has_news=False) if self._held else self._policy.choose(together)

    def observe(self, feedback: StepFeedback) -> None:
        if self._held:
            self._held.observe(partial(told_for, feedback), has_drafted=feedback.has_drafted)
        else:
            self._policy.observe(feedback)


class ForgetsWhatWasHeld(AdaptiveExpansion):
    def _count_held(self) -> None:
        self._num_since_choice = 0


def coming_and_going(odds: float) -> list[list[Text]]:
    """Return sequences of some hundreds of steps each: who comes feeds a prompt first, and one has a tree of its own."""
    many = [replace(one, name=name) for one, name in zip(texts_of(odds, 7), "abcdefg", strict=True)]
    comes = [replace(one, num_prompt=300) for one in many[3:5]]
    own = replace(many[5], speculation=Speculation(expansion=CHAIN), offers=0.5)
    return [many[:3], [*many[1:3], comes[0]], [many[2], *comes], [many[2], own], [many[2]], [many[2], many[6]]]


def check_held(
    machine: Machine, odds: float, menu: Menu, kind: type[AdaptiveExpansion] = AdaptiveExpansion
) -> list[tuple[int, int]]:
    """Return how often a policy was asked while each of some sequences ran: in every step, and by who holds its choices."""
    ran, asked = [], []
    for is_held in (False, True):
        policy = Asked(adaptive(machine, menu, kind))
        held, counts = Held(policy, is_held), [0]
        for part, texts in enumerate(coming_and_going(odds)):
            ran.append(run(held, machine, texts, 300, seed=part))
            counts.append(policy.num_asked)
        asked.append(np.diff(counts).tolist())
    half = len(ran) // 2
    for name in ("choices", "reasons", "foretold"):
        for part, (one, other) in enumerate(zip(ran[:half], ran[half:], strict=True)):
            pairs = enumerate(zip(getattr(one, name), getattr(other, name), strict=True))
            # The first that differs: pytest's account of two long lists takes minutes where `CI` is set.
            differs = next(((part, at, *pair) for at, pair in pairs if pair[0] != pair[1]), None)
            assert differs is None, name
    return [*zip(*asked, strict=True)]


@pytest.mark.parametrize("machine", [CHEAP, USUAL, DEAR])
@pytest.mark.parametrize(("odds", "menu"), [(0.9, MENU), (0.5, BY_CHANCE), (0.05, MENU)])
def test_choices_that_are_held_are_those_that_would_be_made(machine, odds, menu):
    """In every step, and the policy is seldom asked."""
    asked = check_held(machine, odds, menu)
    assert [always for always, _ in asked] == [300] * len(asked)
    assert asked[0][1] < 150


def test_who_forgets_the_steps_in_which_a_choice_was_held_stays_with_it_too_long():
    with pytest.raises(AssertionError):
        check_held(USUAL, 0.9, MENU, ForgetsWhatWasHeld)


def test_a_probe_is_a_chain_where_something_else_is_drafted_and_any_tree_where_nothing_is():
    """What was chosen for any of them is none, nor is what one of them may not have."""
    policy, entries = adaptive(USUAL), MENU.entries
    texts = [*texts_of(0.5, 3), Text(flat(0.5), max_tokens=3)]
    batch = policy._batch([one.view(str(index)) for index, one in enumerate(texts)], [])
    chains = {place for place, entry in enumerate(entries) if entry.branches == 1 and not entry.is_plain}
    forked, chain = next(place for place, entry in enumerate(entries) if entry.branches > 1), min(chains)
    places = (0, forked, chain, chain)
    assert set(batch.probes_open(places, [0])) == set(range(1, len(entries)))
    assert set(batch.probes_open(places, [1])) == chains
    assert set(batch.probes_open(places, [1, 2])) == chains - {chain}
    shallow = {place for place in chains if entries[place].max_depth < 3}
    assert shallow
    assert set(batch.probes_open(places, [1, 3])) == shallow - {chain}
    assert batch.can_probe(places) == [True] * 4
    ending = policy._batch([Text(flat(0.5), max_tokens=1).view("0")], [])
    assert ending.can_probe([0]) == [False]
    two = replace(batch, menu=Menu((PLAIN, CHAIN)), is_allowed_BM=None)
    assert two.can_probe([0, 1]) == [True, False]


def test_a_bound_on_nodes_cuts_what_is_expected_of_larger_trees_though_the_deepest_has_no_more():
    menu, bound = Menu((PLAIN, Expansion(0, 4, 8, "noise_aware", 64, least_chance=0.03), Expansion(16, 1, 0))), 18
    policy, draws = adaptive(CHEAP, menu), Text(flat(0.5))
    for most in (None, bound):
        ranks = Text(flat(0.5), temperature=0.0, speculation=Speculation(max_nodes=most))
        batch = policy._batch([ranks.view("0"), draws.view("1")], [])
        assert batch.menu is menu, "that of both"
        told = _within_bounds(policy._estimator.estimate(batch.views, batch.menu), batch).nodes[0]
        assert (told.max() <= bound) == (most is not None)


def test_a_step_draws_for_each_sequence_that_does_and_for_the_nodes_of_its_own_tree():
    own = Speculation(expansion=CHAIN)
    texts = [Text(flat(0.5), temperature=0.0, speculation=own), Text(flat(0.5), speculation=own), *texts_of(0.5, 2)]
    views = [one.view(str(index)) for index, one in enumerate(texts)]
    batch = adaptive(USUAL)._batch(views, [(view, CHAIN) for view in views[:2]])
    assert (batch.free, batch.load.base.num_drawn) == ((2, 3), 3 + 4)
    num_keys = sum(view.num_committed for view in views)
    assert (batch.load.base.num_keys, batch.load.base.num_scores) == (num_keys, num_keys + 4 * 200 * 2)
    assert batch.load.base_tokens == 2.0


def settled(names: list[list[str]], kind: type[AdaptiveExpansion] = AdaptiveExpansion, machine: Machine = CHEAP) -> list[int]:
    """Return for how many steps each of some choices stands, over sequences that all draft the same."""
    policy, found = adaptive(machine, kind=kind), []
    for one in names:
        policy._num_standing = 0
        policy.choose([Text(flat(1.0)).view(name) for name in one])
        found.append(policy._standing.num_settled)
    return found


class EverybodyConfirms(AdaptiveExpansion):
    def _num_settled(self, trees, reason, menu, reads_roots):
        self._standing = replace(self._standing, trees=trees)
        return super()._num_settled(trees, reason, menu, reads_roots)


def test_a_choice_stands_longer_each_time_it_is_the_same_and_as_long_where_some_have_come():
    abc, abd, ade = ["a", "b", "c"], ["a", "b", "d"], ["a", "e", "f"]
    assert settled([abc, abc, abc]) == [4, 8, 16]
    assert settled([abc, abc, abd, abd]) == [4, 8, 8, 16]
    assert settled([abc, abc, ade]) == [4, 8, 4], "most have come"
    assert settled([abc, abc, abd, ade], EverybodyConfirms) == [4, 8, 16, 16]


def test_who_has_stayed_and_is_plain_confirms_nothing_for_who_comes():
    """One of two that drafted has gone, and one that asks for no drafts has stayed."""
    policy, off, settled = adaptive(CHEAP), Text(flat(1.0), speculation=Speculation(is_enabled=False)), []
    for one in ("a", "a", "b"):
        policy._num_standing = 0
        policy.choose([Text(flat(1.0)).view(one), off.view("off")])
        settled.append(policy._standing.num_settled)
    assert settled == [4, 8, 4]


def test_beside_a_requests_own_tree_every_step_is_told():
    policy, texts = adaptive(DEAR), texts_of(0.0, 2)
    own = replace(texts[1], speculation=Speculation(expansion=CHAIN))
    run(policy, DEAR, texts, 100)
    for beside, is_all in ((texts[1], False), (own, True)):
        policy._num_standing = 0
        views = [texts[0].view("0"), beside.view("1")]
        choices = [policy.choose(BatchViews(partial(list, views), 2, is_all)) for _ in range(3)]
        held = [one for one in choices if one.num_steps > 1]
        assert held
        assert all((one.plain_told == Choice(()).plain_told) is is_all for one in held)


def test_where_nobody_drafts_who_has_come_is_thought_of_as_soon_as_at_first():
    abc, abd, slow = ["a", "b", "c"], ["a", "b", "d"], Machine(pass_s=0.3)
    assert settled([abc, abc, abd, abd], machine=slow) == [4, 8, 4, 8]
    assert settled([abc, abc, abd, abd], EverybodyConfirms, slow) == [4, 8, 16, 32]
