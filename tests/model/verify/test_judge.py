"""Each tree uses the rule of its row, broken logits fail, and log-probabilities are the target's own."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core.rng_keys import StepKey
from engine.core.step_plan import Row
from engine.core.tree import PLAIN, Expansion
from engine.core.types import ErrorCode, SamplingParams
from engine.draft.trees.grow import grow, growers_of
from engine.verify import coupled
from engine.verify import dispatch as judging
from engine.verify.coupled import judge_greedy
from engine.verify.dispatch import NOT_FINITE, Judge, logprobs_of
from engine.verify.registry import create_verifier
from engine.verify.verdict import Verdict, VerificationFailure
from tests.chi_square import PASSES_BELOW, z_of_counts
from tests.model.distributions import probs_of
from tests.model.passes import CPU
from tests.model.rows import GREEDY, TableDrafter, decoding_row
from tests.needs import needs_library

V = 5
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0)) * 2
WARM = SamplingParams(temperature=0.8, top_p=0.95)
TYPICAL = SamplingParams(temperature=0.8, typical_p=0.9)
KINDS = [(GREEDY, "coupled"), (WARM, "coupled"), (WARM, "traversal"), (WARM, "specinfer"), (SamplingParams(), "nss")]


def rows_of(kinds) -> list[Row]:
    return [
        decoding_row((1, i % V), Expansion(1, 2, 2), sampling, verifier, seed=50 + i, request_id=str(i))
        for i, (sampling, verifier) in enumerate(kinds)
    ]


def target_logits(forest) -> torch.Tensor:
    """Return the target's logits after every node: like the drafter's, a little different."""
    ids = torch.tensor([token_id for tree in forest.trees for token_id in tree.token_ids], dtype=torch.int64)
    return TABLE[ids] + 0.5 * torch.sin(torch.arange(V) + ids[:, None].float())


def expected_verdict(row: Row):
    """Return the verdict of the row's own rule on its tree alone."""
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), [row]).forest
    logits_NV = target_logits(forest)
    if row.sampling.is_greedy:
        return judge_greedy(forest.trees, logits_NV.argmax(-1).tolist())[0]
    probs_NV = probs_of(logits_NV, [row.sampling] * len(logits_NV))
    return create_verifier(row.verifier).judge(forest, probs_NV, [row.key])[0]


def check(judge: Judge, kinds, broken: set[int]) -> None:
    rows = rows_of(kinds)
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    for i in broken:
        logits_NV[forest.offsets[i + 1] - 1, 2] = float("nan")
    verdicts = judge.judge(rows, forest, logits_NV)
    assert len(verdicts) == len(rows)
    for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        wanted = None if i in broken else expected_verdict(row)
        assert isinstance(verdict, VerificationFailure) == (wanted is None)
        if isinstance(verdict, Verdict) and wanted is not None:
            assert (verdict.path, verdict.extra_id) == (wanted.path, wanted.extra_id)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(KINDS), max_size=7), st.sets(st.integers(0, 6), max_size=2))
def test_mixed_rows_get_their_separate_verdicts(kinds, broken):
    check(Judge(), kinds, {i for i in broken if i < len(kinds)})


class Indifferent(Judge):
    """Never looks whether logits are finite."""

    def _valid_trees(self, forest, is_valid):
        return [True] * len(forest.trees)


class BrokenTogether(Judge):
    """One broken tree spoils all."""

    def _valid_trees(self, forest, is_valid):
        return [all(super()._valid_trees(forest, is_valid))] * len(forest.trees)


class FirstRootsOnly(Judge):
    """Looks at the root of each tree and not at the rest of it."""

    def _valid_trees(self, forest, is_valid):
        return [is_valid[offset] for offset in forest.offsets[:-1]]


class SamplingOfTheFirst(Judge):
    """Uses one row's parameters for all."""

    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        return super().judge([structs.replace(row, sampling=rows[-1].sampling) for row in rows], forest, logits_NV, best, walks)


class KeyOfTheFirst(Judge):
    def judge(self, rows, forest, logits_NV, best=None, walks=None):
        return super().judge([structs.replace(row, seed=rows[0].seed) for row in rows], forest, logits_NV, best, walks)


@pytest.mark.parametrize("mutant", [Indifferent, BrokenTogether, FirstRootsOnly, SamplingOfTheFirst, KeyOfTheFirst])
def test_judge_detects_mutants(mutant):
    kinds = KINDS * 4
    check(Judge(), kinds, {3, 5, 11})
    with pytest.raises((AssertionError, ValueError)):
        check(mutant(), kinds, {3, 5, 11})


def test_masked_tokens_are_valid_infinite_ones_invalid():
    rows = rows_of([KINDS[2]] * 3)
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    logits_NV[0, 1] = float("-inf")
    logits_NV[forest.offsets[1], 1] = float("inf")
    logits_NV[forest.offsets[2]] = float("-inf")
    assert [isinstance(verdict, Verdict) for verdict in Judge().judge(rows, forest, logits_NV)] == [True, False, False]


@pytest.mark.parametrize("kind", KINDS[:3], ids=["greedy", "coupled", "traversal"])
def test_fully_masked_row_fails_alone(kind):
    """The request allows two tokens, the model neither: no arg max means anything there."""
    sampling, verifier = kind
    rows = rows_of([kind, (replace(sampling, allowed_token_ids=(0, 3)), verifier), kind])
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    logits_NV[:, [0, 3]] = float("-inf")
    verdicts = Judge().judge(rows, forest, logits_NV)
    assert [isinstance(verdict, Verdict) for verdict in verdicts] == [True, False, True]
    assert isinstance(verdicts[1], VerificationFailure)
    assert verdicts[1].code is ErrorCode.NO_POSSIBLE_TOKEN


def test_masked_broken_logit_is_still_an_error():
    rows = rows_of([(replace(WARM, allowed_token_ids=(0, 3)), "traversal")])
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    logits_NV[-1, 1] = float("nan")
    assert Judge().judge(rows, forest, logits_NV) == [NOT_FINITE]


def test_a_verifier_is_made_once(monkeypatch):
    """The bug: they were computed at each step and dropped."""
    judge = Judge()
    check(judge, KINDS[1:4], set())
    monkeypatch.delattr(judging, "create_verifier")
    check(judge, KINDS[1:4], set())


@given(st.integers(0, V + 2), st.lists(st.tuples(st.integers(0, V - 1), st.integers(0, V - 1)), min_size=1, max_size=5))
def test_logprobs_are_those_of_the_raw_logits(num_top, wanted):
    nodes, ids = [node for node, _ in wanted], [token_id for _, token_id in wanted]
    found = logprobs_of(TABLE, nodes, ids, num_top)
    for one, node, token_id in zip(found, nodes, ids, strict=True):
        distribution = torch.log_softmax(TABLE[node].double(), -1)
        assert one.logprob == pytest.approx(float(distribution[token_id]), abs=1e-5)
        assert list(one.top_ids) == distribution.argsort(descending=True)[:num_top].tolist()
        assert list(one.top_logprobs) == pytest.approx(distribution.sort(descending=True).values[:num_top].tolist(), abs=1e-5)


def test_invalid_tree_fails_alone():
    """One InvalidDistributionError once ended the step, and with it the worker and every request in it."""
    rows = rows_of([KINDS[2]] * 3)
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    probs_RV = forest.draft_probs_RV.clone()
    child = forest.trees[1].children[0][0]
    probs_RV[forest.probs_rows[1][0], forest.trees[1].token_ids[child]] = 0.0
    verdicts = Judge().judge(rows, structs.replace(forest, draft_probs_RV=probs_RV), target_logits(forest))
    assert [isinstance(verdict, Verdict) for verdict in verdicts] == [True, False, True]
    assert isinstance(verdicts[1], VerificationFailure)
    assert "could not have been drawn" in verdicts[1].reason
    assert verdicts[2] == expected_verdict(rows[2])


def roots_of(sampling: SamplingParams, verifier: str, num: int = 3) -> list[Row]:
    return [decoding_row((1, i % V), PLAIN, sampling, verifier, seed=70 + i, request_id=str(i)) for i in range(num)]


@needs_library
@pytest.mark.parametrize(
    ("sampling", "own"), [(SamplingParams(temperature=0.8), "coupled"), (WARM, "coupled"), (TYPICAL, "traversal")]
)
def test_single_root_is_drawn_the_cheapest_way(sampling, own):
    """The coupled rule applies where the library reads the logits and typical-p is not set.

    It reports that one token is accepted.
    """
    rows = roots_of(sampling, "traversal")
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    probs_NV = probs_of(logits_NV, [sampling] * len(rows))
    wanted = create_verifier(own).judge(forest, probs_NV, [row.key for row in rows])
    assert Judge().judge(rows, forest, logits_NV) == [Verdict(one.path, one.extra_id, 1.0) for one in wanted]


@needs_library
@pytest.mark.parametrize("verifier", ["traversal", "nss"])
def test_single_root_successors_follow_the_distribution(verifier):
    sampling, num = SamplingParams(temperature=0.8), 4000
    rows = [structs.replace(row, certain_ids=(1, 3)) for row in roots_of(sampling, verifier, num)]
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    logits_NV = target_logits(forest)
    distribution = dict(enumerate(probs_of(logits_NV[:1], [sampling])[0].tolist()))
    verdicts = Judge().judge(rows, forest, logits_NV)
    counts = Counter(verdict.extra_id for verdict in verdicts if isinstance(verdict, Verdict))
    assert counts.total() == num
    assert z_of_counts(counts, distribution) < PASSES_BELOW
    other = probs_of(logits_NV[:1], [SamplingParams(temperature=0.7)])[0].tolist()
    assert z_of_counts(counts, dict(enumerate(other))) > PASSES_BELOW


def of_library(monkeypatch, rows: list[Row]) -> list[StepKey]:
    """Return the keys of those that our library judges."""
    keys: list[StepKey] = []

    def judge_coupled_natively(*args):
        keys.extend(args[-1])
        return coupled.judge_coupled_natively(*args)

    monkeypatch.setattr(judging, "judge_coupled_natively", judge_coupled_natively)
    forest = grow(growers_of(TableDrafter(TABLE), V, CPU), rows).forest
    Judge().judge(rows, forest, target_logits(forest))
    return keys


@needs_library
def test_rows_are_verified_independently_of_others(monkeypatch):
    """The bug: one row with typical-p sent all rows of the coupled rule the slow way. Their distributions then had other sums."""
    rows = rows_of([(WARM, "coupled"), (TYPICAL, "coupled"), (SamplingParams(), "coupled")])
    wanted = [rows[0].key, rows[2].key]
    assert of_library(monkeypatch, rows) == wanted
    monkeypatch.setattr(judging, "_rule", lambda row, *_: row.verifier)
    assert of_library(monkeypatch, rows) != wanted
