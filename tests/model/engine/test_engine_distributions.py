"""Losslessness of whole runs: over many seeds the first tokens follow the target's distribution, whatever was drafted."""

import secrets
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count, product

import pytest
import torch

from engine.attention import tree_attention
from engine.attention.paths import path_steps
from engine.attention.scoring import Scoring
from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import Expansion, TreeKind
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.trees import sampling as children
from engine.engine import Engine
from engine.testing import tiny_engine
from engine.verify import two_phase
from engine.verify.verdict import Verdict
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.checkpoints import learnt_engine
from tests.model.distributions import text_distribution
from tests.model.driving import run
from tests.model.heads import head_engine, learnt_head
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.tiny import own_logits, pair

PROMPT = (5, 9, 33, 4)
# Three tokens to choose from at each position, so that triples can be counted.
SAMPLING = SamplingParams(temperature=1.5, top_k=3, max_tokens=4, ignore_eos=True)
DELAYED, BUSHY = Expansion(1, 3, 1), Expansion(0, 2, 2)
DISTINCT = (
    Expansion(1, 2, 1, "delayed_distinct"),
    Expansion(0, 3, 3, "heap", 5),
    Expansion(0, 3, 3, "threshold", 5),
    Expansion(0, 3, 3, "static", 5),
    Expansion(0, 3, 3, "calibrated", 6),
)
SET_TREE, BEAM, NOISE_AWARE = (Expansion(0, 3, 3, tree, 5) for tree in ("greedy_sample", "beam", "noise_aware"))
NUM_REQUESTS, FIRST_SEED = 1000, 2000
WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=4096, max_model_len=32)


@cache
def target_distribution(family: str = "llama") -> dict[tuple[int, ...], float]:
    """Return the distribution of the first three tokens, by transformers' logits."""
    return text_distribution(lambda texts: own_logits(family, [[*PROMPT, *text] for text in texts])[:, -1], 3, SAMPLING)


def triples(verifier: str | None, expansion: Expansion, engine: Engine | None = None) -> Counter[tuple[int, ...]]:
    """Return how often each first three tokens came, over as many seeds; without a verifier the seeds are the engine's."""
    requests = [
        Request(
            str(index),
            PROMPT,
            SAMPLING if verifier is None else replace(SAMPLING, seed=FIRST_SEED + index),
            Speculation(verifier=verifier),
        )
        for index in range(NUM_REQUESTS)
    ]
    session = run(engine or tiny_engine(*pair("llama", noise=0.1), FixedExpansion(expansion), config=WIDE), requests)
    accepted, drafts = (sum(getattr(s, name) for s in session.stats) for name in ("num_accepted_tokens", "num_drafts"))
    assert 0.15 < accepted / drafts < 1.9, "neither a useless drafter nor a perfect one proves anything"
    return Counter(tuple(outcome.ids[:3]) for outcome in session.outcomes.values())


@pytest.fixture
def numbered_secrets(monkeypatch):
    """Seeds that the engine makes are 0, 1, 2, ..., so that the run repeats itself."""
    seeds = count()
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(seeds))


@pytest.mark.parametrize(
    ("verifier", "expansion"),
    [
        *(("traversal", DELAYED), ("traversal", BUSHY), ("specinfer", DELAYED), ("nss", BUSHY), ("coupled", DELAYED)),
        *((verifier, tree) for tree in DISTINCT for verifier in ("traversal", "rrsw")),
        *((verifier, tree) for tree in (DISTINCT[0], DISTINCT[3]) for verifier in ("hu", "univer")),
        *(("univer", SET_TREE), ("hu", SET_TREE), ("nss", BEAM), ("coupled", NOISE_AWARE), ("coupled", DISTINCT[1])),
        *(("spectr", BUSHY), ("khisti", BUSHY), ("tournament", DELAYED), ("gbv", BUSHY), ("block", BUSHY), ("naive_tree", BUSHY)),
    ],
)
def test_named_verifiers_keep_the_targets_distribution(verifier, expansion):
    assert z_of_counts(triples(verifier, expansion), target_distribution()) < PASSES_BELOW


SINKS = [("traversal", DELAYED), ("coupled", NOISE_AWARE)]


@pytest.mark.parametrize(("verifier", "expansion"), SINKS)
def test_attention_sinks_keep_the_targets_distribution(verifier, expansion):
    engine = tiny_engine(*pair("gpt_oss", noise=0.02), FixedExpansion(expansion), config=WIDE)
    assert z_of_counts(triples(verifier, expansion, engine), target_distribution("gpt_oss")) < PASSES_BELOW


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_recurrent_layers_keep_the_targets_distribution(family):
    """The draft model has recurrent layers too."""
    engine = tiny_engine(*pair(family, noise=0.02), FixedExpansion(DELAYED), config=WIDE)
    assert z_of_counts(triples("traversal", DELAYED, engine), target_distribution(family)) < PASSES_BELOW


def test_the_state_of_a_sibling_is_seen(monkeypatch):
    def swapped(batch):
        return [replace(step, ends=step.ends[1:] + step.ends[:1]) for step in path_steps(batch)]

    engine = tiny_engine(*pair("qwen3_next", noise=0.02), FixedExpansion(DELAYED), config=WIDE)
    monkeypatch.setattr(tree_attention, "path_steps", swapped)
    assert z_of_counts(triples("traversal", DELAYED, engine), target_distribution("qwen3_next")) > FAILS_ABOVE


def test_sinks_left_out_are_seen(monkeypatch):
    engine = tiny_engine(*pair("gpt_oss", noise=0.02), FixedExpansion(DELAYED), config=WIDE)
    monkeypatch.setattr(Scoring, "weights", lambda scoring, scores: torch.softmax(scores, dim=-1, dtype=torch.float32))
    assert z_of_counts(triples(*SINKS[0], engine), target_distribution("gpt_oss")) > FAILS_ABOVE


@pytest.mark.parametrize(
    ("verifier", "expansion"), [("traversal", DELAYED), ("rrsw", DISTINCT[4]), ("hu", SET_TREE), ("coupled", NOISE_AWARE)]
)
def test_a_draft_head_keeps_the_targets_distribution(verifier, expansion):
    """Its distributions lack a third of the vocabulary. Other seeds have other trees in the adjacent slots."""
    engine = head_engine(learnt_head(), policy=FixedExpansion(expansion), config=WIDE)
    assert z_of_counts(triples(verifier, expansion, engine), target_distribution()) < PASSES_BELOW


CHECKPOINTS = [
    *(("eagle3", *pair) for pair in (("traversal", DELAYED), ("rrsw", DISTINCT[4]), ("hu", SET_TREE), ("coupled", NOISE_AWARE))),
    *(("dflash", *pair) for pair in (("traversal", BUSHY), ("specinfer", DELAYED), ("nss", BEAM), ("coupled", DISTINCT[1]))),
    *(("medusa", *pair) for pair in (("traversal", DELAYED), ("univer", DISTINCT[3]))),
]


@pytest.mark.parametrize(("kind", "verifier", "expansion"), CHECKPOINTS)
def test_checkpoints_keep_the_targets_distribution(kind, verifier, expansion, tmp_path):
    """A reduced vocabulary is that of the target's ids, and the levels of one pass are marginals."""
    engine = learnt_engine(tmp_path, kind, FixedExpansion(expansion), WIDE)
    assert z_of_counts(triples(verifier, expansion, engine), target_distribution()) < PASSES_BELOW


def at_random() -> Engine:
    """Return an engine whose policy wishes any tree for anybody at any step."""
    return tiny_engine(*pair("llama", noise=0.1), RandomExpansion(3), config=WIDE)


@pytest.mark.parametrize("verifier", ["traversal", "specinfer", "coupled"])
def test_policy_with_random_choices_keeps_target_distribution(verifier):
    assert z_of_counts(triples(verifier, DELAYED, at_random()), target_distribution()) < PASSES_BELOW


@pytest.mark.usefixtures("numbered_secrets")
def test_unseeded_requests_keep_the_targets_distribution():
    assert z_of_counts(triples(None, DELAYED), target_distribution()) < PASSES_BELOW


def test_unseeded_requests_get_unlike_seeds():
    engine = tiny_engine(*pair("llama"))
    texts = run(engine, [Request(str(index), PROMPT, SamplingParams(max_tokens=8)) for index in range(8)]).texts()
    assert len({tuple(text) for text in texts.values()}) == 8


def draft_believed(self, forest, target_probs_NV, keys):
    """Accept the first path completely, whatever the target's probabilities."""
    return [
        Verdict((*one.path, *tree.children[one.path[-1]][:1]), one.extra_id)
        for tree, one in zip(forest.trees, _JUDGE(self, forest, target_probs_NV, keys), strict=True)
    ]


def one_stream_for_drafts_and_acceptance(seed, position, stream):
    return stream_key(seed, position, Stream.DRAFT if stream is Stream.ACCEPT else stream)


_JUDGE = two_phase.TwoPhase.judge


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (two_phase.TwoPhase, "judge", draft_believed),
        (two_phase, "stream_key", one_stream_for_drafts_and_acceptance),
    ],
)
def test_distribution_detects_mutants(where, name, mutant, monkeypatch):
    monkeypatch.setattr(where, name, mutant)
    assert z_of_counts(triples("traversal", DELAYED), target_distribution()) > FAILS_ABOVE


def test_distribution_detects_unverified_drafts(monkeypatch):
    monkeypatch.setattr(two_phase.TwoPhase, "judge", draft_believed)
    assert z_of_counts(triples("traversal", DELAYED, at_random()), target_distribution()) > FAILS_ABOVE


def misreport_draft_probs(monkeypatch):
    """Draw from one distribution and hand over a flatter one."""
    drawn_iid = children._sample_iid

    def misreported(nodes, logits_PM, probs, vocab):
        drawn = drawn_iid(nodes, logits_PM, probs, vocab)
        probs[-1] = torch.where(probs[-1] > 0, probs[-1] ** 0.2, 0.0)
        probs[-1] /= probs[-1].sum(-1, keepdim=True)
        return drawn

    monkeypatch.setitem(children._SAMPLING_RULES, TreeKind.IID, misreported)


def test_distribution_detects_undrawn_draft_distribution(monkeypatch):
    misreport_draft_probs(monkeypatch)
    assert z_of_counts(triples("traversal", DELAYED), target_distribution()) > FAILS_ABOVE


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_distribution_detects_probabilities_of_another_node(kind, tmp_path, monkeypatch):
    """Children are drawn from their node's distribution, and the next node's is recorded."""
    drawn_iid = children._sample_iid

    def misreported(nodes, logits_PM, probs, vocab):
        drawn = drawn_iid(nodes, logits_PM, probs, vocab)
        probs[-1] = probs[-1].roll(1, 0)
        return drawn

    monkeypatch.setitem(children._SAMPLING_RULES, TreeKind.IID, misreported)
    engine = learnt_engine(tmp_path, kind, FixedExpansion(BUSHY), WIDE)
    assert z_of_counts(triples("block", BUSHY, engine), target_distribution()) > FAILS_ABOVE


def best_first(offers):
    """Siblings sorted by draft probability, whatever the order in which they were drawn."""
    spoilt = []
    for one in offers:
        order = torch.tensor(one.probs).argsort(descending=True).tolist()
        spoilt.append(replace(one, token_ids=tuple(one.token_ids[i] for i in order), probs=tuple(one.probs[i] for i in order)))
    return spoilt


def worst_dropped(offers):
    """The least likely of the draws is thrown away."""
    return [replace(one, token_ids=one.token_ids[:-1], probs=one.probs[:-1]) if one.probs[-1] < 0.3 else one for one in offers]


@pytest.mark.parametrize(
    ("verifier", "expansion", "spoil"),
    [
        ("rrsw", DISTINCT[1], best_first),
        ("hu", SET_TREE, worst_dropped),
    ],
)
def test_distribution_detects_altered_draws(verifier, expansion, spoil, monkeypatch):
    rule = children._SAMPLING_RULES[expansion.kind]
    monkeypatch.setitem(children._SAMPLING_RULES, expansion.kind, lambda *args: spoil(rule(*args)))
    assert z_of_counts(triples(verifier, expansion), target_distribution()) > FAILS_ABOVE


def test_the_distribution_is_a_distribution():
    distribution = target_distribution()
    assert len(distribution) == len(list(product(range(3), repeat=3)))
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-5)
