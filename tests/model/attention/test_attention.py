"""Tree pass = sequential pass: the logits at every node are those of its path run alone, whatever it is packed with."""

import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.attention import packing
from engine.attention.packing import Group, pack
from engine.attention.scoring import Scoring
from engine.attention.segments import chain_segment
from engine.attention.tree_attention import GatheredAttention, UnsupportedAttention, group_attention, tree_attention
from engine.core.tree import TokenTree
from engine.kv_cache.kv_cache import KVCache
from engine.testing import FAMILIES, tiny_model
from engine.weights import UnsupportedModel
from tests.model.passes import CPU, error_of, node_logits, repadded, scene_row
from tests.model.tiny import model
from tests.strategies import VOCAB_SIZE, token_trees

EXACT = 2e-4  # float32, logits of size 10
WRONG = 1e-2
DRIVEN = (*FAMILIES, "gpt_oss")  # the presets', and one with attention sinks and windows


@st.composite
def scenes(draw):
    """One to four rows of 1 to 24 tokens, each with a tree and random cuts, over shuffled slots."""
    rng = draw(st.randoms(use_true_random=False))
    texts = draw(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24), min_size=1, max_size=4))
    trees = [draw(token_trees(max_nodes=8, root_id=text[-1])) for text in texts]
    free_slots = list(range(sum(map(len, texts)) + sum(tree.num_nodes for tree in trees)))
    rng.shuffle(free_slots)
    return [scene_row(rng, text, tree, free_slots) for text, tree in zip(texts, trees, strict=True)]


@pytest.mark.parametrize("family", DRIVEN)
@settings(max_examples=25)
@given(rows=scenes(), max_padding=st.sampled_from([1.0, 1.2, 2.0, 100.0]))
def test_tree_pass_is_the_sequential_pass(family, rows, max_padding):
    """`max_padding` makes anything from one group a row to one group for all."""
    with patch.object(packing, "_MAX_PADDING", max_padding):
        logits = node_logits(model(family), rows)
    assert error_of(logits, family, rows) < EXACT


def ragged_scene():
    """Two rows of unlike length with branching trees, cut in chunks, in one padded group."""
    rng = random.Random(5)
    shapes = [
        (19, ((-1, 0, 0, 1, 2, 4, 5), ((1, 2), (3,), (4,), (), (5,), (6,), ()))),
        (9, ((-1, 0, 0, 0, 2), ((1, 2, 3), (), (4,), (), ()))),
    ]
    free_slots = rng.sample(range(60), 60)
    rows = []
    for length, (parents, draws) in shapes:
        text = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        tree = TokenTree(parents, (text[-1], *(10 + 3 * node for node in range(1, len(parents)))), draws)
        rows.append(scene_row(rng, text, tree, free_slots))
    return rows


def long_scene():
    """Rows of 30 to 120 tokens with a branching tree; the last pass feeds 1 to 17 tokens of text: contexts of several blocks.

    Some positions end at 40; others are on both sides of it.
    """
    rng = random.Random(11)
    lengths = [
        (30, 3),
        (37, 4),
        (37, 1),
        (39, 5),
        (44, 1),
        (70, 1),
        (101, 17),
        (120, 4),
    ]  # tokens, and those left for the last pass
    parents, draws = (-1, 0, 0, 1, 3, 4, 2), ((1, 2), (3,), (6,), (4,), (5,), (), ())
    free_slots = rng.sample(range(600), 600)
    rows = []
    for length, left in lengths:
        text = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        tree = TokenTree(parents, (text[-1], *(10 + 3 * node for node in range(1, len(parents)))), draws)
        rows.append(replace(scene_row(rng, text, tree, free_slots), cuts=(length // 3, length - left)))
    return rows


def causal_mask(segment):
    return structs.replace(segment, tail_visible_TW=np.tri(segment.num_tokens, dtype=np.bool_))


def only_itself_seen(segment):
    return structs.replace(segment, tail_visible_TW=np.eye(segment.num_tokens, dtype=np.bool_))


def positions_by_index(segment):
    first = segment.positions[0]
    positions = list(range(first, first + segment.num_tokens))
    return structs.replace(segment, positions=positions, tail_positions=positions)


def keys_written_to_neighbours(segment):
    return structs.replace(segment, write_slots=[*segment.write_slots[1:], segment.write_slots[0]])


def padding_seen(batch):
    return repadded(batch, groups=tuple(_all_padding_seen(group) for group in batch.padded.groups))


def _all_padding_seen(group: Group) -> Group:
    is_padding_BL = ~group.visible_BTL.any(1)
    return replace(group, visible_BTL=group.visible_BTL | is_padding_BL[:, None, :], _biases={})


def outputs_of_others(batch):
    return repadded(batch, unpad_T=batch.padded.unpad_T.flip(0), is_identity=False)


def window_ignored(batch):
    return repadded(batch, groups=tuple(_WindowlessGroup.like(group) for group in batch.padded.groups))


def window_one_too_wide(batch):
    return repadded(batch, groups=tuple(_WideWindowGroup.like(group) for group in batch.padded.groups))


def window_by_index(batch):
    """The window reaches back from a node's place in the tree, not from its depth."""
    groups = []
    for group in batch.padded.groups:
        positions_BT = group.query_positions_BT
        by_index_BT = positions_BT[:, :1] + torch.arange(positions_BT.shape[1])
        groups.append(replace(group, query_positions_BT=by_index_BT, _biases={}))
    return repadded(batch, groups=tuple(groups))


class _WindowlessGroup(Group):
    @classmethod
    def like(cls, group):
        return cls(*(getattr(group, name) for name in _GROUP_FIELDS))

    def bias(self, window, dtype):
        return super().bias(None, dtype)


class _WideWindowGroup(_WindowlessGroup):
    def bias(self, window, dtype):
        return Group.bias(self, None if window is None else window + 1, dtype)


_GROUP_FIELDS = ("token_index_BT", "key_slots_BL", "visible_BTL", "query_positions_BT", "key_positions_BL")


@pytest.mark.parametrize("family", DRIVEN)
def test_ragged_scene_is_exact(family):
    assert error_of(node_logits(model(family), ragged_scene()), family, ragged_scene()) < EXACT


@pytest.mark.parametrize("family", DRIVEN)
@pytest.mark.parametrize("mutant", [causal_mask, only_itself_seen, positions_by_index, keys_written_to_neighbours])
def test_tree_pass_detects_segment_mutants(family, mutant):
    assert error_of(node_logits(model(family), ragged_scene(), segment=mutant), family, ragged_scene()) > WRONG


@pytest.mark.parametrize("family", DRIVEN)
@pytest.mark.parametrize("mutant", [padding_seen, outputs_of_others])
def test_tree_pass_detects_batch_mutants(family, mutant):
    with patch.object(packing, "_MAX_PADDING", 100.0):
        assert error_of(node_logits(model(family), ragged_scene(), batch=mutant), family, ragged_scene()) > WRONG


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("mutant", [window_ignored, window_one_too_wide, window_by_index])
def test_tree_pass_detects_window_mutants(mutant, family):
    """Only models with a sliding window can see these."""
    assert error_of(node_logits(model(family), ragged_scene(), batch=mutant), family, ragged_scene()) > WRONG
    assert error_of(node_logits(model("llama"), ragged_scene(), batch=mutant), "llama", ragged_scene()) < EXACT


def no_sinks(scoring, scores):
    return torch.softmax(scores, dim=-1, dtype=torch.float32)


def sinks_of_others(scoring, scores):
    """Each head has the sink of another."""
    return _WEIGHTS(scoring._replace(sinks_HG=scoring.sinks_HG.flip(0)), scores)


def sinks_with_values(scoring, scores):
    """The weights that remain are scaled to a sum of 1."""
    weights = _WEIGHTS(scoring, scores)
    return weights / weights.sum(-1, keepdim=True)


_WEIGHTS = Scoring.weights


@pytest.mark.parametrize("mutant", [no_sinks, sinks_of_others, sinks_with_values])
def test_tree_pass_kills_sinks(mutant, monkeypatch):
    """The pass and the comparison at load both notice."""
    driven = model("gpt_oss")
    monkeypatch.setattr(Scoring, "weights", mutant)
    assert error_of(node_logits(driven, ragged_scene()), "gpt_oss", ragged_scene()) > WRONG
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        tiny_model("gpt_oss")


def attention_inputs(heads: int = 4, kv_heads: int = 2, size: int = 8):
    """Return a chain of five tokens with random queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, count, 5, size, generator=generator) for count in (heads, kv_heads, kv_heads))
    batch = pack([chain_segment([1, 2, 3, 4, 5], 0, [4, 0, 3, 1, 2])], CPU)
    return query, key, value, GatheredAttention(batch, KVCache(5, CPU))


class Layer(torch.nn.Module):
    layer_idx = 0


class LayerWithSinks(Layer):
    sinks = torch.zeros(4)


def test_matches_torch_attention():
    """A chain alone is causal attention; grouped heads are neither expanded nor mixed up."""
    query, key, value, context = attention_inputs()
    out, _ = tree_attention(Layer(), query, key, value, None, attention_context=context)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)


def test_softcap_bounds_the_scores():
    query, key, value, context = attention_inputs()
    out, _ = tree_attention(Layer(), 50 * query, key, value, None, scaling=1.0, softcap=2.0, attention_context=context)
    scores = torch.tanh(50 * query @ key.repeat_interleave(2, 1).transpose(2, 3) / 2.0) * 2.0
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-5)


def test_a_group_returns_its_padding_too():
    query, key, value, context = attention_inputs()
    tree_attention(Layer(), query, key, value, None, attention_context=context)
    group = context.batch.padded.groups[0]
    query_THGK = query[0].transpose(0, 1).reshape(5, 2, 2, 8)
    keys_BLHK, values_BLHK = context.cache.gather(0, group.key_slots_BL)
    out = group_attention(query_THGK, keys_BLHK, values_BLHK, group, Scoring(8**-0.5))
    assert out.shape == (5, 32)


def test_inexact_attention_is_refused():
    query, key, value, context = attention_inputs()
    with pytest.raises(UnsupportedAttention, match="context"):
        tree_attention(Layer(), query, key, value, None)
    with pytest.raises(UnsupportedAttention, match="masks"):
        tree_attention(Layer(), query, key, value, torch.zeros(1), attention_context=context)
    with pytest.raises(UnsupportedAttention, match="sinks"):
        tree_attention(LayerWithSinks(), query, key, value, None, attention_context=context)
