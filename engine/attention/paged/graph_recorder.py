"""Records a function over fixed buffers and replays it, with CUDA graphs or by calling the function."""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from engine.utils.one_line import one_line

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records functions that can be replayed with new contents of their buffers."""

    name: str

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a function that repeats the tensor operations of `run` and returns the same tensors if possible.

        It may call `run`, which must be idempotent over the same buffers and must not read values from the device.
        """
        ...


class Unrecorded:
    """Calls the function itself: on a CPU, and if graphs are off."""

    name = "no graphs"

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return the function."""
        return run


class GraphRefused(ValueError):
    """A required graph cannot be captured."""


class CudaGraphs:
    """Captures a CUDA graph of each function. All graphs share their memory, so only one may run at a time.

    The first failed capture logs a warning and turns graphs off. With `is_required` it raises GraphRefused.
    """

    name = "CUDA graphs"

    def __init__(self, is_required: bool = False) -> None:
        self._is_required = is_required
        self._is_off = False
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # only one, because libraries allocate a workspace for each
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the shared memory alive

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a graph's replay."""
        if self._is_off:
            return run
        try:
            return self._captured(run)
        except RuntimeError as error:
            # Torch raises that the capture cannot end; the cause is this error's context.
            reason = one_line(error.__context__ or error)
            if self._is_required:
                raise GraphRefused(f"a pass cannot be captured: {reason}") from error
            self._is_off, self.name = True, Unrecorded.name
            _logger.warning("CUDA graphs are off: %s", reason)
            return run

    def _captured(self, run: Callable[[], T]) -> Callable[[], T]:
        if self._first is None:
            self._first, _ = self._capture(lambda: torch.zeros(1, device="cuda"))
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # compiles kernels and allocates workspaces outside the graph
            run()
        current.wait_stream(self._stream)
        graph, result = self._capture(run)

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        return graph, result
