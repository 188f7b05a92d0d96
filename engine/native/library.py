"""The compiled part: finds it, and declares what it takes. Structures mirror those of linear.h, pass.h, growth.h and walk.h."""

import ctypes
import hashlib
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
NUM_SCORES = 64  # best tokens of a node whose chances are compared: the rest weighs nothing (ranked_tree.h)
LAYOUT = 3  # of what a row whose tree is to grow means, where no size tells it (ranked_tree.h)
NUM_SHARES = 9  # of chances: the edges between them are engine.draft.trees.calibration's (kShareEdges)


if TYPE_CHECKING:
    Numbers: TypeAlias = "array[Any]"
else:
    Numbers = array  # which names no type of its numbers at run time


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
    """A decoder layer; norms that it has not are null."""

    _fields_ = (
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
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


class Features(Structure):
    """What a draft head reads of a model's tokens, and where it is kept."""

    _fields_ = (
        ("linear", Linear),
        ("num_states", c_int64),
        ("after", c_void_p),
        ("eps", c_float),
        ("kept", c_void_p),
    )


class Pass(Structure):
    """Packed tokens, segment after segment, and where everything of theirs lies."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_rows")),
        *((name, c_void_p) for name in ("token_ids", "positions", "write_slots", "pool", "before")),
        ("num_segments", c_int64),
        *((name, c_void_p) for name in ("first_token", "first_key", "first_tail", "first_seen")),
        *((name, c_void_p) for name in ("key_slots", "tail_positions", "seen")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
        ("apart", c_int64),
        *((name, POINTER(c_void_p)) for name in ("cosines", "sines")),
        *((name, c_void_p) for name in ("rows", "states", "logits", "largest", "likeliest")),
        ("kept", POINTER(c_void_p)),
        ("features", POINTER(Features)),
        ("is_cached_in_half", c_int64),
    )


class RankedRow(Structure):
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
    )


class FedRow(Structure):
    """Committed tokens to be fed."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "first_position")),
        *((name, c_void_p) for name in ("token_ids", "slots")),
        ("tree", c_int64),
    )


class Fed(Structure):
    """What a round fed the head, and about how many of these tokens it was asked."""

    _fields_ = (("num_tokens", c_int64), ("num_queried", c_int64))


class Told(Structure):
    """What cached text foretells at nodes."""

    _fields_ = (
        *((name, c_void_p) for name in ("firsts", "columns", "odds", "chances", "is_sure", "unknown")),
        ("num_unknown", c_int64),
        ("is_rather_cached", c_void_p),
    )


class Walked(Structure):
    """Trees to be walked down, and where to."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("firsts", "rows", "parents", "tokens", "inverse_temperatures", "keys"),
            *("path", "lengths", "extras"),
        )
    )


# Instruction sets that the library is compiled for, best first.
INSTRUCTION_SETS: dict[str, Callable[[], bool]] = {
    "AVX-512 VNNI": lambda: torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported(),
    "AVX2": lambda: torch.cpu._is_avx2_supported(),
}
# Where each of them lies.
MODULES = {"AVX-512 VNNI": "engine.native.kernels_avx512", "AVX2": "engine.native.kernels_avx2"}


def is_available() -> bool:
    """Return whether the library was compiled when the package was installed, for instructions that the processor has."""
    return instruction_set() is not None


@cache
def instruction_set() -> str | None:
    """Return the best of INSTRUCTION_SETS that the processor has and the library was compiled for, or None."""
    return next((name for name in supported() if is_compiled(name)), None)


def supported() -> list[str]:
    """Return those of INSTRUCTION_SETS that the processor has, best first."""
    return [name for name, has in INSTRUCTION_SETS.items() if has()]


@cache
def is_compiled(instructions: str) -> bool:
    """Return whether the library for these instructions lies beside this package."""
    return find_spec(MODULES[instructions]) is not None


def library() -> ctypes.CDLL:
    """Return the library for this processor; raise OSError if there is none."""
    return compiled_for(_best())


@cache
def digest() -> str:
    """Return what tells this library from another version; raise OSError if there is none."""
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
    """Return the library for an instruction set; raise OSError if it is not there."""
    file = _file_of(instructions)
    loaded = ctypes.CDLL(str(file))
    mirrored: tuple[type[Structure], ...] = (Linear, Layer, Decoder, Pass, RankedRow, Told, Walked, Features, FedRow, Fed)
    expected = [*map(ctypes.sizeof, mirrored), NUM_SCORES, NUM_SHARES, LAYOUT]
    sizes = (c_int64 * len(expected))()
    loaded.latebranch_sizes(sizes)
    if list(sizes) != expected:
        raise OSError(f"{file} was compiled from another version: install the package again")
    loaded.latebranch_decode.argtypes = [POINTER(Decoder), POINTER(Pass), c_int]
    loaded.latebranch_decode.restype = None
    loaded.latebranch_linear.argtypes = [POINTER(Linear), c_void_p, c_int64, c_void_p, c_int]
    loaded.latebranch_linear.restype = None
    loaded.latebranch_keep.argtypes = [POINTER(Features), POINTER(c_void_p), c_int64, c_void_p, c_int64]
    loaded.latebranch_keep.restype = None
    loaded.latebranch_fuse.argtypes = [POINTER(Features), c_void_p, c_int64, c_void_p, c_int]
    loaded.latebranch_fuse.restype = None
    loaded.latebranch_gumbels.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int]
    loaded.latebranch_gumbels.restype = None
    loaded.latebranch_likeliest.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int]
    loaded.latebranch_likeliest.restype = None
    loaded.latebranch_laws.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int]
    loaded.latebranch_laws.restype = None
    loaded.latebranch_choose.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]
    loaded.latebranch_choose.restype = None
    loaded.latebranch_walk.argtypes = [c_void_p, c_int64, POINTER(Walked), c_int64, c_int]
    loaded.latebranch_walk.restype = None
    loaded.latebranch_rank.argtypes = [c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int64, *[c_void_p] * 3, c_int]
    loaded.latebranch_rank.restype = None
    loaded.latebranch_mix.argtypes = [c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_void_p, c_void_p]
    loaded.latebranch_mix.restype = None
    loaded.latebranch_grow.argtypes = [POINTER(Decoder), c_void_p, POINTER(RankedRow), c_int64, POINTER(FedRow), c_int64, c_int64]
    loaded.latebranch_grow.restype = c_void_p
    loaded.latebranch_grow_round.argtypes = [c_void_p, POINTER(Told), POINTER(Pass), c_void_p, c_int64, POINTER(Fed), c_int]
    loaded.latebranch_grow_round.restype = c_int64
    loaded.latebranch_grown.argtypes = [*[c_void_p] * 4, c_int64, *[c_void_p] * 3]
    loaded.latebranch_grown.restype = None
    loaded.latebranch_end_growth.argtypes = [c_void_p]
    loaded.latebranch_end_growth.restype = None
    return loaded


_taken: int | None = None


def take_threads(count: int | None) -> None:
    """Run passes with so many threads from now on (None: with those torch has), and leave torch one.

    What torch does between passes is too little to share, and threads of its own that wait for work take ours' time.
    """
    global _taken
    if count is not None or _taken is None:
        _taken = count or torch.get_num_threads()
    torch.set_num_threads(1)


def num_threads() -> int:
    """Return with how many threads passes are run."""
    return _taken or torch.get_num_threads()


def address(array: NDArray[Any]) -> int:
    """Return where an array's numbers begin; they must lie side by side."""
    return int(array.__array_interface__["data"][0])


def address_of(numbers: Numbers) -> int:
    """Return the same of an array of Python's own."""
    return numbers.buffer_info()[0]


def room(typecode: str, count: int) -> Numbers:
    """Return an array of so many numbers for the library to write to."""
    return array(typecode, bytes(array(typecode).itemsize * count))


Pointers: TypeAlias = "ctypes.Array[c_void_p]"


def pointers(addresses: Sequence[int]) -> Pointers:
    """Return an array of pointers."""
    return (c_void_p * len(addresses))(*addresses)
