"""A drafter's decoder layer in torch, and the layers around it, built from a checkpoint's tensors.

Shape key: T tokens, P of them with logits, W inner width, H key-value heads, G query heads for each, K head size, R = 2 K,
M drafter's vocabulary, V target's vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from engine.draft.checkpoints.files import CheckpointFiles
from engine.draft.checkpoints.shapes import KnownTokens, LayersShape
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import NATIVE, linear_of, prepare_linears
from engine.native.linear import QUANTISED


def stored_linear(files: CheckpointFiles, name: str) -> nn.Linear:
    """Return a linear layer with the file's weight, and its bias if there is one."""
    linear = linear_of(files.tensor(f"{name}.weight"))
    if f"{name}.bias" in files.shapes:
        linear.bias = nn.Parameter(files.tensor(f"{name}.bias"), requires_grad=False)
    return linear


def stored_norm(files: CheckpointFiles, name: str, eps: float) -> nn.RMSNorm:
    """Return a norm with the file's weight."""
    weight = files.tensor(f"{name}.weight")
    norm = nn.RMSNorm(len(weight), eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def embeddings_of(files: CheckpointFiles, target: CausalModel, dtype: torch.dtype) -> Float[Tensor, "V W"]:
    """Return the file's embeddings in a format, or the target's own, unscaled."""
    has_own = "embed_tokens.weight" in files.shapes
    return files.tensor("embed_tokens.weight").to(target.device, dtype) if has_own else target.embeddings_VD


def output_of(files: CheckpointFiles, vocab: KnownTokens, target: CausalModel) -> nn.Linear:
    """Return the file's output layer, or the target's rows of the drafter's tokens."""
    if "lm_head.weight" in files.shapes:
        return linear_of(files.tensor("lm_head.weight"))
    ids = torch.arange(vocab.size) if vocab.ids is None else torch.tensor(vocab.ids)
    return linear_of(target.output_rows(ids.to(target.device)).float())


def prepared(network: nn.Module, target: CausalModel, linears: str, precision: str) -> torch.dtype:
    """Move a network to its target's device in a precision; return the dtype of its activations.

    Raise ValueError for a precision that is not possible.
    """
    if precision in QUANTISED and linears != NATIVE:
        raise ValueError(f"draft_dtype {precision} needs the compiled library on a CPU")
    dtype = torch.float32 if linears == NATIVE else getattr(torch, precision)
    network.to(target.device, dtype).requires_grad_(False).eval()
    prepare_linears(network, linears, precision)
    for layer in network.modules():
        if isinstance(layer, CheckpointLayer) and target.device.type != "cpu":
            layer.attention_dtype = dtype  # on a CPU a product of a few bfloat16 rows is slower than of float32
    return dtype


class CheckpointLayer(nn.Module):
    """A decoder layer without its attention product. Keys and values can be made of other inputs than queries.

    Attention is computed in `attention_dtype`.
    """

    attention_dtype = torch.float32

    def __init__(self, files: CheckpointFiles, shape: LayersShape, index: int) -> None:
        super().__init__()
        self.shape, self.window = shape, shape.windows[index]
        prefix = f"layers.{index}"
        attention = f"{prefix}.self_attn"
        self.query, self.key, self.value, self.output = (
            stored_linear(files, f"{attention}.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.gate, self.up, self.down = (
            stored_linear(files, f"{prefix}.mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.input_norm = stored_norm(files, f"{prefix}.input_layernorm", shape.norm_eps)
        self.mlp_norm = stored_norm(files, f"{prefix}.post_attention_layernorm", shape.norm_eps)
        self.query_norm, self.key_norm = (
            stored_norm(files, f"{attention}.{name}", shape.norm_eps) if shape.has_head_norms else None
            for name in ("q_norm", "k_norm")
        )

    def queries(self, x: Float[Tensor, "P X"], rotation_PR: Float[Tensor, "P R"]) -> Float[Tensor, "P H G K"]:
        """Return rotated queries."""
        query = _headed(self.query(x), self.query_norm, self.shape.head_size)
        rotated = _rotated(query, rotation_PR).to(self.attention_dtype)
        return torch.unflatten(rotated, 1, (self.shape.num_kv_heads, -1))

    def pairs(
        self, x: Float[Tensor, "T X"], rotation_TR: Float[Tensor, "T R"]
    ) -> tuple[Float[Tensor, "T H K"], Float[Tensor, "T H K"]]:
        """Return rotated keys, and values."""
        size = self.shape.head_size
        key, value = _headed(self.key(x), self.key_norm, size), _headed(self.value(x), None, size)
        return _rotated(key, rotation_TR).to(self.attention_dtype), value.to(self.attention_dtype)

    def after_attention(self, residual_PW: Float[Tensor, "P W"], attended: Float[Tensor, "P HGK"]) -> Float[Tensor, "P W"]:
        """Return the layer's output from the attention's output."""
        state_PW = residual_PW + self.output(attended.to(residual_PW.dtype))
        x = self.mlp_norm(state_PW)
        return state_PW + self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _headed(x: Float[Tensor, "T X"], norm: nn.Module | None, size: int) -> Float[Tensor, "T N K"]:
    heads = torch.unflatten(x, -1, (-1, size))
    return heads if norm is None else norm(heads)


def _rotated(x: Float[Tensor, "T N K"], rotation_TR: Float[Tensor, "T R"]) -> Float[Tensor, "T N K"]:
    """Return rotated heads in the rotation's precision."""
    cos, sin = rotation_TR[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def taken(x: Float[Tensor, "T X"], places_P: Int[Tensor, " P"] | None) -> Float[Tensor, "P X"]:
    """Return some rows, or all."""
    return x if places_P is None else x.index_select(0, places_P)
