"""Dynamo's frontend and workers behind it, as processes of this machine. They share a folder and speak TCP."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx
import msgspec
import pytest

from tests.cluster.noting_worker import Arrival
from tests.e2e.server import free_port

MODEL = "smollm2-135m"
_ROOT = Path(__file__).resolve().parents[2]
_START_LIMIT_S = 120.0
_HERE = "127.0.0.1"
_PROGRAM = "import sys; from tests.cluster.noting_worker import main; sys.exit(main())"


def dynamo_python() -> Path:
    """Return Python of the environment DYNAMO_VENV. Skip the test without it."""
    program = Path(os.environ.get("DYNAMO_VENV", "")) / "bin" / "python"
    if not program.is_absolute():
        pytest.skip("DYNAMO_VENV names no environment with Dynamo (make cluster-test)")
    return program


@dataclass
class DynamoWorker:
    """A worker that is started again after each death. Its metrics are at `url`."""

    log: Path
    environment: Mapping[str, str]
    model: str
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: _small_port())
    _process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def url(self) -> str:
        return f"http://{_HERE}:{self.port}"

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        flags = ["--model", self.model, "--model-name", MODEL, "--num-threads", "1", *self.flags]
        command = [str(dynamo_python()), "-c", _PROGRAM, str(self._notes), "dynamo-worker", *flags]
        environment = {**self.environment, "DYN_SYSTEM_PORT": str(self.port)}
        with self.log.open("ab") as out:  # a group of its own, to see whether all its processes end
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    @property
    def _notes(self) -> Path:
        return self.log.with_suffix(".arrivals")

    def arrivals(self) -> list[Arrival]:
        """Return all requests that reached the worker."""
        lines = self._notes.read_bytes().splitlines() if self._notes.exists() else []
        return [msgspec.json.decode(line, type=Arrival) for line in lines]

    @property
    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.process.poll() is None and httpx.get(self.url + "/health", timeout=5).json()["status"] == "ready"
        return False

    def wait_ready(self) -> None:
        _wait(lambda: self.is_ready or self.process.poll() is not None, self.log)
        assert self.is_ready, self.log.read_text()[-4000:]

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples over its labels."""
        lines = [line for line in httpx.get(self.url + "/metrics", timeout=10).text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def kill(self) -> None:
        """Kill the worker's first process alone, as the loss of a machine would, and wait until its engine has ended too."""
        self.process.kill()
        self.process.wait()
        _wait(lambda: not _has_group(self.process.pid), self.log)


@dataclass(frozen=True)
class Cluster:
    """The address of a frontend, and its workers."""

    url: str
    workers: list[DynamoWorker]

    def num_migrated(self) -> float:
        """Return how many streams were sent to another worker."""
        return sum(count for line, count in self._metrics() if "model_migration_total{" in line and "ongoing_request" in line)

    def cache_events(self) -> Counter[tuple[str, str]]:
        """Return how many events of the workers' caches the router has seen, by kind and by what became of them."""
        found = Counter[tuple[str, str]]()
        for line, count in self._metrics():
            if count and (labels := re.search(r'kv_cache_events_applied\{.*event_type="(\w+)",status="(\w+)"', line)):
                found[labels[1], labels[2]] += int(count)
        return found

    def _metrics(self) -> list[tuple[str, float]]:
        lines = httpx.get(self.url + "/metrics", timeout=10).text.splitlines()
        return [(name, float(value)) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))]


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    num_workers: int,
    *flags: str,
    frontend_flags: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    model: str = MODEL,
) -> Iterator[Cluster]:
    """Start a frontend that migrates, and workers with flags; yield them once all serve; end all processes."""
    store = folder / "store"
    store.mkdir()
    environment = {
        **os.environ,
        **dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), _HERE),
        "DYN_FILE_KV": str(store),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(_ROOT),
        **variables,
    }
    workers = [DynamoWorker(folder / f"worker{index}.log", environment, model, flags) for index in range(num_workers)]
    port = free_port()
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq", "--migration-limit", "10"]
    command = [
        str(dynamo_python()),
        "-m",
        "dynamo.frontend",
        "--http-host",
        _HERE,
        "--http-port",
        str(port),
        *planes,
        *frontend_flags,
    ]
    with (folder / "frontend.log").open("wb") as out:
        frontend = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    cluster = Cluster(f"http://{_HERE}:{port}", workers)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_ready()
        _wait(lambda: _is_listed(cluster.url), folder / "frontend.log")
        yield cluster
    finally:
        for process in (frontend, *(worker.process for worker in workers if worker.is_started)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _small_port() -> int:
    """Return a free port that DYN_SYSTEM_PORT can hold, a signed number of 16 bits."""
    for port in random.sample(range(20_000, 1 << 15), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HERE, port))
            return port
    raise AssertionError("no free port below 32768")


def _is_listed(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return any(model["id"] == MODEL for model in httpx.get(url + "/v1/models", timeout=5).json()["data"])
    return False


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(is_done: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end:
        if is_done():
            return
        time.sleep(0.1)
    raise AssertionError(f"not in time:\n{log.read_text()[-4000:]}")
