"""A real `latebranch serve` process on a free port, and its end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PROGRAM = Path(sys.executable).parent / "latebranch"
_START_LIMIT_S = 600.0


@dataclass(frozen=True)
class RunningServer:
    """The address and the process of a server."""

    url: str
    port: int
    process: subprocess.Popen[str]
    key: str | None = None

    def get(self, path: str) -> httpx.Response:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return httpx.get(self.url + path, timeout=60, headers=headers)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples over its labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextlib.contextmanager
def running_server(
    log: Path, *flags: str, key: str | None = None, program: Path = PROGRAM, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Start `latebranch serve` with flags, wait until it is ready, and stop it with SIGTERM. Requests carry `key`."""
    port = free_port()
    command = [str(program), "serve", "--port", str(port), "--num-threads", "1", *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=dict(environment or os.environ))
    server = RunningServer(f"http://127.0.0.1:{port}", port, process, key)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def _wait_until_ready(server: RunningServer, log: Path) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if server.get("/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def sse(lines: Iterator[str]) -> Iterator[dict[str, Any] | None]:
    """Yield each event's JSON, and None for `[DONE]`."""
    for line in lines:
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line[6:])
