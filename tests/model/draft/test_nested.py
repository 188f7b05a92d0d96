"""Truncations of one deep tree: each equals the tree that its expansion grows alone, with the same expected tokens."""

import pytest
import torch

from engine.core.tree import Expansion, TreeKind, TreeName
from engine.core.types import SamplingParams
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from engine.draft.drafter import GrowingTree
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.nested import Nested
from engine.draft.trees.sampling import ChildCandidates
from engine.draft.trees.strategies import Delayed
from engine.profiling import counterfactual as lab_module
from engine.profiling.counterfactual import Counterfactual, NestedPoint, TreeSpec
from engine.verify.registry import create_verifier
from tests.model.heads import head_engine, learnt_head
from tests.model.rows import decoding_row

TEXT = tuple(5 + (7 * i) % 40 for i in range(30))
SHAPES = [(1, 1, 0), (3, 1, 0), (0, 3, 2), (1, 2, 2), (2, 3, 1), (0, 2, 3)]
SAMPLING = SamplingParams(temperature=1.5)


def nested_point(family: TreeName = "delayed", sampling: SamplingParams = SAMPLING, verifier: str = "traversal") -> NestedPoint:
    laboratory = Counterfactual(head_engine(learnt_head()))
    laboratory.load(TEXT)
    expansions = [Expansion(*shape, "delayed" if shape[1] == 1 else family) for shape in SHAPES]
    plantings = [TreeSpec(Expansion(0, 3, 3, family), verifier, seed) for seed in (5, 6)]
    return laboratory.nested(17, expansions, plantings, sampling)


class Script:
    """Draws that depend on the path and their own number alone, with some that coincide."""

    @staticmethod
    def candidates(tree: GrowingTree, node: int, count: int) -> ChildCandidates:
        base = sum((depth + 1) * tree.token_ids[at] for depth, at in enumerate(tree.path(node)[1:]))
        return ChildCandidates(tuple((base + draw * draw) % 3 for draw in range(count)), (0.3,) * count)


def grown_whole(strategy) -> None:
    while frontier := strategy.frontier():
        for one in frontier:
            strategy.expand(one.node, Script.candidates(strategy.tree, one.node, one.num_draws))


def paths_of(tree) -> list[tuple[list[int], list[int]]]:
    return sorted(
        ([tree.token_ids[v] for v in tree.path(node)[1:]], [tree.token_ids[child] for child in tree.draws[node]])
        for node in range(tree.num_nodes)
    )


def test_truncation_equals_the_separately_grown_tree():
    expansions = [Expansion(*shape) for shape in SHAPES]
    row = decoding_row(expansion=Expansion(0, 3, 4))
    whole = Nested(GrowingTree(row), expansions)
    grown_whole(whole)
    for expansion, one in zip(expansions, whole.truncations(), strict=True):
        alone = Delayed(GrowingTree(decoding_row(expansion=expansion)))
        grown_whole(alone)
        assert paths_of(one.tree) == paths_of(alone.finish().tree), expansion
        assert [whole.tree.token_ids[node] for node in one.nodes[1:]] == list(one.tree.token_ids[1:])


@pytest.mark.parametrize("family", ["delayed", "delayed_distinct"])
def test_merging_undrafted_tokens_changes_no_expectation(family):
    point = nested_point(family)
    kind = TreeKind.IID if family == "delayed" else TreeKind.FIXED_DISTINCT
    names = [name for name in VERIFIER_NAMES if name != "coupled" and is_exact(kind, name)]
    assert "traversal" in names
    for name in names:
        verifier = create_verifier(name)
        forest = point.forest(0)
        probs_MV = point.whole.target_probs_NV(0)
        nodes = torch.tensor([node for one in point.truncations[0] for node in one.nodes])
        full = verifier.judge(forest, probs_MV[nodes], [point.whole.rows[0].key] * len(SHAPES))
        brought = point.tokens(0, verifier)
        assert [one.tokens for one in brought] == pytest.approx([one.expected_tokens for one in full], abs=1e-6), name
        assert [one.accepted_depth for one in brought] == [len(one.path) - 1 for one in full], name
        assert len({round(one.tokens, 6) for one in brought}) > 2


@pytest.mark.parametrize("family", ["delayed", "delayed_distinct"])
def test_trees_grown_beside_are_those_grown_alone(family):
    """Other trees of a point share the passes: their nodes and distributions are those of a point of their own."""
    laboratory = Counterfactual(head_engine(learnt_head()))
    laboratory.load(TEXT)
    specs = [TreeSpec(Expansion(0, 2, 4, "heap", 4), "traversal", seed) for seed in (7, 8)]
    whole = TreeSpec(Expansion(0, 3, 3, family), "traversal", 5)
    beside = laboratory.nested(17, [Expansion(*shape) for shape in SHAPES], [whole], SAMPLING, specs).others
    alone = laboratory.point(17, specs, SAMPLING, Calibrations())
    assert beside is not None
    assert beside.growth.forest.trees == alone.growth.forest.trees
    assert beside.growth.rounds == alone.growth.rounds
    for index in range(len(specs)):
        torch.testing.assert_close(beside.target_probs_NV(index), alone.target_probs_NV(index))
    assert laboratory.nested(17, [Expansion(1, 1, 0)], [whole], SAMPLING).others is None


def test_leaving_the_unknown_tokens_out_would_show(monkeypatch):
    """The mutation of the test before: probability of tokens that no draft knows is lost."""
    whole = lab_module.merge_undrafted

    def without_rest(*args):
        merged = whole(*args)
        merged.target_probs_MC[:, -1] = 0.0
        return merged._replace(target_probs_MC=merged.target_probs_MC / merged.target_probs_MC.sum(-1, keepdim=True))

    monkeypatch.setattr(lab_module, "merge_undrafted", without_rest)
    with pytest.raises(AssertionError):
        test_merging_undrafted_tokens_changes_no_expectation("delayed_distinct")


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "traversal"), (1.2, "coupled")])
def test_truncations_are_judged_separately_under_other_chances(temperature, verifier):
    point = nested_point("delayed_distinct", SamplingParams(temperature=temperature), verifier)
    for index in range(2):
        brought = point.tokens(index, create_verifier(verifier) if temperature else None)
        for one, truncation in zip(brought, point.truncations[index], strict=True):
            assert one.accepted_depth == one.tokens - 1
            probs_NV = point.whole.probs_UV
            if temperature:
                assert probs_NV is not None
                numbers = [point.whole.nodes[index][node] for node in truncation.nodes]
                forest = point.forest(index).subset([point.truncations[index].index(truncation)])
                alone = create_verifier(verifier).judge(forest, probs_NV[torch.tensor(numbers)], [point.whole.rows[index].key])
                assert one.accepted_depth == len(alone[0].path) - 1
    assert max(
        one.accepted_depth
        for index in range(2)
        for one in point.tokens(index, create_verifier("coupled") if temperature else None)
    )
