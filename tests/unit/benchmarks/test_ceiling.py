"""The replay of ways to choose: features add something where acceptance depends on them, and counting is the server's."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ceiling.__main__ import rows_of
from benchmarks.ceiling.ways import Shapes, counted, predictions
from selector.network.examples import Examples
from selector.network.features import SCALARS
from selector.network.replay import best_places
from tests.selector.roots import examples

NUM_PROMPTS, NUM_ROOTS = 24, 8
ROOTS = examples(NUM_PROMPTS, NUM_ROOTS)
ENTRIES = ROOTS.menu.entries


def seconds_of(roots: Examples) -> np.ndarray:
    """Return seconds in which a node costs a tenth of a step."""
    return 1.0 + 0.1 * roots.nodes_RM.astype(np.float64)


def rates(roots: Examples) -> dict[str, float]:
    """Return tokens a second by way, over counting."""
    seconds_RM, rows = seconds_of(roots), np.arange(len(roots))
    found = {}
    for way, tokens_RM in predictions(roots, seconds_RM).items():
        places = best_places(tokens_RM, seconds_RM)
        found[way] = float(roots.tokens_RM[rows, places].sum() / seconds_RM[rows, places].sum())
    return {way: rate / found["counting"] for way, rate in found.items()}


def test_informative_features_are_ahead():
    found = rates(ROOTS)
    assert found["linear: request, root"] > found["linear: request"] + 0.02
    assert found["residual: root"] > 1.02
    assert found["oracle"] >= max(found.values())


def test_uninformative_features_add_nothing():
    scalars_RS = ROOTS.scalars_RS.copy()
    scalars_RS[:, 0] = np.random.default_rng(1).normal(size=len(ROOTS))
    found = rates(replace(ROOTS, scalars_RS=scalars_RS))
    assert found["residual: root"] == pytest.approx(1.0, abs=0.03)
    assert found["linear: request, root"] == pytest.approx(found["linear: request"], abs=0.03)
    assert SCALARS[0] == "entropy"


def test_survival_is_that_of_the_tree():
    """Of depths that the menu lacks too: they are between their neighbours."""
    shapes, tokens_M = Shapes(ROOTS.menu), ROOTS.tokens_RM[0].astype(np.float64)
    for place, entry in enumerate(ENTRIES):
        survival_D = shapes.survival_D(tokens_M, place)
        assert len(survival_D) == entry.max_depth
        assert survival_D == sorted(survival_D, reverse=True)
        assert 1.0 + sum(survival_D) == pytest.approx(tokens_M[place], abs=0.05), entry


def test_counting_learns_what_came():
    tokens_RM = np.repeat(ROOTS.tokens_RM.mean(0, keepdims=True), len(ROOTS), 0)
    alike = replace(ROOTS, tokens_RM=tokens_RM)
    found_RM = counted(alike, seconds_of(alike), Shapes(alike.menu))
    chain = next(place for place, entry in enumerate(ENTRIES) if entry.trunk == 1 and entry.branches == 1)
    assert found_RM[len(ROOTS) // 2 :, chain].mean() == pytest.approx(tokens_RM[0, chain], rel=0.05)


def test_each_rule_and_temperature_has_a_row():
    rows = rows_of(ROOTS, seconds_of(ROOTS))
    assert [(row["rule"], row["temperature"], row["roots"]) for row in rows] == [("traversal", "1", str(len(ROOTS)))]
    assert float(rows[0]["over plain"]) > 1.0
    assert rows[0]["oracle"].startswith("1.")
