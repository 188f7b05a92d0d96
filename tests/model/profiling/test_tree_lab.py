"""Counterfactual trees: sharing between trees changes none of them, and the table contains the measurements."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.trees.collect import Collector, Design
from benchmarks.trees.contenders import contenders_of
from benchmarks.trees.paired import differences
from benchmarks.trees.report import report
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.core.verifier_table import is_exact
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import grow, growers_of
from engine.profiling import counterfactual as lab_module
from engine.profiling.counterfactual import Counterfactual, TreeSpec
from engine.testing import tiny_engine
from tests.model.distributions import probs_of
from tests.model.passes import CPU
from tests.model.tiny import own_logits, pair

TEXT = tuple(5 + (7 * i) % 40 for i in range(30))
SAMPLING = SamplingParams(temperature=1.2, top_k=20)
PLANTINGS = [
    TreeSpec(Expansion(2, 2, 2), "traversal", 1),
    TreeSpec(Expansion(0, 3, 4, "heap", 9), "traversal", 2),
    TreeSpec(Expansion(0, 3, 4, "greedy_sample", 8), "univer", 3),
    TreeSpec(Expansion(0, 3, 4, "noise_aware", 8), "coupled", 4),
]
POINT = 17


@pytest.fixture
def lab() -> Counterfactual:
    laboratory = Counterfactual(tiny_engine(*pair("llama", noise=0.1)))
    laboratory.load(TEXT)
    return laboratory


def check_distributions(laboratory: Counterfactual) -> None:
    """The distribution after each node is the target's own after the sequence and the node's path."""
    point = laboratory.point(POINT, PLANTINGS, SAMPLING, Calibrations())
    for index, tree in enumerate(point.growth.forest.trees):
        paths = [[*TEXT[: POINT + 1], *(tree.token_ids[v] for v in tree.path(node)[1:])] for node in range(tree.num_nodes)]
        for path, probs_V in zip(paths, point.target_probs_NV(index), strict=True):
            assert torch.allclose(probs_V, probs_of(own_logits("llama", [path])[:, -1], [SAMPLING])[0], atol=1e-4)


def test_union_pass_gives_distributions_of_each_tree(lab):
    check_distributions(lab)


def test_distributions_detect_union_with_wrong_paths(lab, monkeypatch):
    monkeypatch.setattr(lab_module, "_add", lambda union, tree: [0] * tree.num_nodes)
    with pytest.raises(AssertionError):
        check_distributions(lab)


def test_trees_are_those_that_are_grown_alone(lab):
    together = lab.point(POINT, PLANTINGS, SAMPLING, Calibrations()).growth.forest.trees
    engine = tiny_engine(*pair("llama", noise=0.1))
    alone = Counterfactual(engine)
    alone.load(TEXT)
    for planting, tree in zip(PLANTINGS, together, strict=True):
        row = alone.row(POINT, planting, SAMPLING)
        assert engine.drafter is not None
        assert grow(growers_of(engine.drafter, engine.info.vocab_size, CPU), [row]).forest.trees == (tree,)


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("budget", [8, 16, 32])
def test_contenders_are_exact_pairs_of_equal_size(budget, is_greedy):
    contenders = contenders_of(budget, is_greedy)
    for one in contenders:
        assert one.expansion.num_draft_tokens == budget
        assert is_greedy or all(is_exact(one.expansion.kind, name) or name == "coupled" for name in one.verifiers)
    assert len({(one.expansion, one.row_verifier) for one in contenders}) == len(contenders)


def test_a_run_makes_a_table(tmp_path: Path):
    out = tmp_path / "trees.jsonl"
    design = Design((8,), (0.0, 1.0), num_text_tokens=12, point_stride=5, time_every=2)
    Collector(tiny_engine(*pair("llama", noise=0.1)), design, out).run({"code": [TEXT[:9]], "prose": [TEXT[3:11]]})
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["type"] for line in lines} == {"tokens", "time"}
    assert all(1.0 <= line["tokens"] <= line["num_nodes"] + 1 for line in lines if line["type"] == "tokens")
    text = report(out)
    assert "### Temperature 0, 8 nodes" in text
    assert "| calibrated | traversal |" in text
    assert "| noise_aware | coupled |" in text


def test_the_table_counts_right(tmp_path: Path):
    out = tmp_path / "trees.jsonl"
    of = {"type": "tokens", "temperature": 1.0, "budget": 8, "expansion": "heap.8.8.4", "verifier": "traversal", "num_nodes": 8}
    tokens = [
        {**of, "kind": kind, "tokens": value, "judge_s": 0.01} for kind, value in (("a", 2.0), ("a", 4.0), ("b", 6.0), ("b", 8.0))
    ]
    time = {
        "type": "time",
        "kind": "a",
        "temperature": 1.0,
        "budget": 8,
        "expansion": "heap.8.8.4",
        "draft_s": 0.09,
        "verify_s": 0.1,
    }
    plain = {**time, "expansion": "plain", "budget": 0, "draft_s": 0.0}
    out.write_text("\n".join(map(json.dumps, [*tokens, time, plain])))
    # 5 tokens in 0.2 s are 25 a second, plain decoding's are 10; errors of the kinds' means 1 and 1, of their mean sqrt(2) / 2.
    assert "| heap | traversal | 3.00 | 7.00 | **5.00** ± 0.71 | 10.0 | 5.0% | 25.0 | 2.50 |" in report(out)


def test_paired_differences_are_taken_point_by_point(tmp_path: Path):
    of = {"type": "tokens", "temperature": 1.0, "budget": 8, "kind": "a", "num_nodes": 8, "judge_s": 0.0}
    heap = [{**of, "expansion": "heap.8.8.4", "verifier": "rrsw", "point": str(i), "tokens": float(i)} for i in range(4)]
    chain = [{**of, "expansion": "8.1.0", "verifier": "naive", "point": str(i), "tokens": 1.0} for i in (3, 2, 0)]
    out = tmp_path / "trees.jsonl"
    out.write_text("\n".join(map(json.dumps, [*heap, *chain])))
    # 3 - 1, 2 - 1 and 0 - 1: mean 2 / 3, standard deviation 1.53.
    assert "heap/rrsw - 8.1.0/naive = +0.67 ± 0.88 tokens a step (3 points)" in differences(out, "heap/rrsw", "8.1.0/naive")
    with pytest.raises(SystemExit):
        differences(out, "heap/rrsw", "beam/nss")
