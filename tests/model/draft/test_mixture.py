"""Cached text beside a model's distribution: the library mixes as torch does, and the mixture follows the weights."""

import math

import pytest
import torch

from engine.core.enums import DraftSource, Origin
from engine.draft.drafter import TrimmedVocabulary
from engine.draft.text import mixture
from engine.draft.text.matching import CachedDistribution
from engine.draft.text.mixture import extended_vocabulary, mixtures
from engine.native import mixture as native
from tests.model.passes import CPU
from tests.needs import needs_library

SIZE = 500
VOCAB = TrimmedVocabulary(torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))[:123].sort().values, SIZE)
KNOWN_ID, OTHER_ID = int(VOCAB.ids_M[3]), int(VOCAB.ids_M[90])
UNKNOWN_ID = next(token_id for token_id in range(SIZE) if token_id not in VOCAB.ids_M.tolist())
CACHED = [
    CachedDistribution({KNOWN_ID: 0.5, UNKNOWN_ID: 0.25, OTHER_ID: 0.25}, 0.7, frozenset({OTHER_ID})),
    None,
    CachedDistribution({KNOWN_ID: 1.0}, 0.03, frozenset()),
    CachedDistribution({OTHER_ID: 0.5, UNKNOWN_ID: 0.5}, 0.9, frozenset()),
    CachedDistribution({OTHER_ID: 1.0}, 0.98, frozenset()),
]
ROWS = [2, 0, 4, None, 1]
LOGITS = torch.randn(5, 123, generator=torch.Generator().manual_seed(1)) * 3.0 + 5.0


def mixed(vocab=VOCAB, logits=LOGITS, rows=ROWS):
    known = [distribution for distribution in CACHED if distribution is not None]
    logits_PM, origins = mixtures(logits, rows, CACHED, extended_vocabulary(known, vocab), SIZE, CPU)
    return logits_PM.softmax(-1), origins


def by_torch(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patched:
        patched.setattr(native, "can_mix", lambda device: False)
        return mixed(*args, **kwargs)


def is_as_by_torch(monkeypatch, **kwargs) -> bool:
    (probs_PM, origins), (other_PM, other_origins) = mixed(**kwargs), by_torch(monkeypatch, **kwargs)
    return torch.allclose(probs_PM, other_PM, atol=1e-6) and origins == other_origins


@needs_library
@pytest.mark.parametrize("is_trimmed", [True, False])
def test_the_library_mixes_what_torch_mixes(monkeypatch, is_trimmed):
    logits = LOGITS if is_trimmed else torch.randn(5, SIZE, generator=torch.Generator().manual_seed(2)) * 3.0
    assert is_as_by_torch(monkeypatch, vocab=VOCAB if is_trimmed else None, logits=logits)


@needs_library
@pytest.mark.parametrize(
    "mutant",
    [
        lambda distribution, columns: native.Predicted(columns, [*distribution.probs.values()], 0.5),  # whatever it is trusted
        lambda distribution, columns: native.Predicted(columns, [1.0 / len(columns)] * len(columns), distribution.confidence),
        lambda distribution, columns: native.Predicted(
            [max(0, column - 1) for column in columns], [*distribution.probs.values()], distribution.confidence
        ),
    ],
)
def test_other_mixtures_are_noticed(monkeypatch, mutant):
    monkeypatch.setattr(mixture, "as_native", mutant)
    assert not is_as_by_torch(monkeypatch)


def test_a_mixture_weighs_both_by_their_odds():
    probs_PM, origins = mixed()
    own_M = LOGITS[2].softmax(-1)
    trust = float(own_M.square().sum())
    weight = (0.7 / 0.3) / (0.7 / 0.3 + trust / (1.0 - trust))
    assert probs_PM[0, 3] == pytest.approx(weight * 0.5 + (1.0 - weight) * float(own_M[3]), abs=1e-5)
    assert probs_PM[0, 7] == pytest.approx((1.0 - weight) * float(own_M[7]), abs=1e-5)
    assert probs_PM[0, 123] == pytest.approx(weight * 0.25, abs=1e-5)  # which the model does not know
    assert torch.allclose(probs_PM[1, :123], LOGITS[0].softmax(-1), atol=1e-6)
    assert probs_PM[3].nonzero()[:, 0].tolist() == [90, 123]  # the cache alone
    assert origins[0][OTHER_ID] == Origin(DraftSource.PREDICTION, True)
    assert origins[1] == {}
    assert {*origins[3].values()} == {Origin(DraftSource.CACHE, True)}


@needs_library
def test_broken_logits_stay_broken():
    for value in (math.nan, math.inf):
        logits = LOGITS.clone()
        logits[2, 50] = value
        probs_PM, _ = mixed(logits=logits)
        assert probs_PM[0].isnan().any()
        assert not probs_PM[1:].isnan().any()
