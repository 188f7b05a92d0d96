"""Builds an engine from its configuration: resolves weights, loads and checks models, creates drafter and policy."""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.attention.paged.graph_recorder import GraphRefused
from engine.audit.auditor import Auditor
from engine.audit.background import AuditedEngine
from engine.audit.outcomes import tie_tolerance
from engine.choice_cache import CachedChoice
from engine.core.config import EngineConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion, PlainDecoding, RootSource
from engine.core.refusal import Refusal
from engine.core.step_plan import Feeding
from engine.core.types import ModelInfo, Request, RequestDefaults, SamplingParams
from engine.core.verifier_table import require_exact
from engine.draft.checkpoints.load import CheckpointDrafter, load_drafter
from engine.draft.checkpoints.read import read_checkpoint
from engine.draft.compatibility import UnreadableDrafter, check_drafter, have_same_tokens
from engine.draft.drafter import Drafter
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import Lens, early_exit_drafter
from engine.draft.models.head import DraftHead
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.models.token_map import token_map
from engine.draft.models.translating_drafter import TranslatingDrafter
from engine.draft.models.vocab_padding import RepaddedModel
from engine.draft.text.long_chains import CHAIN_LENGTHS, LongChainPolicy
from engine.draft.text.recent_texts import RecentLimits
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import DrafterWithTextCache, TextDrafter
from engine.draft.text_and_model import CombinedDrafter
from engine.engine import Engine
from engine.graph_setup import Prepared, record, static_steps
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.kv_cache import KVCache
from engine.memory_plan import memory_need, shortage
from engine.model.causal_lm import CausalModel, load_model, weights_dtype
from engine.model.hidden_states import has_layer_states
from engine.model.linear_backends import FP8, fastest_linears, fastest_precision
from engine.model.ranks import load_sharded
from engine.model.root_features import RootFeatures
from engine.model.sharding import require_shardable, why_not_sharded
from engine.model.stored_model import load_stored
from engine.model.target import Target
from engine.native import library
from engine.plain_comparison import PlainComparison
from engine.profiling.peaks import cached_peaks
from engine.profiling.step_timer import StepTimer
from engine.structured_output.grammars import CompiledGrammars, vocabulary_loader
from engine.trace.file import TraceFile
from engine.trace.tracer import FileTracer, header_of
from engine.weights import UnsupportedModel, resolve
from engine.weights.facts import read_facts
from engine.weights.fingerprint import weights_digest
from engine.weights.lora import Adapter, read_adapter, require_fitting
from engine.weights.request_defaults import read_request_defaults
from engine.weights.vocabulary import read_vocabulary

_logger = logging.getLogger(__name__)


class BadConfiguration(Refusal, ValueError):
    """The configuration names something that does not exist or does not fit together."""


PolicyFactory = Callable[[EngineConfig, StepTimer, RootSource], ExpansionPolicy]
Models = MutableMapping[tuple[str, str], CausalModel]  # by reference and number format
ModelLoader = Callable[[Path, str, torch.device], CausalModel]  # of a folder and a number format


def build_engine(
    config: EngineConfig,
    adaptive: PolicyFactory | None = None,
    models: Models | None = None,
    load: ModelLoader | None = None,
) -> Engine:
    """Load everything and return an engine that is ready to step. Takes seconds to a minute.

    `adaptive` creates the policies that are not part of the engine. `models` caches loaded models, so that engines of the same
    number format and device can share weights. `load` is by default `load_whole`. Raises BadConfiguration and the errors of
    engine.weights.
    """
    require_exact(config.expansion, config.verifier)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    adapters = _adapters(config)
    config = _compatible(config)
    device = device_of(config)
    _require_device(device)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # our kernels and graphs run on the current device
    if adapters:
        require_fitting(adapters, resolve(config.model).folder)
    if config.tensor_parallel > 1:
        _require_ranks(config, device)
    _require_memory(config, device, sum(adapter.num_bytes for adapter in adapters))
    loader = _Models(load or load_whole, {} if models is None else models)
    model = _target(config, device, loader)
    if adapters:
        model.add_adapters(adapters)
    if config.deterministic:
        _round_alike(model, config)
    if model.native is not None:
        library.set_num_threads(config.num_threads)
    if model.has_states and config.scheduler.prefix_block_tokens:
        _logger.info("%s has recurrent layers: the prefix cache is off", config.model)
    canary = SlotCanary() if config.kv_canary else None
    target = Target(model, config.scheduler.num_slots, canary)
    config, own_drafter = _drafter_or_stand_in(config, target, loader)
    with _refusing_graphs(config):
        recorded = _recorded(config, target, own_drafter)
        _prepare(recorded)
    drafter, roots = _with_texts(own_drafter, config, model), RootFeatures(model, own_drafter)
    max_model_len = min(config.scheduler.max_model_len, model.max_positions, config.scheduler.num_slots)
    folder = resolve(config.model).folder
    info = ModelInfo(
        name=config.model_name or config.model,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        num_slots=config.scheduler.num_slots,
        eos_token_ids=model.eos_token_ids,
        dtype=config.dtype,
        device=str(device),
        drafter=drafter.name if drafter else "none",
        verifier=config.verifier,
        policy=config.policy,
        has_same_bits=model.has_same_bits,
        cache_dtype=None if model.cache_dtype is None else str(model.cache_dtype).removeprefix("torch."),
        defaults=read_request_defaults(folder) if config.generation_config == "auto" else RequestDefaults(),
        adapters=tuple(adapter.name for adapter in adapters),
    )
    measured = TextDrafter(model.vocab_size, device, _texts(config)) if isinstance(own_drafter, TextDrafter) else own_drafter
    _warm_up(info, config, target, _with_texts(measured, config, model))
    rig = StepTimer(info, config.scheduler, target, measured, _drafter_weights(config, loader.loaded))
    policy = _policy(config, drafter, rig, roots, adaptive)
    with _refusing_graphs(config):
        _prepare(recorded)  # again, because the policy may now record root features
    info = replace(info, policy=policy.name)
    grammars = CompiledGrammars(vocabulary_loader(folder, info.vocab_size, info.eos_token_ids))
    engine = Engine(info, config.scheduler, target, drafter, policy, roots, grammars)
    target.cache.release()
    if canary is not None:
        engine.watch_slots(canary)
    if config.trace_file is not None:
        engine.add_observer(_file_tracer(Path(config.trace_file), info))
    if info.rounds_by_width:
        _logger.warning("bfloat16 rounds wide and narrow passes differently: near ties can be decided differently")
    _logger.info("%s in %s on %s; drafter: %s; tree policy: %s", info.name, info.dtype, info.device, info.drafter, info.policy)
    _logger.debug("engine ready: %s", info)
    return engine


def _round_alike(model: CausalModel, config: EngineConfig) -> None:
    """Raise BadConfiguration unless a row's logits have the same bits in any pass from now on."""
    try:
        if config.kv_canary and model.native is None:
            raise UnsupportedModel("deterministic: kv_canary reads keys in groups")
        model.round_alike()
    except UnsupportedModel as error:
        raise BadConfiguration(str(error)) from error


def build_served(config: EngineConfig, adaptive: PolicyFactory | None = None) -> Engine | AuditedEngine:
    """Return the engine that a worker runs, wrapped in the audit if that is enabled. Raises the errors of `build_engine`."""
    reads_module = bool(config.audit_share) or config.drafter == "early-exit"
    engine = build_engine(config, adaptive, load=load_whole if reads_module else load_prepared)
    engine.info = replace(engine.info, peaks=cached_peaks(engine.target.model, config.dtype))
    if not config.audit_share:
        return engine
    tolerance = tie_tolerance(config.dtype, engine.info.has_same_bits)
    auditor = Auditor(config.audit_share, config.audit_tokens, tolerance, secrets.randbits(63), engine.grammars)
    return AuditedEngine(engine, auditor)


def _warm_up(info: ModelInfo, config: EngineConfig, target: Target, drafter: Drafter | None) -> None:
    """Run a few tokens through every stage, so that caches are filled, kernels selected and failures found before serving.

    `drafter` is like the served one but has its own text cache, so that the served one does not learn from the warm-up.
    """
    policy = FixedExpansion(config.expansion) if drafter else PlainDecoding()
    engine = Engine(info, config.scheduler, target, drafter, policy)
    prompt = tuple(index % info.vocab_size for index in range(1, 9))
    for adapter in (None, *info.adapters):
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add(Request(f"warm-up {adapter}", prompt, sampling, adapter=adapter))
    while engine.has_work:
        engine.step()


def _adapters(config: EngineConfig) -> list[Adapter]:
    """Return the LoRA adapters of the configuration, before anything is fetched. Raises BadConfiguration or UnusableAdapter."""
    if config.lora and config.dtype == FP8:
        raise BadConfiguration(f"lora: adapters are not supported in dtype {config.dtype}")
    return [read_adapter(name, Path(folder).expanduser()) for name, folder in config.lora]


def _target(config: EngineConfig, device: torch.device, loader: "_Models") -> CausalModel:
    if config.tensor_parallel == 1:
        return loader.load(config.model, config.dtype, device)
    num_threads = config.num_threads or torch.get_num_threads()
    return load_sharded(resolve(config.model).folder, config.dtype, device, config.tensor_parallel, num_threads)


def _require_ranks(config: EngineConfig, device: torch.device) -> None:
    """Raise BadConfiguration or UnsupportedModel unless the ranks can run the target, before anything is loaded."""
    if (reason := why_not_sharded(config, device)) is not None:
        raise BadConfiguration(f"tensor_parallel: {reason}")
    require_shardable(resolve(config.model).folder, config.tensor_parallel)


@contextmanager
def _refusing_graphs(config: EngineConfig) -> Iterator[None]:
    """Raise BadConfiguration if CUDA graphs are required but not possible."""
    try:
        yield
    except GraphRefused as error:
        raise BadConfiguration(f"cuda_graphs: {config.cuda_graphs}: {error}") from error


def _recorded(config: EngineConfig, target: Target, drafter: Drafter | None) -> Sequence[Prepared]:
    """Return the replayed passes, not yet prepared."""
    steps = static_steps(config, target.model)
    return () if steps is None else record(steps, config.scheduler, target, drafter)


def _prepare(recorded: Sequence[Prepared]) -> None:
    for passes in recorded:
        passes.prepare()


def _require_memory(config: EngineConfig, device: torch.device, adapter_bytes: int) -> None:
    """Raise BadConfiguration if the engine does not fit into memory, before anything is loaded."""
    need = memory_need(config, draft_dtype(config, device), device)
    need = replace(need, weights=need.weights + adapter_bytes)
    if (lacking := shortage(need, device)) is not None:
        raise BadConfiguration(lacking)
    _logger.debug("memory at most: %s", need)


def _file_tracer(path: Path, info: ModelInfo) -> FileTracer:
    try:
        return FileTracer(TraceFile(path, header_of(info)))
    except OSError as error:
        raise BadConfiguration(f"the trace file {path} cannot be written: {error.strerror}") from error


def load_whole(folder: Path, dtype: str, device: torch.device) -> CausalModel:
    """Return a model with transformers' module, checked now."""
    return load_model(folder, dtype, device, fastest_linears(device))


def load_prepared(folder: Path, dtype: str, device: torch.device) -> CausalModel:
    """Return a model that is to be run alone, without the module: the checked one of the cache if possible."""
    return load_stored(folder, dtype, device) or load_whole(folder, dtype, device)


@dataclass(frozen=True, slots=True)
class _Models:
    """Loads each model once."""

    loader: ModelLoader
    loaded: Models

    def load(self, reference: str, dtype: str, device: torch.device) -> CausalModel:
        """Return the model of a reference. Raises the errors of the loader and of engine.weights."""
        if (reference, dtype) not in self.loaded:
            self.loaded[reference, dtype] = self.loader(resolve(reference).folder, dtype, device)
        return self.loaded[reference, dtype]


def device_of(config: EngineConfig) -> torch.device:
    """Return the device of the configuration, by default cuda if available. Raises BadConfiguration for an unknown one."""
    try:
        return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise BadConfiguration(f"device {config.device!r} is not known; cpu, cuda and cuda:1 are examples") from error


def _require_device(device: torch.device) -> None:
    """Raise BadConfiguration unless this machine has the device."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"there are {torch.cuda.device_count()}" if torch.cuda.device_count() else "torch finds no CUDA device"
        raise BadConfiguration(f"device {device}: {found}; --device cpu serves without one")
    if device.type not in ("cpu", "cuda"):
        raise BadConfiguration(f"device {device}: cpu and cuda are supported")


def draft_dtype(config: EngineConfig, device: torch.device) -> str:
    """Return the number format of a draft model or head. Rounding affects acceptance a little, but not exactness."""
    return config.draft_dtype or fastest_precision(device, weights_dtype(config.dtype))


def _compatible(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a drafter that fits its target, or raise BadConfiguration, before any weight is loaded."""
    try:
        found = check_drafter(config)
    except UnreadableDrafter as error:
        return _with_stand_in(config, BadConfiguration(str(error)))
    for warning in found.warnings:
        _logger.warning("%s", warning)
    if found.refusals:
        differences = "; ".join(found.refusals)
        return _with_stand_in(config, BadConfiguration(f"the drafter does not belong to {config.model}: {differences}"))
    return config


def _with_stand_in(config: EngineConfig, error: BadConfiguration) -> EngineConfig:
    """Return the configuration with its stand-in as the drafter, and log the error. Raise the error if there is no stand-in."""
    if config.stand_in is None:
        raise error
    _logger.warning("%s; %s drafts instead", error, config.stand_in)
    bare = replace(config, draft_model=None, lens=None, head=None, checkpoint=None, cached_text=False, selector=None)
    return replace(bare, drafter=config.stand_in, stand_in=None)


def _drafter_or_stand_in(config: EngineConfig, target: Target, models: "_Models") -> tuple[EngineConfig, Drafter | None]:
    """Return the configuration, with the stand-in if the drafter cannot be loaded, and the drafter."""
    try:
        return config, _drafter(config, target, models)
    except BadConfiguration as error:  # the file's metadata fits this model, but its content is unusable
        config = _with_stand_in(config, error)
        return config, _drafter(config, target, models)


def _drafter_weights(config: EngineConfig, models: Models) -> str:
    """Return an identifier of the drafter's weights: their number format, and a file's digest or a model's configuration."""
    if config.draft_model is not None:
        drafts = {dtype: model for (reference, dtype), model in models.items() if reference == config.draft_model}
        return " ".join(f"{dtype} {model.description}" for dtype, model in drafts.items())
    if config.checkpoint is not None:
        return f"{config.draft_dtype or 'auto'} {weights_digest(Path(config.checkpoint))}"
    digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (config.lens, config.head) if file is not None]
    return " ".join([config.draft_dtype or "auto", *digests])


def _drafter(config: EngineConfig, target: Target, models: "_Models") -> Drafter | None:
    if config.drafter == "none":
        return None
    if config.drafter == "ngram":
        return TextDrafter(target.model.vocab_size, target.model.device, _texts(config))
    if config.drafter in ("early-exit", "head", "checkpoint") and not has_layer_states(target.model):
        raise BadConfiguration(f"drafter {config.drafter}: the states between the layers of {config.model} cannot be read")
    if config.drafter == "early-exit" and target.model.has_states:
        raise BadConfiguration(f"drafter early-exit: {config.model} has recurrent layers")
    if config.drafter == "early-exit":
        return _early_exit_drafter(Path(_required(config.lens, "lens")), target)
    if config.drafter == "head":
        return _head_drafter(Path(_required(config.head, "head")), target, draft_dtype(config, target.model.device))
    if config.drafter == "model":
        return _model_drafter(_required(config.draft_model, "draft_model"), config, target, models)
    if config.drafter == "checkpoint":
        return _checkpoint_drafter(Path(_required(config.checkpoint, "checkpoint")), config, target)
    raise BadConfiguration(f"unknown drafter {config.drafter!r}; known: none, ngram, early-exit, head, model, checkpoint")


def _with_texts(drafter: Drafter | None, config: EngineConfig, model: CausalModel) -> Drafter | None:
    """Return a drafter that also uses predictions and, with `cached_text`, all cached text."""
    if drafter is None or isinstance(drafter, TextDrafter):
        return drafter
    return CombinedDrafter(drafter, _texts(config), model.vocab_size, model.device)


def _with_runs(policy: ExpansionPolicy, config: EngineConfig, drafter: Drafter) -> ExpansionPolicy:
    """Return a policy that replaces trees by long chains of cached text, up to the largest tree's depth."""
    if not isinstance(drafter, DrafterWithTextCache):
        return policy
    return LongChainPolicy(
        policy, drafter.texts, config.largest_expansion.max_depth if config.largest_expansion else CHAIN_LENGTHS[0]
    )


def _texts(config: EngineConfig) -> TextCache:
    has_own_texts = config.cached_text or config.drafter == "ngram"
    return TextCache(config.ngram_min_tokens, RecentLimits(config.recent_tokens, config.total_recent_tokens), has_own_texts)


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise BadConfiguration(f"this drafter needs the setting {name!r}")
    return value


def _early_exit_drafter(lens: Path, target: Target) -> ModelDrafter:
    try:
        return early_exit_drafter(target.model, target.cache, Lens.load(lens))
    except ValueError as error:  # the file is no lens or has another size
        raise BadConfiguration(str(error)) from error


def _head_drafter(path: Path, target: Target, dtype: str) -> HeadDrafter:
    try:
        head, _ = DraftHead.load(path)
        linears = fastest_linears(target.model.device)
        cache = target.cache
        drafter = HeadDrafter("head", head, target.model, cache.num_slots, linears, dtype, cache.canary)
    except (OSError, SafetensorError) as error:
        raise BadConfiguration(f"the draft head {path} cannot be read: {error}") from error
    except ValueError as error:
        raise BadConfiguration(f"the draft head {path.name} cannot be used: {error}") from error
    target.report_to(drafter)
    return drafter


def _checkpoint_drafter(folder: Path, config: EngineConfig, target: Target) -> CheckpointDrafter:
    model, cache = target.model, target.cache
    try:
        checkpoint = read_checkpoint(folder, read_facts(resolve(config.model).folder))
        linears, precision = fastest_linears(model.device), draft_dtype(config, model.device)
        drafter = load_drafter(checkpoint, model, cache.num_slots, linears, precision, cache.canary)
    except ValueError as error:
        raise BadConfiguration(f"the drafter in {folder} cannot be used: {error}") from error
    target.report_to(drafter)
    return drafter


def _model_drafter(reference: str, config: EngineConfig, target: Target, models: "_Models") -> ModelDrafter:
    try:
        draft = models.load(reference, draft_dtype(config, target.model.device), target.model.device)
    except UnsupportedModel as error:
        if config.draft_dtype is not None:
            raise
        _logger.warning("%s; it drafts in %s", error, config.dtype)
        draft = models.load(reference, config.dtype, target.model.device)
    if draft.has_states:
        raise BadConfiguration(f"draft model {reference}: it has recurrent layers")
    num_rows, folders = target.model.vocab_size, (resolve(config.model).folder, resolve(reference).folder)
    if not have_same_tokens(*map(read_vocabulary, folders)):
        return TranslatingDrafter(f"model {reference}", draft, config.scheduler.num_slots, token_map(*folders), num_rows)
    model = draft if draft.vocab_size == num_rows else RepaddedModel(draft, num_rows)
    cache = KVCache(config.scheduler.num_slots, draft.device, target.cache.canary)
    return ModelDrafter(f"model {reference}", model, cache, Feeding.OWN_CACHE)


def _policy(
    config: EngineConfig, drafter: Drafter | None, rig: StepTimer, roots: RootSource, adaptive: PolicyFactory | None
) -> ExpansionPolicy:
    if drafter is None or config.policy == "plain":
        return PlainDecoding()
    if config.policy == "fixed":
        return FixedExpansion(config.expansion)
    if adaptive is not None:
        try:
            return PlainComparison(_with_runs(CachedChoice(adaptive(config, rig, roots)), config, drafter))
        except ValueError as error:  # no such policy, or its network was trained for other models or trees
            raise BadConfiguration(str(error)) from error
    raise BadConfiguration(f"unknown policy {config.policy!r}; known: plain, fixed")
