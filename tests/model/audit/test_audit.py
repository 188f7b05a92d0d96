"""The audit passes sound engines under every kind of tree and rule, and finds each broken one.

First seeds are fixed, so that every score is the same in every run: no false alarm comes and goes.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from msgspec import structs

from engine.audit.collect import AuditRequestFailed, collect
from engine.audit.examine import examine
from engine.audit.plan import AuditPlan, Setting
from engine.audit.reference import Reference
from engine.audit.report import Report
from engine.core.config import SchedulerConfig
from engine.core.rng_keys import Stream, stream_key
from engine.core.tree import Expansion, TreeKind
from engine.core.types import FinishReason, SamplingParams, TokenEvent
from engine.draft.trees import sampling as children
from engine.sampling.distributions import warped_probs
from engine.testing import ProbsAfter, table_module, table_pair, tiny_engine
from engine.verify import coupled, two_phase
from engine.verify import node_plans as plans
from engine.verify import registry as rules
from engine.verify.directions import BottomUp
from engine.verify.first_path import FirstPath
from engine.verify.node_plans import WithoutReplacement
from engine.verify.two_phase import TwoPhase
from engine.verify.verdict import Verdict
from tests.model.tiny import own_module, pair
from tests.model.verify.test_verify_mutants import SortsNothingButTriesLast

PROMPTS = ((5, 9, 33, 4), (7, 8))
CONFIG = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=8192, max_model_len=64)
DELAYED, BUSHY, CHAIN = Expansion(1, 3, 1), Expansion(0, 2, 2), Expansion(3, 1, 0)
HEAP, SET_TREE, BEAM = (Expansion(0, 3, 3, tree, 5) for tree in ("heap", "greedy_sample", "beam"))
SHARP = SamplingParams(temperature=1.5, top_k=4)


@cache
def reference() -> Reference:
    return Reference(own_module("llama"))


def report(verifier="traversal", expansion=DELAYED, sampling=SHARP, num_samples=150, noise=0.1):
    setting = Setting(sampling, verifier, expansion)
    plan = AuditPlan(PROMPTS, (setting,), first_seed=7, num_samples=num_samples, max_tokens=4, num_choice_tokens=16)
    engine = tiny_engine(*pair("llama", noise), config=CONFIG)
    return examine(collect(engine, plan), reference())


@pytest.mark.parametrize(
    ("verifier", "expansion"),
    [
        *(("traversal", DELAYED), ("specinfer", BUSHY), ("block", CHAIN), ("spectr", BUSHY), ("rrsw", HEAP)),
        *(("univer", SET_TREE), ("nss", BEAM), ("coupled", DELAYED)),
    ],
)
def test_a_sound_engine_passes(verifier, expansion):
    found = report(verifier, expansion, num_samples=80)
    assert found.is_lossless
    (draws,) = found.sampled
    assert draws.num_tokens == draws.support.num_match == 2 * 80 * 4
    assert draws.num_accepted > 50
    assert {choice.tally.num_mismatch for choice in (*found.greedy, *found.coupled)} == {0}
    assert [choice.num_unlike_texts for choice in found.coupled] == [0]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.05, top_k=7),
        SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    ],
)
def test_every_parameter_is_that_of_the_reference(sampling):
    assert report(sampling=sampling, num_samples=80).is_lossless


def test_the_policy_may_choose_the_tree():
    found = report(expansion=None, num_samples=50)
    assert found.is_lossless
    assert "by policy" in found.sampled[0].setting


def draft_believed(self, forest, target_probs_NV, keys):
    """Accept the first path completely, whatever the target's probabilities."""
    return [
        Verdict((*one.path, *tree.children[one.path[-1]][:1]), one.extra_id)
        for tree, one in zip(forest.trees, _JUDGE(self, forest, target_probs_NV, keys), strict=True)
    ]


def uniform_residual(self, level, prefix_P):
    """Draw the extra token from a uniform distribution."""
    return torch.ones_like(_WEIGHTS(self, level, prefix_P))


def from_the_root(self, forest, target_probs_NV, keys):
    """Draw the extra token from the distribution after the root, wherever the path ends."""
    roots_BV = target_probs_NV[list(forest.offsets[:-1])]
    extras = two_phase.draw(roots_BV, torch.tensor(two_phase._uniforms(keys, Stream.EXTRA), dtype=torch.float64)).tolist()
    return [Verdict(one.path, extra) for one, extra in zip(_JUDGE(self, forest, target_probs_NV, keys), extras, strict=True)]


def shared_stream(seed, position, stream):
    """Let what drafted a token judge it too."""
    return stream_key(seed, position, Stream.DRAFT if stream is Stream.ACCEPT else stream)


_JUDGE = two_phase.TwoPhase.judge
_WEIGHTS = two_phase.PlannedForest.extra_weights


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (two_phase.TwoPhase, "judge", draft_believed),
        (two_phase.TwoPhase, "judge", from_the_root),
        (two_phase.PlannedForest, "extra_weights", uniform_residual),
        (two_phase, "stream_key", shared_stream),
    ],
)
def test_a_broken_verifier_is_found(where, name, mutant, monkeypatch):
    monkeypatch.setattr(where, name, mutant)
    assert not is_lawful(report())


def is_lawful(found) -> bool:
    """Whether the draws alone, not the texts that leave no choice, pass."""
    return all(draws.is_lossless(found.level) for draws in found.sampled)


def test_siblings_tried_against_sampling_order_are_found(monkeypatch):
    broken = TwoPhase("traversal", SortsNothingButTriesLast(), BottomUp())
    monkeypatch.setitem(rules._REGISTRY, "traversal", lambda: broken)
    assert not is_lawful(report(expansion=HEAP, num_samples=500))


class UnscaledResidual(FirstPath):
    """Block Verification that draws from (p - q)+ where it should from (a p - q)+."""

    def residual(self, families):
        return super().residual(replace(families, mass_M=torch.ones_like(families.mass_M)))


class Kept(WithoutReplacement):
    """Duplicates merged, but a refused child's q is not set to 0 for its siblings."""

    def split(self, families):
        return plans.split_in_order(families, plans._keep)

    def residual(self, families):
        return plans.residual_in_order(families, plans._keep)


@dataclass(frozen=True)
class Table:
    """Distributions of tokens 3 to 5 that expose an error of a rule in few samples, with its verifier, tree and error."""

    verifier: str
    slip: object
    expansion: Expansion
    target: ProbsAfter
    draft: ProbsAfter
    num_samples: int
    max_tokens: int = 2


TABLES = {
    "block, residual not scaled": Table(
        *("block", UnscaledResidual(), Expansion(2, 1, 0)),
        lambda token_id: (0.413, 0.112, 0.475) if token_id == 1 else (0.638, 0.319, 0.043),
        lambda token_id: (0.038, 0.003, 0.959) if token_id == 1 else (0.318, 0.002, 0.680),
        *(1000, 3),
    ),
    "traversal, q kept after i.i.d. draws": Table(
        *("traversal", Kept(), Expansion(0, 4, 1)),
        lambda _: (0.611, 0.343, 0.046),
        lambda _: (0.013, 0.196, 0.791),
        num_samples=200,
    ),
    "traversal, q kept after distinct draws": Table(
        *("traversal", Kept(), Expansion(0, 2, 1, "delayed_distinct")),
        lambda _: (0.05, 0.05, 0.90),
        lambda _: (0.02, 0.96, 0.02),
        num_samples=150,
    ),
}


def table_report(table: Table) -> Report:
    setting = Setting(SamplingParams(), table.verifier, table.expansion)
    sizes = {"num_samples": table.num_samples, "max_tokens": table.max_tokens, "num_choice_tokens": 1, "num_seeds": 1}
    plan = AuditPlan(((5, 6, 1),), (setting,), first_seed=7, **sizes)
    config = replace(CONFIG, max_running=256)
    engine = tiny_engine(*table_pair(table.target, table.draft), config=config)
    return examine(collect(engine, plan), Reference(table_module(table.target)))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_error_in_rule_formula_is_detected(table, monkeypatch):
    """The unchanged rule passes under the same distributions."""
    assert is_lawful(table_report(table))
    broken = TwoPhase(table.verifier, table.slip, BottomUp())
    monkeypatch.setitem(rules._REGISTRY, table.verifier, lambda: broken)
    assert not is_lawful(table_report(table))


def likeliest_as_draws(nodes, logits_PM, probs, vocab):
    """Choose the likeliest tokens as children but hand over the distribution as if they had been drawn from it."""
    probs_PM = children._recorded_probs(nodes, logits_PM, probs, vocab)
    width = max(node.num_draws for node in nodes)
    return children._to_candidates(children._to_host(nodes, probs_PM.topk(width).indices, probs_PM, vocab))


def test_ratio_rule_on_chosen_children_is_detected(monkeypatch):
    monkeypatch.setitem(children._SAMPLING_RULES, TreeKind.IID, likeliest_as_draws)
    assert not is_lawful(report())


def one_too_many(logits_NV, sampling, rows):
    return warped_probs(logits_NV, [replace(params, top_k=params.top_k + 1) for params in sampling], rows)


def one_too_few(logits_NV, sampling, rows):
    """Cut the nucleus before the token that completes it."""
    probs_NV = warped_probs(logits_NV, sampling, rows)
    least_N1 = probs_NV.masked_fill(probs_NV <= 0, 2.0).amin(-1, keepdim=True)
    cut_NV = torch.where((probs_NV > least_N1) | (probs_NV == probs_NV.amax(-1, keepdim=True)), probs_NV, 0.0)
    return cut_NV / cut_NV.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("mutant", "sampling"), [(one_too_many, SHARP), (one_too_few, SamplingParams(temperature=1.5, top_p=0.5))]
)
def test_distribution_truncated_off_by_one_is_detected(mutant, sampling, monkeypatch):
    """In the judge and in plain decoding alike: only a reference of other make can see it."""
    monkeypatch.setattr("engine.verify.dispatch.warped_probs", mutant)
    monkeypatch.setattr("engine.verify.dispatch._coupled_rule", lambda _: None)  # the library truncates by itself
    found = report(sampling=sampling)
    assert not is_lawful(found)
    assert bool(found.sampled[0].support.num_mismatch) is (mutant is one_too_many)
    assert found.coupled[0].num_unlike_texts == 0
    assert not found.coupled[0].is_lossless


def extra_after_the_root(trees, choices):
    """Take the extra token from the root's choice, wherever the path ends."""
    offsets = [sum(tree.num_nodes for tree in trees[:index]) for index in range(len(trees))]
    return [Verdict(one.path, choices[first]) for one, first in zip(_GREEDY(trees, choices), offsets, strict=True)]


_GREEDY = coupled.judge_greedy


def test_greedy_token_from_root_is_detected(monkeypatch):
    monkeypatch.setattr("engine.verify.dispatch.judge_greedy", extra_after_the_root)
    found = report(num_samples=1, noise=0.01)
    assert found.greedy[0].tally.num_mismatch
    assert not found.is_lossless


def test_noise_of_a_wrong_position_is_found(monkeypatch):
    """With and without speculation the texts are equal, and wrong."""
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: stream_key(key.seed, key.root_position + depth, Stream.TOKEN))
    found = report(num_samples=1)
    assert found.coupled[0].tally.num_mismatch
    assert not found.is_lossless


def test_root_noise_at_each_depth_is_detected(monkeypatch):
    monkeypatch.setattr(coupled, "_noise_key", lambda key, depth: stream_key(key.seed, key.root_position + 1, Stream.TOKEN))
    found = report(num_samples=1, noise=0.01)
    assert found.coupled[0].num_unlike_texts
    assert not found.is_lossless


def test_a_failed_request_fails_the_audit(monkeypatch):
    engine = tiny_engine(*pair("llama"), config=CONFIG)
    step = engine.step
    failed = (TokenEvent("audit-0", finish=FinishReason.ERROR, error="no memory"),)
    monkeypatch.setattr(engine, "step", lambda: structs.replace(step(), events=failed))
    plan = AuditPlan(PROMPTS, (Setting(SHARP, "traversal", DELAYED),), first_seed=7, num_samples=1)
    with pytest.raises(AuditRequestFailed, match="no memory"):
        collect(engine, plan)


def test_an_audit_repeats_itself():
    first, second = report(num_samples=40), report(num_samples=40)
    assert first == second


def test_no_seed_is_used_twice():
    settings = (Setting(SHARP, "traversal", DELAYED), Setting(SHARP, "specinfer", DELAYED))
    plan = AuditPlan(PROMPTS, settings, first_seed=7, num_samples=20, max_tokens=1, num_choice_tokens=1)
    collected = collect(tiny_engine(*pair("llama"), config=CONFIG), plan)
    seeds = [text.seed for part in collected.sampled for text in part.texts]
    assert len(set(seeds)) == len(seeds) == 80
