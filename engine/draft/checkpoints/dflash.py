"""A DFlash drafter in torch: one pass over a block of an anchor and masks predicts the tokens of the whole block.

The target's states are fused into one feature for each token. Every layer makes keys and values of it, so that the context has no
queries. The predictions of a block do not depend on each other: each is the marginal of its place.
Shape key: T context tokens, B blocks, N tokens of a block, L levels, W inner width, M drafter's vocabulary, D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from engine.attention.packing import Segment, pack
from engine.attention.scoring import Scoring
from engine.attention.tree_attention import GatheredAttention
from engine.draft.checkpoints.decoder_layer import (
    CheckpointLayer,
    embeddings_of,
    output_of,
    prepared,
    stored_linear,
    stored_norm,
)
from engine.draft.checkpoints.files import CheckpointFiles
from engine.draft.checkpoints.shapes import DFlashShape
from engine.kv_cache.canary import Canary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.utils.host_transfer import integers
from engine.utils.rotary_table import RotaryTable

_BLOCKS_OF_A_PASS = 32


@dataclass(frozen=True, slots=True)
class Anchor:
    """The last known token of a sequence: its id, its position, and the slots of the tokens before it."""

    token_id: int
    position: int
    slots: Sequence[int]


class DFlashNetwork(nn.Module):
    """The drafter with its cache, on its target's device. Raise ValueError if it cannot be run.

    The keys of a block are written to slots after the slots of the sequences, and are valid for one pass.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        shape: DFlashShape,
        target: CausalModel,
        linears: str,
        precision: str,
        num_slots: int,
        canary: Canary | None,
    ) -> None:
        super().__init__()
        self.shape, self.num_levels, self.width = shape, shape.num_levels, shape.layers.width
        eps = shape.layers.norm_eps
        self.fuse, self.fused_norm = stored_linear(files, "fc"), stored_norm(files, "hidden_norm", eps)
        self.layers = nn.ModuleList(CheckpointLayer(files, shape.layers, index) for index in range(shape.layers.num_layers))
        self.last_norm = stored_norm(files, "norm", eps)
        self.output = output_of(files, shape.vocab, target)
        self.dtype = prepared(self, target, linears, precision)
        self._embeddings_VW = embeddings_of(files, target, self.dtype)
        self._rotations = RotaryTable(shape.layers.rotary.table, target.device)
        self._device, self._first_block_slot = target.device, num_slots
        self._cache = KVCache(num_slots + _BLOCKS_OF_A_PASS * shape.block_size, target.device, canary)

    def features(self, states: Sequence[Float[Tensor, "T D"]]) -> Float[Tensor, "T W"]:
        """Fuse the target's states after some layers into one feature for each token."""
        return self.fused_norm(self.fuse(torch.cat([state.to(self.dtype) for state in states], dim=-1)))  # type: ignore[no-any-return]

    def cache_context(self, features_TW: Float[Tensor, "T W"], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Write the keys and values of tokens that the target has cached."""
        rotation_TR, slots_T = self._rotation(positions), integers(slots, self._device)
        for index, layer in enumerate(self._layers):
            self._cache.write(index, slots_T, *layer.pairs(features_TW, rotation_TR))

    def level_logits(self, anchors: Sequence[Anchor], num_levels: int) -> Float[Tensor, "B L M"]:
        """Return the logits of the first levels after each anchor."""
        parts = [anchors[first : first + _BLOCKS_OF_A_PASS] for first in range(0, len(anchors), _BLOCKS_OF_A_PASS)]
        return torch.cat([self._block_logits(part, num_levels) for part in parts])

    def _block_logits(self, anchors: Sequence[Anchor], num_levels: int) -> Float[Tensor, "B L M"]:
        size = self.shape.block_size
        # Layers of one kind share a packed batch.
        kinds = [*zip(self.shape.is_causal, self.shape.layers.windows, strict=True)]
        batches = {
            kind: pack([self._segment(block, anchor, *kind) for block, anchor in enumerate(anchors)], self._device)
            for kind in set(kinds)
        }
        fed = batches[kinds[0]]
        rotation_TR = self._rotation(fed.tokens_3T[1].tolist())
        states_TW = self._embeddings_VW[fed.input_ids_1T[0]].to(self.dtype)
        for index, (layer, kind) in enumerate(zip(self._layers, kinds, strict=True)):
            x = layer.input_norm(states_TW)
            self._cache.write(index, fed.write_slots_T, *layer.pairs(x, rotation_TR))
            context = GatheredAttention(batches[kind], self._cache)
            attended = context.attended(index, layer.queries(x, rotation_TR), Scoring(self.shape.layers.head_size**-0.5))
            states_TW = layer.after_attention(states_TW, attended)
        first = 0 if self.shape.starts_at_anchor else 1
        wanted = states_TW.view(len(anchors), size, -1)[:, first : first + num_levels]
        return self.output(self.last_norm(wanted)).float()  # type: ignore[no-any-return]

    def _segment(self, block: int, anchor: Anchor, is_causal: bool, window: int | None) -> Segment:
        """Return the segment of a block. All of its keys are tail keys, each with its own mask."""
        size, position = self.shape.block_size, anchor.position
        first = 0 if window is None else max(0, position - window)
        first_slot = self._first_block_slot + block * size
        own_slots, own = range(first_slot, first_slot + size), range(position, position + size)
        query, key = np.array(own)[:, None], np.array([*range(first, position), *own])[None]
        visible = key <= query if is_causal else np.ones((size, key.shape[1]), dtype=np.bool_)
        if window is not None and not self.shape.windows_from_anchor:
            visible = visible & (query - key < window)
        return Segment(
            token_ids=[anchor.token_id, *[self.shape.mask_id] * (size - 1)],
            positions=own,
            write_slots=own_slots,
            key_slots=[*anchor.slots[first:position], *own_slots],
            tail_visible_TW=visible,
            tail_positions=[*range(first, position), *own],
        )

    def _rotation(self, positions: Sequence[int]) -> Float[Tensor, "T R"]:
        table = self._rotations.below(max(positions, default=0) + 1)
        return table.index_select(0, integers(positions, self._device))

    @property
    def _layers(self) -> list[CheckpointLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def context_share(self) -> float:
        """The cost of a context token as a share of a block's, in multiplications."""
        shape = self.shape.layers
        queries, pairs = shape.num_heads * shape.head_size, shape.pair_width
        whole = shape.num_layers * (2 * queries + pairs + 3 * shape.inner) * self.shape.block_size
        return shape.num_layers * pairs / (whole + self.num_levels * self.shape.vocab.num_known)
