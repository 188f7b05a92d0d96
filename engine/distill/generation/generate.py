"""Offline generation of many texts at a time by a target without speculation: the training data of drafters."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from engine.distill.generation.cuda_batches import generate_by_graphs
from engine.distill.generation.jobs import GeneratedText, GenerationJob, RunningJob
from engine.distill.generation.native_batches import generate_natively
from engine.distill.generation.torch_batches import generate_by_torch
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap
from engine.weights import UnsupportedModel


def generate(
    model: CausalModel, jobs: Mapping[int, GenerationJob], batch: int, layers: Sequence[int] = ()
) -> Iterator[GeneratedText]:
    """Yield each job's text as it finishes, `batch` at a time, with states of `layers`, counted as by StateTap.

    The model must not run anything else before the iterator is exhausted.
    """
    if batch < 1:
        raise ValueError(f"{batch} texts cannot be generated at a time")
    if not jobs:
        return
    if model.has_states:
        raise UnsupportedModel(f"{type(model.module).__name__} has recurrent layers; texts cannot be generated offline")
    rows = [RunningJob(name, job) for name, job in jobs.items()]
    tap = StateTap(model, layers) if layers else None
    try:
        yield from _backend(model)(model, rows, batch, tap)
    finally:
        if tap is not None:
            tap.close()


def _backend(model: CausalModel) -> Callable[[CausalModel, Sequence[RunningJob], int, StateTap | None], Iterator[GeneratedText]]:
    if model.native is not None:
        return generate_natively
    return generate_by_graphs if model.device.type == "cuda" else generate_by_torch
