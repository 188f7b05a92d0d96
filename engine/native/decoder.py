"""A transformers decoder, run by the library. Its parts are found by name.

A model with unknown parts is refused by name; the caller may let transformers run it.
Shape key: T packed tokens, N rows of logits, V vocabulary, D width, P positions, K head size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.attention.packing import PackedBatch
from engine.kv_cache.kv_cache import KVCache
from engine.native import library
from engine.native.adapters import NativeAdapters
from engine.native.decoder_pass import Features, Output, Runner, Tables
from engine.native.draft_steps import DraftSteps
from engine.native.linear import PackedWeights
from engine.native.walks import Walks
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
_MOST_COMPARED = 1 << 17  # positions


class UnknownDecoder(ValueError):
    """The library cannot run the model."""


@dataclass(frozen=True, eq=False)
class _Watcher:
    indices: frozenset[int]
    report: Callable[[Output], None]


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A decoder layer: linear layers and norms by the names of library.Layer; norms that it lacks are left out."""

    linears: Mapping[str, PackedWeights]
    norms: Mapping[str, Tensor]
    window: int
    rotation: int  # which of the model's


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """A decoder as the library reads it. `sizes` are the other fields of library.Decoder.

    `rotations` return the cosines and sines of positions, of each kind of layer.
    """

    sizes: Mapping[str, int | float]
    embeddings_VD: Float[Tensor, "V D"]
    last_norm: Float[Tensor, " D"]
    head: PackedWeights
    layers: Sequence[LayerParts]
    rotations: Sequence[Callable[[Int[Tensor, " P"]], Tables]]


class NativeDecoder:
    """Runs passes of a model, of which it owns the parts.

    Between passes it keeps no state but its watchers.
    """

    def __init__(self, parts: DecoderParts, precision: str) -> None:
        self.parts = parts
        self.adapters: NativeAdapters | None = None  # of the segments that name one
        self._rotations = [RotaryTable(make) for make in parts.rotations]
        layers = [
            library.Layer(
                **{name: weights.structure for name, weights in layer.linears.items()},
                **{name: norm.data_ptr() for name, norm in layer.norms.items()},
                window=layer.window,
                rotation=layer.rotation,
            )
            for layer in parts.layers
        ]
        self._runner = Runner(
            library.Decoder(
                **parts.sizes,
                num_layers=len(layers),
                embeddings=parts.embeddings_VD.data_ptr(),
                last_norm=parts.last_norm.data_ptr(),
                layers=(library.Layer * len(layers))(*layers),
                head=parts.head.structure,
            ),
            precision,
        )
        self._latest: tuple[ref[Tensor], library.Numbers, library.Numbers] | None = None  # logits, their arg maxes
        self._watchers: list[_Watcher] = []

    @property
    def cache_dtype(self) -> torch.dtype:
        """The format of cached keys and values."""
        return self._runner.cache_dtype

    def watch(self, indices: Iterable[int], report: Callable[[Output], None]) -> Callable[[], None]:
        """Call `report` after each later pass, with the states of `indices` (Output.after). Return a function that ends this."""
        watcher = _Watcher(frozenset(indices), report)
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    @property
    def is_watched(self) -> bool:
        """Whether passes are reported."""
        return bool(self._watchers)

    def keep_features(self, cache: KVCache, features: Features) -> None:
        """Store the inputs of these features, each token's in its slot, in later passes over a cache."""
        assert self not in cache.native, "a second head for one cache"
        cache.native[self] = features

    def forward(
        self, batch: PackedBatch, cache: KVCache, logit_rows: Sequence[int] | Int[Tensor, " N"], walks: Walks | None = None
    ) -> Float[Tensor, "N V"]:
        """Run one pass over the packed tokens; write their keys; return float32 logits of the chosen packed tokens.

        The trees of `walks` are followed.
        """
        wanted = frozenset[int]().union(*(watcher.indices for watcher in self._watchers)) if self._watchers else None
        end = batch.end if walks is None or walks.steps is None else batch.end + walks.steps.most - 1
        rotations, features = [one.below(end) for one in self._rotations], cache.native.get(self)
        adapted = None if self.adapters is None else self.adapters.rows_of(batch)
        output = self._runner.run(batch, cache, rotations, logit_rows, wanted, features=features, adapted=adapted, walks=walks)
        for watcher in self._watchers:
            watcher.report(output)
        self._latest = ref(output.logits_NM), output.largest_N, output.likeliest_N
        return output.logits_NM

    def run_drafts(self, steps: DraftSteps, cache: KVCache) -> None:
        """Run drafting steps in a row over a cache."""
        rotations = [one.below(steps.end) for one in self._rotations]
        self._runner.run_drafts(steps, cache, rotations, cache.native[self])

    def made(self, logits_NV: Float[Tensor, "N V"]) -> bool:
        """Return whether these are the latest pass's logits."""
        return self._latest is not None and self._latest[0]() is logits_NV

    def likeliest(self, logits_NV: Float[Tensor, "N V"]) -> list[tuple[float, int]] | None:
        """Return the result of `distributions.likeliest` if these are the latest pass's logits, else None."""
        if self._latest is None or not self.made(logits_NV):
            return None
        return list(zip(self._latest[1], self._latest[2], strict=True))


def parts_of(module: Any) -> DecoderParts:
    """Return the parts of a model whose linear layers are the library's, and that `refuse_by_structure` accepts."""
    config, inner = module.config.get_text_config(), module.model
    kinds = _rotation_kinds(config, inner)
    attention, embeddings = inner.layers[0].self_attn, inner.embed_tokens
    head_size, width = int(attention.head_dim), embeddings.weight.shape[1]
    return DecoderParts(
        sizes={
            "width": width,
            "num_heads": attention.q_proj.out_features // head_size,
            "num_kv_heads": attention.k_proj.out_features // head_size,
            "head_size": head_size,
            "inner": inner.layers[0].mlp.gate_proj.out_features,
            "activation": _ACTIVATIONS[type(inner.layers[0].mlp.act_fn).__name__],
            "embedding_width": width,
            "eps": norm_eps(inner.norm),
            "scaling": float(attention.scaling),
            "embedding_scale": float(getattr(embeddings, "embed_scale", 1.0)),
        },
        embeddings_VD=embeddings.weight.detach().float().contiguous(),
        last_norm=_norm(inner.norm),
        head=module.lm_head.weights,
        layers=[_layer(config, layer, kinds) for layer in inner.layers],
        rotations=[_rotation(inner.rotary_emb, kind) for kind in kinds],
    )


def _layer(config: Any, layer: Any, kinds: Sequence[str | None]) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    linears = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    norms = {
        "attention_norm": layer.input_layernorm,
        "after_attention_norm": layer.post_attention_layernorm if is_sandwich else None,
        "mlp_norm": layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm,
        "after_mlp_norm": layer.post_feedforward_layernorm if is_sandwich else None,
        "query_norm": getattr(attention, "q_norm", None),
        "key_norm": getattr(attention, "k_norm", None),
    }
    kind = getattr(attention, "layer_type", None)
    return LayerParts(
        linears={name: linear.weights for name, linear in zip(library.LINEARS, linears, strict=True)},
        norms={name: _norm(norm) for name, norm in norms.items() if norm is not None},
        window=window_of(config, attention) or 0,
        rotation=kinds.index(kind) if kind in kinds else 0,
    )


def _norm(norm: Any) -> Float[Tensor, " D"]:
    weight: Tensor = norm.weight.detach().float() + _NORMS[type(norm).__name__]
    return weight.contiguous()


def _rotation(embedding: Any, kind: str | None) -> Callable[[Int[Tensor, " P"]], Tables]:
    """Return the function of a kind of layer's cosines and sines, by the model's own embedding."""
    options = {} if kind is None else {"layer_type": kind}

    def make(positions_P: Int[Tensor, " P"]) -> Tables:
        cosines, sines = embedding(torch.empty(0), positions_P[None], **options)
        return cosines[0].contiguous(), sines[0].contiguous()

    return make


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of the kinds that `refuse_by_structure` accepts: by fixed frequencies, the cosines and sines scaled."""

    frequencies_F: Float[Tensor, " F"]
    scaling: float

    def __call__(self, positions_P: Int[Tensor, " P"]) -> Tables:
        """Return the cosines and sines of positions."""
        angles_PF = positions_P[:, None].float() * self.frequencies_F
        angles_PK = torch.cat((angles_PF, angles_PF), dim=-1)
        return angles_PK.cos() * self.scaling, angles_PK.sin() * self.scaling


def rotations_of(module: Any) -> list[Rotation]:
    """Return the rotations of a model, for storage; raise UnknownDecoder unless they equal the model's own."""
    config, inner = module.config.get_text_config(), module.model
    found = []
    for kind in _rotation_kinds(config, inner):
        prefix = "" if kind is None else f"{kind}_"
        frequencies_F = getattr(inner.rotary_emb, f"{prefix}inv_freq").detach().float().clone()
        found.append(Rotation(frequencies_F, float(getattr(inner.rotary_emb, f"{prefix}attention_scaling"))))
        positions_P = torch.arange(min(int(getattr(config, "max_position_embeddings", 0) or 0), _MOST_COMPARED) + 1)
        pairs = zip(found[-1](positions_P), _rotation(inner.rotary_emb, kind)(positions_P), strict=True)
        if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
            raise UnknownDecoder("its rotary embeddings are not a function of fixed frequencies")
    return found


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


def window_of(config: Any, attention: Any) -> int | None:
    """Return the tokens of a layer's sliding window."""
    return getattr(attention, "sliding_window", config.sliding_window if type(attention).__name__ == "MistralAttention" else None)


def norm_eps(norm: Any) -> float:
    """Return what a norm adds to the mean square."""
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
