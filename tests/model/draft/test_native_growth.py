"""Ranked trees grown by the library are those that grow round by round: the same trees, slots, sources, rounds and lessons."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from engine import engine as stepping
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice, ExpansionPolicy, SequenceView, StepFeedback
from engine.core.step_plan import Feeding, Row
from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthCosts
from engine.core.types import DraftSource, FinishReason, Request, SamplingParams, Speculation
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.text.text_cache import TextCache
from engine.draft.text_and_model import CombinedDrafter
from engine.draft.trees import grow as growth
from engine.draft.trees import native_growth
from engine.draft.trees.grower import Growth, NodeValues
from engine.draft.trees.sampling import ChildCandidates
from engine.engine import Engine
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE
from engine.native import library
from engine.native.growth import Offered
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run, sampled
from tests.model.heads import learnt_head, random_head
from tests.model.native_models import native
from tests.model.passes import CPU
from tests.model.tiny import pair
from tests.needs import needs_library

pytestmark = needs_library

LONG = [3 + (11 * i) % 7 for i in range(19)]
TREES = [
    Expansion(0, 2, 3, "noise_aware", 4),
    Expansion(0, 4, 5, "noise_aware", 9),
    PLAIN,
    Expansion(0, 1, 6, "noise_aware", 6),
    Expansion(5, 1, 0),
    Expansion(0, 5, 2, "noise_aware", 20),
    Expansion(0, 4, 5, "noise_aware", 9, least_chance=0.1),
]


class Changing:
    """A policy that gives every sequence another tree at every step, or a chain, at growth costs that end some trees early."""

    name = "changing"

    def __init__(self) -> None:
        self._step = 0

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        self._step += 1
        trees = tuple(TREES[(self._step + place) % len(TREES)] for place in range(len(views)))
        growth_costs = (
            GrowthCosts(0.05, 0.25),
            FREE_GROWTH,
            FREE_GROWTH,
            GrowthCosts(0.05, 0.0, (0.0, 0.0, 0.05, 0.2)),
            FREE_GROWTH,
        )
        return ExpansionChoice(trees, growth_costs=growth_costs[self._step % len(growth_costs)])

    def observe(self, feedback: StepFeedback) -> None:
        pass


ROOMY = SchedulerConfig(num_slots=2048, max_model_len=256)
CRAMPED = SchedulerConfig(max_running=6, max_step_tokens=48, num_slots=150, max_model_len=128)


def engine_of(
    with_texts: bool, config: SchedulerConfig = ROOMY, precision: str = "float32", policy: ExpansionPolicy | None = None
) -> Engine:
    """Return an engine whose library drafts with a head, with cached text beside it."""
    target = native("llama", precision)
    head = HeadDrafter("head", learnt_head(), target, config.num_slots, NATIVE, precision)
    drafter = CombinedDrafter(head, TextCache(min_tokens=1), target.vocab_size, CPU) if with_texts else head
    engine = tiny_engine(target, drafter, policy or Changing(), config=config)
    engine.target.report_to(head)
    return engine


def crowd() -> list[Request]:
    """Greedy, seeded and truncated requests, some with texts that repeat or are predicted, and tokens that the head lacks.

    Two continue equally often with one such token and with another. The smaller token comes first in one and last in the other.
    """
    predicted = Request(
        *("predicted", tuple(LONG), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), Speculation()),
        prediction_ids=(7, 14, 21, *LONG, 48, 9, 9, 9),
    )
    seeded = [sampled(str(row), LONG[row:] * 2, row, 20, temperature=0.4 + 0.3 * row) for row in range(4)]
    truncations: list[dict[str, Any]] = [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2, "top_p": 0.95, "top_k": 9}]
    seeded += [sampled(f"truncated {row}", LONG[row:] * 2, row, 20, **one) for row, one in enumerate(truncations)]
    tied = [greedy(str(ids), [5, ids[0], 5, ids[1], 5], 8) for ids in ((14, 7), (7, 21), (42, 3))]
    return [greedy("greedy", LONG * 2, 32), *seeded, predicted, greedy("other", [7, 14, 21, 28, 35] * 6, 32), *tied]


def plain_texts() -> dict[str, list[int]]:
    """Return the crowd's texts without speculation."""
    plain = [replace(request, speculation=Speculation(is_enabled=False)) for request in crowd()]
    return run(engine_of(with_texts=False), plain).texts()


Compare = Callable[[Growth, Growth], bool]


def are_same(one: Growth, other: Growth) -> bool:
    """Return whether two growths are equal. Odds, noise and node values may differ by rounding."""
    facts, others = (
        (g.forest.trees, g.forest.probs_rows, g.fed, g.sources, g.rounds, g.num_rounds, g.passes) for g in (one, other)
    )
    return (
        facts == others
        and all(a == pytest.approx(b, rel=1e-4) for a, b in zip(one.draft_probs, other.draft_probs, strict=True))
        and all(map(have_same_values, one.node_values, other.node_values))
        and all(
            {*a} == {*b} and all(are_same_candidates(a[v], b[v]) for v in a)
            for a, b in zip(one.candidates, other.candidates, strict=True)
        )
    )


def are_same_candidates(one: ChildCandidates | Offered, other: ChildCandidates | Offered) -> bool:
    noise = [*other.noise] or [0.0] * len(other.probs)  # a greedy row's
    return (
        [*one.token_ids] == [*other.token_ids]
        and [*one.probs] == pytest.approx([*other.probs], rel=1e-4)
        and [*one.noise] == pytest.approx(noise)
    )


def have_same_values(one: NodeValues | None, other: NodeValues | None) -> bool:
    if one is None or other is None:
        return one is other
    are_alike = (getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5) for name in ("chances", "given_parent"))
    return all(are_alike) and one.is_cached == other.is_cached


def grown_both_ways(monkeypatch, engine: Engine) -> list[tuple[Growth, Growth]]:
    """Run a crowd; return what each step's trees are by the library and round by round, from the same state.

    By turns the one or the other comes last: what it leaves in the slots is what the next step reads.
    """
    pairs: list[tuple[Growth, Growth]] = []

    def by_library(*args):
        return growth.grow(*args)

    def by_rounds(growers, *args):
        return growth.grow(growers[-1:], *args)

    def both(growers, rows, *rest):
        if all(row.expansion.is_plain for row in rows if row.is_decoding):
            return growth.grow(growers, rows, *rest)
        ways = (by_library, by_rounds) if len(pairs) % 2 else (by_rounds, by_library)
        found = {way: way(growers, rows, *rest) for way in ways}
        pairs.append((found[by_library], found[by_rounds]))
        return found[ways[-1]]

    monkeypatch.setattr(stepping, "start_growth", both)
    run(engine, crowd())
    return pairs


@pytest.mark.parametrize("with_texts", [False, True])
def test_the_library_grows_the_same_trees(monkeypatch, with_texts):
    pairs = grown_both_ways(monkeypatch, engine_of(with_texts))
    assert all(are_same(*pair) for pair in pairs)
    trees = [tree for one, _ in pairs for tree in one.forest.trees]
    sources = {source for one, _ in pairs for of_tree in one.sources for source in of_tree}
    assert len(pairs) > 10
    assert {*range(6)} <= {max(tree.depths) for tree in trees}, "of every depth"
    assert any(len(children) > 2 for tree in trees for children in tree.children), "branching"
    assert any(one.fed[b] < {*range(tree.num_nodes)} for one, _ in pairs for b, tree in enumerate(one.forest.trees)), "leaves"
    if with_texts:
        assert sources == {DraftSource.MODEL, DraftSource.CACHE, DraftSource.PREDICTION}
        assert any(token_id % 7 == 0 for tree in trees for token_id in tree.token_ids[1:]), "which the head does not know"
        fed = [fed for one, _ in pairs for fed, tree in zip(one.fed, one.forest.trees, strict=True) if tree.num_nodes > 1]
        assert any(0 not in one for one in fed), "roots without a head pass"


@pytest.mark.parametrize(("config", "precision"), [(CRAMPED, "float32"), (CRAMPED, "int8"), (ROOMY, "int8"), (ROOMY, "compact")])
def test_trees_are_equal_at_any_precision(monkeypatch, config, precision):
    pairs = grown_both_ways(monkeypatch, engine_of(True, config, precision))
    assert all(are_same(*pair) for pair in pairs)


@pytest.mark.parametrize("with_texts", [False, True])
@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_drafting_changes_no_token(config, with_texts):
    session = run(engine_of(with_texts, config), crowd())
    assert session.texts() == plain_texts()
    assert any(stats.num_preemptions for stats in session.stats) == (config is CRAMPED)
    assert sum(stats.num_accepted_tokens for stats in session.stats) > 20


def without_noise(row):
    return row._replace(has_noise=False)


def at_no_cost(row):
    return row._replace(least_chances=[0.0] * row.max_nodes, level_cost=0.0)


def of_another_prior(row):
    return row._replace(continued=30.0)


def of_another_scale(row):
    return row._replace(scale=3.0 * row.scale)


def of_another_sharpness(row):
    return row._replace(sharpness=3.0 * row.sharpness)


def of_another_temperature(row):
    return row._replace(temperature=3.0 * row.temperature)


def without_top_k(row):
    return row._replace(truncation=row.truncation._replace(top_k=0))


def without_top_p(row):
    return row._replace(truncation=row.truncation._replace(top_p=1.0))


def without_min_p(row):
    return row._replace(truncation=row.truncation._replace(min_p=0.0))


def of_no_shares(row):
    return row._replace(shares=[[1.0] * 9] * 2)


def of_the_other_s_shares(row):
    return row._replace(shares=row.shares[::-1])


native_row = native_growth._native_row


def of_no_least_chance(row):
    return row._replace(least_chances=[0.0 if least == 0.1 else least for least in row.least_chances])


def of_the_first_node_s_cost(row):
    return row._replace(least_chances=row.least_chances[:1] * row.max_nodes)


MUTANTS = [
    of_no_least_chance,
    of_the_first_node_s_cost,
    without_noise,
    at_no_cost,
    of_another_prior,
    of_another_scale,
    of_another_sharpness,
    of_another_temperature,
    without_top_k,
    without_top_p,
    without_min_p,
    of_no_shares,
    of_the_other_s_shares,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_trees_of_other_rows_are_noticed(monkeypatch, mutant):
    monkeypatch.setattr(native_growth, "_native_row", lambda *args: mutant(native_row(*args)))
    assert not all(are_same(*pair) for pair in grown_both_ways(monkeypatch, engine_of(with_texts=True)))


TEXT_MUTANTS: dict[str, Callable[[library.RequestTextsStructure], dict[str, Any]]] = {
    "nothing sure": lambda own: {"sure": 1.0},
    "no prompt": lambda own: {"prompt": None},
    "no prediction": lambda own: {"prediction": None},
    "the text before": lambda own: {"num_tokens": own.num_tokens - 1},
    "longer matches": lambda own: {"least": own.least + 1},
}


@pytest.mark.parametrize("mutant", TEXT_MUTANTS.values(), ids=TEXT_MUTANTS)
def test_trees_of_other_texts_are_noticed(monkeypatch, mutant):
    def of_other_texts(*args):
        row = native_row(*args)
        assert row.texts is not None
        other = copy(row.texts)
        other.structure = library.RequestTextsStructure.from_buffer_copy(row.texts.structure)
        for name, value in mutant(other.structure).items():
            setattr(other.structure, name, value)
        return row._replace(texts=other)

    monkeypatch.setattr(native_growth, "_native_row", of_other_texts)
    assert not all(are_same(*pair) for pair in grown_both_ways(monkeypatch, engine_of(with_texts=True)))


OTHERS = {
    "typical_p": sampled("x", LONG, 3, 12, typical_p=0.8),
    "penalty": sampled("x", LONG, 3, 12, repetition_penalty=1.2),
    "bias": sampled("x", LONG, 3, 12, logit_bias=((9, 2.0),)),
    "beam": greedy("x", LONG, 12, expansion=Expansion(0, 3, 5, "beam", 8)),
    "drawn": sampled("x", LONG, 3, 12, verifier="traversal"),
    "drawn chain": Request("x", tuple(LONG), SamplingParams(seed=3, max_tokens=12), Speculation(verifier="traversal")),
}


class Mixed:
    """A policy that has ranked trees grown for all but one row, which gets what its verifier is exact on."""

    name = "mixed"

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        drawn = {"traversal": Expansion(2, 1, 0)}
        return ExpansionChoice(tuple(drawn.get(view.verifier, TREES[0]) for view in views))

    def observe(self, feedback: StepFeedback) -> None:
        pass


def of_other_parents(tree, candidates):
    return honest_draft_probs(tree, {node: candidates[next(iter(candidates))] for node in candidates})


honest_draft_probs = native_growth._draft_probs


@pytest.mark.parametrize("with_texts", [False, True])
def test_traced_rows_report_the_same_probabilities(monkeypatch, with_texts):
    """The bug: a traced request grew its trees round by round in Python, at a lower speed."""
    traced = [replace(one, speculation=replace(one.speculation, is_traced=True)) for one in crowd()]
    monkeypatch.setitem(globals(), "crowd", lambda: traced)
    pairs = grown_both_ways(monkeypatch, engine_of(with_texts))
    assert all(are_same(*pair) for pair in pairs)
    reported = [probs for one, _ in pairs for probs in one.draft_probs]
    assert max(map(len, reported)) > 4
    assert not any(math.isnan(prob) for probs in reported for prob in probs)
    monkeypatch.setattr(native_growth, "_draft_probs", of_other_parents)
    assert not all(are_same(*pair) for pair in grown_both_ways(monkeypatch, engine_of(with_texts)))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_unsupported_row_keeps_step_off_the_library(monkeypatch, other):
    """An edited row, one with typical-p, one that draws: alone and beside rows that rank."""
    batches: list[Sequence[Row]] = []

    grow = native_growth.NativeTreeGrower.grow

    def noted(grower, rows, *rest):
        batches.append(rows)
        return grow(grower, rows, *rest)

    monkeypatch.setattr(native_growth.NativeTreeGrower, "grow", noted)
    for beside in ([], [greedy("a", LONG, 12), sampled("b", LONG[2:], 5, 12)]):
        session = run(engine_of(with_texts=True, policy=Mixed()), [*beside, other])
        assert all(outcome.finish is not FinishReason.ERROR for outcome in session.outcomes.values())
        grown_with_other = [rows for rows in batches if any(row.request_id == "x" and not row.expansion.is_plain for row in rows)]
        assert not grown_with_other
    assert batches, "steps that the other has left"


def test_library_grows_only_its_own_heads():
    target = native("llama")
    heads = {
        "torch": HeadDrafter("head", learnt_head(), target, 64),
        "watched": HeadDrafter("head", learnt_head(), target, 64, NATIVE, canary=SlotCanary()),
        "library": HeadDrafter("head", learnt_head(), target, 64, NATIVE),
    }
    assert [name for name, head in heads.items() if head.native_grower() is not None] == ["library"]
    both = {name: CombinedDrafter(head, TextCache(), target.vocab_size, CPU) for name, head in heads.items()}
    assert [name for name, drafter in both.items() if drafter.native_grower() is not None] == ["library"]
    assert CombinedDrafter(model_drafter(), TextCache(), 61, CPU).native_grower() is None


def model_drafter() -> ModelDrafter:
    return ModelDrafter("tiny", pair("llama")[1], KVCache(64, CPU), Feeding.OWN_CACHE)


def test_more_tokens_than_are_compared(monkeypatch):
    """A vocabulary of hundreds: the best 64 probabilities are kept, and the rest are 0. Truncated rows have fewer."""
    target = adopt(tiny_module(vocab_size=300), CPU, NATIVE)
    head = HeadDrafter("head", random_head(vocab_size=300), target, ROOMY.num_slots, NATIVE)
    engine = tiny_engine(target, head, Changing(), config=ROOMY)
    engine.target.report_to(head)
    pairs = grown_both_ways(monkeypatch, engine)
    assert all(are_same(*pair) for pair in pairs)
    counts = {len(candidates.token_ids) for one, _ in pairs for by_node in one.candidates for candidates in by_node.values()}
    assert max(counts) == 64


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63, 2**64 - 1])
def test_noise_is_that_of_the_position(monkeypatch, seed):
    """Seeds of all 64 bits name the same noise in the library as in engine.core.rng_keys."""
    monkeypatch.setattr("tests.model.draft.test_native_growth.crowd", lambda: [sampled("a", LONG, seed, 12, temperature=1.5)])
    assert all(are_same(*pair) for pair in grown_both_ways(monkeypatch, engine_of(with_texts=False)))
