"""A drafter with a trimmed vocabulary: its trees, offers and distributions equal those of logits that mask the other tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.core.tree import parse_expansion
from engine.core.types import SamplingParams
from engine.draft.drafter import Proposal, TrimmedVocabulary
from engine.draft.trees import sampling as children
from engine.draft.trees.grow import grow, growers_of
from engine.draft.trees.grower import Growth
from tests.model.passes import CPU
from tests.model.rows import GREEDY, SAMPLED, TableDrafter, decoding_row

VOCAB_SIZE = 40
KNOWN = torch.tensor([token_id for token_id in range(VOCAB_SIZE) if token_id % 3 != 1])
CASES = [
    ("3.2.2", SAMPLED, "traversal"),
    ("delayed_distinct.1.3.2", SAMPLED, "traversal"),
    ("greedy_sample.8", SAMPLED, "spectr"),
    ("2.3.1", GREEDY, "traversal"),
    ("2.3.1", SAMPLED, "coupled"),
    ("beam.8", SAMPLED, "nss"),
    ("2.2.2", replace(SAMPLED, top_p=0.8, temperature=0.6), "traversal"),
    ("2.2.2", replace(SAMPLED, logit_bias=((1, 30.0), (5, -3.0))), "traversal"),
    ("2.2.2", replace(SAMPLED, repetition_penalty=1.4), "coupled"),
    ("2.3.1", replace(GREEDY, allowed_token_ids=(2, 3, 5, 6, 7)), "traversal"),
]


class TrimmedDrafter(TableDrafter):
    """The same table, of the known tokens alone."""

    def extend(self, frontier):
        whole = super().extend(frontier)
        return Proposal(whole.indices, whole.logits_PM[:, KNOWN], vocab=TrimmedVocabulary(KNOWN, VOCAB_SIZE))


def table() -> Tensor:
    logits_VV = 3.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    is_known_V = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, KNOWN, True)
    return logits_VV.masked_fill(~is_known_V, float("-inf"))


def grown(drafter: TableDrafter, tree: str, sampling: SamplingParams, verifier: str) -> Growth:
    rows = [
        decoding_row((5, 6, 7 + seed), parse_expansion(tree), sampling, verifier, seed=seed, request_id=str(seed))
        for seed in range(12)
    ]
    return grow(growers_of(drafter, VOCAB_SIZE, CPU), rows)


def check(tree: str, sampling: SamplingParams, verifier: str) -> None:
    whole, trimmed = (grown(drafter(table()), tree, sampling, verifier) for drafter in (TableDrafter, TrimmedDrafter))
    assert trimmed.forest.trees == whole.forest.trees
    assert trimmed.forest.probs_rows == whole.forest.probs_rows
    assert trimmed.forest.draft_probs_RV.shape == whole.forest.draft_probs_RV.shape
    assert torch.allclose(trimmed.forest.draft_probs_RV, whole.forest.draft_probs_RV, atol=1e-6)


@pytest.mark.parametrize(("tree", "sampling", "verifier"), CASES)
def test_trimmed_logits_grow_the_full_tree(tree, sampling, verifier):
    check(tree, sampling, verifier)


def columns_for_tokens(nodes, columns_PC, probs_PM, vocab, *rest):
    return _TO_HOST(nodes, columns_PC, probs_PM, None, *rest)


def ranked_columns_for_tokens(nodes, logits_PM, sampling, keys, vocab):
    return _TOP_BY_NATIVE(nodes, logits_PM, sampling, keys, None)


def edits_by_column(proposal):
    return proposal.logits_PM


_TO_HOST, _TOP_BY_NATIVE = children._to_host, children._top_by_native


@pytest.mark.parametrize(
    ("where", "name", "mutant", "case"),
    [
        (children, "_to_host", columns_for_tokens, CASES[0]),
        (children, "_top_by_native", ranked_columns_for_tokens, CASES[4]),
        (Proposal, "logits_PV", property(edits_by_column), CASES[7]),
        (TrimmedVocabulary, "widened", lambda vocab, rows_PM, filler: rows_PM, CASES[0]),
    ],
)
def test_trimming_mutants_are_detected(where, name, mutant, case, monkeypatch):
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(*case)
