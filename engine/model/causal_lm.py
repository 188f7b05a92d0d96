"""Any transformers causal language model, run over packed segments and a slot cache.

Replaces a loaded model's attention and linear layers. A model that cannot be run exactly is refused by name: one with recurrent
state, masks of its own, or rotary embeddings that depend on the batch.
Shape key: T packed tokens, N rows of logits, V vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.packing import PackedBatch
from engine.attention.paged.attention import (
    Attend,
    PagedContext,
    check_kernel,
    heads_of,
    kernel,
    kernel_errors,
    unsupported_reason,
)
from engine.attention.paged.graphs import PassMemory
from engine.attention.paged.table import IDS, POSITIONS, PagedBatch, Shape, TableColumns, table_of
from engine.attention.tree_attention import NAME, AttentionContext, GatheredAttention, register
from engine.kv_cache.kv_cache import KVCache
from engine.model.adapters import AdaptedRows, adapt
from engine.model.check import check_text, own_logits, require_equal, require_same_bits, tolerance_of
from engine.model.fp8 import fp8_reason
from engine.model.fused.decoder import FusedDecoder
from engine.model.linear_backends import FP8, NATIVE, fastest_linears, prepare_linears, torch_linears, weight_of
from engine.model.recurrent import RecurrentLayers
from engine.model.sharding import ShardedHead, load_shard
from engine.native.adapters import NativeAdapters
from engine.native.decoder import NativeDecoder, UnknownDecoder, parts_of, refuse_by_structure
from engine.native.linear import QUANTISED, NativeLinear
from engine.native.walks import Walks
from engine.sampling.argmax import RowArgMax
from engine.utils.host_transfer import integers, integers_32
from engine.utils.one_line import one_line
from engine.utils.progress_bar import quiet_libraries
from engine.weights import UnsupportedModel
from engine.weights.facts import end_tokens
from engine.weights.lora import Adapter
from engine.weights.pretrained import load_module, refuse_by_configuration, refused
from engine.weights.stored_config import read_config
from engine.weights.weight_headers import stored_dtype

if TYPE_CHECKING:
    from engine.model.ranks import Ranks

_logger = logging.getLogger(__name__)
# For passes whose attention adds in another order. int8 rounds inputs of layers to 15 bits, compact and fp8 to 8.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-3, "int8": 2e-2, "compact": 0.1, FP8: 0.2}
_NO_LIMIT = 1 << 20
_WITH_CONSTANTS = "gemma"  # prefix of model types that scale embeddings by a constant in the format of their weights


class CausalModel:
    """A causal language model on a device. It keeps no state between passes: caches are arguments."""

    fused: FusedDecoder | None = None  # if set, runs passes over tables in place of the module
    recurrent: RecurrentLayers | None = None
    adapters: AdaptedRows | None = None  # of LoRA adapters that the module runs
    ranks: "Ranks | None" = None  # the processes with the other parts of a sharded model

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module: Any = module.to(device).eval()
        self.device = device
        self.module.requires_grad_(False)
        self.native: NativeDecoder | None = None  # if set, runs passes in place of the module
        self.attend: Attend | None = None  # the kernel over tables; without it keys are gathered
        self.memories: list[PassMemory] = []

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.config.get_text_config().vocab_size)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.module.model.layers)

    @property
    def description(self) -> str:
        """The configuration, as JSON."""
        return str(self.module.config.to_json_string())

    @property
    def precision(self) -> str:
        """The number format in which it computes, as a name."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def embeddings_VD(self) -> Float[Tensor, "V D"]:
        """The embeddings of tokens, unscaled, also if the model scales them."""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    def output_rows(self, ids_M: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """Return the output layer's weights of some tokens, ascending."""
        output = self.module.get_output_embeddings()
        if isinstance(output, ShardedHead):
            with nullcontext() if self.ranks is None else self.ranks.reading_rows(ids_M):
                return output.rows(ids_M)
        return output.weights.rows(ids_M) if isinstance(output, NativeLinear) else weight_of(output)[ids_M]

    @property
    def max_positions(self) -> int:
        """Longest context that the model can run. A model whose configuration has no limit is assumed to have none."""
        return int(getattr(self.module.config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, by the model's generation settings, else its configuration."""
        return end_tokens(self.module.generation_config.eos_token_id, self.module.config.get_text_config().eos_token_id)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The format of cached keys and values; None: the format in which they are computed."""
        return None if self.native is None else self.native.cache_dtype

    @property
    def has_same_bits(self) -> bool:
        """Whether a row's logits have the same bits in any pass."""
        return self.native is not None or (self.fused is not None and self.fused.is_deterministic)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that segments may name."""
        adapters = self.adapters if self.native is None else self.native.adapters
        return () if adapters is None else adapters.names

    @property
    def runners(self) -> list[NativeDecoder | FusedDecoder]:
        """What runs passes in place of the module, all of them or some."""
        return [runner for runner in (self.native, self.fused) if runner is not None]

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent states in the cache."""
        return self.recurrent is not None

    @property
    def reads_tables(self) -> bool:
        """Whether it can run passes over tables."""
        return self.attend is not None

    def round_alike(self) -> None:
        """Let a row's logits have the same bits in any pass from now on. Raises UnsupportedModel if that is not possible."""
        if self.has_same_bits:
            return
        self.fused = None  # frees its weights, before others are stacked
        if self.adapters is None:
            self.fused = _fused_of(self, is_deterministic=True)
        if self.fused is None:
            raise UnsupportedModel(f"deterministic: on {self.device} passes of this model round by their width")
        require_same_bits(self, check_text(self))

    def add_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Add LoRA adapters, which segments name. The library runs them, or else transformers' module runs every pass.

        Raises UnsupportedModel.
        """
        if self.has_states:
            raise UnsupportedModel("lora: adapters of models with recurrent layers are not supported")
        if self.native is not None:
            self.native.adapters = NativeAdapters(adapters, self.depth)
            return
        self.fused = None
        self.adapters = adapt(self.module, adapters, self.device)

    def restore_attention(self) -> None:
        """Let the model attend to an engine's slots again, after another attention was set."""
        register()
        self.module.set_attn_implementation(NAME)

    def forward(
        self, batch: PackedBatch, cache: KVCache, logit_rows: Sequence[int] | Int[Tensor, " N"], walks: Walks | None = None
    ) -> Float[Tensor, "N V"]:
        """Run one pass over the packed tokens; write their keys; return float32 logits of the chosen packed tokens.

        A native model follows the trees of `walks`; other models have none.
        """
        if self.native is not None:
            return self.native.forward(batch, cache, logit_rows, walks)
        logit_rows_N = logit_rows if isinstance(logit_rows, Tensor) else integers(logit_rows, self.device)
        if self.ranks is not None:
            with self.ranks.running_pass(batch, cache, logit_rows_N):
                return self._forward(batch, cache, logit_rows_N)
        if self.adapters is None:
            return self._forward(batch, cache, logit_rows_N)
        with self.adapters.of(batch):
            return self._forward(batch, cache, logit_rows_N)

    def _forward(self, batch: PackedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        if self.attend is None or cache.is_watched:
            context = GatheredAttention(batch, cache)
            with nullcontext() if self.recurrent is None else self.recurrent.within(context):
                return self._run(batch.input_ids_1T, batch.position_ids_1T, logit_rows_N, context)
        shape = Shape(batch.num_tokens, 0, is_by_row=self.has_same_bits)
        columns = TableColumns(tokens=(0, 0, cache.dummy_slot), outputs=())
        table = integers_32(table_of(batch, shape, columns), self.device)
        return self._run_table(PagedBatch(table, shape, columns), cache, logit_rows_N)

    def likeliest(self, logits_NV: Float[Tensor, "N V"], count: int) -> list[RowArgMax] | None:
        """Return the likeliest tokens of the first `count` rows, which a native pass has for its own logits; else None."""
        known = None if self.native is None else self.native.likeliest(logits_NV)
        return None if known is None else [RowArgMax(*pair) for pair in known[:count]]

    def forward_table(self, batch: PagedBatch, cache: KVCache) -> Float[Tensor, "N V"]:
        """Run one pass over a table; return float32 logits of the tokens in the table's first column of queried places."""
        return self._run_table(batch, cache, batch.outputs[0])

    def _run_table(self, batch: PagedBatch, cache: KVCache, logit_rows_N: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        assert self.attend is not None
        if self.fused is not None and self.fused.runs(batch.shape.num_tokens):
            return self.fused.forward(batch, cache, logit_rows_N)
        ids_T, positions_T = batch.tokens[IDS], batch.tokens[POSITIONS]
        return self._run(ids_T[None], positions_T[None], logit_rows_N, PagedContext(batch, cache, self.attend))

    def _run(
        self,
        input_ids_1T: Int[Tensor, "1 T"],
        position_ids_1T: Int[Tensor, "1 T"],
        logit_rows_N: Int[Tensor, " N"],
        context: AttentionContext,
    ) -> Float[Tensor, "N V"]:
        with torch.inference_mode():
            out = self.module(
                input_ids=input_ids_1T,
                position_ids=position_ids_1T,
                use_cache=False,
                logits_to_keep=logit_rows_N,
                attention_context=context,
            )
            return out.logits[0].float()  # type: ignore[no-any-return]


def weights_dtype(dtype: str) -> torch.dtype:
    """Return the number format of weights and activations for a named precision."""
    if dtype == FP8:
        return torch.bfloat16
    return torch.float32 if dtype in QUANTISED else getattr(torch, dtype)


def loaded_dtype(folder: Path, dtype: str, linears: str) -> torch.dtype:
    """Return the number format in which a folder's weights are loaded.

    The library packs weights layer by layer, so it takes the file's format if that is narrower. Exception: a model whose own
    constants would be rounded with the weights.
    """
    wanted = weights_dtype(dtype)
    if linears != NATIVE or wanted != torch.float32:
        return wanted
    has_constants = read_config(folder).model_type.startswith(_WITH_CONSTANTS)
    return wanted if has_constants else stored_dtype(folder)


def is_run_natively(module: nn.Module, device: torch.device) -> bool:
    """Return whether the library runs a model's passes on a device, when the fastest linear layers are chosen."""
    if fastest_linears(device) != NATIVE:
        return False
    try:
        refuse_by_structure(module)
    except UnknownDecoder:
        return False
    return True


def load_model(folder: Path, dtype: str, device: torch.device, linears: str, num_ranks: int = 1) -> CausalModel:
    """Load and check a model. `dtype` is a torch name, int8 or compact; `linears` a kind of engine.model.linear_backends.

    With more than one rank it is this one's part (engine.model.ranks).
    transformers runs a model that the library does not know, with packed linear layers. In int8 and compact it is refused.
    """
    quiet_libraries()
    with _refusing(folder):
        return _load(folder, dtype, device, linears, num_ranks)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Raise UnsupportedModel in place of the errors of transformers or of our passes for an architecture of another kind."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refused(read_config(folder).model_type, f"{type(error).__name__}: {error}") from error


def _load(folder: Path, dtype: str, device: torch.device, linears: str, num_ranks: int) -> CausalModel:
    if dtype == FP8:
        if (reason := fp8_reason(device)) is not None:
            raise UnsupportedModel(f"{dtype} needs a GPU that multiplies it: {reason}")
        linears = FP8
    if num_ranks > 1:
        return adopt(load_shard(folder, weights_dtype(dtype), num_ranks), device, linears)
    module = _loaded(folder, loaded_dtype(folder, dtype, linears), weights_dtype(dtype))
    if linears == NATIVE:
        try:
            return adopt(module, device, NATIVE, dtype)
        except UnknownDecoder as error:
            if dtype in QUANTISED:
                raise UnsupportedModel(f"{dtype}: {error}") from error
            _logger.info("%s; transformers runs it", error)
            return adopt(module.to(weights_dtype(dtype)), device, torch_linears(device))
    if dtype in QUANTISED:
        raise UnsupportedModel(f"{dtype} needs the compiled library and a processor with AVX2, which {device} lacks")
    return adopt(module, device, linears)


def _loaded(folder: Path, dtype: torch.dtype, wanted: torch.dtype) -> nn.Module:
    """Load a model in a format that holds its weights, or in the wanted format if the first would round its own constants."""
    module: nn.Module = load_module(folder, dtype=dtype, attn_implementation="eager")
    constants = {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()}
    if dtype != wanted and not constants <= {torch.float32}:
        del module  # frees its memory before the second load
        return _loaded(folder, wanted, wanted)
    module.config.dtype = wanted  # the format in which it will compute
    return module


def adopt(module: nn.Module, device: torch.device, linears: str = "plain", precision: str = "float32") -> CausalModel:
    """Replace a loaded model's attention and linear layers, and compare a pass with the model's own.

    `precision` applies to native linear layers only. With these the library runs the passes, in float32 but for the weights, and
    the comparison is with the module's own pass over the same linear layers.
    Raises UnsupportedModel. Raises UnknownDecoder, before any change, for a model that the library does not know.
    """
    refuse_by_configuration(module.config)
    model = CausalModel(module, device)
    ids = check_text(model)
    if linears == NATIVE:
        refuse_by_structure(module)
        try:
            prepare_linears(module, NATIVE, precision)
            module.float()
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        expected_NV = own_logits(model, ids)
        model.restore_attention()
        model.native = NativeDecoder(parts_of(module), precision)
        require_equal(model, ids, expected_NV, _TOLERANCE[precision])
        require_same_bits(model, ids)
    else:
        if linears == FP8:  # rounds, so that the module's own pass is to round too
            prepare_linears(model.module, linears)
        expected_NV = own_logits(model, ids)
        tolerance = tolerance_of(model, ids, expected_NV)
        if linears == FP8:
            tolerance = max(tolerance, _TOLERANCE[FP8])
        model.restore_attention()
        prepare_linears(model.module, linears)
        model.recurrent = RecurrentLayers.of(module)
        model.attend = _attend_of(model)
        model.fused = _fused_of(model)
        require_equal(model, ids, expected_NV, tolerance)
    return model


def _attend_of(model: CausalModel) -> Attend | None:
    """Return the attention kernel for a model, or None. On a GPU, log the reason for None."""
    if model.has_states:
        return None  # recurrent layers take the tokens of packed segments
    heads, device, dtype = heads_of(model.module.config), model.device, model.module.dtype
    if (reason := unsupported_reason(device, heads.size, heads.num_shared, dtype)) is None:
        try:
            check_kernel(attend := kernel(), device, heads.num, heads.num_shared, heads.size, dtype)
            return attend
        except kernel_errors() as error:
            reason = f"the attention kernel cannot run: {one_line(error)}"
    if device.type == "cuda":
        _logger.warning("%s; attention gathers keys, without CUDA graphs", reason)
    return None


def _fused_of(model: CausalModel, is_deterministic: bool = False) -> FusedDecoder | None:
    """Return the fused decoder of a model that attends over tables on a GPU; None if its parts are not known."""
    if model.attend is None or model.device.type != "cuda":
        return None
    from engine.model.fused.launch import Kernels

    try:
        return FusedDecoder(model.module, Kernels(is_deterministic), model.attend, is_deterministic)
    except UnknownDecoder as error:
        _logger.info("%s; a layer's operations are launched one by one", error)
        return None
