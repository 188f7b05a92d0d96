"""The network of a checkpoint, in one form for all projects."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings: `scaling` has the settings of a scaled kind (rope_type llama3, linear or yarn), else it is empty."""

    theta: float
    head_size: int
    max_positions: int
    scaling: Mapping[str, object]

    @cached_property
    def _frequencies(self) -> tuple[Float[Tensor, " F"], float]:
        if not self.scaling:
            return self.theta ** (-torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size), 1.0
        from transformers import LlamaConfig  # here, because it takes seconds
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        settings = {**self.scaling, "rope_theta": self.theta}
        sizes = {"hidden_size": self.head_size, "num_attention_heads": 1, "head_dim": self.head_size}
        config = LlamaConfig(**sizes, max_position_embeddings=self.max_positions, rope_parameters=settings)
        frequencies, factor = ROPE_INIT_FUNCTIONS[str(settings["rope_type"])](config, torch.device("cpu"))
        return frequencies.float(), float(factor)

    def table(self, positions_N: Int[Tensor, " N"]) -> Float[Tensor, "N R"]:
        """Return cosines and sines of positions, side by side."""
        frequencies, factor = self._frequencies
        angles = positions_N[:, None].float() * frequencies.to(positions_N.device)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor


@dataclass(frozen=True)
class LayersShape:
    """Sizes of a drafter's decoder layers. `windows` has each layer's sliding window, None for full attention."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    norm_eps: float
    rotary: Rotary
    windows: tuple[int | None, ...]
    has_head_norms: bool
    has_attention_biases: bool
    has_mlp_biases: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def pair_width(self) -> int:
        """Numbers of a token's keys and values in a layer."""
        return 2 * self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class KnownTokens:
    """The tokens that a drafter predicts. None for `ids`: all of the target's."""

    ids: tuple[int, ...] | None
    size: int  # of the target's

    @property
    def num_known(self) -> int:
        """Number of tokens."""
        return self.size if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class Eagle3Shape:
    """An EAGLE-3 head. `after` are numbers of target layers, ascending, whose outputs are fused.

    `fused_norms` are the tensors of the norms before fusing: none, one over all states together, or one for each. With
    `feeds_normed` the next round reads the normed output. With `is_residual_normed` the residual of the first layer is the
    normed state.
    """

    layers: LayersShape
    after: tuple[int, ...]
    target_width: int
    vocab: KnownTokens
    fused_norms: tuple[str, ...]
    is_residual_normed: bool
    feeds_normed: bool


@dataclass(frozen=True)
class DFlashShape:
    """A DFlash drafter of blocks of `block_size` tokens: an anchor and masks.

    `is_causal` states for each layer whether a slot of the block sees only the slots before it. With `starts_at_anchor` the
    anchor's slot predicts the token after it; else each mask predicts the token in its own place. With `windows_from_anchor` the
    window of a sliding layer ends at the anchor for the whole block, else at each slot.
    """

    layers: LayersShape
    after: tuple[int, ...]
    target_width: int
    vocab: KnownTokens
    block_size: int
    mask_id: int
    is_causal: tuple[bool, ...]
    starts_at_anchor: bool
    windows_from_anchor: bool

    @property
    def num_levels(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size if self.starts_at_anchor else self.block_size - 1


@dataclass(frozen=True)
class MedusaShape:
    """Medusa heads: each has `num_layers` residual layers over the target's normed last state and its own output layer."""

    width: int
    num_heads: int
    num_layers: int
    vocab: KnownTokens
    has_biases: bool
    has_one_output: bool  # the target's or one in the file, for all heads
    is_original: bool  # the names of the tensors: the authors' or vLLM's

    @property
    def residuals(self) -> list[list[str]]:
        """The names of each head's residual layers."""
        form = "{}.{}.linear" if self.is_original else "blocks.{}.layers.{}"
        return [[form.format(head, layer) for layer in range(self.num_layers)] for head in range(self.num_heads)]

    @property
    def outputs(self) -> list[str]:
        """The names of the output layers."""
        form = f"{{}}.{self.num_layers}" if self.is_original else "lm_heads.{}"
        return [form.format(head) for head in range(1 if self.has_one_output else self.num_heads)]


Shape = Eagle3Shape | DFlashShape | MedusaShape
