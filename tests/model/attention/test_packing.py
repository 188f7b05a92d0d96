"""Packing: every token once, padding bounded and blind, outputs back in packed order."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.attention import packing
from engine.attention.packing import Group, PackedBatch, Segment, pack
from engine.attention.segments import chain_segment, tree_segment
from tests.model.passes import repadded
from tests.strategies import token_trees

CPU = torch.device("cpu")


# One to six rows: a text's last tokens, the tree on them, and how much of the text is cached already.
rows = st.lists(
    st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=5), token_trees(max_nodes=6), st.integers(0, 12)),
    min_size=1,
    max_size=6,
)


def segments_of(several) -> list[Segment]:
    """Return the rows' segments; slots differ from segment to segment."""
    segments: list[Segment] = []
    first_slot = 0
    for chain, tree, context_len in several:
        length = context_len + len(chain) + tree.num_nodes - 1
        segments.append(tree_segment(chain, tree, context_len, range(first_slot, first_slot + length)))
        first_slot += length
    return segments


def check(batch: PackedBatch, packed: list[Segment]) -> None:
    check_flat(batch, packed)
    check_order(batch)
    for segment, start in zip(packed, batch.starts, strict=False):
        check_segment(batch, segment, start)


def check_flat(batch: PackedBatch, packed: list[Segment]) -> None:
    assert batch.input_ids_1T[0].tolist() == [token for segment in packed for token in segment.token_ids]
    assert batch.position_ids_1T[0].tolist() == [position for segment in packed for position in segment.positions]
    assert batch.write_slots_T.tolist() == [slot for segment in packed for slot in segment.write_slots]
    assert batch.starts == tuple(sum(segment.num_tokens for segment in packed[:i]) for i in range(len(packed) + 1))
    assert batch.num_tokens == batch.starts[-1]
    assert batch.end == 1 + max(position for segment in packed for position in segment.positions)


def check_order(batch: PackedBatch) -> None:
    """The concatenated outputs of the groups return in packed order."""
    padded = batch.padded
    index = torch.cat([group.token_index_BT.flatten() for group in padded.groups])
    assert index[padded.unpad_T].tolist() == list(range(batch.num_tokens))
    assert padded.is_identity == (index.tolist() == list(range(batch.num_tokens)))


def check_segment(batch: PackedBatch, segment: Segment, start: int) -> None:
    """A token sees the slots of its segment, at their positions. Padding sees one key, and no key sees padding."""
    [(group, row)] = [
        (group, row)
        for group in batch.padded.groups
        for row, index in enumerate(group.token_index_BT[:, 0].tolist())
        if index == start
    ]
    num_tokens, num_keys = segment.num_tokens, segment.num_keys
    num_context = num_keys - len(segment.tail_positions)
    visible = group.visible_BTL[row]
    assert group.token_index_BT[row, :num_tokens].tolist() == list(range(start, start + num_tokens))
    assert group.key_slots_BL[row, :num_keys].tolist() == list(segment.key_slots)
    assert set(group.key_slots_BL[row, num_keys:].tolist()) <= set(segment.key_slots)
    assert visible[:num_tokens, :num_context].all()
    assert torch.equal(visible[:num_tokens, num_context:num_keys], torch.from_numpy(segment.tail_visible_TW))
    assert not visible[:, num_keys:].any()
    assert (visible[num_tokens:].sum(-1) == 1).all()
    assert group.query_positions_BT[row, :num_tokens].tolist() == list(segment.positions)
    assert group.key_positions_BL[row, :num_keys].tolist() == segment.key_positions().tolist()


@given(rows, st.sampled_from([1.0, 1.3, 2.0, 100.0]))
def test_pack(several, max_padding):
    packed = segments_of(several)
    with patch.object(packing, "_MAX_PADDING", max_padding):
        batch = pack(packed, CPU)
        check(batch, packed)
    for group in batch.padded.groups:
        rows, height, width = group.visible_BTL.shape
        starts = group.token_index_BT[:, 0].tolist()
        area = sum(segment.num_tokens * segment.num_keys for segment, start in zip(packed, batch.starts) if start in starts)
        assert rows * height * width <= max_padding * area


@given(rows)
def test_like_sizes_share_a_group(several):
    assert len(pack(segments_of(several[:1]) * 4, CPU).padded.groups) == 1


@given(rows, st.sampled_from([None, 1, 3, 8]))
def test_bias_is_zero_inside_the_window(several, window):
    for group in pack(segments_of(several), CPU).padded.groups:
        bias = group.bias(window, torch.float32)
        distance = group.query_positions_BT[:, :, None] - group.key_positions_BL[:, None, :]
        is_seen = group.visible_BTL & (distance < (window or 10**9))
        assert torch.equal(bias[:, 0, 0] == 0.0, is_seen)
        assert torch.equal(bias[:, 0, 0] == float("-inf"), ~is_seen)
        assert is_seen.any(-1).all(), "a softmax over nothing is NaN"
        assert group.bias(window, torch.float32) is bias


def example_segments() -> list[Segment]:
    """Two rows that share a padded group and one that does not, out of order of size."""
    return [_chain([1, 2, 3, 4, 5, 6], 2, 100), _chain([5], 9, 0), _chain([7, 8], 9, 200)]


def _chain(token_ids: list[int], context_len: int, first_slot: int) -> Segment:
    return chain_segment(token_ids, context_len, range(first_slot, first_slot + context_len + len(token_ids)))


def _shared(batch: PackedBatch) -> Group:
    return max(batch.padded.groups, key=lambda group: len(group.token_index_BT))


def _with_shared(batch: PackedBatch, **changes) -> PackedBatch:
    shared = _shared(batch)
    groups = tuple(replace(group, **changes) if group is shared else group for group in batch.padded.groups)
    return repadded(batch, groups=groups)


def padding_keys_seen(batch):
    return _with_shared(batch, visible_BTL=torch.ones_like(_shared(batch).visible_BTL))


def in_order_of_size(batch):
    return repadded(batch, unpad_T=torch.arange(batch.num_tokens), is_identity=True)


def slots_of_the_other_row(batch):
    return _with_shared(batch, key_slots_BL=_shared(batch).key_slots_BL.flip(0))


def written_elsewhere(batch):
    first, end = 2 * batch.num_tokens, 3 * batch.num_tokens
    reversed_ = batch.numbers[end - 1 : first - 1 : -1]
    return structs.replace(batch, numbers=batch.numbers[:first] + reversed_ + batch.numbers[end:])


@pytest.mark.parametrize("mutant", [padding_keys_seen, in_order_of_size, slots_of_the_other_row, written_elsewhere])
def test_packing_detects_mutants(mutant):
    packed = example_segments()
    batch = pack(packed, CPU)
    assert len(batch.padded.groups) == 2
    check(batch, packed)
    with pytest.raises(AssertionError):
        check(mutant(batch), packed)


def test_chunk_mask_covers_its_own_rows_only():
    """No mask has the square of the sequence's size: only a chunk's queries by its keys, and a square of the chunk."""
    length, chunk = 8192, 512
    segment = chain_segment([5] * chunk, length - chunk, range(length))
    assert segment.tail_visible_TW.size == chunk * chunk
    batch = pack([segment, chain_segment([5], 3, range(length, length + 4))], CPU)
    assert sum(group.visible_BTL.numel() for group in batch.padded.groups) <= packing._MAX_PADDING * (chunk * length + 4)
