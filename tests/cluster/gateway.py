"""The gateway smg before replicas."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import free_port

BALANCE = ("--policy", "cache_aware", "--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1")  # as in deploy/
_START_LIMIT_S = 60.0
_PROBE_S = 2  # seconds between health checks


def gateway_program() -> Path:
    """Return smg of the environment CLUSTER_VENV. Skip the test without it."""
    program = Path(os.environ.get("CLUSTER_VENV", "")) / "bin" / "smg"
    if not program.is_absolute():
        pytest.skip("CLUSTER_VENV names no environment with smg (make cluster-test)")
    return program


@contextlib.contextmanager
def running_gateway(log: Path, workers: Sequence[str]) -> Iterator[str]:
    """Start smg before workers, wait until it knows them all, and yield its address."""
    port, metrics_port = free_port(), free_port()
    addresses = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(metrics_port),
    ]
    health = ["--health-check-endpoint", "/ready", "--health-check-interval-secs", str(_PROBE_S), "--load-monitor-interval", "1"]
    command = [str(gateway_program()), "launch", *addresses, *health, *BALANCE, "--worker-urls", *workers]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_workers(url, len(workers), process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()


def _wait_for_workers(url: str, num: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            workers = httpx.get(url + "/workers", timeout=5).json().get("workers", [])
            if sum(worker.get("is_healthy", False) for worker in workers) == num:
                return
        time.sleep(0.1)
    raise AssertionError(f"smg did not accept {num} workers:\n{log.read_text()[-4000:]}")
