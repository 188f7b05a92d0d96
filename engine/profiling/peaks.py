"""The two bounds of a roofline on this machine: what it reads, and what a layer of the model's kind multiplies at most.

The first start measures them. Later starts on the same machine, with the same library and kind of weights, read them.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from engine.core.types import Peaks
from engine.model.causal_lm import CausalModel
from engine.model.fp8 import Fp8Linear
from engine.model.linear_backends import PackedLinear, linear_of
from engine.native import library
from engine.native.decoder import NativeDecoder
from engine.native.linear import PackedWeights
from engine.profiling.machine import machine_facts
from engine.utils.one_line import one_line
from engine.weights import WeightsCache, default_root

_logger = logging.getLogger(__name__)
_READ_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}  # more than caches hold
_COPIES = 16  # on a GPU, so that a launch takes little of the time
_WIDTHS = {"cpu": 1024, "cuda": 4096}  # of a layer that is multiplied, and its rows
_ROWS = {"cpu": 128, "cuda": 4096}
_RUNS = 4  # without a faster one, after which the fastest counts
_MOST_RUNS = 24
_VERSION = 1  # of the measurement and its file


class _Work(NamedTuple):
    """What a run does, and its bytes or operations."""

    run: Callable[[], object]
    amount: int


def cached_peaks(model: CausalModel, dtype: str) -> Peaks | None:
    """Return the peaks of the cache, measured first if it lacks them; None if there is no memory to measure them."""
    cache = WeightsCache(default_root())
    return _if_possible(
        lambda: msgspec.json.decode(
            cache.text(cache.profile(_key(model, dtype)), lambda: msgspec.json.encode(_measured(model)).decode()), type=Peaks
        )
    )


def measured_peaks(model: CausalModel) -> Peaks | None:
    """Return the most bytes and operations a second, of a few runs each; None if there is no memory for them."""
    return _if_possible(lambda: _measured(model))


def _if_possible(measure: Callable[[], Peaks]) -> Peaks | None:
    try:
        return measure()
    except (MemoryError, torch.OutOfMemoryError) as error:
        _logger.info("the machine's peaks are not measured: %s", one_line(error))
        return None


def _measured(model: CausalModel) -> Peaks:
    try:
        with torch.inference_mode():
            reading = _reading(model)
            num_bytes = _most(reading, model.device)
            del reading  # frees its memory before more is taken
            return Peaks(num_bytes, _most(_multiplying(model), model.device))
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _key(model: CausalModel, dtype: str) -> str:
    """Return the file's name, a digest of everything that the peaks depend on."""
    kind = "torch" if model.native is None else library.digest()
    facts = {
        **machine_facts(model.device),
        "version": _VERSION,
        "kind": kind,
        "dtype": dtype,
        "width": model.embeddings_VD.shape[1],
    }
    return hashlib.sha256(json.dumps(["peaks", facts], sort_keys=True).encode()).hexdigest()[:24]


def _reading(model: CausalModel) -> _Work:
    device, num_bytes = model.device, _READ_BYTES[model.device.type]
    if device.type == "cuda":
        source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            for _ in range(_COPIES):
                target.copy_(source)

        return _Work(copy, _COPIES * num_bytes)  # half of it is read, the other half written
    width = 4096
    if model.native is not None:
        weights = PackedWeights.zeros(width, num_bytes // (4 * width))
        row = torch.zeros(1, width)
        return _Work(lambda: weights.times(row), weights.packed.nbytes)
    weight, vector = torch.zeros(num_bytes // (4 * width), width), torch.zeros(width)
    return _Work(lambda: weight @ vector, num_bytes)


def _multiplying(model: CausalModel) -> _Work:
    kind = model.device.type
    width, num_rows = _WIDTHS[kind], _ROWS[kind]
    if model.native is not None:
        return _multiplying_natively(model.native, width, num_rows)
    numbers = torch.empty(width + num_rows, width, dtype=model.module.dtype, device=model.device).normal_()
    linear, rows, kinds = linear_of(numbers[:width]), numbers[width:], {type(one) for one in model.module.modules()}
    special = next((kind for kind in (Fp8Linear, PackedLinear) if kind in kinds), None)
    layer: nn.Module = linear if special is None else special(linear)
    return _Work(lambda: layer(rows), 2 * num_rows * width * width)


def _multiplying_natively(native: NativeDecoder, width: int, num_rows: int) -> _Work:
    """Multiply by a part of the output head, which has the model's precision."""
    weights = native.parts.head.first(width)
    rows = torch.zeros(num_rows, weights.num_inputs)
    return _Work(lambda: weights.times(rows), 2 * num_rows * weights.num_inputs * weights.num_outputs)


def _most(work: _Work, device: torch.device) -> float:
    """Return the amount a second of the fastest run, once some more runs are no faster."""
    seconds: list[float] = []
    while len(seconds) < _MOST_RUNS and (len(seconds) < _RUNS or min(seconds[:-_RUNS], default=inf) > min(seconds)):
        _wait(device)
        begin_s = time.perf_counter()
        work.run()
        _wait(device)
        seconds.append(time.perf_counter() - begin_s)
    return work.amount / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
