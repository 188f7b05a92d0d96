"""A draft head run by our library: the function of engine.draft.head, one call a pass.

Shape key: T packed tokens, P tokens asked about, V vocabulary, M head vocabulary, D target width, F feature layers, W inner
width.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.by_position import ByPosition
from engine.draft.feature_pool import FeaturePool, Fed
from engine.draft.head import DraftHead, HeadLayer
from engine.kv_cache import KVCache
from engine.linears import linear_of
from engine.native import library
from engine.native.growth import FedRow, Growing, RankedRow
from engine.native.linear import NativeLinear
from engine.native.passes import Features, Runner, SlotStates, Tables
from engine.packing import Segment
from engine.transfer import integers


class NativeHead:
    """The net, with its own copy of the weights. `rows_MD` are the target's output rows of the head's tokens."""

    dtype = torch.float32  # of activations

    def __init__(
        self, head: DraftHead, rows_MD: Float[Tensor, "M D"], embeddings_VD: Float[Tensor, "V D"], precision: str
    ) -> None:
        shape = head.shape
        self._shape, self._precision = shape, precision
        self._kept: list[object] = []  # what the structure points at
        self._fuse = NativeLinear(head.fuse, precision)
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
        self._kept.append(layers)
        self._rotations = ByPosition(self._rotated)

    def keep_features(self, pool: FeaturePool, slots_T: Int[Tensor, " T"], states: Sequence[Float[Tensor, "T D"]]) -> None:
        """Fuse the target's states after the feature layers into one feature a token, and put it in the token's slot."""
        shape, states, pool_SW = self._shape, [state.float().contiguous() for state in states], pool.lent(())
        library.library().latebranch_fuse(
            ctypes.byref(self._fuse.structure),
            library.pointers([state.data_ptr() for state in states]),
            *(len(states), shape.target_width, shape.norm_eps),
            *(slots_T.data_ptr(), len(slots_T), pool_SW.data_ptr(), library.num_threads()),
        )

    def features(self, pool: FeaturePool, after: Sequence[int]) -> Features:
        """Return the same as a part of the target's own passes, of its states `after` some layers (passes.Output)."""
        after_F, pool_SW = np.array(after, dtype=np.int64), pool.lent(())
        structure = library.Features(
            linear=self._fuse.structure,
            num_states=len(after_F),
            after=library.address(after_F),
            eps=self._shape.norm_eps,
            pool=pool_SW.data_ptr(),
        )
        return Features(structure, (self._fuse, after_F, pool_SW))

    def proposed(
        self,
        pool: FeaturePool,
        fed: Fed,
        asked: Sequence[Segment] | None,
        places: Sequence[int],
        cache: KVCache,
    ) -> Float[Tensor, "P M"]:
        """Feed tokens, each by the state in the slot before it; return logits of those asked about, their states in their slots.

        `places` says where they are among the fed.
        """
        del asked  # all are run whole: one layer more or less is nothing beside the target's pass
        pool_SW = pool.lent(fed.before)
        before_T, places_P = (integers(numbers, pool_SW.device) for numbers in (fed.before, places))
        rotations = [self._rotations.below(fed.batch.end)]
        return self._runner.run(fed.batch, cache, rotations, places_P, given=SlotStates(pool_SW, before_T)).logits_NM

    def growing(
        self, pool: FeaturePool, fed: Sequence[FedRow], rows: Sequence[RankedRow], cache: KVCache, vocab_M: Int[Tensor, " M"]
    ) -> Growing:
        """Return the rows' trees as they begin to grow: the first round feeds committed tokens."""
        pool_SW = pool.lent(())
        end = max(row.root_position + row.depth + 1 for row in rows)
        end = max(end, *(row.first_position + len(row.token_ids) for row in fed))
        rotations = [self._rotations.below(end)]
        where = self._runner.places(cache, rotations, pool_SW)
        return Growing(self._runner.structure, vocab_M, rows, fed, pool.before_all, where, keeps=(pool_SW, rotations))

    def _rotated(self, positions_N: Int[Tensor, " N"]) -> Tables:
        cosines, sines = self._shape.rotary(positions_N)
        return cosines[:, 0].contiguous(), sines[:, 0].contiguous()

    def _layer(self, layer: HeadLayer) -> library.Layer:
        shape = layer.shape
        inner, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        norms = [layer.state_norm] if layer.token_norm is None else [layer.token_norm, layer.state_norm]
        parts = {
            **_parts(layer.qkv.weight, query=inner, key=kv, value=kv),
            **_parts(layer.gate_up.weight, gate=shape.intermediate, up=shape.intermediate),
            "output": layer.output,
            "down": layer.down,
        }
        return library.Layer(
            **{name: self._linear(part) for name, part in parts.items()},
            attention_norm=self._tensor(torch.cat([norm.weight for norm in norms])),
            mlp_norm=self._tensor(layer.mlp_norm.weight),
        )

    def _linear(self, linear: nn.Linear) -> library.Linear:
        self._kept.append(native := NativeLinear(linear, self._precision))
        return native.structure

    def _tensor(self, tensor: Tensor) -> int:
        self._kept.append(kept := tensor.detach().float().contiguous())
        return kept.data_ptr()


def _parts(weight: Float[Tensor, "O I"], **sizes: int) -> dict[str, nn.Linear]:
    """Return the rows of a fused layer by what they make."""
    bounds = pairwise(accumulate(sizes.values(), initial=0))
    return {name: linear_of(weight[first:end]) for name, (first, end) in zip(sizes, bounds, strict=True)}
