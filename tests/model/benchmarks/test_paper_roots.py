"""Roots of the table are measured with real models: each figure agrees with another way to compute it."""

import pytest

from benchmarks.paper.collect import Amount, Roots, read
from benchmarks.paper.design import CHAIN, FAMILIES, HEAPS, PAIRS, SHAPES
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.testing import tiny_engine, tiny_pair
from selector.cost import CostModel

SAMPLING = SamplingParams(1.0, top_p=0.9)
SHORT = SHAPES.index(Expansion(8, 1, 0))


@pytest.fixture(scope="module")
def root():
    roots = Roots(tiny_engine(*tiny_pair(noise=0.05)), CostModel())
    (text,) = roots.texts([((5, 6, 7), SamplingParams(1.0, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True))])
    found = list(roots.of_text("text", text, 3, SAMPLING, Amount(((1.0, 0.9),), 1, 30, 10, 2)))
    assert len(found) == 2
    return found[0]


def test_chain_brings_the_sum_of_its_chances(root):
    """E[tau + 1] of the top-down rule for one path is the sum of the chances to reach each depth."""
    assert root["tokens"]["naive/i.i.d."][SHORT] == pytest.approx(sum(root["chances"][:9]), abs=0.001)
    assert root["tokens"]["naive/i.i.d."][CHAIN] >= sum(root["chances"]) - 0.001
    assert max(root["overlaps"]) <= 1.0001


def test_rules_agree_and_differ_where_they_must(root):
    """With one path, SpecInfer is the top-down rule for one path, and Traversal is block verification."""
    tokens = root["tokens"]
    for shape in (SHORT, CHAIN):
        naive, block = (tokens[f"{name}/i.i.d."][shape] for name in ("naive", "block"))
        assert tokens["specinfer/i.i.d."][shape] == pytest.approx(naive, abs=0.001)
        assert tokens["traversal/i.i.d."][shape] == pytest.approx(block, abs=0.001)


def test_every_rule_has_every_shape(root):
    for family in FAMILIES:
        assert len(root["seconds"][family.name]) == len(SHAPES) + len(HEAPS)
        for name in family.verifiers:
            row = root["tokens"][f"{name}/{family.name}"]
            assert all(one is not None and 1.0 <= one <= 13.0 for one in row[: len(SHAPES)])
            assert all((one is None) == (name not in family.heap_verifiers) for one in row[len(SHAPES) :])


def test_file_of_no_run_is_empty(tmp_path):
    assert read(tmp_path / "none.jsonl") == []
    assert PAIRS["smollm2-head"].engine_config().cached_text is False
