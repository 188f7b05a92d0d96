"""Predictions of verdicts hold: over whole runs the accepted depth + 1 agrees with E[tau + 1 | tree], tree by tree."""

import math

import pytest
from msgspec import structs

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import ErrorCode, Request, SamplingParams, Speculation, StepStats
from engine.engine import Engine
from engine.testing import tiny_engine
from engine.verify.dispatch import Judge
from engine.verify.verdict import Verdict, VerificationFailure
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW
from tests.model.driving import greedy, run, sampled
from tests.model.tiny import pair

WIDE = SchedulerConfig(max_running=128, max_step_tokens=2048, num_slots=8192, max_model_len=64)
TREE = Expansion(1, 2, 2)
PAIRS = [  # bottom-up rules first
    *(("traversal", TREE), ("traversal", parse_expansion("heap.5")), ("gbv", TREE)),
    *(("block", TREE), ("univer", parse_expansion("greedy_sample.5"))),
    *(("specinfer", TREE), ("rrsw", parse_expansion("static.5")), ("khisti", TREE)),
]


class RecordingJudge(Judge):
    """Keeps every verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[Verdict] = []

    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        verdicts = super().judge(rows, forest, logits_NV, best, walks)
        self.verdicts.extend(verdict for verdict in verdicts if isinstance(verdict, Verdict))
        return verdicts


def judged_by(judge: RecordingJudge, requests: list[Request], expansion: Expansion = TREE) -> list[StepStats]:
    engine = tiny_engine(*pair("llama", noise=0.1), FixedExpansion(expansion), config=WIDE)
    engine._judge = judge
    return run(engine, requests).stats


def requests_of(verifier: str, num: int = 64, **sampling) -> list[Request]:
    """Sampled requests of unlike temperatures, so that unlike trees come to be."""
    return [
        sampled(str(seed), (5, 9, 3 + seed % 50), seed, 14, verifier, temperature=0.5 + seed % 3 / 2, **sampling)
        for seed in range(num)
    ]


def z_scores(pairs: list[tuple[float, float]]) -> list[float]:
    """Return how far, in standard errors, outcomes are from expectations: in the mean, and in step with the expectation.

    Given its tree an outcome's mean is its expectation, so differences have mean zero whatever they are weighted with.
    """
    mean = sum(expected for expected, _ in pairs) / len(pairs)
    weighings = [[1.0] * len(pairs), [expected - mean for expected, _ in pairs]]
    scores = []
    for weights in weighings:
        terms = [weight * (realised - expected) for weight, (expected, realised) in zip(weights, pairs, strict=True)]
        scores.append(abs(sum(terms)) / math.sqrt(sum(term**2 for term in terms)))
    return scores


def pairs_of(judge: RecordingJudge) -> list[tuple[float, float]]:
    assert all(verdict.expected_tokens is not None for verdict in judge.verdicts)
    return [(verdict.expected_tokens or 0.0, len(verdict.path)) for verdict in judge.verdicts]


@pytest.mark.parametrize(("verifier", "expansion"), PAIRS, ids=str)
def test_outcomes_agree_with_predictions(verifier, expansion):
    judge = RecordingJudge()
    stats = judged_by(judge, requests_of(verifier), expansion)
    pairs = pairs_of(judge)
    assert len({round(expected, 3) for expected, _ in pairs}) > 100, "equal trees prove little"
    assert max(z_scores(pairs)) < PASSES_BELOW
    assert sum(one.num_expected_rows for one in stats) == len(pairs)
    assert sum(one.expected_tokens for one in stats) == pytest.approx(sum(expected for expected, _ in pairs))
    assert sum(one.num_realised_tokens for one in stats) == sum(realised for _, realised in pairs)


class OffByOne(RecordingJudge):
    """The depth for the depth + 1."""

    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        honest = super().judge(rows, forest, logits_NV, best, walks)
        return self._kept([structs.replace(one, expected_tokens=one.expected_tokens - 1) for one in honest])

    def _kept(self, verdicts):
        self.verdicts[len(self.verdicts) - len(verdicts) :] = verdicts
        return verdicts


class OfTheWrongTree(OffByOne):
    """Each tree gets its neighbour's number: the mean over a step is right, but each tree's is wrong."""

    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        honest = RecordingJudge.judge(self, rows, forest, logits_NV, best, walks)
        return self._kept([structs.replace(one, expected_tokens=honest[i - 1].expected_tokens) for i, one in enumerate(honest)])


class OfTheWholeTree(OffByOne):
    """The deepest path's length, whatever its chances."""

    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        honest = RecordingJudge.judge(self, rows, forest, logits_NV, best, walks)
        return self._kept(
            [structs.replace(one, expected_tokens=max(tree.depths) + 1) for one, tree in zip(honest, forest.trees, strict=True)]
        )


@pytest.mark.parametrize("mutant", [OffByOne, OfTheWrongTree, OfTheWholeTree])
@pytest.mark.parametrize("verifier", ["traversal", "specinfer"])
def test_agreement_detects_mutants(verifier, mutant):
    judge = mutant()
    judged_by(judge, requests_of(verifier))
    assert max(z_scores(pairs_of(judge))) > FAILS_ABOVE


def z_of_steps(stats: list[StepStats], outcomes: list[int]) -> float:
    """Return how far, in standard errors, the outcomes of steps are from their predictions."""
    differences = [outcome - one.expected_tokens for one, outcome in zip(stats, outcomes, strict=True)]
    return abs(sum(differences)) / math.sqrt(sum(difference**2 for difference in differences))


def test_truncated_sequence_realises_accepted_tokens():
    """Stop tokens soon cut long accepted paths. The mutant counts the emitted tokens."""
    config = SchedulerConfig(max_running=1, max_step_tokens=128, num_slots=512, max_model_len=64)
    engine = tiny_engine(*pair("llama"), FixedExpansion(Expansion(6, 1, 0)), config=config)
    stats = run(engine, requests_of("traversal", num=150, stop_token_ids=tuple(range(30)))).stats
    assert z_of_steps(stats, [one.num_realised_tokens for one in stats]) < PASSES_BELOW
    assert z_of_steps(stats, [one.num_generated_tokens for one in stats]) > FAILS_ABOVE


def mixed_engine() -> Engine:
    return tiny_engine(*pair("llama"), FixedExpansion(TREE))


def test_rows_without_number_keep_the_others():
    """One coupled row once made the whole step's number unknown; greedy rows count with what came out."""
    requests = [
        greedy("greedy", (5, 9, 3)),
        sampled("coupled", (5, 9, 3), seed=1),
        sampled("traversal", (5, 9, 3), seed=1, verifier="traversal"),
        Request("unseeded", (5, 9, 3), SamplingParams(max_tokens=12, ignore_eos=True), Speculation(verifier="block")),
    ]
    stats = run(mixed_engine(), requests).stats
    assert (stats[0].num_decoding_rows, stats[0].num_expected_rows) == (4, 3)
    alone = run(mixed_engine(), requests[:1]).stats
    assert [one.expected_tokens for one in alone] == [one.num_realised_tokens for one in alone]
    coupled = run(mixed_engine(), requests[1:2]).stats
    assert [(one.num_expected_rows, one.expected_tokens, one.num_realised_tokens) for one in coupled] == [(0, 0.0, 0)] * len(
        coupled
    )


def test_unjudged_row_predicts_nothing(monkeypatch):
    broken = VerificationFailure("broken", ErrorCode.VERIFICATION_FAILED)
    monkeypatch.setattr(Judge, "judge", lambda self, rows, *_: [broken for _ in rows])
    assert run(mixed_engine(), [greedy("r", (5, 9, 3))]).stats[0].num_expected_rows == 0
