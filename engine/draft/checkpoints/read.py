"""Reads a checkpoint's folder: which kind of drafter it is, and its shape. Each unsupported property is refused.

One network has several spellings. speculators writes `speculators_model_type`, and the layers' sizes in
`transformer_layer_config`. SpecForge and the authors of EAGLE-3 and DFlash write the configuration of a small Llama or Qwen3.
Layer numbers differ too. In speculators and at the top of a configuration, k is the input of layer k. Inside `eagle_config` and
`dflash_config` it is the output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.draft.checkpoints.files import CheckpointFiles, Keys, UnusableCheckpoint
from engine.draft.checkpoints.layer_keys import (
    default_layers,
    layer_tensors,
    layers_after,
    layers_shape,
    num_features,
    require_embeddings,
    require_output,
    unused_keys,
    vocabulary,
)
from engine.draft.checkpoints.shapes import DFlashShape, Eagle3Shape, KnownTokens, LayersShape, MedusaShape, Shape
from engine.weights.facts import ModelFacts

Reader = Callable[[CheckpointFiles, ModelFacts], tuple[Shape, Sequence[Keys]]]

_EAGLE3_IDS, _DFLASH_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
_OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
_OF_SPECULATORS = ("speculators_config", "speculators_version", "speculators_model_type", "embed_requires_grad")
_EAGLE_CONFIG: Mapping[str, Any] = {  # the only supported values
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "eagle_decoder_type": "llama",
}
_DFLASH_CONFIG: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_swa": False,
    "shift_label": False,
    "pure_draft_prefix_len": 0,
    "projector_type": None,
    "swa_window_size": None,
    "layer_ids": None,
    "mask_token": None,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that fits its target. `warnings` are one line each."""

    files: CheckpointFiles
    shape: Shape
    warnings: tuple[str, ...]

    @property
    def description(self) -> str:
        """One line about the drafter."""
        shape = self.shape
        known = f"{shape.vocab.num_known} tokens, {self.files.num_parameters / 1e6:.3g} million parameters"
        if isinstance(shape, MedusaShape):
            return f"{shape.num_heads} Medusa heads, {known}"
        read = f"reads the target after layers {', '.join(map(str, shape.after))}"
        kind = f"DFlash, blocks of {shape.block_size}" if isinstance(shape, DFlashShape) else "EAGLE-3"
        return f"{kind}, {shape.layers.num_layers} layers of width {shape.layers.width}, {known}; {read}"

    @property
    def num_kept(self) -> tuple[int, int]:
        """The numbers of a token's keys and values, and of its feature."""
        if isinstance(self.shape, MedusaShape):
            return 0, self.shape.width
        return self.shape.layers.num_layers * self.shape.layers.pair_width, self.shape.layers.width


def read_checkpoint(folder: Path, target: ModelFacts) -> Checkpoint:
    """Return the checkpoint in a folder for a target, without its weights. Raise UnusableCheckpoint."""
    files = CheckpointFiles.open(folder)
    shape, objects = _reader(files)(files, target)
    unknown = unused_keys(objects)
    warnings = (f"{folder.name}: these keys of config.json are not read: {', '.join(unknown)}",) if unknown else ()
    return Checkpoint(files, shape, warnings)


def _reader(files: CheckpointFiles) -> Reader:
    """Return the reader of the kind of drafter. `architectures` differ between a saved and a converted checkpoint."""
    config = files.config
    config.require("parallel_drafting", False)  # P-EAGLE
    if "speculators_model_type" in config:
        config.require("speculators_model_type", "eagle3", "dflash")
        return _read_dflash if config.get("speculators_model_type", str) == "dflash" else _read_eagle3
    if "dflash_config" in config or any("DFlash" in str(one) for one in config.get("architectures", list, [])):
        return _read_dflash
    if "medusa_num_heads" in config or config.get("model_type", str) == "medusa":
        return _read_medusa
    if "layers.0.hidden_norm.weight" in files.shapes:
        return _read_eagle3
    if "fc.weight" in files.shapes:
        raise UnusableCheckpoint("it looks like an EAGLE-1 or EAGLE-2 head: it has no hidden_norm")
    if any(name.startswith("layers.1.") for name in files.shapes):
        raise UnusableCheckpoint("it looks like a whole model: serve it with --drafter model --draft-model")
    raise UnusableCheckpoint("it is not recognised as EAGLE-3, DFlash or Medusa by its configuration and tensors")


def _read_eagle3(files: CheckpointFiles, target: ModelFacts) -> tuple[Eagle3Shape, Sequence[Keys]]:
    config, eagle = files.config, files.config.object("eagle_config")
    keys = _layer_keys(config, target)
    for key, allowed in _EAGLE_CONFIG.items():
        eagle.require(key, allowed)
    layers, vocab = _read_layers(files, keys, target, first_input=2)
    count = num_features(files, target.width, layers.width)
    named = [(config, 0), (eagle, 1)]
    after = _layers_named([(keys, _EAGLE3_IDS, shift) for keys, shift in named], target.num_layers)
    if after is None:
        if count != len(default_layers(target.num_layers)):
            raise UnusableCheckpoint(f"fc.weight reads {count} states of the target, and {_EAGLE3_IDS} does not name them")
        after = layers_after(default_layers(target.num_layers), 0, target.num_layers, f"the default of {_EAGLE3_IDS}")
    _require_count(after, count, _EAGLE3_IDS)
    norms = _fused_norms(files, config, count, target.width)
    own = {"layers.0.hidden_norm.weight": (layers.width,), "norm.weight": (layers.width,)}
    for name, size in (own | norms).items():
        files.require(name, size)
    files.require_no_others({*layer_tensors(layers, 2), *own, *norms, "fc.weight", *_OPTIONAL})
    return Eagle3Shape(
        layers=layers,
        after=after,
        target_width=target.width,
        vocab=vocab,
        fused_norms=tuple(norms),
        is_residual_normed=_is_residual_normed(config),
        feeds_normed=_feeds_normed(config),
    ), (config, keys, eagle)


def _read_dflash(files: CheckpointFiles, target: ModelFacts) -> tuple[DFlashShape, Sequence[Keys]]:
    config, flash = files.config, files.config.object("dflash_config")
    keys = _layer_keys(config, target)
    for key, allowed in _DFLASH_CONFIG.items():
        flash.require(key, allowed)
    layers, vocab = _read_layers(files, keys, target, first_input=1)
    named = [(config, _DFLASH_IDS, 0), (config, "target_layer_ids", 1), (flash, "target_layer_ids", 1)]
    after = _layers_named(named, target.num_layers)
    if after is None:
        raise UnusableCheckpoint("no target_layer_ids or aux_hidden_state_layer_ids: projects differ in what they read then")
    _require_count(after, num_features(files, target.width, layers.width), "target_layer_ids")
    block_size, mask_id = _one_of("block_size", int, config, flash), _one_of("mask_token_id", int, config, flash)
    if block_size is None or block_size < 2:
        raise UnusableCheckpoint(f"block_size is {block_size or 'missing'}: projects differ in its default")
    if mask_id is None or not 0 <= mask_id < target.vocab_size:
        raise UnusableCheckpoint(f"mask_token_id is {mask_id}, not a token of the target's {target.vocab_size}")
    own = {"hidden_norm.weight": (layers.width,), "norm.weight": (layers.width,)}
    for name, size in own.items():
        files.require(name, size)
    files.require_no_others({*layer_tensors(layers, 1), *own, "fc.weight", *_OPTIONAL})
    return DFlashShape(
        layers=layers,
        after=after,
        target_width=target.width,
        vocab=vocab,
        block_size=block_size,
        mask_id=mask_id,
        is_causal=_causal_layers(config, flash, layers.windows),
        starts_at_anchor=config.get("sample_from_anchor", bool, False),
        windows_from_anchor="speculators_model_type" in config,
    ), (config, keys, flash)


def _read_medusa(files: CheckpointFiles, target: ModelFacts) -> tuple[MedusaShape, Sequence[Keys]]:
    config = files.config
    config.skip("base_model_name_or_path", "hidden_size", "version")
    config.require("truncated_vocab_size", config.values.get("vocab_size"))
    num_heads = _one_of("medusa_num_heads", int, config) or config.size("num_heads")
    num_layers = _one_of("medusa_num_layers", int, config) or config.get("num_hidden_layers", int, 1)
    is_original = "0.0.linear.weight" in files.shapes
    linear = "0.0.linear" if is_original else "blocks.0.layers.0"
    has_one_output = config.get("original_lm_head", bool, False)
    has_biases = f"{linear}.bias" in files.shapes
    if has_biases and not config.get("medusa_fc_bias", bool, True):
        raise UnusableCheckpoint(f"medusa_fc_bias is false, but the tensor {linear}.bias exists")
    shape = MedusaShape(
        width=target.width,
        num_heads=num_heads,
        num_layers=num_layers,
        vocab=KnownTokens(None, target.vocab_size),
        has_biases=has_biases or config.get("medusa_fc_bias", bool, False),
        has_one_output=has_one_output,
        is_original=is_original,
    )
    tensors: dict[str, tuple[int, ...]] = {}
    tensors |= {f"{name}.weight": (target.width, target.width) for names in shape.residuals for name in names}
    tensors |= {f"{name}.bias": (target.width,) for names in shape.residuals for name in names if shape.has_biases}
    outputs = {f"{name}.weight": (target.vocab_size, target.width) for name in shape.outputs}
    if not has_one_output or any(name in files.shapes for name in outputs):
        tensors |= outputs
    for name, size in tensors.items():
        files.require(name, size)
    files.require_no_others(set(tensors))
    return shape, (config,)


def _read_layers(files: CheckpointFiles, keys: Keys, target: ModelFacts, first_input: int) -> tuple[LayersShape, KnownTokens]:
    """Return the layers and the tokens that they predict; raise UnusableCheckpoint if they do not fit the target."""
    layers = layers_shape(files, keys, first_input)
    _require_untied(files, keys)
    require_embeddings(files, layers.width, target)
    vocab = vocabulary(files, files.config, target)
    require_output(files, layers.width, vocab, target)
    return layers, vocab


def _layer_keys(config: Keys, target: ModelFacts) -> Keys:
    """Return the object with the layers' sizes. Raise UnusableCheckpoint if it was made for a target of another size."""
    is_nested = "speculators_model_type" in config
    keys = config.object("transformer_layer_config") if is_nested else config
    config.skip(*_OF_SPECULATORS)
    for where, key, size in (
        (config, "target_hidden_size", target.width),
        (keys, "vocab_size", target.vocab_size),
        (config, "num_target_layers", target.num_layers),
    ):
        given = where.get(key, int)
        if given is not None and given != size:
            raise UnusableCheckpoint(f"{where.name_of(key)} is {given}, the target has {size}")
    return keys


def _layers_named(named: Sequence[tuple[Keys, str, int]], depth: int) -> tuple[int, ...] | None:
    """Return the layers that a configuration names, None if it names none; raise UnusableCheckpoint if two names disagree."""
    found = {
        keys.name_of(key): layers_after(ids, shift, depth, keys.name_of(key))
        for keys, key, shift in named
        if (ids := keys.get(key, list))
    }
    if len(set(found.values())) > 1:
        raise UnusableCheckpoint(f"{' and '.join(found)} name different layers of the target")
    return next(iter(found.values()), None)


def _require_count(after: Sequence[int], count: int, key: str) -> None:
    if len(after) != count:
        raise UnusableCheckpoint(f"fc.weight reads {count} states of the target, but {key} names {len(after)} layers")


def _require_untied(files: CheckpointFiles, keys: Keys) -> None:
    is_tied = keys.get("tie_word_embeddings", bool, False) and "embed_tokens.weight" in files.shapes
    if is_tied and "lm_head.weight" not in files.shapes:
        raise UnusableCheckpoint(f"{keys.name_of('tie_word_embeddings')} is true and lm_head.weight is missing: store the tensor")


def _fused_norms(files: CheckpointFiles, config: Keys, count: int, target_width: int) -> dict[str, tuple[int, ...]]:
    """Return the norms of the states before they are fused. A key that is missing is decided by the tensors."""
    has_one = config.get("norm_before_fc", bool, "input_norm.weight" in files.shapes)
    has_each = config.get("fc_norm", bool, "fc_norm.0.weight" in files.shapes)
    if has_one and has_each:
        raise UnusableCheckpoint("norm_before_fc and fc_norm cannot both be true")
    if has_one:
        return {"input_norm.weight": (count * target_width,)}
    return {f"fc_norm.{index}.weight": (target_width,) for index in range(count)} if has_each else {}


def _is_residual_normed(config: Keys) -> bool:
    given = config.get("norm_before_residual", bool)
    if given is None and "speculators_model_type" in config:
        raise UnusableCheckpoint("norm_before_residual is missing: speculators reads false, vLLM true")
    return bool(given)


def _feeds_normed(config: Keys) -> bool:
    """Return whether the next round reads the normed output. SpecForge 0.2.0 uses the same key for another norm."""
    given = config.get("norm_output", bool, False)
    if given and "speculators_model_type" not in config:
        raise UnusableCheckpoint(
            "norm_output is true: SpecForge 0.2.0 means a plain head (then delete the key), vLLM and SGLang mean that the next "
            'round reads the normed state (then write "speculators_norm_output": true in its place)'
        )
    return bool(given or config.get("speculators_norm_output", bool, False))


def _one_of(key: str, kind: type, *objects: Keys) -> Any:
    """Return a value that may be in one of several objects; raise UnusableCheckpoint if two values differ."""
    found = {keys.name_of(key): value for keys in objects if (value := keys.get(key, kind)) is not None}
    if len(set(found.values())) > 1:
        raise UnusableCheckpoint(f"{' and '.join(found)} differ: {', '.join(map(str, found.values()))}")
    return next(iter(found.values()), None)


def _causal_layers(config: Keys, flash: Keys, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each layer whether a slot of the block sees only earlier slots: by default in sliding layers alone."""
    given = {config.get("is_causal", bool), flash.get("causal", bool)} - {None}
    if len(given) > 1:
        raise UnusableCheckpoint("is_causal and dflash_config.causal differ")
    is_causal_window = not config.get("sliding_window_non_causal", bool, False)
    default = tuple(window is not None and is_causal_window for window in windows)
    return (given.pop(),) * len(windows) if given else default
