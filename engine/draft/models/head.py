"""The distilled drafter's network, a small transformer over the target's hidden states, and its file format.

At position t it reads the token at t and a feature of the text before t, and predicts the next token. A feature fuses the
target's states after a few layers. For drafted tokens the target's states are not known yet, and the head's own output replaces
the feature. The output is a state of the target's width. The target's output layer, cut to the frequent tokens, maps it to
logits. Source: EAGLE-3 (arXiv 2503.01840) for the features and their replacement, FR-Spec (arXiv 2502.14856) for the vocabulary.

Shape key: T tokens, D target width, F feature layers, W inner width, M head vocabulary, H key-value heads, G query heads for
each, K head size.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

_FORMAT = "latebranch-head-1"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head. Each of `feature_layers` is a number of target layers after which the state is read.

    The full number reads the output of the last norm.
    """

    target_width: int
    feature_layers: tuple[int, ...]
    width: int
    num_layers: int = 1
    num_heads: int = 9
    num_kv_heads: int = 3
    head_size: int = 64
    intermediate: int = 2304
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def rotary(self, positions_T: Int[Tensor, "*T"]) -> tuple[Float[Tensor, "*T 1 K"], Float[Tensor, "*T 1 K"]]:
        """Return cosines and sines of the positions' rotation."""
        half = torch.arange(0, self.head_size, 2, device=positions_T.device, dtype=torch.float32)
        angles = positions_T[..., None].float() * self.rope_theta ** (-half / self.head_size)
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return angles.cos(), angles.sin()

    def fed_only_share(self, num_known: int) -> float:
        """Return the cost of a token without logits, as a share of the cost of a token with logits over `num_known` tokens.

        Costs are numbers of multiplications. A token without logits ends at the last layer's queries, keys and values.
        """
        queries, pairs = self.num_heads * self.head_size, 2 * self.num_kv_heads * self.head_size
        after_attention = queries + 3 * self.intermediate  # of a layer; all counts are multiples of the inner width
        read = (len(self.feature_layers) + 1) * self.target_width
        layers = (self.num_layers + 1) * (queries + pairs) + self.num_layers * after_attention  # the first reads token and state
        return (read + layers - after_attention) / (read + layers + num_known)


class Norm(nn.RMSNorm):
    """Root mean square norm in the precision of its input, not of its weight."""

    def forward(self, x: Float[Tensor, "*T W"]) -> Float[Tensor, "*T W"]:
        """Return the scaled input."""
        return functional.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class HeadLayer(nn.Module):
    """A pre-norm decoder layer without its attention product, which differs between serving and training.

    The first layer of a head reads the token's embedding together with the state.
    """

    def __init__(self, shape: HeadShape, is_first: bool) -> None:
        super().__init__()
        self.shape = shape
        width, inner = shape.width, shape.num_heads * shape.head_size
        kv = shape.num_kv_heads * shape.head_size
        self.state_norm = Norm(width, shape.norm_eps)
        self.token_norm = Norm(width, shape.norm_eps) if is_first else None
        self.qkv = nn.Linear(2 * width if is_first else width, inner + 2 * kv, bias=False)
        self.output = nn.Linear(inner, width, bias=False)
        self.mlp_norm = Norm(width, shape.norm_eps)
        self.gate_up = nn.Linear(width, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, width, bias=False)

    def projected(
        self, state_TW: Float[Tensor, "*T W"], token_TW: Float[Tensor, "*T W"] | None, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[Float[Tensor, "*T HG K"], Float[Tensor, "*T H K"], Float[Tensor, "*T H K"]]:
        """Return queries, keys (both rotated) and values."""
        shape = self.shape
        x = self.state_norm(state_TW)
        if self.token_norm is not None:
            assert token_TW is not None
            x = torch.cat([self.token_norm(token_TW), x], dim=-1)
        heads = self.qkv(x).unflatten(-1, (shape.num_heads + 2 * shape.num_kv_heads, shape.head_size))
        query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=-2)
        return _rotated(query, cos_TK, sin_TK), _rotated(key, cos_TK, sin_TK), value

    def after_attention(self, state_TW: Float[Tensor, "*T W"], attended: Float[Tensor, "*T HGK"]) -> Float[Tensor, "*T W"]:
        """Return the layer's output from the attention's output."""
        state_TW = state_TW + self.output(attended)
        gate, up = self.gate_up(self.mlp_norm(state_TW)).chunk(2, dim=-1)
        return state_TW + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class DraftHead(nn.Module):
    """The network: maps the target's embeddings and features to states of the target's width. Has no embedding or output layer.

    `vocab_M` are the token ids that the target's output layer is cut to, ascending.
    """

    vocab_M: Tensor

    def __init__(self, shape: HeadShape, vocab_M: Int[Tensor, " M"]) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("vocab_M", vocab_M.to(torch.int32))
        self.fuse = nn.Linear(len(shape.feature_layers) * shape.target_width, shape.width, bias=False)
        self.token = nn.Linear(shape.target_width, shape.width, bias=False)
        self.layers = nn.ModuleList(HeadLayer(shape, index == 0) for index in range(shape.num_layers))
        self.last_norm = Norm(shape.width, shape.norm_eps)
        self.widen = nn.Linear(shape.width, shape.target_width, bias=False)
        nn.init.normal_(self.widen.weight, std=0.02 * shape.width**-0.5)  # so that an untrained head is nearly uniform

    @property
    def decoder(self) -> list[HeadLayer]:
        """The decoder layers, first to last."""
        return list(self.layers)  # type: ignore[arg-type]

    def features(self, states_TFD: Float[Tensor, "*T F D"]) -> Float[Tensor, "*T W"]:
        """Fuse the target's states after the feature layers, each scaled to a mean square of 1, into one feature a token."""
        states_TFD = states_TFD.to(self.last_norm.weight.dtype)
        normed = functional.rms_norm(states_TFD, (states_TFD.shape[-1],), eps=self.shape.norm_eps)
        return self.fuse(normed.flatten(-2))  # type: ignore[no-any-return]

    def tokens(self, embeddings_TD: Float[Tensor, "*T D"]) -> Float[Tensor, "*T W"]:
        """Project the target's embeddings to the inner width."""
        return self.token(embeddings_TD)  # type: ignore[no-any-return]

    def output_states(self, state_TW: Float[Tensor, "*T W"]) -> Float[Tensor, "*T D"]:
        """Return the input of the target's output layer, cut to `vocab_M`."""
        return self.widen(self.last_norm(state_TW))  # type: ignore[no-any-return]

    def save(self, path: Path, recipe: Mapping[str, object]) -> None:
        """Write weights in bfloat16, with the shape and the recipe (training settings and results) in the metadata."""
        tensors = {name: _stored(tensor) for name, tensor in self.state_dict().items()}
        metadata = {"format": _FORMAT, "shape": json.dumps(asdict(self.shape)), "recipe": json.dumps(recipe)}
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> tuple["DraftHead", dict[str, object]]:
        """Read a file that `save` wrote, in float32, with its recipe; raise ValueError for any other file."""
        shape = head_shape(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        try:
            head = cls(shape, tensors["vocab_M"])
            floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
            head.load_state_dict(floats)
            return head.requires_grad_(False).eval(), json.loads(metadata["recipe"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path} is a damaged draft head: {error}") from error


def head_shape(path: Path) -> HeadShape:
    """Read the sizes of a head without its weights; raise ValueError for any other file."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a draft head")
    try:
        fields = json.loads(metadata["shape"])
        return HeadShape(**{**fields, "feature_layers": tuple(fields["feature_layers"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is a damaged draft head: {error}") from error


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _stored(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().contiguous() if tensor.is_floating_point() else tensor
