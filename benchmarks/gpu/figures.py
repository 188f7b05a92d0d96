"""Figures, a JSON line each, and times taken in turns."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contender: median and quartiles, and their ratio to the first contender's of the same turn."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


def in_turns(contenders: Mapping[str, Callable[[], object]], num_turns: int, device: torch.device) -> dict[str, Times]:
    """Return the times of each, all run once a turn, after two turns that are not counted."""
    for run in [*contenders.values()] * 2:
        _timed(run, device)
    turns = [{name: _timed(run, device) for name, run in contenders.items()} for _ in range(num_turns)]
    first = next(iter(contenders))
    return {name: _times([turn[name] for turn in turns], [turn[first] for turn in turns]) for name in contenders}


def _timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin_s = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - begin_s) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(own: Sequence[float], first: Sequence[float]) -> Times:
    ratios = [mine / other for mine, other in zip(own, first, strict=True)]
    return Times(statistics.median(own), _quartiles(own), statistics.median(ratios), _quartiles(ratios))


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Return the figures of a file. A line that a dying process left unfinished is skipped."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def begin_line(path: Path) -> None:
    """End an unfinished line of a file, so that what is appended begins a line."""
    written = path.read_bytes() if path.exists() else b""
    if written and not written.endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


class Figures:
    """Owns the file of figures; each is written as it comes, so that a run that is cut off leaves what it had."""

    def __init__(self, path: Path, limit_s: float, is_resumed: bool = False) -> None:
        self._begin_s, self._limit_s = time.perf_counter(), limit_s
        self.all = read_figures(path) if is_resumed else []
        if is_resumed:
            begin_line(path)
        self._file = path.open("a" if is_resumed else "w")

    def add(self, part: str, **facts: Any) -> None:
        """Write a figure of a part of the benchmark."""
        figure = {"part": part, **{name: asdict(fact) if isinstance(fact, Times) else fact for name, fact in facts.items()}}
        self.all.append(figure)
        self._file.write(json.dumps(figure) + "\n")
        self._file.flush()

    def of(self, part: str) -> list[dict[str, Any]]:
        """Return the figures of one part."""
        return [figure for figure in self.all if figure["part"] == part]

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._begin_s

    def is_late(self, part: str) -> bool:
        """Return whether the time is over, and write that the rest of a part is left out."""
        if self.seconds > self._limit_s:
            self.add(part, left_out=f"{self.seconds:.0f} s are over")
        return self.seconds > self._limit_s

    def close(self) -> None:
        """Close the file."""
        self._file.close()
