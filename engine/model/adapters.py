"""LoRA adapters of a loaded model, chosen for each row of a pass.

An adapted layer computes `W x + B A x` for the rows of each adapter. The low-rank term is in float32 and other rows are not
touched. A row of the base, and every pass without adapters, runs the base alone.
Shape key: T packed tokens, M tokens of one adapter, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.attention.packing import PackedBatch
from engine.weights.lora import Adapter, LowRank


class AdaptedRows:
    """The packed tokens of each adapter in the pass that runs; none between passes."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.by_adapter: dict[str, Tensor] = {}
        self.num_tokens = 0

    @contextmanager
    def of(self, batch: PackedBatch) -> Iterator[None]:
        """Let the adapted layers see the rows of a batch."""
        places: dict[str, list[int]] = {}
        for segment, start in zip(batch.segments, batch.starts):
            if segment.adapter is not None:
                places.setdefault(segment.adapter, []).extend(range(start, start + segment.num_tokens))
        self.by_adapter = {name: torch.tensor(tokens, device=batch.device) for name, tokens in places.items()}
        self.num_tokens = batch.num_tokens
        try:
            yield
        finally:
            self.by_adapter = {}


class AdaptedLinear(nn.Module):
    """A linear layer with the low-rank terms of some adapters."""

    def __init__(self, linear: nn.Module, rows: AdaptedRows) -> None:
        super().__init__()
        self.linear = linear
        self._rows = rows
        self._terms: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, low: LowRank, device: torch.device) -> None:
        """Add an adapter's term."""
        self._terms[name] = (low.a_RI.to(device).t().contiguous(), low.b_OR.to(device).t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, with each adapter's term added to its own rows."""
        y: Tensor = self.linear(x)
        for name, tokens_M in self._rows.by_adapter.items():
            if (term := self._terms.get(name)) is not None:
                x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
                if len(x_TI) != self._rows.num_tokens:
                    raise RuntimeError(f"an adapted layer reads {len(x_TI)} rows of {self._rows.num_tokens} tokens")
                a_IR, b_RO = term
                y_TO[tokens_M] = (y_TO[tokens_M].float() + x_TI[tokens_M].float() @ a_IR @ b_RO).to(y.dtype)
        return y


def adapt(module: nn.Module, adapters: Sequence[Adapter], device: torch.device) -> AdaptedRows:
    """Wrap the adapted layers of a model in place. Return the rows that the caller sets in each pass."""
    rows = AdaptedRows(tuple(adapter.name for adapter in adapters))
    for adapter in adapters:
        for name, low in adapter.layers.items():
            parent, _, last = name.rpartition(".")
            holder = module.get_submodule(parent)
            if not isinstance(layer := getattr(holder, last), AdaptedLinear):
                setattr(holder, last, layer := AdaptedLinear(layer, rows))
            layer.add(adapter.name, low, device)
    return rows
