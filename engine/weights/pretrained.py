"""Loads configuration, tokenizer and weights from model folders by transformers. No code of a folder is ever run.

A model type that cannot be served is refused by its name as soon as its configuration is read. Importing this module does not
import transformers, which takes seconds.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.utils.one_line import one_line
from engine.weights.errors import UnsupportedModel, WeightsError
from engine.weights.layer_sizes import STATE_TYPES

# Without the first, transformers prompts on a terminal whether to run a folder's code; without the second, it reads pickles.
_TRUST: dict[str, Any] = {"trust_remote_code": False}
_WEIGHTS: dict[str, Any] = {**_TRUST, "use_safetensors": True}
_OWN_CODE = "code of its own folder, which is never run"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Model types whose recurrent layers compute the same function in a chunk and token by token.
_WITH_STATES = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "bailing_hybrid", "lfm2", "lfm2_moe"),
    *("mamba2", "falcon_h1", "granitemoehybrid", "bamba"),
}
_KEEPS_STATE = "its recurrent state cannot be computed exactly for each node of a tree"
# transformers chooses its frequencies by the longest position of the whole batch. ("dynamic" does so only beyond the positions
# the model is made for, which are never served.)
_BATCH_DEPENDENT_ROPE = {"longrope"}


def load_config(folder: Path) -> Any:
    """Return the configuration of a model folder; raise WeightsError if it cannot be read, UnsupportedModel if it is refused."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    raw = _json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type is not None and model_type not in CONFIG_MAPPING:
        needs_code = isinstance(raw.get("auto_map"), dict)
        why = f"it needs {_OWN_CODE}" if needs_code else f"transformers {__version__} has none"
        raise refused(model_type, why)
    config = _read(lambda: AutoConfig.from_pretrained(folder, **_TRUST), "configuration", folder)
    refuse_by_configuration(config)
    return config


def load_tokenizer(folder: Path, **options: Any) -> Any:
    """Return the tokenizer of a folder; raise WeightsError if it cannot be read or needs code of the folder."""
    from transformers import AutoTokenizer

    return _read(lambda: AutoTokenizer.from_pretrained(folder, **_TRUST, **options), "tokenizer", folder)


def load_module(folder: Path, **options: Any) -> Any:
    """Return the model of a folder, from safetensors alone. Raises the errors of `load_config` and transformers."""
    from transformers import AutoModelForCausalLM

    load_config(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **_WEIGHTS, **options)


def empty_module(folder: Path) -> Any:
    """Return the model of a folder without its weights, on torch's meta device. Raises what `load_config` raises."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(folder)
    with torch.device("meta"):
        return _read(lambda: AutoModelForCausalLM.from_config(config, **_TRUST), "configuration", folder)


def refused(model_type: object, why: object) -> UnsupportedModel:
    """Return the error for a model type that cannot be served."""
    return UnsupportedModel(f"model type {model_type!r} is not supported: {one_line(why)}")


def refuse_by_configuration(config: Any) -> None:
    """Raise UnsupportedModel for properties that are visible without a pass, or that a short pass would not show."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise refused(config.model_type, "it is no causal language model")
    try:
        text = config.get_text_config()
        has_driven_states, has_limit = config.model_type in _WITH_STATES, not _has_one_function(text)
        sizes = _SIZES[:-1] if has_driven_states else _SIZES  # some have no attention at all
        missing = [name for name in sizes if not isinstance(getattr(text, name, None), int)]
        layer_types = set(getattr(text, "layer_types", None) or ())
        is_chunked = getattr(text, "attention_chunk_size", None) is not None
        rope_types = set(_values_of(getattr(text, "rope_parameters", None) or {}, "rope_type")) & _BATCH_DEPENDENT_ROPE
        for name in ("num_key_value_heads", "head_dim"):  # raises where layers differ in it
            getattr(text, name, None)
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        raise refused(config.model_type, error) from error
    if has_driven_states and has_limit:
        raise refused(config.model_type, "its time_step_limit holds in prompts alone, not token by token")
    if has_driven_states:
        layer_types -= STATE_TYPES
    if layer_types & STATE_TYPES:
        raise refused(config.model_type, f"{_KEEPS_STATE} (layers of type {', '.join(sorted(layer_types & STATE_TYPES))})")
    if layer_types - _LAYER_TYPES or is_chunked:
        unknown = ", ".join(sorted(layer_types - _LAYER_TYPES)) or "chunked"
        raise refused(config.model_type, f"layers of type {unknown} cannot be driven")
    if missing:
        lacks = f"its configuration has no {' and no '.join(missing)}"
        raise refused(config.model_type, f"{_KEEPS_STATE} ({lacks})" if _is_stateful(config) else lacks)
    if rope_types:
        raise refused(
            config.model_type, f"rotary embeddings of type {', '.join(rope_types)} depend on the longest text of a batch"
        )


def _has_one_function(text: Any) -> bool:
    """Return whether Mamba layers compute one function: only prompts apply transformers' limits of time steps."""
    return tuple(getattr(text, "time_step_limit", None) or (0.0, float("inf"))) == (0.0, float("inf"))


def _is_stateful(config: Any) -> bool:
    """Return whether transformers marks the model as one whose state cannot be taken back. This imports the model's code."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False))


def _values_of(settings: dict[str, Any], name: str) -> Iterator[Any]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _values_of(value, name)
        elif key == name:
            yield value


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (OSError, ValueError) as error:
        raise WeightsError(f"the configuration of {path.parent} cannot be read: {one_line(error)}") from error


def _read(load: Callable[[], Any], what: str, folder: Path) -> Any:
    """Return the result of `load`; raise WeightsError in place of transformers' errors for a file."""
    try:
        return load()
    except Exception as error:  # transformers' errors for other projects' files have no common base
        if "trust_remote_code" in str(error):  # it advises this argument
            raise UnsupportedModel(f"the {what} of {folder} needs {_OWN_CODE}") from error
        raise WeightsError(f"the {what} of {folder} cannot be read: {one_line(error)}") from error
