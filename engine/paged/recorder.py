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
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Return a graph's replay."""
        if self._is_off:
            return run
        try:
            return self._captured(run)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            if self._is_required:
                raise GraphRefused(f"a pass cannot be captured: {reason}") from error
            self._is_off, self.name = True, Unrecorded.name
            _logger.warning("CUDA graphs are off: %s", reason)
            return run

    def _captured(self, run: Callable[[], T]) -> Callable[[], T]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces made outside of the graph
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> T:
            graph.replay()
            return result

        return replay
