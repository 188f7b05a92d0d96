"""Measures work of a device for which the host does not wait."""

import torch


class DeviceClock:
    """Measures the work that is started until `stop`. A processor has done it by then, so its seconds are 0."""

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._record(0)

    def stop(self) -> None:
        """End the measurement."""
        self._record(1)

    def _record(self, index: int) -> None:
        if self._events:
            self._events[index].record()

    @property
    def seconds(self) -> float:
        """Seconds of the device. Valid after the host has read results of later work."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else 0.0
