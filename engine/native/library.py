"""Finds the compiled library and declares its functions and structures (the headers in cpp/)."""

import ctypes
import hashlib
import platform
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from numpy.typing import NDArray

SILU, GELU_TANH = 0, 1  # activations
LINEARS = ("query", "key", "value", "output", "gate", "up", "down")  # of a decoder layer
NUM_SCORES = 64  # best tokens of a node whose probabilities are compared: the others weigh nothing (ranked_tree.h)
LAYOUT = 9  # version of the interface, for changes that no structure's size shows (ranked_tree.h)
NUM_RATES = 300  # 3 sources, 10 classes of lengths, 5 of shares, 2 sums each (texts.h)
NUM_SHARES = 9  # intervals of probabilities: their edges are engine.draft.trees.calibration's (kShareEdges)


if TYPE_CHECKING:
    Numbers: TypeAlias = "array[Any]"
else:
    Numbers = array  # cannot be subscripted at run time


class Linear(Structure):
    """A linear layer over packed weights."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("format", c_int32),
    )


class Layer(Structure):
    """A decoder layer; norms that it lacks are null."""

    _fields_ = (
        *((name, Linear) for name in LINEARS),
        *((name, c_void_p) for name in ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        ("window", c_int64),
        ("rotation", c_int64),
    )


class Decoder(Structure):
    """A model."""

    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "inner", "activation")),
        ("embedding_width", c_int64),
        *((name, c_float) for name in ("eps", "scaling", "embedding_scale")),
        ("embeddings", c_void_p),
        ("last_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("head", Linear),
        ("token", Linear),
    )


class FeaturesStructure(Structure):
    """A draft head's features of a model's tokens, and where their inputs are stored."""

    _fields_ = (
        ("linear", Linear),
        ("num_states", c_int64),
        ("after", c_void_p),
        ("eps", c_float),
        ("kept", c_void_p),
    )


class LowRankStructure(Structure):
    """The term of an adapter at a linear layer (low_rank.h). All zero: the adapter does not change the layer."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("rank", c_int64))


class AdaptedLayer(Structure):
    """An adapter's terms of a decoder layer."""

    _fields_ = tuple((name, LowRankStructure) for name in LINEARS)


class Walked(Structure):
    """Trees to walk down, and the results."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("firsts", "rows", "parents", "tokens", "inverse_temperatures", "truncations", "keys"),
            *("path", "lengths", "extras"),
        )
    )


class StepsStructure(Structure):
    """Steps of plain decoding in a row (steps.h), and the tokens that they choose."""

    _fields_ = (("most", c_int64), *((name, c_void_p) for name in ("slots", "seeds", "first_stop", "stop_token_ids", "tokens")))


class Pass(Structure):
    """Packed tokens, segment after segment, and the addresses of all their arrays."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_rows")),
        *((name, c_void_p) for name in ("token_ids", "positions", "write_slots", "pool", "before")),
        ("num_segments", c_int64),
        *((name, c_void_p) for name in ("first_token", "first_key", "first_tail", "first_seen")),
        *((name, c_void_p) for name in ("key_slots", "tail_positions", "seen")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
        *((name, c_int64) for name in ("head_stride", "block_bits", "block_gap")),
        *((name, POINTER(c_void_p)) for name in ("cosines", "sines")),
        *((name, c_void_p) for name in ("rows", "states", "logits", "largest", "likeliest")),
        ("kept", POINTER(c_void_p)),
        ("features", c_void_p),
        ("is_cached_in_half", c_int64),
        ("adapters", c_void_p),
        ("most_rank", c_int64),
        ("walked", c_void_p),
        ("num_trees", c_int64),
    )


class RankedRowStructure(Structure):
    """A row whose tree is to grow."""

    _fields_ = (
        ("root_position", c_int64),
        ("slots", c_void_p),
        *((name, c_int64) for name in ("max_nodes", "depth", "branches")),
        ("seed", c_uint64),
        ("has_noise", c_int64),
        ("least_chances", c_void_p),
        *((name, c_double) for name in ("level_cost", "offered", "continued", "scale")),
        ("shares", c_void_p),
        *((name, c_double) for name in ("temperature", "sharpness")),
        ("truncation", c_double * 3),
        ("texts", c_void_p),
    )


class FedRowStructure(Structure):
    """Committed tokens to feed to the head."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "first_position")),
        *((name, c_void_p) for name in ("token_ids", "slots")),
        ("tree", c_int64),
    )


class Fed(Structure):
    """The number of tokens that a round fed to the head, and how many of them need a distribution."""

    _fields_ = (("num_tokens", c_int64), ("num_queried", c_int64))


class GrowthStructure(Structure):
    """What the trees of a step grow from."""

    _fields_ = (
        ("head", POINTER(Decoder)),
        ("tokens", c_void_p),
        ("rows", POINTER(RankedRowStructure)),
        ("num_rows", c_int64),
        ("fed_rows", POINTER(FedRowStructure)),
        *((name, c_int64) for name in ("num_fed_rows", "before_all")),
        ("addresses", POINTER(Pass)),
    )


class GrownTreesStructure(Structure):
    """Memory for the trees of one step or of several."""

    _fields_ = (
        *((name, c_int64) for name in ("most", "most_rounds")),
        *((name, c_void_p) for name in ("counts", "rounds", "nodes", "chances", "tokens", "odds", "noise")),
        ("fed", POINTER(Fed)),
        ("num_fed", c_void_p),
    )


class DraftedRowStructure(Structure):
    """A sequence of drafting steps in a row."""

    _fields_ = (
        *((name, c_int64) for name in ("tree", "root_token", "root_position")),
        ("slots", c_void_p),
        ("num_remaining", c_int64),
        ("seed", c_uint64),
        ("inverse_temperature", c_float),
        ("truncation", c_double * 3),
        ("stop_token_ids", c_void_p),
        ("num_stops", c_int64),
    )


class DraftStepsStructure(Structure):
    """Drafting steps in a row (steps.h), and their results."""

    _fields_ = (
        *((name, c_int64) for name in ("most", "num_rows", "most_nodes")),
        ("rows", POINTER(DraftedRowStructure)),
        *((name, c_void_p) for name in ("paths", "lengths", "extras", "num_learned", "is_sure", "seconds")),
    )


class RequestTextsStructure(Structure):
    """The texts of a request, and the tokens at the end of its history."""

    _fields_ = (
        *((name, c_void_p) for name in ("prediction", "prompt", "output")),
        ("recent", c_void_p * 2),
        ("least", c_int64),
        ("rates", c_void_p),
        ("sure", c_double),
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "num_new")),
    )


# In the order in which the library reports their sizes.
_MIRRORED: tuple[type[Structure], ...] = (
    *(Linear, Layer, Decoder, Pass, RankedRowStructure, RequestTextsStructure, Walked, FeaturesStructure, FedRowStructure, Fed),
    *(LowRankStructure, AdaptedLayer, StepsStructure, GrowthStructure, GrownTreesStructure),
    *(DraftedRowStructure, DraftStepsStructure),
)

# Arguments and result of each function.
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "latebranch_decode": ([POINTER(Decoder), POINTER(Pass), c_int], None),
    "latebranch_steps": ([POINTER(Decoder), POINTER(Pass), POINTER(StepsStructure), c_int], c_int64),
    "latebranch_linear": ([POINTER(Linear), c_void_p, c_int64, c_void_p, c_int], None),
    "latebranch_keep": ([POINTER(FeaturesStructure), POINTER(c_void_p), c_int64, c_void_p, c_int64], None),
    "latebranch_fuse": ([POINTER(FeaturesStructure), c_void_p, c_int64, c_void_p, c_int], None),
    "latebranch_gumbels": ([c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int], None),
    "latebranch_likeliest": ([c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int], None),
    "latebranch_probs": ([c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int], None),
    "latebranch_choose": ([c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int], None),
    "latebranch_walk": ([c_void_p, c_int64, POINTER(Walked), c_int64, c_int], None),
    "latebranch_rank": ([c_void_p, c_int64, c_int64, *[c_void_p] * 5, c_int64, *[c_void_p] * 3, c_int], None),
    "latebranch_mix": ([c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_void_p, c_void_p], None),
    "latebranch_grow": ([POINTER(GrowthStructure), POINTER(GrownTreesStructure), c_int], None),
    "latebranch_draft_steps": (
        [
            *(POINTER(Decoder), POINTER(Pass), POINTER(GrowthStructure), POINTER(GrownTreesStructure)),
            *(POINTER(DraftStepsStructure), c_int),
        ],
        c_int64,
    ),
    "latebranch_new_texts": ([], c_void_p),
    "latebranch_free_texts": ([c_void_p], None),
    "latebranch_begin_text": ([c_void_p, c_void_p, c_int64], None),
    "latebranch_append_text": ([c_void_p, c_void_p, c_int64], None),
    "latebranch_learn_text": ([POINTER(RequestTextsStructure)], c_int64),
    "latebranch_continue_text": ([POINTER(RequestTextsStructure), c_int64, *[c_void_p] * 3, POINTER(c_double)], c_int64),
}

# The instruction sets that the library is compiled for, best first.
INSTRUCTION_SETS: dict[str, Callable[[], bool]] = {
    "AVX-512 VNNI": lambda: torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported(),
    "AVX2": lambda: torch.cpu._is_avx2_supported(),
}
MODULES = {"AVX-512 VNNI": "engine.native.kernels_avx512", "AVX2": "engine.native.kernels_avx2"}


def is_available() -> bool:
    """Return whether the installation compiled the library for an instruction set of this processor."""
    return instruction_set() is not None


@cache
def instruction_set() -> str | None:
    """Return the best instruction set that the processor has and the library was compiled for, or None."""
    return next((name for name in supported() if is_compiled(name)), None)


def supported() -> list[str]:
    """Return the instruction sets that the processor has, best first."""
    return [name for name, has in INSTRUCTION_SETS.items() if has()]


@cache
def is_compiled(instructions: str) -> bool:
    """Return whether the library for these instructions is part of this package."""
    return find_spec(MODULES[instructions]) is not None


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def library() -> ctypes.CDLL:
    """Return the library for this processor; raise OSError if there is none."""
    return compiled_for(_best())


@cache
def digest() -> str:
    """Return a digest of this library's file; raise OSError if there is none."""
    return hashlib.sha256(_file_of(_best()).read_bytes()).hexdigest()


def _best() -> str:
    instructions = instruction_set()
    if instructions is None:
        raise OSError("the library was not compiled, or not for this processor")
    return instructions


def _file_of(instructions: str) -> Path:
    spec = find_spec(MODULES[instructions])
    if spec is None or spec.origin is None:
        raise OSError(f"{MODULES[instructions]} was not compiled")
    return Path(spec.origin)


@cache
def compiled_for(instructions: str) -> ctypes.CDLL:
    """Return the library for an instruction set; raise OSError if it was not compiled, or from other sources."""
    file = _file_of(instructions)
    loaded = ctypes.CDLL(str(file))
    expected = [*map(ctypes.sizeof, _MIRRORED), NUM_SCORES, NUM_SHARES, NUM_RATES, LAYOUT]
    sizes = (c_int64 * len(expected))()
    loaded.latebranch_sizes(sizes)
    if list(sizes) != expected:
        raise OSError(f"{file} was compiled from another version: install the package again")
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


_num_threads: int | None = None


def set_num_threads(count: int | None) -> None:
    """Run passes with `count` threads from now on (None: as many as torch has), and leave torch one thread.

    Torch's work between passes is too small to share, and its idle threads would take processor time from passes.
    """
    global _num_threads
    if count is not None or _num_threads is None:
        _num_threads = count or torch.get_num_threads()
    torch.set_num_threads(1)


def num_threads() -> int:
    """Return the number of threads of a pass."""
    return _num_threads or torch.get_num_threads()


def structures(kind: type[Structure], count: int) -> Any:
    """Return an array of structures for the library to read or to write to."""
    return _array_type(kind, count)()


@cache  # ctypes makes a type that is in use nowhere anew
def _array_type(kind: type[Structure], count: int) -> Any:
    return kind * count


def address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous NumPy array."""
    return int(array.__array_interface__["data"][0])


def address_of(numbers: Numbers) -> int:
    """Return the address of an array of Python's own."""
    return numbers.buffer_info()[0]


_ZERO = {typecode: array(typecode, (0,)) for typecode in "qdfB"}


def empty_array(typecode: str, count: int) -> Numbers:
    """Return an array of `count` numbers for the library to write to."""
    return _ZERO[typecode] * count


Pointers: TypeAlias = "ctypes.Array[c_void_p]"


def pointers(addresses: Sequence[int]) -> Pointers:
    """Return an array of pointers."""
    return (c_void_p * len(addresses))(*addresses)
