"""Ranked trees grown by the library are those that grow round by round: the same trees, slots, sources, rounds and lessons."""

from collections.abc import Callable, Sequence

import pytest

from engine import engine as stepping
from engine.config import SchedulerConfig
from engine.draft import growth, ranked
from engine.draft.combined import CombinedDrafter
from engine.draft.grown import Growth
from engine.draft.head_drafter import HeadDrafter
from engine.draft.texts import TextCache
from engine.engine import Engine
from engine.linears import NATIVE
from engine.native.growth import Growing
from engine.policy import Choice, SequenceView, StepFeedback
from engine.testing import tiny_engine
from engine.tree import FREE_GROWTH, PLAIN, Expansion, GrowthPrices
from engine.types import DraftSource, Request, SamplingParams, Speculation
from tests.model.driving import greedy, run, sampled
from tests.model.heads import learnt_head
from tests.model.native import native, needs_library
from tests.model.passes import CPU

pytestmark = needs_library

LONG = [3 + (11 * i) % 7 for i in range(19)]
TREES = [
    Expansion(0, 2, 3, "noise_aware", 4),
    Expansion(0, 4, 5, "noise_aware", 9),
    PLAIN,
    Expansion(0, 1, 6, "noise_aware", 6),
    Expansion(0, 5, 2, "noise_aware", 20),
]


class Changing:
    """A policy that gives every sequence another tree at every step, at prices that end some of them early."""

    name = "changing"

    def __init__(self) -> None:
        self._step = 0

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        self._step += 1
        trees = tuple(TREES[(self._step + place) % len(TREES)] for place in range(len(views)))
        return Choice(trees, prices=GrowthPrices(0.05, 0.25) if self._step % 3 == 0 else FREE_GROWTH)

    def observe(self, feedback: StepFeedback) -> None:
        pass


def engine_of(with_texts: bool) -> Engine:
    """Return an engine whose library drafts with a head, with cached text beside it."""
    target, config = native("llama"), SchedulerConfig(num_slots=2048, max_model_len=256)
    head = HeadDrafter("head", learnt_head(), target, config.num_slots, NATIVE)
    drafter = CombinedDrafter(head, TextCache(min_tokens=1), target.vocab_size, CPU) if with_texts else head
    engine = tiny_engine(target, drafter, Changing(), config=config)
    engine.target.report_to(head)
    return engine


def crowd() -> list[Request]:
    """Greedy and seeded requests, some of whose texts repeat or are predicted, with tokens that the head does not know."""
    predicted = Request(
        *("predicted", tuple(LONG), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), Speculation()),
        prediction_ids=(7, 14, 21, *LONG, 48, 9, 9, 9),
    )
    seeded = [sampled(str(row), LONG[row:] * 2, row, 20, temperature=0.4 + 0.3 * row) for row in range(4)]
    return [greedy("greedy", LONG * 2, 24), *seeded, predicted, greedy("other", [7, 14, 21, 28, 35] * 6, 24)]


Compare = Callable[[Growth, Growth], bool]


def are_same(one: Growth, other: Growth) -> bool:
    """Return whether two growths are equal; scores up to rounding."""
    facts, others = (
        (g.forest.trees, g.forest.law_rows, g.fed, g.sources, g.rounds, g.num_rounds, g.passes, g.draft_probs)
        for g in (one, other)
    )
    return facts == others and all(
        {*a} == {*b} and all(a[v].token_ids == b[v].token_ids and a[v].scores == pytest.approx(b[v].scores, abs=1e-5) for v in a)
        for a, b in zip(one.offers, other.offers, strict=True)
    )


def grown_both_ways(monkeypatch, with_texts: bool) -> list[tuple[Growth, Growth]]:
    """Run a crowd; return what each step's trees are by the library and round by round, from the same state."""
    pairs = []

    def both(drafter, rows, *rest):
        found = growth.grow(drafter, rows, *rest)
        if any(row.is_decoding and not row.expansion.is_plain for row in rows):
            with monkeypatch.context() as patched:
                patched.setattr(growth, "can_rank", lambda rows: False)
                pairs.append((found, growth.grow(drafter, rows, *rest)))
        return found

    monkeypatch.setattr(stepping, "grow", both)
    run(engine_of(with_texts), crowd())
    return pairs


@pytest.mark.parametrize("with_texts", [False, True])
def test_the_library_grows_the_same_trees(monkeypatch, with_texts):
    pairs = grown_both_ways(monkeypatch, with_texts)
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
        assert any(0 not in one for one in fed), "roots about which the head is not asked"


def without_noise(row, scale):
    honest = ranked_row(row, scale)
    return type(honest)(**{name: getattr(honest, name) for name in honest.__slots__} | {"has_noise": False})


def at_no_price(row, scale):
    honest = ranked_row(row, scale)
    return type(honest)(**{name: getattr(honest, name) for name in honest.__slots__} | {"node_price": 0.0, "level_price": 0.0})


def of_another_scale(row, scale):
    return ranked_row(row, 3.0 * scale)


ranked_row = ranked._ranked


@pytest.mark.parametrize("mutant", [without_noise, at_no_price, of_another_scale])
def test_trees_of_other_rows_are_noticed(monkeypatch, mutant):
    monkeypatch.setattr(ranked, "_ranked", mutant)
    assert not all(are_same(*pair) for pair in grown_both_ways(monkeypatch, with_texts=False))


def unknown_share_a_column(self, law, unknown):
    columns = self._vocab.columns(law.odds)
    unknown[:] = unknown or [token_id for token_id, column in zip(law.odds, columns, strict=True) if column < 0][:1]
    return [len(self._vocab.ids_M) if column < 0 else column for column in columns]


def nothing_is_sure(self, told, is_sure, unknown):
    return honest_round(self, told, [False] * len(is_sure), unknown)


honest_round = Growing.round


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(ranked._Texts, "_columns", unknown_share_a_column), (Growing, "round", nothing_is_sure)],
)
def test_texts_that_are_told_wrongly_are_noticed(monkeypatch, where, name, mutant):
    monkeypatch.setattr(where, name, mutant)
    assert not all(are_same(*pair) for pair in grown_both_ways(monkeypatch, with_texts=True))


def test_rows_that_need_more_than_a_temperature_grow_round_by_round(monkeypatch):
    """A traced row, an edited one, a truncated one, another tree: each keeps all of its step from the library."""
    asked: list[object] = []

    def noted(*args):
        asked.append(args)
        return ranked.grow_ranked(*args)

    monkeypatch.setattr(growth, "grow_ranked", noted)
    run(engine_of(with_texts=True), [sampled("a", LONG, 3, 12, top_p=0.9)])
    run(engine_of(with_texts=True), [sampled("a", LONG, 3, 12, min_p=0.1)])
    run(engine_of(with_texts=True), [sampled("a", LONG, 3, 12, repetition_penalty=1.2)])
    traced = greedy("a", LONG, 12, is_traced=True)
    run(engine_of(with_texts=True), [traced])
    run(engine_of(with_texts=True), [greedy("a", LONG, 12, expansion=Expansion(0, 3, 5, "beam", 8))])
    assert not asked
    run(engine_of(with_texts=True), [greedy("a", LONG, 12)])
    assert asked
