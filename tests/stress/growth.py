"""The resources of a working server, and how they grow: memory, open files, threads, processes, series of metrics."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.e2e.server import RunningServer

_WORKER = "latebranch-work"  # as the kernel knows it
_WARM_UP = 0.25  # of the samples: caches fill, pools are made
MOST_KIB, MOST_COUNT = 16 * 1024.0, 1.5  # of fitted growth: what an allocator keeps, a connection more or less
MOST_SERIES = 32.0  # of trees on the policy's menu: one begins when its tree is first chosen

# oneDNN compiles a kernel for each number of rows and keeps 1024 in each of two caches: half a gigabyte, full after a thousand
# requests. Below them nothing else would be seen.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}

Sample = Mapping[str, float]


def sample(server: RunningServer) -> Sample:
    """Return the resources of the server and the processes below it. Memory is in KiB."""
    amounts: dict[str, float] = {"processes": 0}
    for pid in _family(server.process.pid):
        role = "front end" if pid == server.process.pid else "worker" if _name_of(pid) == _WORKER else "helpers"
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        own = {
            "memory": float(status["VmRSS"].split()[0]),
            "files": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
            "threads": float(status["Threads"]),
        }
        amounts["processes"] += 1
        for what, amount in own.items():
            amounts[f"{what} of {role}"] = amounts.get(f"{what} of {role}", 0.0) + amount
    amounts["series of metrics"] = sum(not line.startswith("#") for line in server.get("/metrics").text.splitlines())
    return amounts


def worker_of(server: RunningServer) -> int:
    """Return the process that runs the engine."""
    (worker,) = (pid for pid in _family(server.process.pid) if _name_of(pid) == _WORKER)
    return worker


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def more(before: Sample, after: Sample, most_kib: float) -> list[str]:
    """Return the growth of an idle server's resources, a line each. Memory up to `most_kib` does not count."""
    limits = {name: most_kib if name.startswith("memory") else 0.0 for name in after if name != "series of metrics"}
    grown = {name: after[name] - before.get(name, 0.0) for name in limits}
    return [f"{name}: {before.get(name, 0.0):.0f} before, {after[name]:.0f} now" for name in limits if grown[name] > limits[name]]


def growths(samples: Sequence[Sample]) -> dict[str, float]:
    """Return by how much each quantity has grown since the warm-up, by the straight line that fits it best."""
    watched = samples[int(_WARM_UP * len(samples)) :]
    last = len(watched) - 1
    names = dict.fromkeys(name for one in watched for name in one)
    series = {name: [one.get(name, 0.0) for one in watched] for name in names}
    return {name: statistics.linear_regression(range(last + 1), values).slope * last for name, values in series.items()}


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Return what has grown by more than it may, a line each."""
    limits = {name: _limit(name) for one in samples for name in one}
    return [f"{name} grew by {grown:.1f}" for name, grown in growths(samples).items() if grown > limits[name]]


def _limit(name: str) -> float:
    if name == "series of metrics":
        return MOST_SERIES
    return MOST_KIB if name.startswith("memory") else MOST_COUNT
