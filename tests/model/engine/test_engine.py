"""Golden equality: greedy text is `generate`'s, seeded text plain decoding's, whatever drafts, in whatever batch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionChoice, FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Feeding
from engine.core.tree import DELAYED_TREES, PLAIN, TREE_NAMES, Expansion, GrowthCosts
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import Lens, early_exit_drafter
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.draft.text_and_model import CombinedDrafter
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.sampling.noise import gumbels
from engine.scheduler.scheduler import Scheduler
from engine.testing import FAMILIES, tiny_engine
from engine.verify import coupled
from engine.verify import dispatch as judge
from engine.verify.verdict import Verdict
from tests.model.distributions import probs_of
from tests.model.driving import give_drafter, greedy, run, sampled
from tests.model.passes import CPU
from tests.model.tiny import model, own_greedy_text, own_logits, pair
from tests.strategies import any_expansions, expansions, growth_costs

BEAM, HEAP = Expansion(0, 3, 4, "beam", 7), Expansion(0, 3, 4, "heap", 7)
EXPANSIONS = [PLAIN, Expansion(4, 1, 0), Expansion(0, 3, 2), Expansion(2, 2, 2), Expansion(1, 4, 1), BEAM, HEAP]
DRAFTERS = ["none", "model", "ngram", "early exit", "model and text"]
TIGHT = SchedulerConfig(max_running=6, max_step_tokens=20, num_slots=90, max_model_len=64)
LONG = [3 + (11 * i) % 7 for i in range(19)]  # repeats itself, so that look-ups find something


def engine_of(family: str, drafter: str, expansion: Expansion = PLAIN, config: SchedulerConfig | None = None) -> Engine:
    policy = FixedExpansion(expansion)
    if drafter == "model":
        return tiny_engine(*pair(family), policy, config=config)
    if drafter == "model and text":
        target, draft = pair(family)
        cache = KVCache((config or SchedulerConfig(num_slots=2048)).num_slots, CPU)
        combined = CombinedDrafter(ModelDrafter("tiny", draft, cache, Feeding.OWN_CACHE), TextCache(min_tokens=1), 61, CPU)
        return tiny_engine(target, combined, policy, config=config)
    if drafter == "none":
        return tiny_engine(model(family), None, policy, config=config)
    engine = tiny_engine(model(family), TextDrafter(61, CPU, TextCache(min_tokens=1)), policy, config=config)
    if drafter == "early exit":
        lens = Lens(2, torch.eye(32), torch.zeros(32), {})
        give_drafter(engine, early_exit_drafter(engine._target.model, engine._target.cache, lens))
    return engine


@cache
def generated(family: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return own_greedy_text(family, prompt, num_tokens)


@cache
def seeded_text(family: str, request: Request) -> list[int]:
    """Return plain decoding's tokens by transformers' logits: each the arg max of log probability plus its position's noise."""
    text = list(request.prompt_ids)
    for _ in range(request.sampling.max_tokens):
        distribution = probs_of(own_logits(family, [text])[:, -1], [request.sampling])[0].double()
        noise = gumbels([stream_key(request.sampling.seed or 0, len(text), Stream.TOKEN)], len(distribution))[0]
        text.append(int((distribution.log() + noise).argmax()))
    return text[len(request.prompt_ids) :]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family, expansion, drafter):
    session = run(engine_of(family, drafter, expansion), [greedy("r", LONG)])
    assert session.outcomes["r"].ids == generated(family, tuple(LONG), 12)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_tokens_equal_plain_decoding(drafter):
    request = sampled("r", LONG, seed=2**63 - 1, temperature=0.7, top_p=0.9)
    for expansion in EXPANSIONS:
        assert run(engine_of("llama", drafter, expansion), [request]).outcomes["r"].ids == seeded_text("llama", request)


@pytest.mark.parametrize("tree", TREE_NAMES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_all_trees_keep_greedy_and_seeded_tokens(drafter, tree):
    expansion = Expansion(1, 2, 3, tree) if tree in DELAYED_TREES else Expansion(0, 3, 4, tree, 7)
    seeded = sampled("seeded", LONG, seed=5, temperature=0.8, top_p=0.95)
    outcomes = run(engine_of("llama", drafter, expansion), [greedy("greedy", LONG), seeded]).outcomes
    assert outcomes["greedy"].ids == generated("llama", tuple(LONG), 12)
    assert outcomes["seeded"].ids == seeded_text("llama", seeded)


def mixed_requests() -> list[Request]:
    """Eight rows of every kind: greedy, seeded, truncated, each with its own shape; one does not want speculation."""
    wishes = [None, *EXPANSIONS, Expansion(3, 3, 1)]
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_p=0.9, seed=8),
        SamplingParams(temperature=1.5, top_k=5, seed=9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, min_p=0.05, seed=7),
        SamplingParams(temperature=0.8, seed=10),
    ]
    return [
        Request(
            str(row),
            tuple(LONG[row:] + [5 + row] * (1 + 2 * row)),
            replace(sampling, max_tokens=6 + row, ignore_eos=True),
            Speculation(is_enabled=row != 5, expansion=wishes[row % len(wishes)]),
        )
        for row, sampling in enumerate(samplings)
    ]


def check_mixed(engine: Engine, family: str, requests: list[Request]) -> None:
    session = run(engine, requests)
    assert sum(stats.num_preemptions for stats in session.stats) > 0
    assert max(stats.num_running for stats in session.stats) >= 3
    for request in requests:
        length = request.sampling.max_tokens
        is_greedy = request.sampling.is_greedy
        expected = generated(family, request.prompt_ids, length) if is_greedy else seeded_text(family, request)
        assert session.outcomes[request.request_id].ids == expected, request


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_changes_no_token(family, drafter):
    """Chunked prompts, few slots, preemption, eight unlike rows: each sequence equals its run alone."""
    check_mixed(engine_of(family, drafter, Expansion(2, 2, 1), TIGHT), family, mixed_requests())


def test_order_of_requests_changes_no_token():
    check_mixed(engine_of("llama", "model", Expansion(1, 3, 2), TIGHT), "llama", mixed_requests()[::-1])


class Script:
    """A policy that reads its wishes from a list, over and over."""

    name = "script"

    def __init__(self, wishes: list[Expansion], growth_costs: GrowthCosts) -> None:
        self._wishes = wishes
        self._growth_costs = growth_costs
        self._next = 0

    def choose(self, views):
        chosen = [self._wishes[(self._next + i) % len(self._wishes)] for i in range(len(views))]
        self._next += len(views)
        return ExpansionChoice(tuple(chosen), growth_costs=self._growth_costs)

    def observe(self, feedback):
        pass


@settings(max_examples=12)
@given(st.lists(expansions(5, 4, 4) | any_expansions(12), min_size=1, max_size=8), growth_costs())
def test_policy_changes_no_token(wishes, growth_costs):
    requests = [greedy("greedy", LONG), sampled("seeded", LONG[:5], seed=3, top_k=20)]
    texts = run(tiny_engine(*pair("llama"), Script(wishes, growth_costs)), requests).texts()
    assert texts == {"greedy": generated("llama", tuple(LONG), 12), "seeded": seeded_text("llama", requests[1])}


def bonus_from_the_root(trees, choice_ids):
    verdicts, offset = [], 0
    for tree, verdict in zip(trees, _JUDGE_GREEDY(trees, choice_ids), strict=True):
        verdicts.append(Verdict(verdict.path, choice_ids[offset]))
        offset += tree.num_nodes
    return verdicts


def last_token_forgotten(trees, choice_ids):
    verdicts = _JUDGE_GREEDY(trees, choice_ids)
    return [Verdict(one.path[:-1], one.extra_id) if len(one.path) > 1 else one for one in verdicts]


def drafts_believed(trees, choice_ids):
    offset, verdicts = 0, []
    for tree in trees:
        verdicts.append(Verdict(tree.path(tree.num_nodes - 1), choice_ids[offset + tree.num_nodes - 1]))
        offset += tree.num_nodes
    return verdicts


_JUDGE_GREEDY = coupled.judge_greedy


@pytest.mark.parametrize("mutant", [bonus_from_the_root, last_token_forgotten, drafts_believed])
def test_greedy_equality_detects_mutants(mutant, monkeypatch):
    monkeypatch.setattr(judge, "judge_greedy", mutant)
    texts = run(engine_of("llama", "model", Expansion(2, 2, 2)), [greedy("r", LONG)]).texts()
    assert texts["r"] != generated("llama", tuple(LONG), 12)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda key, depth: stream_key(key.seed, key.root_position + depth, Stream.TOKEN),
        lambda key, depth: stream_key(key.seed, key.root_position, Stream.TOKEN),
        lambda key, depth: stream_key(key.seed, key.root_position + depth + 1, Stream.EXTRA),
    ],
)
def test_seeded_equality_detects_mutants(mutant, monkeypatch):
    """Noise of the wrong position, one noise for a whole tree, noise of another stream."""
    monkeypatch.setattr(coupled, "_noise_key", mutant)
    request = sampled("r", LONG, seed=5)
    assert run(engine_of("llama", "model", Expansion(2, 2, 2)), [request]).outcomes["r"].ids != seeded_text("llama", request)


def test_mixed_batches_detect_stale_length_after_preemption(monkeypatch):
    """The sequence believes that its text is still cached, in slots that hold something else."""
    preempted = []

    def preempt(scheduler, sequence):
        preempted.append(sequence)
        _PREEMPT(scheduler, sequence)

    def admit(scheduler):
        _ADMIT(scheduler)
        for sequence in scheduler._running:
            if sequence in preempted and not sequence.slots:
                sequence.slots = scheduler.pool.allocate(min(sequence.num_tokens - 1, scheduler.pool.num_free))

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    monkeypatch.setattr(Scheduler, "admit", admit)
    with pytest.raises(AssertionError):
        check_mixed(engine_of("llama", "model", Expansion(2, 2, 1), TIGHT), "llama", mixed_requests())


_PREEMPT, _ADMIT = Scheduler._preempt, Scheduler.admit


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_perfect_drafter_is_accepted_completely(kind):
    """Greedy and coupled trees rank by the very numbers that judge them: a drafter equal to the target is never refused."""
    expansion = Expansion(3, 1, 0)
    request = greedy("r", LONG) if kind == "greedy" else sampled("r", LONG, seed=5)
    session = run(tiny_engine(model("llama"), model("llama"), FixedExpansion(expansion)), [request])
    assert [len(event.token_ids) for event in session.outcomes["r"].events] == [4, 4, 4]
