"""Cached text and a model in one tree: no sequence and no distribution changes. The model runs only where the cache is unsure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.core.policy import FixedExpansion
from engine.core.step_plan import Feeding, Row
from engine.core.tree import ROOT, Expansion, TreeKind, parse_expansion
from engine.core.types import DraftSource, Request, SamplingParams, Speculation
from engine.draft import text_and_model as combined
from engine.draft.drafter import Drafter, FrontierNode, Proposal
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.text import text_cache as texts_module
from engine.draft.text.matching import SURE_CONFIDENCE, CachedDistribution
from engine.draft.text.recent_texts import RecentLimits
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.draft.text_and_model import CombinedDrafter
from engine.draft.trees import sampling as children
from engine.draft.trees.calibration import Reliability
from engine.draft.trees.grow import grow, growers_of
from engine.draft.trees.grower import Growth
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.native import mixture as native
from engine.testing import tiny_engine
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.driving import give_drafter, greedy, run, sampled
from tests.model.engine import test_engine_distributions
from tests.model.engine.test_engine_distributions import PROMPT, SAMPLING, WIDE, target_distribution
from tests.model.heads import head_engine, learnt_head
from tests.model.kv_cache.test_kv_cache import EXACT, RandomExpansion, cache_error
from tests.model.passes import CPU
from tests.model.rows import TableDrafter, decoding_row
from tests.model.tiny import model, own_greedy_text, pair

LONG = [3 + (11 * i) % 7 for i in range(19)]
CHAIN = Expansion(6, 1, 0)


class Counting:
    """A drafter that counts its passes and asserts that the parents of fed tokens were fed before."""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.feeding = drafter.name, drafter.feeding
        self.drafter = drafter
        self.num_passes = 0

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        assert all(row.draft_ids for row in rows)
        self.num_passes += 1
        return self.drafter.feed(rows, roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        self.num_passes += 1
        begun = {(id(place.tree), node) for place in frontier for node in place.tree.fed}
        for place in frontier:
            above = [(id(place.tree), node) for node in place.tree.path(place.node)[:-1]]
            assert begun.issuperset(above), "a node is fed after its ancestors"
            if self.feeding is Feeding.TARGET_FEATURES:
                assert place.tree.parents[place.node] in place.tree.fed, "the state of a node's parent is there"
            begun.add((id(place.tree), place.node))
        return self.drafter.extend(frontier)


def engine_of(policy, feeding: Feeding = Feeding.OWN_CACHE, texts: TextCache | None = None) -> tuple[Engine, Counting]:
    """Return an engine that drafts with a model and cached text, and the model's drafter."""
    target, draft = pair("llama")
    inner = Counting(ModelDrafter("tiny", draft, KVCache(2048, CPU), feeding))
    return tiny_engine(target, CombinedDrafter(inner, texts or TextCache(min_tokens=1), 61, CPU), policy), inner


@pytest.mark.parametrize(
    "expansion", [CHAIN, Expansion(1, 2, 3), Expansion(0, 3, 5, "heap", 8), Expansion(0, 3, 5, "beam", 8)], ids=str
)
def test_prediction_right_or_wrong_changes_no_token(expansion):
    """Half right predictions make trunks of cached text that are left for the model, and the other way round."""
    text = own_greedy_text("llama", LONG, 24)
    predictions = [tuple(text), (*text[:9], 5, 5, *text[9:]), tuple(text[5:12]), (7, 8, 9)]
    engine, _ = engine_of(FixedExpansion(expansion))
    requests = [replace(greedy(str(i), LONG, 24), prediction_ids=ids) for i, ids in enumerate(predictions)]
    seeded = sampled("seeded", LONG, seed=5, temperature=0.7)
    plain = run(tiny_engine(model("llama")), [seeded]).outcomes["seeded"].ids
    outcomes = run(engine, [*requests, replace(seeded, prediction_ids=tuple(plain[:8]))]).outcomes
    assert [outcomes[str(i)].ids for i in range(len(predictions))] == [text] * len(predictions)
    assert outcomes["seeded"].ids == plain


def test_draft_cache_stays_right_after_late_feeding():
    engine, inner = engine_of(RandomExpansion(1))
    errors: list[float] = []
    drafter = inner.drafter
    assert isinstance(drafter, ModelDrafter)

    def look(engine: Engine) -> None:
        for sequence in engine._scheduler._by_id.values():
            ids = sequence.token_ids[: sequence.draft_len]
            errors.append(cache_error(drafter._model, drafter._cache, ids, sequence.slots[: sequence.draft_len]))

    text = own_greedy_text("llama", LONG, 30)
    requests = [replace(greedy(str(i), LONG, 30), prediction_ids=tuple(text[:end])) for i, end in enumerate((30, 12, 20))]
    run(engine, requests, look)
    assert max(errors) < EXACT


@pytest.mark.parametrize("tree", ["2.2.2", "heap.8", "beam.8"])
def test_head_with_cached_text_changes_no_token(tree):
    """Committed tokens are fed with features as they come, whatever is drafted from; nothing below a cached node is fed."""
    engine = head_engine(learnt_head(), policy=FixedExpansion(parse_expansion(tree)))
    assert engine.drafter is not None
    drafter = CombinedDrafter(Counting(engine.drafter), TextCache(), 61, CPU)
    give_drafter(engine, drafter)
    prompt = [5 + (7 + 3 * i) % 50 for i in range(13)]
    text = own_greedy_text("llama", prompt, 24)
    predictions = [(), tuple(text), (*text[:9], 5, 5, *text[9:]), tuple(text[5:12])]
    seeded = sampled("seeded", prompt, seed=5, max_tokens=24)
    plain = run(tiny_engine(model("llama")), [seeded]).outcomes["seeded"].ids
    requests = [replace(greedy(str(i), prompt, 24), prediction_ids=ids) for i, ids in enumerate(predictions)]
    session = run(engine, [*requests, replace(seeded, prediction_ids=tuple(plain[:8]))])
    assert [session.outcomes[str(i)].ids for i in range(len(predictions))] == [text] * len(predictions)
    assert session.outcomes["seeded"].ids == plain
    accepted = sum((Counter(stats.accepted_by_source) for stats in session.stats), Counter())
    assert set(accepted) >= {DraftSource.MODEL, DraftSource.PREDICTION}


def num_passes(prediction_ids: Sequence[int], feeding: Feeding = Feeding.OWN_CACHE) -> tuple[int, int]:
    """Return passes of the model and steps of a request with this prediction."""
    engine, inner = engine_of(FixedExpansion(CHAIN), feeding, TextCache(has_own_texts=False))
    session = run(engine, [replace(greedy("r", LONG, 60), prediction_ids=tuple(prediction_ids))])
    return inner.num_passes, len(session.stats)


def test_predicted_text_needs_few_model_passes():
    text = own_greedy_text("llama", LONG, 60)
    (without, _), (with_it, num_steps) = num_passes(()), num_passes(text)
    assert with_it < num_steps
    assert with_it < without / 2


def first_step(sampling: dict[str, Any]) -> tuple[list[int], int, int]:
    """Return the text of a greedy request whose plain text is its prediction, and its first step's drafted and predicted."""
    text = own_greedy_text("llama", LONG, 12)
    request = replace(greedy("r", LONG, 12), prediction_ids=tuple(text))
    engine, _ = engine_of(FixedExpansion(CHAIN), texts=TextCache(has_own_texts=False))
    outcome = run(engine, [replace(request, sampling=replace(request.sampling, **sampling))]).outcomes["r"]
    return outcome.ids, outcome.events[0].num_draft_tokens, outcome.events[0].num_predicted_tokens


def test_forbidden_predicted_token_is_drafted_by_model():
    """The bug: the cache was sure of the token, so the model did not run.

    The forbidden token was then removed without a replacement.
    """
    forbidden: dict[str, Any] = {"logit_bias": ((own_greedy_text("llama", LONG, 1)[0], -100.0),)}
    request = greedy("r", LONG, 12)
    plain = run(tiny_engine(model("llama")), [replace(request, sampling=replace(request.sampling, **forbidden))])
    assert first_step({})[1:] == (6, 6)
    text, num_drafted, num_predicted = first_step(forbidden)
    assert text == plain.outcomes["r"].ids
    assert num_drafted == 6
    assert num_predicted < 6


def test_forbidden_tokens_detect_unmasked_cache(monkeypatch):
    monkeypatch.setattr(texts_module, "may_suppress", lambda sampling, token_ids, num_generated: False)
    with pytest.raises(AssertionError):
        test_forbidden_predicted_token_is_drafted_by_model()


class Stateful(TableDrafter):
    """A drafter that reads its parent's state: it can be fed a level at a time and no otherwise."""

    feeding = Feeding.TARGET_FEATURES


class CacheByLength(TextCache):
    """A cache whose match depends on the sequence's length only: by length, a distribution and its chance."""

    def __init__(self, by_length: dict[int, tuple[dict[int, float], float]]) -> None:
        super().__init__()
        self._by_length = by_length

    def distribution_after(self, row: Row, path_ids: Sequence[int]) -> CachedDistribution | None:
        found = self._by_length.get(len(path_ids))
        return None if found is None else CachedDistribution(found[0], found[1], frozenset({3}), found[1] >= SURE_CONFIDENCE)


TABLE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
SURE_OF_3 = ({3: 1.0}, 0.95)


def grown(texts: TextCache, expansion: Expansion, stateful: bool = False, num_seeds: int = 1) -> tuple[Growth, Counting]:
    inner = Counting((Stateful if stateful else TableDrafter)(TABLE.log()))
    inner.feeding = Feeding.TARGET_FEATURES if stateful else Feeding.OWN_CACHE
    rows = [decoding_row((1, 0), expansion, seed=seed, request_id=str(seed), verifier="rrsw") for seed in range(num_seeds)]
    return grow(growers_of(CombinedDrafter(inner, texts, 4, CPU), 4, CPU), rows), inner


def test_node_below_cached_trunk_feeds_the_trunk():
    growth, inner = grown(CacheByLength({0: SURE_OF_3, 1: SURE_OF_3, 2: SURE_OF_3}), Expansion(4, 1, 0))
    assert growth.forest.trees[0].token_ids[:4] == (0, 3, 3, 3)
    assert growth.fed[0] == {0, 1, 2, 3}
    assert inner.num_passes == 2  # the sequence, then the trunk with the node that needs the model
    assert growth.sources[0] == (DraftSource.PREDICTION,) * 3 + (DraftSource.MODEL,)


def test_cached_tree_defers_all_passes():
    growth, inner = grown(CacheByLength(dict.fromkeys(range(4), SURE_OF_3)), Expansion(4, 1, 0))
    assert (inner.num_passes, growth.fed) == (0, (frozenset(),))


def test_state_reading_drafter_avoids_cached_paths():
    unsure = ({1: 1.0}, 0.3)
    growth, inner = grown(CacheByLength({0: SURE_OF_3, 1: unsure}), Expansion(4, 1, 0), stateful=True)
    assert growth.forest.trees[0].token_ids == (0, 3, 1)
    assert (inner.num_passes, growth.fed) == (1, (frozenset(),))  # the text is fed: it does not come again with features
    growth, inner = grown(CacheByLength({1: SURE_OF_3}), Expansion(4, 1, 0), stateful=True)
    assert growth.forest.trees[0].num_nodes == 3


def test_deferred_tokens_are_bounded(monkeypatch):
    monkeypatch.setattr(combined, "_MAX_DEFERRED", 5)
    growth, inner = grown(CacheByLength({0: SURE_OF_3}), Expansion(1, 1, 0), num_seeds=4)
    assert inner.num_passes == 1
    assert [len(fed) for fed in growth.fed] == [0, 0, 1, 1]


MIXED = CacheByLength({0: ({0: 0.25, 2: 0.75}, 0.6)})


def mixture() -> torch.Tensor:
    """Return the distribution at a node where the cache is unsure. Each side's weight is its odds to be right."""
    trust = float((TABLE[0] ** 2).sum())
    odds_cached, odds_model = 0.6 / 0.4, trust / (1 - trust)
    weight = odds_cached / (odds_cached + odds_model)
    return weight * torch.tensor([0.25, 0.0, 0.75, 0.0]) + (1 - weight) * TABLE[0]


def test_mixture_of_distributions_is_the_kept_distribution():
    growth, inner = grown(MIXED, Expansion(1, 1, 0))
    assert growth.forest.draft_probs_RV[0].tolist() == pytest.approx(mixture().tolist())
    assert (inner.num_passes, growth.fed) == (1, (frozenset({ROOT}),))


def first_draws(num_seeds: int = 4000) -> Counter[tuple[int]]:
    growth, _ = grown(MIXED, Expansion(1, 1, 0), num_seeds=num_seeds)
    return Counter((tree.token_ids[1],) for tree in growth.forest.trees)


def test_draws_are_of_the_mixture():
    distribution = {(token_id,): float(p) for token_id, p in enumerate(mixture())}
    assert z_of_counts(first_draws(), distribution) < PASSES_BELOW


def weight_chosen_after_the_draw(*args):
    """The mutant: label a drawn token as cached if the cache knows it. The kept distribution is then not the drawn one."""
    offers = _DRAWN(*args)
    known = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return [replace(offer, token_ids=tuple(i if known[i] else 2 for i in offer.token_ids)) for offer in offers]


_DRAWN = children._sample_iid


def test_draws_detect_weight_chosen_after_drawing(monkeypatch):
    monkeypatch.setitem(children._SAMPLING_RULES, TreeKind.PATH, weight_chosen_after_the_draw)
    distribution = {(token_id,): float(p) for token_id, p in enumerate(mixture())}
    assert z_of_counts(first_draws(), distribution) > FAILS_ABOVE


NUM_REQUESTS = 700


def triples(verifier: str, expansion: Expansion) -> Counter[tuple[int, ...]]:
    """Return how often each first three tokens came; predictions are likely texts, some of them the request's own plain one."""
    distribution = target_distribution()
    likely = sorted(distribution, key=lambda text: -distribution[text])[:7]
    requests = [
        Request(
            str(index),
            PROMPT,
            replace(SAMPLING, seed=9000 + index),
            speculation=replace(sampled("", (), 0).speculation, verifier=verifier),
            prediction_ids=likely[index % len(likely)],
        )
        for index in range(NUM_REQUESTS)
    ]
    target, draft = pair("llama", noise=0.1)
    inner = ModelDrafter("tiny", draft, KVCache(WIDE.num_slots, CPU), Feeding.OWN_CACHE)
    drafter = CombinedDrafter(inner, TextCache(min_tokens=1), 61, CPU)
    session = run(tiny_engine(target, drafter, FixedExpansion(expansion), config=WIDE), requests)
    by_source = sum((Counter(stats.accepted_by_source) for stats in session.stats), Counter())
    assert min(by_source[DraftSource.MODEL], by_source[DraftSource.PREDICTION]) > NUM_REQUESTS / 20
    return Counter(tuple(outcome.ids[:3]) for outcome in session.outcomes.values())


LAWFUL = [
    ("traversal", test_engine_distributions.DELAYED),
    ("rrsw", test_engine_distributions.DISTINCT[1]),
    ("coupled", test_engine_distributions.DELAYED),
]


@pytest.mark.parametrize(("verifier", "expansion"), LAWFUL)
def test_combined_drafts_keep_the_targets_distribution(verifier, expansion):
    assert z_of_counts(triples(verifier, expansion), target_distribution()) < PASSES_BELOW


def test_distribution_detects_wrong_kept_mixture(monkeypatch):
    test_engine_distributions.misreport_draft_probs(monkeypatch)
    assert z_of_counts(triples(*LAWFUL[0]), target_distribution()) > FAILS_ABOVE


def predicted(prediction: Sequence[int], num_tokens: int = 20) -> tuple[int, int, int]:
    """Return predicted tokens drafted and accepted, and all tokens, of a greedy request."""
    policy = FixedExpansion(Expansion(4, 1, 0))
    engine = tiny_engine(model("llama"), TextDrafter(61, CPU, TextCache(min_tokens=1, has_own_texts=False)), policy)
    events = run(engine, [replace(greedy("r", LONG, num_tokens), prediction_ids=tuple(prediction))]).outcomes["r"].events
    for event in events:
        assert len(event.predicted_places) <= event.num_accepted_tokens <= event.num_draft_tokens
        assert event.num_predicted_tokens == event.num_draft_tokens
    return (
        sum(event.num_predicted_tokens for event in events),
        sum(len(event.predicted_places) for event in events),
        sum(len(event.token_ids) for event in events),
    )


def test_predicted_tokens_are_counted_drafted_and_accepted():
    text = own_greedy_text("llama", LONG, 20)
    assert predicted(text) == (16, 16, 20)  # four steps of four drafts and an extra token each
    assert predicted(()) == (0, 0, 20)
    wrong = [token_id + 1 if token_id < 60 else 3 for token_id in text]
    drafted, accepted, _ = predicted(wrong)
    assert drafted > accepted
    off_by_one = [*text[:7], text[7] + 1 if text[7] < 60 else 3, *text[8:]]
    drafted, accepted, _ = predicted(off_by_one)
    assert 8 < accepted < drafted < 24


class Trusting:
    """A drafter of maximal certainty: its likeliest token has nearly all probability."""

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.feeding, self._drafter = drafter.name, drafter.feeding, drafter

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        return self._sharp(self._drafter.feed(rows, roots))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        return self._sharp(self._drafter.extend(frontier))

    def _sharp(self, proposal: Proposal) -> Proposal:
        return replace(proposal, logits_PM=100.0 * proposal.logits_PM)


@pytest.mark.parametrize("expansion", [CHAIN, parse_expansion("noise_aware.8.5.4")], ids=str)
@pytest.mark.parametrize("by_library", [True, False])
def test_predicted_tokens_keep_their_source(by_library, expansion, monkeypatch):
    """A penalty without effect makes the model run everywhere, because it might change a predicted token.

    Their chances are corrected, and their outcomes learnt, like those of the model's tokens.
    """
    if not by_library:
        monkeypatch.setattr(native, "can_mix", lambda device: False)
    corrected: list[bool] = []
    learnt: list[bool] = []
    own = Reliability.corrected

    def noted(self, chance, is_cached):
        corrected.append(is_cached)
        return own(self, chance, is_cached)

    monkeypatch.setattr(Reliability, "corrected", noted)
    monkeypatch.setattr(Reliability, "observe", lambda self, chance, is_cached, came: learnt.append(is_cached and came))
    target, _ = pair("llama")
    text = own_greedy_text("llama", LONG, 30)
    perfect = Trusting(ModelDrafter("own", target, KVCache(2048, CPU), Feeding.OWN_CACHE))
    engine = tiny_engine(target, CombinedDrafter(perfect, TextCache(min_tokens=1), 61, CPU), FixedExpansion(expansion))
    sampling = SamplingParams(0.0, max_tokens=30, frequency_penalty=1e-6)
    outcome = run(engine, [Request("r", tuple(LONG), sampling, Speculation(), tuple(text))]).outcomes["r"]
    assert outcome.ids == text
    num_accepted = sum(event.num_accepted_tokens for event in outcome.events)
    assert num_accepted > 20
    assert sum(len(event.predicted_places) for event in outcome.events) == num_accepted
    assert not any(learnt)
    assert sum(corrected) < num_accepted  # of other branches some are rather cached
    assert bool(learnt) == bool(corrected) == (expansion is not CHAIN)


def test_steps_count_tokens_by_source():
    text = own_greedy_text("llama", LONG, 30)
    engine, _ = engine_of(FixedExpansion(Expansion(1, 2, 2)))
    stats = run(engine, [replace(greedy("r", LONG, 30), prediction_ids=tuple(text[:10]))]).stats
    for one in stats:
        assert sum(one.drafted_by_source.values()) == one.num_draft_tokens
        assert sum(one.accepted_by_source.values()) == one.num_accepted_tokens
    sources = Counter(source for one in stats for source in one.accepted_by_source)
    assert set(sources) >= {DraftSource.PREDICTION, DraftSource.MODEL}


def test_tenant_outputs_speed_up_own_requests_only():
    def num_steps(second_tenant: str) -> int:
        drafter = TextDrafter(61, CPU, TextCache(2, RecentLimits(100)))
        engine, prompt = tiny_engine(model("llama"), drafter, FixedExpansion(CHAIN)), (5, 9, 33, 4)
        run(engine, [replace(greedy("0", prompt, 30), tenant="mine")])
        return len(run(engine, [replace(greedy("1", prompt, 30), tenant=second_tenant)]).stats)

    mine, others, without = (num_steps(tenant) for tenant in ("mine", "other", ""))
    assert mine < others == without
