"""The replay of roots: ways that use their features are ahead where features are informative, and only there."""

import numpy as np
import pytest

from benchmarks.roots import Known, folds, most_over_all, replayed
from selector.network.replay import best_places

NUM_TEXTS, NUM_ROOTS = 30, 20


def paper_roots(informativeness: float) -> Known:
    """Return roots with two trees of one and eight nodes; a scalar predicts their acceptance, or nothing."""
    rng = np.random.default_rng(3)
    count = NUM_TEXTS * NUM_ROOTS
    acceptance = rng.choice([0.05, 0.9], count)
    came = (rng.random((count, 8)) < acceptance[:, None]).cumprod(1)
    tokens = np.stack([np.ones(count), 1.0 + came[:, 0], 1.0 + came.sum(1)], axis=1)
    seconds = np.tile([1.0, 1.2, 2.2], (count, 1))
    means = np.tile(tokens.mean(0), (count, 1))
    features = informativeness * acceptance + (1.0 - informativeness) * rng.random(count)
    return Known(
        texts=tuple(f"text-{place // NUM_ROOTS}" for place in range(count)),
        temperature_R=np.zeros(count),
        features_RX=features[:, None],
        states_RX=rng.normal(size=(count, 4)).astype(np.float32),
        counted_RK=means,
        counted_s_RK=seconds,
        tokens_RK=tokens,
        expected_RK=means,
        seconds_RK=seconds,
    )


def rates(known: Known) -> dict[str, float]:
    return {name: float(rate.split()[0]) for name, rate, *_ in replayed(known)}


def test_informative_roots_improve_choices():
    found = rates(paper_roots(informativeness=1.0))
    assert found["plain decoding"] == 1.0
    for way in ("linear", "network"):
        assert found[way] > 1.1 * found["one least chance"]
    assert found["what came"] >= found["linear"]


def test_uninformative_roots_improve_nothing():
    found = rates(paper_roots(informativeness=0.0))
    for way in ("linear", "network", "counting"):
        assert found[way] == pytest.approx(found["one least chance"], rel=0.05)


def test_folds_cover_roots_and_separate_texts():
    texts = [f"text-{place % 7}" for place in range(50)]
    covered = []
    for learnt, of_fold in folds(texts):
        assert not {texts[row] for row in learnt} & {texts[row] for row in of_fold}
        covered += of_fold.tolist()
    assert sorted(covered) == list(range(50))


def test_choices_maximise_overall_rate():
    """A dear tree that brings more a second than plain decoding, but less than what else the seconds could buy, is left."""
    tokens, seconds = np.array([[1.0, 4.0], [1.0, 1.3]]), np.array([[1.0, 1.1], [1.0, 1.2]])
    assert most_over_all(tokens, seconds).tolist() == [1, 0]
    assert best_places(tokens, seconds).tolist() == [1, 1]
