"""Growth: trees have the requested shape. Children are drawn from exactly the distribution that the verifier gets."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Feeding
from engine.core.tree import ROOT, Expansion, TokenTree, TreeKind
from engine.core.types import SamplingParams
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.trees import sampling as children
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import grow, grow_by, growers_of, strategy_of
from engine.draft.trees.grower import plain_growth
from engine.draft.trees.strategies import num_draws
from engine.kv_cache.kv_cache import KVCache
from engine.sampling.noise import gumbels
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.distributions import probs_of
from tests.model.passes import CPU
from tests.model.rows import GREEDY, SAMPLED, TableDrafter, decoding_row
from tests.model.tiny import pair
from tests.strategies import VOCAB_SIZE, expansions, sampling_params


def model_drafter() -> ModelDrafter:
    draft = pair("llama")[1]
    return ModelDrafter("tiny", draft, KVCache(512, CPU), Feeding.OWN_CACHE)


def draft_logits(text: list[int]) -> torch.Tensor:
    """Return the drafter's logits after the text, fed alone."""
    draft = pair("llama")[1]
    batch = pack([chain_segment(text, 0, range(len(text)))], CPU)
    return draft.forward(batch, KVCache(len(text), CPU), torch.tensor([len(text) - 1]))[0]


def path_text(text, tree: TokenTree, node: int) -> list[int]:
    return [*text, *(tree.token_ids[v] for v in tree.path(node)[1:])]


def check_shape(tree: TokenTree, expansion: Expansion) -> None:
    """Each node has the draws that its depth and the paths through it need."""
    num_paths = {ROOT: 1}
    for node, drawn in enumerate(tree.draws):
        depth, fork = tree.depths[node], expansion.branches if tree.depths[node] == expansion.trunk else 1
        assert len(drawn) == (num_paths[node] * fork if depth < expansion.max_depth else 0)
        num_paths.update(Counter(drawn))


@given(expansions(), st.integers(0, 8), st.integers(1, 4))
def test_num_draws(expansion, depth, num_paths):
    expected = num_paths * expansion.width_at(depth + 1) / max(1, expansion.width_at(depth))
    assert num_draws(expansion, depth, num_paths) == expected


batches = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6), expansions(3, 3, 3)), min_size=1, max_size=3
)


def rows_of(several, sampling: SamplingParams, verifier: str, seed: int):
    """Return one decoding row for each (text, expansion), with slots of their own."""
    return [
        decoding_row(text, expansion, sampling, verifier, seed + i, str(i), first_slot=100 * i)
        for i, (text, expansion) in enumerate(several)
    ]


@settings(max_examples=40)
@given(batches, sampling_params(), st.integers(0, 2**62))
def test_sampled_trees_have_their_shape_and_distributions(several, sampling, seed):
    """`probs_rows` points at the drafter's processed distribution after each node's path. Children come from its support."""
    rows = rows_of(several, sampling, "traversal", seed)
    grown = grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), rows)
    for row, tree, probs_rows, fed in zip(rows, grown.forest.trees, grown.forest.probs_rows, grown.fed, strict=True):
        check_shape(tree, row.expansion)
        assert fed == {node for node, drawn in enumerate(tree.draws) if drawn}
        for node, probs_row in enumerate(probs_rows):
            assert (probs_row is None) == (not tree.draws[node])
            if probs_row is not None:
                probs_V = grown.forest.draft_probs_RV[probs_row]
                expected_V = probs_of(draft_logits(path_text(row.certain_ids, tree, node))[None], [sampling])[0]
                assert torch.allclose(probs_V, expected_V, atol=1e-4)
                assert all(probs_V[tree.token_ids[child]] > 0 for child in tree.draws[node])


@settings(max_examples=40)
@given(batches, st.sampled_from(["greedy", "coupled"]), sampling_params(), st.integers(0, 2**62), st.sampled_from([1.0, 2.5]))
def test_ranked_trees_take_the_best_tokens(several, kind, sampling, seed, sharpness):
    rows = rows_of(several, GREEDY if kind == "greedy" else sampling, "coupled", seed)
    calibrations = Calibrations()
    calibrations.of(rows[0]).agreement.log_prob_weight *= sharpness
    grown = grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), rows, calibrations)
    assert len(grown.forest.draft_probs_RV) == 0
    for row, tree in zip(rows, grown.forest.trees, strict=True):
        for node, drawn in enumerate(tree.draws):
            width = num_draws(row.expansion, tree.depths[node], 1)
            text = path_text(row.certain_ids, tree, node)
            expected = ranking(text, row.sampling, row.seed, sharpness)[:width]
            assert [tree.token_ids[child] for child in drawn] == expected


def ranking(text: list[int], sampling: SamplingParams, seed: int, sharpness: float) -> list[int]:
    """Return the tokens of positive score, best first, at the position after the text."""
    scores = draft_logits(text).double()
    if not sampling.is_greedy:
        key = stream_key(seed, len(text), Stream.TOKEN)
        scores = sharpness * probs_of(scores[None].float(), [sampling])[0].double().log() + gumbels([key], VOCAB_SIZE)[0]
    order = scores.argsort(descending=True).tolist()
    return [token_id for token_id in order if scores[token_id] > float("-inf")]


@settings(max_examples=25)
@given(batches, st.sampled_from([("traversal", SAMPLED), ("coupled", SAMPLED), ("coupled", GREEDY)]), st.integers(0, 2**62))
def test_tree_is_independent_of_batch_mates(several, kind, seed):
    rows = rows_of(several, kind[1], kind[0], seed)
    together = grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), rows).forest.trees
    assert together == tuple(grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), [row]).forest.trees[0] for row in rows)


def test_batch_mates_detect_draws_by_batch_index(monkeypatch):
    calls = iter(range(10**6))
    monkeypatch.setattr(children, "_uniforms", lambda node, count: [(0.37 * next(calls) + 0.11 * i) % 1 for i in range(count)])
    rows = rows_of([([5, 6], Expansion(2, 2, 2)), ([9], Expansion(0, 3, 2))], SAMPLED, "traversal", 0)
    together = grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), rows).forest.trees
    assert together[1] != grow(growers_of(model_drafter(), VOCAB_SIZE, CPU), rows[1:]).forest.trees[0]


# Distributions of the next token over a vocabulary of four, by last token.
TABLE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0], [0.7, 0.1, 0.1, 0.1]])
FORK = Expansion(1, 2, 1)


def forks(num_seeds: int = 4000, root_position: int = 2) -> list[tuple[int, int, int]]:
    """Return (trunk token, first branch, second branch) for each seed, all grown in one batch."""
    text = (1,) * root_position + (0,)
    rows = [decoding_row(text, FORK, seed=seed, request_id=str(seed)) for seed in range(num_seeds)]
    trees = grow(growers_of(TableDrafter(TABLE.log()), 4, CPU), rows).forest.trees
    return [(tree.token_ids[1], tree.token_ids[tree.draws[1][0]], tree.token_ids[tree.draws[1][1]]) for tree in trees]


def fork_z() -> float:
    """Return how far trunk and branches are from independent draws."""
    distribution = {(t, a, b): float(TABLE[0, t] * TABLE[t, a] * TABLE[t, b]) for t, a, b in product(range(4), repeat=3)}
    return z_of_counts(Counter(forks()), {outcome: p for outcome, p in distribution.items() if p > 0})


def test_children_are_independent_draws_of_the_distribution():
    assert fork_z() < PASSES_BELOW


def one_uniform_for_all_nodes(node, count):
    return _UNIFORMS(replace(node, node=ROOT), count)


def one_uniform_for_all_draws(node, count):
    return _UNIFORMS(node, 1) * count


def draws_of_neighbours_shared(node, count):
    return _UNIFORMS(node, count + 1)[1:] if node.node == ROOT else _UNIFORMS(replace(node, node=ROOT), count)


def distinct_draws(*args):
    """A token drawn before is replaced by another: not i.i.d. any more."""
    offers = _DRAWN(*args)
    return [
        replace(one, token_ids=(one.token_ids[0], (one.token_ids[0] + 1) % 4))
        if len(set(one.token_ids)) < len(one.token_ids)
        else one
        for one in offers
    ]


_UNIFORMS, _DRAWN = children._uniforms, children._sample_iid


@pytest.mark.parametrize("mutant", [one_uniform_for_all_nodes, one_uniform_for_all_draws, draws_of_neighbours_shared])
def test_independence_of_draws_detects_mutants(mutant, monkeypatch):
    monkeypatch.setattr(children, "_uniforms", mutant)
    assert fork_z() > FAILS_ABOVE


def test_independence_test_detects_draws_without_replacement(monkeypatch):
    monkeypatch.setitem(children._SAMPLING_RULES, TreeKind.IID, distinct_draws)
    assert fork_z() > FAILS_ABOVE


def position_z() -> float:
    """Return the dependence between the draws at two positions, over seeds."""
    here, there = ([trunk for trunk, *_ in forks(root_position=position)] for position in (2, 3))
    distribution = {(a, b): float(TABLE[0, a] * TABLE[0, b]) for a, b in product(range(4), repeat=2)}
    return z_of_counts(Counter(zip(here, there, strict=True)), distribution)


def test_draws_at_two_positions_are_independent():
    assert position_z() < PASSES_BELOW


def test_positions_detect_key_without_position(monkeypatch):
    monkeypatch.setattr(children, "stream_key", lambda seed, position, stream: stream_key(seed, 0, stream))
    assert position_z() > FAILS_ABOVE


def test_equal_draws_are_one_node_with_multiplicity():
    certain = torch.full((4, 4), float("-inf"))
    certain[:, 3] = 0.0
    tree = grow(growers_of(TableDrafter(certain), 4, CPU), [decoding_row((0,), Expansion(1, 3, 2))]).forest.trees[0]
    assert tree.draws == ((1,), (2, 2, 2), (3, 3, 3), ())


def test_largest_uniform_draws_a_valid_token(monkeypatch):
    """The point u x total can round up to the total, past every token; the draw was then no token at all."""
    monkeypatch.setattr(children, "_uniforms", lambda node, count: [1.0 - 2.0**-53] * count)
    logits = torch.tensor([[0.3, 0.1, 0.7, float("-inf")]]).repeat(4, 1)
    tree = grow(growers_of(TableDrafter(logits), 4, CPU), [decoding_row((0,), Expansion(3, 2, 2))]).forest.trees[0]
    assert set(tree.token_ids[1:]) == {2}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(("sampling", "verifier"), [(SAMPLED, "traversal"), (SAMPLED, "coupled"), (GREEDY, "coupled")])
def test_broken_draft_logits_end_the_tree(broken, sampling, verifier):
    """They once drew a token outside the vocabulary, which failed the step for everybody."""
    logits = TABLE.log().clone()
    logits[3, 1] = broken
    rows = [
        decoding_row((first,), Expansion(2, 2, 1), sampling, verifier, seed, str(seed)) for seed, first in enumerate((3, 0, 1, 2))
    ]
    grown = grow(growers_of(TableDrafter(logits), 4, CPU), rows)
    assert grown.forest.trees[0].num_nodes == 1
    for tree, probs_rows in zip(grown.forest.trees, grown.forest.probs_rows, strict=True):
        for node, token_id in enumerate(tree.token_ids):
            assert token_id != 3 or (not tree.draws[node] and probs_rows[node] is None)
    assert torch.isfinite(grown.forest.draft_probs_RV).all()


@pytest.mark.parametrize("first_broken", range(4))
def test_broken_logits_end_only_their_own_tree(first_broken):
    """Offers are made kind by kind, and in each kind for the rows that have a distribution."""
    logits = TABLE.log().clone()
    logits[first_broken, 1] = float("nan")
    kinds = [(SAMPLED, "traversal"), (SAMPLED, "coupled"), (GREEDY, "coupled"), (SAMPLED, "nss")]
    rows = [
        decoding_row((first,), Expansion(0, 2, 1), *kind, seed, f"{seed} {first}")
        for seed, kind in enumerate(kinds)
        for first in ((seed + turn) % 4 for turn in range(4))
    ]
    grown = grow(growers_of(TableDrafter(logits), 4, CPU), rows)
    assert [tree.num_nodes == 1 for tree in grown.forest.trees] == [row.certain_ids == (first_broken,) for row in rows]
    alone = [grow(growers_of(TableDrafter(logits), 4, CPU), [row]).forest.trees[0] for row in rows]
    assert list(grown.forest.trees) == alone


def test_plain_growth_is_roots_alone():
    grown = plain_growth(rows_of([([5, 6], Expansion(2, 2, 2)), ([9], Expansion(0, 3, 2))], SAMPLED, "traversal", 0), 61, CPU)
    assert grown.forest.trees == (TokenTree.single(6), TokenTree.single(9))
    assert grown.fed == (frozenset(), frozenset())


def test_batch_of_chunks_only_feeds_the_drafter():
    """A drafter with a cache of its own is fed the chunk; its keys are there for the tree that comes later."""
    chunk = structs.replace(decoding_row((5, 6, 7, 8), Expansion(0, 1, 0)), is_decoding=False)
    drafter = model_drafter()
    grown = grow(growers_of(drafter, VOCAB_SIZE, CPU), [chunk])
    assert grown.forest.trees == ()
    fresh = KVCache(4, CPU)
    pair("llama")[1].forward(pack([chain_segment((5, 6, 7, 8), 0, range(4))], CPU), fresh, torch.tensor([0]))
    where = torch.arange(4)[None]
    assert torch.allclose(drafter._cache.gather(1, where)[0], fresh.gather(1, where)[0], atol=1e-5)


@pytest.mark.parametrize("is_traced", [False, True])
def test_batch_without_drafts_feeds_and_keeps_roots(is_traced):
    rows = [
        structs.replace(decoding_row((5, 9, 33), Expansion(0, 1, 0)), is_traced=is_traced),
        decoding_row((4,), Expansion(0, 1, 0)),
    ]
    strategies = [strategy_of(row, Calibrations().of(row)) for row in rows]
    grown, expected = grow(growers_of(model_drafter(), 61, CPU), rows), grow_by(strategies, model_drafter(), rows, 61, CPU)
    assert grown.passes == expected.passes
    assert grown.passes.num_fed
    assert torch.equal(grown.forest.draft_probs_RV, expected.forest.draft_probs_RV)
    assert structs.replace(grown.forest, draft_probs_RV=expected.forest.draft_probs_RV) == expected.forest
    assert structs.replace(grown, forest=expected.forest) == expected
