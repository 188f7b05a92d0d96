"""Starting what is measured, asking it, and ending it. Each peer has a process group of its own."""

import http.client
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from benchmarks.peers.groups import ProcessGroup
from benchmarks.peers.jobs import Answers, Job, JobFailed

_START_LIMIT_S, _JOB_LIMIT_S = 420.0, 420.0
_ROOT = Path(__file__).parents[2]
PORT = "{port}"  # in a server's command: where it is to listen


class PeerDied(JobFailed):
    """A peer ended, or never became ready; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a peer's process is started and spoken to, and how much memory it is expected to need."""

    command: tuple[str, ...]
    speaks: Literal["http", "lines"]
    expected_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)


class Usage(Protocol):
    """What a peer's processes have used of the machine since they began."""

    def cpu_s(self) -> float:
        """Return processor seconds."""

    def peak_bytes(self) -> int:
        """Return the most memory each held, added up."""


class Asked(Protocol):
    """A running peer."""

    @property
    def group(self) -> Usage:
        """Return what it has used."""

    def answer(self, job: Job) -> Answers:
        """Return its answers. Raises JobFailed."""

    def stop(self) -> None:
        """End it."""


class LineProcess:
    """A process that answers jobs on its standard streams."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(environment),
                start_new_session=True,
            )
        self.group = ProcessGroup(self._process.pid)
        try:
            self._line(_START_LIMIT_S)
        except PeerDied:
            self.stop()
            raise

    def answer(self, job: Job) -> Answers:
        """Return its answers. Raises JobFailed."""
        assert self._process.stdin is not None
        try:
            print(job.to_json(), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise _death("it ended", self._log) from error
        return Answers.from_json(self._line(_JOB_LIMIT_S))

    def stop(self) -> None:
        """End it."""
        self.group.stop()
        self._process.communicate()

    def _line(self, limit_s: float) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise _death(f"no answer within {limit_s:g} s", self._log)
            line = self._process.stdout.readline()
        if not line:
            raise _death("it ended", self._log)
        return line


class ServerProcess:
    """A server, and the client that asks it."""

    def __init__(self, launch: Launch, client: LineProcess, log: Path) -> None:
        self._client, self._log = client, log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(port) if word == PORT else word for word in launch.command]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(launch.environment),
                start_new_session=True,
            )
        self.group = ProcessGroup(self._process.pid)
        try:
            self._wait_until_ready(port)
        except PeerDied:
            self.stop()
            raise

    def answer(self, job: Job) -> Answers:
        """Return its answers. Raises JobFailed."""
        if self._process.poll() is not None:
            raise _death("it ended", self._log)
        return self._client.answer(replace(job, url=self.url))

    def stop(self) -> None:
        """End it."""
        self.group.stop()
        self._process.wait()

    def _wait_until_ready(self, port: int) -> None:
        end_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if _is_healthy(port):
                return
            time.sleep(0.2)
        raise _death("it did not become ready", self._log)


def start_client(log: Path) -> LineProcess:
    """Return a client that asks servers."""
    return LineProcess([sys.executable, "-m", "benchmarks.peers.load"], {}, log)


def start(launch: Launch, client: LineProcess, log: Path) -> Asked:
    """Return the peer, ready to be asked. Raises PeerDied."""
    if launch.speaks == "http":
        return ServerProcess(launch, client, log)
    return LineProcess(launch.command, launch.environment, log)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **own}


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _death(what: str, log: Path) -> PeerDied:
    return PeerDied(f"{what}; {log} ends with:\n{log.read_text(errors='replace')[-1500:]}")
