"""A known decoder run over tables by fused launches, with the weights of the loaded module.

Shape key: T tokens, N output tokens, D width, O rows of a weight, K head size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from engine.attention.paged.attention import Attend
from engine.attention.paged.table import IDS, PagedBatch
from engine.attention.scoring import Scoring
from engine.kv_cache.kv_cache import KVCache
from engine.model.fp8 import Fp8Linear
from engine.model.fused.parts import FusedLayer, FusedOperations, Pools, RopeScale, Weight
from engine.native.decoder import UnknownDecoder, norm_eps, refuse_by_structure, window_of
from engine.native.decoder_pass import Output

MOST_TOKENS = 128  # of a fused pass; beyond, products of the vendor's library are faster
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class _PassWatcher:
    indices: frozenset[int]
    report: Callable[[Output], None]


class FusedDecoder:
    """Runs passes of a model over tables. The module keeps its own, larger passes: its weights become views of the stacked ones.

    Raises UnknownDecoder for a model with other parts.
    """

    def __init__(self, module: Any, operations: FusedOperations, attend: Attend, is_deterministic: bool = False) -> None:
        refuse_by_structure(module)
        _refuse(module)
        inner = module.model
        attention = inner.layers[0].self_attn
        self.is_deterministic = is_deterministic
        self._operations, self._attend = operations, attend
        self._embeddings_VD: Tensor = inner.embed_tokens.weight
        self._head, self._norm_D, self._eps = _weight_of(module.lm_head), _norm(inner.norm), norm_eps(inner.norm)
        self._num_heads, self._size = _num_rows(attention.k_proj) // attention.head_dim, int(attention.head_dim)
        self._scaling = float(attention.scaling)
        rotary = inner.rotary_emb
        self._rotary = RopeScale(rotary.inv_freq.detach().float(), float(rotary.attention_scaling))
        self._layers = [_layer(module.config.get_text_config(), layer) for layer in inner.layers]
        self._watchers: list[_PassWatcher] = []

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads, without embeddings."""
        layers = (weight for one in self._layers for weight in (one.qkv, one.output, one.gate_up, one.down))
        return self._head.num_bytes + sum(weight.num_bytes for weight in layers)

    def runs(self, num_tokens: int) -> bool:
        """Return whether it is to run a pass of this size. With equal bits at any width, it runs all."""
        return self.is_deterministic or num_tokens <= MOST_TOKENS

    def watch(self, indices: Iterable[int], report: Callable[[Output], None]) -> Callable[[], None]:
        """Call `report` after each later pass, with the states of `indices` (Output.after). Return a function that ends this."""
        watcher = _PassWatcher(frozenset(indices), report)
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch, cache: KVCache, rows_N: Tensor) -> Float[Tensor, "N V"]:
        """Run one pass; write its keys; return float32 logits of the tokens in `rows_N`."""
        operations, eps = self._operations, self._eps
        wanted = {index for watcher in self._watchers for index in watcher.indices}
        states_TD = self._embeddings_VD[batch.tokens[IDS]]
        after: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            pools = Pools(*cache.made_layer(index, self._num_heads, self._size, states_TD.dtype))
            query_THGK = operations.rotated(states_TD, layer, self._rotary, eps, pools, batch)
            scoring = Scoring(self._scaling, layer.window, None)
            attended_TO = self._attend(query_THGK, *pools, batch, scoring).flatten(1)
            operations.add_product(states_TD, attended_TO, layer.output)
            operations.add_product(states_TD, operations.gated(states_TD, layer, eps), layer.down)
            if index in wanted:
                after[index] = states_TD.clone()
        if len(self._layers) in wanted:
            after[len(self._layers)] = self._normed(states_TD)
        states_ND = states_TD[rows_N]
        logits_NV = operations.logits(states_ND, self._norm_D, self._head, eps)
        if self._watchers:
            output = Output(logits_NV, self._normed(states_ND), after)
            for watcher in self._watchers:
                watcher.report(output)
        return logits_NV

    def _normed(self, states: Tensor) -> Tensor:
        wide = states.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self._norm_D).to(states.dtype)


def _refuse(module: Any) -> None:
    """Raise UnknownDecoder for what the library runs and these launches do not."""
    inner = module.model
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms = {type(part).__name__ for name, part in layer.named_modules() if name.endswith("norm")}
        if unknown := norms - set(_NORMS):
            raise UnknownDecoder(f"{', '.join(sorted(unknown))} is not fused")
        linears = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj, module.lm_head)
        if any(getattr(linear, "bias", None) is not None for linear in linears):
            raise UnknownDecoder("a bias outside of queries, keys and values is not fused")
        if not type(mlp.act_fn).__name__.startswith("SiLU"):
            raise UnknownDecoder(f"{type(mlp.act_fn).__name__} is not fused")
    if hasattr(inner.rotary_emb, "layer_types"):
        raise UnknownDecoder("several kinds of rotary embeddings are not fused")
    if module.dtype not in _DTYPES:
        raise UnknownDecoder(f"{module.dtype} is not fused")


def _layer(config: Any, layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [linear.bias for linear in projections]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return FusedLayer(
        attention_norm_D=_norm(layer.input_layernorm),
        qkv=_stacked(projections),
        bias_O=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        head_norms_2K=None if norms[0] is None else torch.stack([_norm(norm) for norm in norms]),
        output=_weight_of(attention.o_proj),
        mlp_norm_D=_norm(layer.post_attention_layernorm),
        gate_up=_stacked((mlp.gate_proj, mlp.up_proj)),
        down=_weight_of(mlp.down_proj),
        window=window_of(config, attention),
    )


def _norm(norm: Any) -> Float[Tensor, " D"]:
    weight: Tensor = norm.weight.detach().float()
    return weight.contiguous()


def _num_rows(linear: Any) -> int:
    return int(linear.out_features)


def _weight_of(linear: nn.Module) -> Weight:
    if isinstance(linear, Fp8Linear):
        return Weight(linear.weight_OI, linear.scales_O)
    if type(linear) is not nn.Linear:
        raise UnknownDecoder(f"{type(linear).__name__} is not fused")
    return Weight(linear.weight.detach())


def _stacked(linears: Sequence[nn.Module]) -> Weight:
    """Return the stacked weights of layers. The layers keep views of them, so that no weight is in memory twice."""
    parts = [_weight_of(linear) for linear in linears]
    rows_OI = torch.cat([part.rows_OI for part in parts])
    scales = [part.scales_O for part in parts if part.scales_O is not None]
    for linear, view in zip(linears, torch.split(rows_OI, [len(part.rows_OI) for part in parts]), strict=True):
        if isinstance(linear, Fp8Linear):
            linear.weight_OI = view
        else:
            linear.weight = nn.Parameter(view, requires_grad=False)
    return Weight(rows_OI, torch.cat(scales) if scales else None)
