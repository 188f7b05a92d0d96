"""Records a function over buffers that stay where they are, and replays it: CUDA graphs, or the function itself."""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Makes functions that do a thing again, with what lies in its buffers then."""

    name: str

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return what does all that `run` does to tensors and returns what it returned, the same tensors where it can.

        May run it. What it does twice over the same buffers must be what it does once; it may not look at the device's numbers.
        """
        ...


class Unrecorded:
    """Runs the function itself: on a processor, and wherever graphs are off."""

    name = "no graphs"

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return the function."""
        return run


class GraphRefused(ValueError):
    """A graph was demanded of a function that cannot be captured."""


class CudaGraphs:
    """Captures a CUDA graph of each function; all share their memory, so that one at a time may run.

    A capture that fails is told of once, and from then on functions run themselves. With `is_required` it raises GraphRefused.
    """

    name = "CUDA graphs"

    def __init__(self, is_required: bool = False) -> None:
        self._is_required = is_required
        self._is_off = False
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one, so that libraries keep their workspaces once
        self._first: torch.cuda.CUDAGraph | None = None  # the shared memory lives as long as some graph

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a graph's replay."""
        if self._is_off:
            return run
        try:
            return self._captured(run)
        except RuntimeError as error:
            # What ended the capture stands behind the complaint that it cannot be ended.
            reason = " ".join(str(error.__context__ or error).split())
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
        with torch.cuda.stream(self._stream):  # kernels are compiled and workspaces made outside of the graph
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
            torch.cuda.set_stream(current)  # where a capture that fails does not go back to
        return graph, result
