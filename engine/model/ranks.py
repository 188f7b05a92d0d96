"""The processes that run a sharded model: rank 0 is this one, which starts and leads the others.

Every rank loads and checks its part of the model by the same calls. Then rank 0 sends the inputs of its passes through pipes, and
the other ranks run them over their own part of the cache. A pipe may be idle for any time. The other ranks end with rank 0, even
within a collective operation or while they hang. If another rank ends before its pipe is closed, rank 0 dies of the same cause.
Its supervisor starts all again.

A death fails collective operations of all other ranks. So a rank with an error waits until such a death would have ended it.
"""

import ctypes
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.packing import PackedBatch, Segment, pack
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, load_model
from engine.model.linear_backends import torch_linears
from engine.utils.process_name import name_process
from engine.utils.run_folder import run_folder

_logger = logging.getLogger(__name__)

_END_S = 10.0
_SEEN_S = 2.0  # in which rank 0 sees the end of another
_REPORTED_S = 5.0  # in which rank 0 reports an error that all ranks have
_PR_SET_PDEATHSIG = 1  # of Linux


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank loads, and where it meets the others."""

    folder: Path
    dtype: str
    device: str
    num_threads: int
    meeting: str
    num_ranks: int
    log_level: int
    rank: int = 0

    def load(self) -> CausalModel:
        """Return this rank's part, in the process group of all ranks."""
        device = torch.device("cuda", self.rank) if self.device == "cuda" else torch.device(self.device)
        os.environ["LOCAL_RANK"] = str(self.rank)  # by which transformers chooses the device
        os.environ.setdefault("GLOO_SOCKET_IFNAME", next(name for _, name in socket.if_nameindex() if name.startswith("lo")))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(self.num_threads)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{self.meeting}",
            world_size=self.num_ranks,
            rank=self.rank,
            device_id=device if device.type == "cuda" else None,
        )
        return load_model(self.folder, self.dtype, device, torch_linears(device), self.num_ranks)


class Ranks:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, num: int) -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import follow; follow()"]
        self._processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(num)]
        self._numbers: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()
        self._num_caches = 0
        self._is_closing = False
        self._watches = [
            threading.Thread(target=self._die_with, args=(rank,), name=f"watch-rank-{rank}", daemon=True)
            for rank in range(1, num + 1)
        ]
        for watch in self._watches:
            watch.start()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    @contextmanager
    def _joint(self) -> Iterator[None]:
        """Run a block that other ranks run too. If it fails because one of them died, this process dies of the same cause."""
        try:
            yield
        except Exception:
            time.sleep(_SEEN_S)  # in which `_die_with` ends this process
            raise

    def load(self, own: _Part) -> CausalModel:
        """Have the other ranks load their parts, and load this rank's. Raises the errors of `load_model`."""
        try:
            with self._joint():
                for rank, process in enumerate(self._processes, 1):
                    self._post([process], replace(own, rank=rank))
                return own.load()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def running_pass(self, batch: PackedBatch, cache: KVCache, rows_N: Tensor) -> Iterator[None]:
        """Have the other ranks run a pass, which the block must run, over their caches in place of `cache`."""
        if cache not in self._numbers:
            self._num_caches += 1
            self._numbers[cache] = self._num_caches
        used = [*self._numbers.values()]
        with self._joint():
            self._post(self._processes, _Pass(batch.segments, rows_N.tolist(), self._numbers[cache], cache.num_slots, used))
            yield

    @contextmanager
    def reading_rows(self, ids_M: Tensor) -> Iterator[None]:
        """Have the other ranks read rows of the output head, which the block must read."""
        with self._joint():
            self._post(self._processes, _Rows(ids_M.tolist()))
            yield

    def close(self) -> None:
        """End the other ranks. The model cannot run any more."""
        self._is_closing = True
        for process in self._processes:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for watch in self._watches:
            watch.join(_END_S)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _die_with(self, rank: int) -> None:
        """Wait until a rank ends. Unless it was to end, end this process as it ended."""
        status = self._processes[rank - 1].wait()
        if self._is_closing:
            return
        _logger.error("rank %d ended with status %d, so that this process ends", rank, status)
        if status < 0:
            os.kill(os.getpid(), -status)
            time.sleep(_SEEN_S)  # another thread may receive it
        os._exit(1)

    @staticmethod
    def _post(processes: "Sequence[subprocess.Popen[bytes]]", message: "_Part | _Pass | _Rows") -> None:
        data = pickle.dumps(message)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(data)
            process.stdin.flush()


def load_sharded(folder: Path, dtype: str, device: torch.device, num_ranks: int, num_threads: int) -> CausalModel:
    """Start the other ranks, load a model's parts in all, and return this rank's. Raises the errors of `load_model`.

    `num_threads` are shared out on a CPU.
    """
    with run_folder() as folder_of_meeting:
        num_own = max(1, num_threads // num_ranks) if device.type == "cpu" else num_threads
        level = logging.getLogger().getEffectiveLevel()
        own = _Part(folder, dtype, device.type, num_own, str(folder_of_meeting / "meeting"), num_ranks, level)
        ranks = Ranks(num_ranks - 1)
        model = ranks.load(own)
    model.ranks = ranks
    return model


@dataclass(frozen=True, slots=True)
class _Pass:
    """The inputs of a pass: the rows of its logits, its cache by number, and the numbers of all caches that are in use."""

    segments: tuple[Segment, ...]
    rows: list[int]
    cache: int
    num_slots: int
    used_caches: list[int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens whose rows of the output head are read."""

    ids: list[int]


def _messages() -> Iterator[Any]:
    """Yield rank 0's messages. This process ends as soon as rank 0 is gone."""
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                received.put(pickle.load(sys.stdin.buffer))
        finally:
            os._exit(0)

    threading.Thread(target=read, name="read-rank-0", daemon=True).start()
    while True:
        yield received.get()


def follow() -> None:
    """Run another rank than 0: load its part, then run the passes that rank 0 sends."""
    name_process("latebranch-rank")
    if sys.platform == "linux":  # the end of the pipe would not end a stopped process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes
    messages = _messages()
    part: _Part = next(messages)
    logging.basicConfig(level=part.log_level, format=f"%(asctime)s %(levelname)s rank {part.rank} %(name)s: %(message)s")
    try:
        _run_passes(part.load(), messages)
    except BaseException:
        time.sleep(_REPORTED_S)  # rank 0 ends this process if it has failed too, or if the death of a rank was the cause
        _logger.exception("rank %d failed", part.rank)
        os._exit(1)  # not by the interpreter's end, which would wait for the thread that reads


def _run_passes(model: CausalModel, messages: Iterator[Any]) -> NoReturn:
    caches: dict[int, KVCache] = {}
    for message in messages:
        if isinstance(message, _Rows):
            model.output_rows(torch.tensor(message.ids, device=model.device))
            continue
        if message.cache not in caches:
            caches = {number: cache for number, cache in caches.items() if number in message.used_caches}
            caches[message.cache] = KVCache(message.num_slots, model.device)
        rows_N = torch.tensor(message.rows, dtype=torch.int64, device=model.device)
        model.forward(pack(message.segments, model.device), caches[message.cache], rows_N)
    raise AssertionError("rank 0 sends messages without end")
