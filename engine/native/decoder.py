"""A transformers decoder, run by the library. Its parts are found by name.

A model with unknown parts is refused by name; the caller may let transformers run it.
Shape key: T packed tokens, N rows of logits, V vocabulary, D width, P positions, K head size.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.pool import KVCache
from engine.native import library
from engine.native.passes import Features, Output, Runner, Tables
from engine.utils.rotary_table import RotaryTable

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Gemma3DecoderLayer")
_NORMS = {  # added to the weight
    "LlamaRMSNorm": 0.0,
    "MistralRMSNorm": 0.0,
    "Qwen2RMSNorm": 0.0,
    "Qwen3RMSNorm": 0.0,
    "Gemma3RMSNorm": 1.0,
}
_ACTIVATIONS = {"SiLU": library.SILU, "SiLUActivation": library.SILU, "GELUTanh": library.GELU_TANH}
_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # that depend on the position alone, not on the longest sequence
_PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


class UnknownDecoder(ValueError):
    """The library does not know how to run the model."""


@dataclass(frozen=True, eq=False)
class _Watcher:
    indices: frozenset[int]
    report: Callable[[Output], None]


class NativeDecoder:
    """Runs passes of a model whose linear layers are the library's, and that `refuse_by_structure` accepts.

    Between passes it keeps no state but its watchers.
    """

    def __init__(self, module: Any, precision: str) -> None:
        config, inner = module.config.get_text_config(), module.model
        self._module = module  # with `_tensors`, owns what the structures point at
        self._kinds = _rotation_kinds(config, inner)
        self._rotations = [_rotations(inner.rotary_emb, kind) for kind in self._kinds]
        self._tensors: list[Tensor] = []
        attention = inner.layers[0].self_attn
        layers = [self._layer(config, layer) for layer in inner.layers]
        embeddings, head_size = inner.embed_tokens, int(attention.head_dim)
        self._runner = Runner(
            library.Decoder(
                num_layers=len(layers),
                width=embeddings.weight.shape[1],
                num_heads=attention.q_proj.out_features // head_size,
                num_kv_heads=attention.k_proj.out_features // head_size,
                head_size=head_size,
                inner=inner.layers[0].mlp.gate_proj.out_features,
                activation=_ACTIVATIONS[type(inner.layers[0].mlp.act_fn).__name__],
                embedding_width=embeddings.weight.shape[1],
                eps=_eps(inner.norm),
                scaling=float(attention.scaling),
                embedding_scale=float(getattr(embeddings, "embed_scale", 1.0)),
                embeddings=self._kept(embeddings.weight.detach()),
                last_norm=self._norm(inner.norm),
                layers=(library.Layer * len(layers))(*layers),
                head=module.lm_head.structure,
            ),
            precision,
        )
        self._latest: tuple[ref[Tensor], list[tuple[float, int]]] | None = None
        self._watchers: list[_Watcher] = []
        self._features: WeakKeyDictionary[KVCache, Features] = WeakKeyDictionary()

    @property
    def cache_dtype(self) -> torch.dtype:
        """The format of cached keys and values."""
        return self._runner.cache_dtype

    def watch(self, indices: Iterable[int], report: Callable[[Output], None]) -> Callable[[], None]:
        """Call `report` after each later pass, with the states of `indices` (Output.after). Return a function that ends this."""
        watcher = _Watcher(frozenset(indices), report)
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def keep_features(self, cache: KVCache, features: Features) -> None:
        """Store the inputs of these features in later passes over a cache: those of each token, in the token's slot."""
        assert cache not in self._features, "a second head for one cache"
        self._features[cache] = features

    def forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Run one pass over the packed tokens; write their keys; return float32 logits of the chosen packed tokens."""
        wanted = {index for watcher in self._watchers for index in watcher.indices}
        rotations, features = [one.below(batch.end) for one in self._rotations], self._features.get(cache)
        output = self._runner.run(batch, cache, rotations, logit_rows_N, wanted, features=features)
        for watcher in self._watchers:
            watcher.report(output)
        self._latest = ref(output.logits_NM), output.likeliest
        return output.logits_NM

    def likeliest(self, logits_NV: Float[Tensor, "N V"]) -> list[tuple[float, int]] | None:
        """Return what `distributions.likeliest` returns, if these are the latest pass's logits; else None."""
        if self._latest is None or self._latest[0]() is not logits_NV:
            return None
        return self._latest[1]

    def _layer(self, config: Any, layer: Any) -> library.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linears = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
        kind = getattr(attention, "layer_type", None)
        return library.Layer(
            **{name: linear.structure for name, linear in zip(_PROJECTIONS, linears, strict=True)},
            attention_norm=self._norm(layer.input_layernorm),
            after_attention_norm=self._norm(layer.post_attention_layernorm) if is_sandwich else None,
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm),
            after_mlp_norm=self._norm(layer.post_feedforward_layernorm) if is_sandwich else None,
            query_norm=self._norm(getattr(attention, "q_norm", None)),
            key_norm=self._norm(getattr(attention, "k_norm", None)),
            window=_window(config, attention) or 0,
            rotation=self._kinds.index(kind) if kind in self._kinds else 0,
        )

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._kept(norm.weight.detach().float() + _NORMS[type(norm).__name__])

    def _kept(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.float().contiguous())
        return self._tensors[-1].data_ptr()


def _rotations(embedding: Any, kind: str | None) -> RotaryTable[Tables]:
    """Return the cosines and sines of a kind of layer, by the model's own embedding."""
    options = {} if kind is None else {"layer_type": kind}

    def make(positions_P: Int[Tensor, " P"]) -> Tables:
        cosines, sines = embedding(torch.empty(0), positions_P[None], **options)
        return cosines[0].contiguous(), sines[0].contiguous()

    return RotaryTable(make)


def refuse_by_structure(module: Any) -> None:
    """Raise UnknownDecoder for a model with parts that the library does not know; linear layers may be of any kind."""
    config, inner = module.config.get_text_config(), getattr(module, "model", None)
    layers = getattr(inner, "layers", None)
    if not layers or not hasattr(inner, "rotary_emb") or not hasattr(module, "lm_head"):
        raise UnknownDecoder(f"{type(module).__name__} lacks the parts of a decoder")
    for layer in layers:
        norms = [part for name, part in layer.named_modules() if name.endswith("norm")]
        unknown = {type(part).__name__ for part in norms} - set(_NORMS) | {type(layer).__name__} - set(_LAYERS)
        unknown |= {type(layer.mlp.act_fn).__name__} - set(_ACTIVATIONS) if not unknown else set()
        if unknown:
            raise UnknownDecoder(f"{', '.join(sorted(unknown))} is not a known part")
        if layer.self_attn.head_dim % 2:
            raise UnknownDecoder(f"the head size {layer.self_attn.head_dim} is odd")
    kinds = set(_values(getattr(config, "rope_parameters", None) or {}, "rope_type"))
    if kinds - _ROTATIONS:
        raise UnknownDecoder(f"rotary embeddings of type {', '.join(sorted(kinds - _ROTATIONS))} are not known")
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "partial_rotary_factor"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UnknownDecoder(f"{name} is not known")


def _values(settings: Mapping[str, Any], name: str) -> list[str]:
    nested = [found for value in settings.values() if isinstance(value, dict) for found in _values(value, name)]
    return [*nested, *([settings[name]] if name in settings else [])]


def _rotation_kinds(config: Any, inner: Any) -> list[str | None]:
    """Return the kinds of layers that have their own rotary frequencies; [None] if all layers share them."""
    return sorted(set(config.layer_types)) if hasattr(inner.rotary_emb, "layer_types") else [None]


def _window(config: Any, attention: Any) -> int | None:
    return getattr(attention, "sliding_window", config.sliding_window if type(attention).__name__ == "MistralAttention" else None)


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
