"""The parts of a fused decoder: stacked weights, and the operations of a layer as a protocol.

Shape key: T tokens, N output tokens, D width, O rows of a weight, I its columns, H key-value heads, G query heads for each,
K head size, F = K / 2, S slots, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxtyping import Float
from torch import Tensor

from engine.attention.paged.table import PagedBatch


class Weight(NamedTuple):
    """A weight [O, I], and the scales of its rows if it has eight bits."""

    rows_OI: Tensor
    scales_O: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.rows_OI.nbytes + (0 if self.scales_O is None else self.scales_O.nbytes)


@dataclass(frozen=True, eq=False)
class RopeScale:
    """The rotary embedding's frequencies and the factor of its cosines and sines."""

    frequencies_F: Float[Tensor, " F"]
    scaling: float


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """A layer's weights: queries, keys and values stacked, gate and up stacked, norms in float32."""

    attention_norm_D: Float[Tensor, " D"]
    qkv: Weight
    bias_O: Tensor | None
    head_norms_2K: Float[Tensor, "2 K"] | None
    output: Weight
    mlp_norm_D: Float[Tensor, " D"]
    gate_up: Weight
    down: Weight
    window: int | None


class Pools(NamedTuple):
    """The keys and values of a layer by slot."""

    keys_SHK: Float[Tensor, "S H K"]
    values_SHK: Float[Tensor, "S H K"]


class FusedOperations(Protocol):
    """The launches of a layer, but for attention: kernels or their reference."""

    def rotated(
        self,
        states_TD: Float[Tensor, "T D"],
        layer: FusedLayer,
        rotary: RopeScale,
        eps: float,
        pools: Pools,
        batch: PagedBatch,
    ) -> Float[Tensor, "T H G K"]:
        """Write the tokens' keys and values to their slots; return their queries."""
        ...

    def gated(self, states_TD: Float[Tensor, "T D"], layer: FusedLayer, eps: float) -> Float[Tensor, "T M"]:
        """Return SiLU(gate) * up of the normed states."""
        ...

    def add_product(self, states_TD: Float[Tensor, "T D"], x_TI: Float[Tensor, "T I"], weight: Weight) -> None:
        """Add x W^T to the states, in place."""
        ...

    def logits(self, states_ND: Float[Tensor, "N D"], norm_D: Tensor, head: Weight, eps: float) -> Float[Tensor, "N V"]:
        """Return float32 logits of states before the last norm."""
        ...
