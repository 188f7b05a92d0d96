"""Silent connections, slow bodies and streams that work, all together: `python -m tests.stress.siege --silent 5000`.

A real server over a tiny model whose limit of descriptors is 1,024. The streams have seeds: they are requested before, with
nothing beside them, and again once the connections are open. Meanwhile another process requests `/health`, each time over a new
connection.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conformance.folder import served_folder
from tests.e2e import health_probe
from tests.e2e.health_probe import Probe
from tests.e2e.server import PROGRAM, RunningServer, running_server

_NUM_DESCRIPTORS = 1024  # of the server
_AT_ONCE = 50  # connections that are opened without a pause
_SLOW_S = 0.5  # between two bytes of a slow body
_HEALTH_S = 0.05  # between two requests for /health
_WATCH_S = 0.2  # between two samples of the server's resources
_LIMIT_S = 180.0  # of all of it: a server that is stopped accepts no connection
_FLAGS = ("--drafter", "ngram", "--policy", "fixed", "--max-running", "64", "--max-model-len", "512", "--spare-worker", "false")
MOST_HEALTH_S, MOST_KIB, MOST_LOG_BYTES = 1.0, 64 * 1024.0, 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How many of each kind there are."""

    num_silent: int = 5000
    num_slow: int = 200
    num_streams: int = 50
    num_tokens: int = 400  # of a stream


@dataclass(frozen=True, slots=True)
class Siege:
    """The results of a siege."""

    num_different: int  # streams
    slowest_health_s: float
    slowest_connect_s: float  # of /health
    num_health: int
    num_failed_health: int
    grown_kib: float  # of the front end, at its most
    num_log_bytes: int
    num_files: int  # descriptors of the server, at their most
    undisturbed_s: float
    besieged_s: float

    @property
    def faults(self) -> list[str]:
        """Return the faults, a line each."""
        found = {
            f"{self.num_different} streams are other than undisturbed": self.num_different > 0,
            f"/health took {self.slowest_health_s:.2f} s": self.slowest_health_s > MOST_HEALTH_S,
            f"/health failed {self.num_failed_health} times": self.num_failed_health > 0,
            f"memory grew by {self.grown_kib / 1024:.1f} MiB": self.grown_kib > MOST_KIB,
            f"the log grew by {self.num_log_bytes} bytes": self.num_log_bytes > MOST_LOG_BYTES,
        }
        return [text for text, is_so in found.items() if is_so]


async def _stream(client: httpx.AsyncClient, number: int, plan: Plan) -> str:
    """Return the contents of a stream except its id and time."""
    body = {"model": "tiny", "prompt": f"stream {number}", "seed": number, "temperature": 1.0, "ignore_eos": True}
    lines = []
    async with client.stream("POST", "/v1/completions", json=body | {"max_tokens": plan.num_tokens, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
    texts = [httpx.Response(200, content=line[6:]).json()["choices"][0]["text"] for line in lines if '"choices":[{' in line]
    return "".join(texts) + lines[-2 if lines[-1] == "" else -1]


async def _streams(server: RunningServer, plan: Plan) -> tuple[list[str], float]:
    limits = httpx.Limits(max_connections=plan.num_streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S, limits=limits) as client:
        began_s = time.monotonic()
        texts = await asyncio.gather(*(_stream(client, number, plan) for number in range(plan.num_streams)))
    return texts, time.monotonic() - began_s


class _Silent(asyncio.Protocol):
    """A silent connection."""


async def _slow(port: int) -> None:
    """Send a body byte by byte, over a new connection whenever the server has ended the last one."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 100000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(_SLOW_S)
        except OSError:
            await asyncio.sleep(_SLOW_S)


async def _open_silent(port: int, num_silent: int) -> list[asyncio.BaseTransport]:
    loop = asyncio.get_running_loop()
    opened: list[asyncio.BaseTransport] = []
    for first in range(0, num_silent, _AT_ONCE):
        count = min(_AT_ONCE, num_silent - first)
        found = await asyncio.gather(*(loop.create_connection(_Silent, "127.0.0.1", port) for _ in range(count)))
        opened += [transport for transport, _ in found]
    return opened


def _usage(pid: int) -> tuple[float, float]:
    """Return the memory of a process in KiB, and how many descriptors it has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.split("VmRSS:")[1].split()[0]), float(len(os.listdir(f"/proc/{pid}/fd")))


async def _watch(server: RunningServer, seen: dict[str, float]) -> None:
    """Record the server's resources repeatedly."""
    before, _ = _usage(server.process.pid)
    while True:
        memory, num_files = _usage(server.process.pid)
        seen["grown_kib"] = max(seen["grown_kib"], memory - before)
        seen["files"] = max(seen["files"], num_files)
        await asyncio.sleep(_WATCH_S)


@contextlib.asynccontextmanager
async def _probing(port: int) -> AsyncIterator[list[Probe]]:
    """Request /health in another process; the list is filled at the end."""
    command = ("-m", health_probe.__name__, str(port), str(_HEALTH_S))
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE)
    probes: list[Probe] = []
    try:
        yield probes
        output, _ = await process.communicate(b"")
        probes += (Probe(*values) for values in json.loads(output))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def besiege(server: RunningServer, log: Path, plan: Plan) -> Siege:
    """Return what became of the streams of a server that has all these connections."""
    undisturbed, undisturbed_s = await _streams(server, plan)
    log_before = os.stat(log).st_size
    seen: dict[str, float] = {"grown_kib": 0.0, "files": 0.0}
    watching = asyncio.create_task(_watch(server, seen))
    async with _probing(server.port) as probes:
        slow = [asyncio.create_task(_slow(server.port)) for _ in range(plan.num_slow)]
        streaming = asyncio.create_task(_streams(server, plan))
        silent = await _open_silent(server.port, plan.num_silent)
        besieged, besieged_s = await streaming
    for task in (watching, *slow):
        task.cancel()
    ends: list[Any] = await asyncio.gather(watching, *slow, return_exceptions=True)
    for transport in silent:
        transport.close()
    if failed := [end for end in ends if not isinstance(end, asyncio.CancelledError)]:
        raise failed[0]
    return Siege(
        num_different=sum(one != other for one, other in zip(undisturbed, besieged, strict=True)),
        slowest_health_s=max(probe.total_s for probe in probes),
        slowest_connect_s=max(probe.connect_s for probe in probes),
        num_health=len(probes),
        num_failed_health=sum(not probe.is_well for probe in probes),
        grown_kib=seen["grown_kib"],
        num_log_bytes=os.stat(log).st_size - log_before,
        num_files=int(seen["files"]),
        undisturbed_s=undisturbed_s,
        besieged_s=besieged_s,
    )


def besieged(folder: Path, plan: Plan) -> Siege:
    """Besiege a server of its own; `folder` is for its files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = plan.num_silent + plan.num_slow + plan.num_streams + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"this program needs {needed} descriptors: ulimit -Hn is {hard}")
    program = folder / "latebranch"
    program.write_text(f'#!/bin/sh\nulimit -n {_NUM_DESCRIPTORS} && exec "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    model = str(served_folder(folder / "model"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    try:
        with running_server(folder / "log", "--model", model, "--model-name", "tiny", *_FLAGS, program=program) as server:
            return asyncio.run(asyncio.wait_for(besiege(server, folder / "log", plan), _LIMIT_S))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main() -> None:
    """Run it and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silent", type=int, default=Plan().num_silent)
    parser.add_argument("--slow", type=int, default=Plan().num_slow)
    parser.add_argument("--streams", type=int, default=Plan().num_streams)
    parser.add_argument("--tokens", type=int, default=Plan().num_tokens)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        siege = besieged(Path(folder), Plan(parsed.silent, parsed.slow, parsed.streams, parsed.tokens))
    sys.stdout.write("\n".join([str(siege), *siege.faults, f"{len(siege.faults)} faults"]) + "\n")
    raise SystemExit(bool(siege.faults))


if __name__ == "__main__":
    main()
