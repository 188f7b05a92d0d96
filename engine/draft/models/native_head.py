"""A draft head run by the native library: the function of engine.draft.models.head, with one call for each pass.

The target's states are stored by slot in half precision. They are fused only when the head is fed the next token. Rejected nodes
are never fused, nor are sequences that do not draft while feeding them is expensive.

Shape key: T packed tokens, P tokens with logits, V vocabulary, M head vocabulary, D target width, F feature layers, W inner
width.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.packing import Segment
from engine.draft.models.feature_pool import FeaturePool, FedTokens
from engine.draft.models.head import DraftHead, HeadLayer
from engine.kv_cache.kv_cache import KVCache
from engine.model.linear_backends import linear_of
from engine.native import library
from engine.native.decoder_pass import Features, Runner, SlotStates, Tables
from engine.native.growth import FedRow, NativeGrowth, RankedRow
from engine.native.linear import NativeLinear
from engine.utils.host_transfer import as_longs, integers
from engine.utils.rotary_table import RotaryTable


class NativeHead:
    """The network, with its own copy of the weights. `rows_MD` are the target's output rows of the head's tokens.

    `states` stores the target's states: float16, F x D in a row, each scaled to a mean square of 1.
    """

    dtype = torch.float32  # of activations

    def __init__(
        self,
        head: DraftHead,
        rows_MD: Float[Tensor, "M D"],
        embeddings_VD: Float[Tensor, "V D"],
        precision: str,
        states: FeaturePool,
    ) -> None:
        shape = head.shape
        self._shape, self._precision = shape, precision
        self._referenced: list[object] = []  # objects that the structure points at
        self._states = states
        self._fuse = NativeLinear(head.fuse, precision)
        self._features = self.features(range(len(shape.feature_layers)))
        layers = (library.Layer * shape.num_layers)(*(self._layer(layer) for layer in head.decoder))
        output = linear_of(rows_MD.float() @ head.widen.weight.to(rows_MD.device, torch.float32))
        self._runner = Runner(
            library.Decoder(
                num_layers=shape.num_layers,
                width=shape.width,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_size,
                inner=shape.intermediate,
                activation=library.SILU,
                embedding_width=shape.target_width,
                eps=shape.norm_eps,
                scaling=shape.head_size**-0.5,
                embedding_scale=1.0,
                embeddings=self._tensor(embeddings_VD),
                last_norm=self._tensor(head.last_norm.weight),
                layers=layers,
                head=self._linear(output),
                token=self._linear(head.token),
            ),
            precision,
        )
        self._referenced.append(layers)
        self._rotations = RotaryTable(self._rotation)

    def keep_features(self, pool: FeaturePool, slots_T: Int[Tensor, " T"], states: Sequence[Float[Tensor, "T D"]]) -> None:
        """Store the target's states after the feature layers in the tokens' slots."""
        del pool  # for the head's own states alone
        states = [state.float().contiguous() for state in states]
        library.library().latebranch_keep(
            ctypes.byref(self._features.structure),
            library.pointers([state.data_ptr() for state in states]),
            *(self._shape.target_width, slots_T.data_ptr(), len(slots_T)),
        )

    def features_at(self, pool: FeaturePool, slots: Sequence[int]) -> Float[Tensor, "T W"]:
        """Return the features of the tokens in these slots, fused from the stored states."""
        del pool
        slots_T, features_TW = integers(slots, torch.device("cpu")), torch.empty(len(slots), self._shape.width)
        self._states.check(slots)
        library.library().latebranch_fuse(
            *(ctypes.byref(self._features.structure), slots_T.data_ptr(), len(slots_T)),
            *(features_TW.data_ptr(), library.num_threads()),
        )
        return features_TW

    def features(self, after: Sequence[int]) -> Features:
        """Return the states, `after` some layers, that the target's passes must store (passes.Output)."""
        after_F, states_SX = np.array(after, dtype=np.int64), self._states.rows_SW
        structure = library.FeaturesStructure(
            linear=self._fuse.structure,
            num_states=len(after_F),
            after=library.address(after_F),
            eps=self._shape.norm_eps,
            kept=states_SX.data_ptr(),
        )
        return Features(structure, (self._fuse, after_F, states_SX))

    def draft_logits(
        self,
        pool: FeaturePool,
        fed: FedTokens,
        queried: Sequence[Segment] | None,
        places: Sequence[int],
        cache: KVCache,
    ) -> Float[Tensor, "P M"]:
        """Feed tokens, each with the row of the slot before it. Return the logits at `places` and store the states there.

        `places` are indices of the fed tokens.
        """
        del queried  # after the last layer's keys the library continues with the tokens at `places` alone
        (self._states if fed.are_committed else pool).check(fed.previous_slots)
        pool_SW, features = pool.rows_SW, self._features if fed.are_committed else None
        rotations, slot_states = [self._rotations.below(fed.batch.end)], SlotStates(pool_SW, as_longs(fed.previous_slots))
        return self._runner.run(fed.batch, cache, rotations, places, slot_states=slot_states, features=features).logits_NM

    def growth(
        self,
        pool: FeaturePool,
        fed: Sequence[FedRow],
        rows: Sequence[RankedRow],
        cache: KVCache,
        vocab_M: Int[Tensor, " M"],
        num_steps: int = 1,
    ) -> NativeGrowth:
        """Return the growth of the rows' trees, in one step or in several, which begins with feeding committed tokens."""
        pool_SW = pool.rows_SW
        end = max([len(row.slots) if num_steps > 1 else row.root_position + row.depth + 1 for row in rows])
        end = max(end, *[row.first_position + len(row.token_ids) for row in fed])
        rotations = [self._rotations.below(end)]
        addresses = self._runner.shared_addresses(cache, rotations, pool_SW)
        addresses.features = ctypes.addressof(self._features.structure)
        return NativeGrowth(self._runner.structure, vocab_M, rows, fed, pool.zero_row, addresses, num_steps)

    def _rotation(self, positions_N: Int[Tensor, " N"]) -> Tables:
        cosines, sines = self._shape.rotary(positions_N)
        return cosines[:, 0].contiguous(), sines[:, 0].contiguous()

    def _layer(self, layer: HeadLayer) -> library.Layer:
        shape = layer.shape
        inner, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        norms = [layer.state_norm] if layer.token_norm is None else [layer.token_norm, layer.state_norm]
        parts = {
            **_split_rows(layer.qkv.weight, query=inner, key=kv, value=kv),
            **_split_rows(layer.gate_up.weight, gate=shape.intermediate, up=shape.intermediate),
            "output": layer.output,
            "down": layer.down,
        }
        return library.Layer(
            **{name: self._linear(part) for name, part in parts.items()},
            attention_norm=self._tensor(torch.cat([norm.weight for norm in norms])),
            mlp_norm=self._tensor(layer.mlp_norm.weight),
        )

    def _linear(self, linear: nn.Linear) -> library.Linear:
        self._referenced.append(native := NativeLinear(linear, self._precision))
        return native.structure

    def _tensor(self, tensor: Tensor) -> int:
        self._referenced.append(copy := tensor.detach().float().contiguous())
        return copy.data_ptr()


def _split_rows(weight: Float[Tensor, "O I"], **sizes: int) -> dict[str, nn.Linear]:
    """Return the linear layers that a fused one consists of, by name and number of rows."""
    bounds = pairwise(accumulate(sizes.values(), initial=0))
    return {name: linear_of(weight[first:end]) for name, (first, end) in zip(sizes, bounds, strict=True)}
