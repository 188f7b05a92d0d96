"""Texts that a target writes without speculation, many at a time: what drafters are made from."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from engine.distill.generation.cuda_batches import write_by_graphs
from engine.distill.generation.jobs import OpenText, Order, Written
from engine.distill.generation.native_batches import write_in_lanes
from engine.distill.generation.torch_batches import write_in_columns
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap


def write(model: CausalModel, orders: Mapping[int, Order], batch: int, layers: Sequence[int] = ()) -> Iterator[Written]:
    """Yield every ordered text as it is done, `batch` at a time; `layers` as StateTap counts them.

    The model must not run anything else before the last text is taken.
    """
    if batch < 1:
        raise ValueError(f"{batch} texts cannot be written at a time")
    if not orders:
        return
    rows = [OpenText(name, order) for name, order in orders.items()]
    tap = StateTap(model, layers) if layers else None
    try:
        yield from _way(model)(model, rows, batch, tap)
    finally:
        if tap is not None:
            tap.close()


def _way(model: CausalModel) -> Callable[[CausalModel, Sequence[OpenText], int, StateTap | None], Iterator[Written]]:
    if model.native is not None:
        return write_in_lanes
    return write_by_graphs if model.device.type == "cuda" else write_in_columns
