"""Examines the parts of a server with given settings, one line per part, before any weight is loaded.

Knows configurations, folders and this machine. Does not know how findings are printed, and starts no engine.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.build import device_of, draft_dtype, load_prepared
from engine.core.config import EngineConfig
from engine.draft.compatibility import UnreadableDrafter, check_drafter
from engine.draft.models.head import head_shape
from engine.graph_setup import why_not_replayed
from engine.memory_plan import GB, configuration_of, memory_need, memory_of, shortage
from engine.model.linear_backends import NATIVE, fastest_linears, multiplies_bfloat16, torch_linears
from engine.model.sharding import require_shardable, why_not_sharded
from engine.model.stored_model import forget_stored
from engine.native import library
from engine.native.linear import QUANTISED
from engine.utils.one_line import one_line
from engine.weights import UnsupportedModel, WeightsCache, WeightsError, default_root, find_preset, load_presets, resolve
from engine.weights.weight_headers import num_parameters
from selector.menu import menu_for_all
from selector.network.net import SelectorNet
from selector.network.net_estimator import mismatches


class Level(StrEnum):
    """The severity of a finding; `refused` prevents serving."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    part: str
    level: Level
    text: str
    is_unsupported: bool = False  # another start would fail too


def examine(config: EngineConfig) -> Iterator[Finding]:
    """Yield the findings. Fetches no preset; other references are resolved as at a start. Unknown facts are left out."""
    device = device_of(config)
    if device.type == "cuda" and not torch.cuda.is_available():
        yield Finding("device", Level.REFUSED, f"{device}: torch finds no CUDA device")
        return
    yield Finding("device", Level.OK, _device_text(config, device))
    yield from _precision(config, device)
    missing = [reference for reference in (config.model, config.draft_model) if reference is not None and _is_missing(reference)]
    for reference in missing:
        text = f"{reference} is not fetched yet: the first start does, or latebranch weights fetch {reference}"
        yield Finding("weights", Level.WARNING, text)
    parts: list[tuple[str, Callable[[EngineConfig, torch.device], Iterator[Finding]]]] = [("selector", _selector)]
    if not missing:
        parts = [("model", _model), ("passes", _passes), ("cache", _cache), ("drafter", _drafter), *parts]
    reasons: set[str] = set()  # of parts that were refused; several may be for the same one
    for name, part in parts:
        try:
            yield from part(config, device)
        except (WeightsError, UnsupportedModel) as error:
            if str(error) not in reasons:
                yield Finding(name, Level.REFUSED, str(error), isinstance(error, UnsupportedModel))
            reasons.add(str(error))


def check_models(config: EngineConfig) -> Iterator[Finding]:
    """Load and pack the target and the draft model, repeat their checks and yield the findings."""
    device = device_of(config)
    wanted = [(config.model, config.dtype)]
    wanted += [] if config.draft_model is None else [(config.draft_model, draft_dtype(config, device))]
    for reference, dtype in wanted:
        try:
            folder = resolve(reference).folder
            forget_stored(folder, dtype)
            load_prepared(folder, dtype, device)
            yield Finding("check", Level.OK, f"{reference} in {dtype}: a tree-masked pass gives the logits of transformers' pass")
        except (WeightsError, UnsupportedModel) as error:
            yield Finding("check", Level.REFUSED, str(error), isinstance(error, UnsupportedModel))
        except OSError as error:
            yield Finding("check", Level.REFUSED, f"{reference}: its stored check cannot be deleted: {one_line(error)}")


def _is_missing(reference: str) -> bool:
    preset = load_presets().get(reference)
    return preset is not None and find_preset(preset, WeightsCache(default_root())) is None


def _device_text(config: EngineConfig, device: torch.device) -> str:
    why = "by the settings" if config.device else "there is no CUDA device" if device.type == "cpu" else "there is one"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({why})"
    threads = config.num_threads or torch.get_num_threads()
    return f"{device} ({why}), {threads} threads of {os.cpu_count()} processors"


def _precision(config: EngineConfig, device: torch.device) -> Iterator[Finding]:
    on_cpu = device.type == "cpu"
    linears = fastest_linears(device) if config.tensor_parallel == 1 else torch_linears(device)
    has_bfloat16, is_native = on_cpu and multiplies_bfloat16(), linears == NATIVE
    ours = library.instruction_set() or ("not compiled" if library.supported() else "not for this processor")
    instructions = f"; bfloat16 instructions: {_yes(has_bfloat16)}, our library: {ours}" if on_cpu else ""
    text = f"target {config.dtype}, linear layers {linears}{instructions}"
    if is_native:
        yield Finding("precision", Level.OK, f"{text}; rows have the same bits in any batch")
    elif config.dtype in QUANTISED:
        why = "our library, which was not compiled" if library.supported() else "a processor with AVX2"
        yield Finding("precision", Level.REFUSED, f"{text}; {config.dtype} needs {why if on_cpu else 'a processor'}")
    elif config.dtype == "bfloat16":
        slow = "" if has_bfloat16 or not on_cpu else "; without these instructions it is slower than float32"
        yield Finding("precision", Level.WARNING, f"{text}; near ties can fall either way{slow}")
    else:
        yield Finding("precision", Level.OK, f"{text}; texts equal plain decoding's, token for token")
    if config.drafter in ("head", "model"):
        why = "by the settings" if config.draft_dtype else "the fastest here"
        yield Finding("precision", Level.OK, f"drafter {draft_dtype(config, device)} ({why})")


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _model(config: EngineConfig, device: torch.device) -> Iterator[Finding]:
    model = configuration_of(config.model)
    text = model.get_text_config()
    size_gb = num_parameters(resolve(config.model).folder) / GB
    sizes = f"{text.num_hidden_layers} layers of width {text.hidden_size}, {size_gb:.3g} billion parameters"
    yield Finding("model", Level.OK, f"{model.model_type}: {sizes}; our tree attention over slots")
    if config.tensor_parallel > 1:
        require_shardable(resolve(config.model).folder, config.tensor_parallel)
        reason = why_not_sharded(config, device)
        text = "its layers are shared out" if reason is None else reason
        yield Finding("model", Level.OK if reason is None else Level.REFUSED, f"tensor_parallel {config.tensor_parallel}: {text}")


def _passes(config: EngineConfig, device: torch.device) -> Iterator[Finding]:
    """Report how passes run on a GPU, and on any device an error if required CUDA graphs are not available."""
    reason = why_not_replayed(config, configuration_of(config.model), device)
    if config.cuda_graphs == "on" and reason is not None:
        yield Finding("passes", Level.REFUSED, f"cuda_graphs: on: {reason}")
    elif device.type == "cuda" and reason is not None:
        yield Finding("passes", Level.WARNING, f"{reason}: passes run without CUDA graphs")
    elif device.type == "cuda":
        yield Finding("passes", Level.OK, f"padded to shapes, CUDA graphs {config.cuda_graphs}")


def _cache(config: EngineConfig, device: torch.device) -> Iterator[Finding]:
    limits, text_config = config.scheduler, configuration_of(config.model).get_text_config()
    need, memory = memory_need(config, draft_dtype(config, device), device), memory_of(device)
    lacking = shortage(need, device)
    grave = Level.REFUSED if lacking else Level.WARNING if need.total > memory.free else Level.OK
    text = lacking or f"{need.total / GB:.2f} GB at most: {need}; {memory.free / GB:.2f} GB free of {memory.total / GB:.2f}"
    yield Finding("cache", grave, f"{limits.num_slots} slots; {text}")
    positions = getattr(text_config, "max_position_embeddings", None)
    bounds = {"max_model_len": limits.max_model_len, "num_slots": limits.num_slots, "model": positions or limits.max_model_len}
    longest = min(bounds.values())
    level = Level.WARNING if longest == bounds["num_slots"] and longest < limits.max_model_len else Level.OK
    bounds_text = ", ".join(f"{name} {bound}" for name, bound in bounds.items())
    yield Finding("cache", level, f"texts of {longest} tokens at most ({bounds_text})")


def _drafter(config: EngineConfig, _: torch.device) -> Iterator[Finding]:
    grave, instead = (Level.REFUSED, "") if config.stand_in is None else (Level.WARNING, f"; {config.stand_in} drafts instead")
    try:
        found = check_drafter(config)
    except UnreadableDrafter as error:
        yield Finding("drafter", grave, f"{error}{instead}")
        return
    drafter = f"{config.drafter} with cached text" if config.cached_text else config.drafter
    yield from (Finding("drafter", Level.OK, fact) for fact in (drafter, *found.facts))
    yield from (Finding("drafter", Level.WARNING, warning) for warning in found.warnings)
    yield from (Finding("drafter", grave, refusal + instead) for refusal in found.refusals)


def _selector(config: EngineConfig, _: torch.device) -> Iterator[Finding]:
    if config.policy != "adaptive" or config.selector is None:
        how = "acceptance is counted" if config.policy == "adaptive" else f"policy {config.policy} needs no selector"
        yield Finding("selector", Level.OK, how)
        return
    path = Path(config.selector)
    try:
        net, recipe = SelectorNet.load(path)
        if _is_missing(config.model):
            yield Finding("selector", Level.OK, f"{path.name} can be read; whether it fits is checked when the model is fetched")
            return
        width = configuration_of(config.model).get_text_config().hidden_size
        read = width + (head_shape(Path(config.head)).width if config.head is not None else 0)
    except (OSError, SafetensorError, ValueError) as error:
        yield Finding("selector", Level.REFUSED, f"{path.name} cannot be used: {error}")
        return
    differences = mismatches(net, menu_for_all(config.expansion, config.verifier, config.largest_expansion), width, read)
    yield from (Finding("selector", Level.REFUSED, f"{path.name} cannot be used: {one}") for one in differences)
    if not differences:
        of = f", made for {recipe['model']}" if "model" in recipe else ""
        shape = f"{len(net.menu)} trees, rules {', '.join(net.shape.rules)}"
        yield Finding("selector", Level.OK, f"{path.name} fits{of}: {shape}; other rules are counted")
