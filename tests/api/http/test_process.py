"""The life of a server process: ready, drained by a signal, forced by a second one, gone when the engine cannot start."""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.api.harness import completion
from tests.e2e.server import free_port

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def _process(port: int, drain_s: float, *error: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.api.serve_fake", str(port), str(drain_s), *error]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


def _wait_closed(port: int) -> None:
    """Return once the port is closed: the first signal has been handled, and the next is a second one.

    A client that connected before the port was closed, and was not accepted, is cut off: that is not yet a refusal.
    """
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/live")
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server still listens")


@contextlib.contextmanager
def _open_stream(port: int) -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that has begun and, the engine's gate being shut, goes no further."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=completion(stream=True), timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_sigterm_drains_then_ends_streams_with_error():
    with _process(port := free_port(), 0.5) as process:
        _wait_ready(port)
        with _open_stream(port) as lines:
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/live")


def test_a_second_signal_forces():
    """The bug: it ended the process, but with a CancelledError's traceback in the log, as if something had broken."""
    with _process(port := free_port(), 1000) as process:
        _wait_ready(port)
        with _open_stream(port):
            process.send_signal(signal.SIGTERM)
            _wait_closed(port)
            assert process.poll() is None, "it drains"
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        assert process.returncode == 0
        lines = [json.loads(line) for line in log.decode().splitlines()]
        assert [line for line in lines if line["level"] not in ("info", "warning") or "traceback" in line] == []


def messages(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the messages of an ended process."""
    _, log = process.communicate(timeout=60)
    return [json.loads(line)["message"] for line in log.decode().splitlines()]


def test_last_startup_line_has_address_and_request():
    """The bug: a start ended in a record of forty numbers, and the address was three lines of uvicorn's before it."""
    with _process(port := free_port(), 0.5) as process:
        _wait_ready(port)
        process.send_signal(signal.SIGINT)
        logged = [line for line in messages(process) if not line.startswith("GET /")]
    url = f"http://127.0.0.1:{port}"
    assert logged[0].startswith("loading fake")
    assert logged[-1].startswith(f"ready: open {url}, or curl {url}/v1/chat/completions ")
    body = shlex.split(logged[-1].partition(", or ")[2])[-1]
    assert json.loads(body) == {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}


def test_interrupt_reports_open_answers():
    """The bug: Ctrl-C under an open stream looked as if it did nothing for half a minute."""
    with _process(port := free_port(), 1000) as process:
        _wait_ready(port)
        with _open_stream(port):
            process.send_signal(signal.SIGINT)
            _wait_closed(port)
            process.send_signal(signal.SIGINT)
            logged = messages(process)
    assert "stopping: 1 answer gets 1000 s to finish; Ctrl-C again ends them now" in logged


def test_an_interrupt_without_answers_waits_for_nothing():
    with _process(port := free_port(), 1000) as process:
        _wait_ready(port)
        process.send_signal(signal.SIGINT)
        logged = messages(process)
        assert process.returncode == 0
    assert not any(line.startswith("stopping") for line in logged)


def test_failed_engine_start_exits_with_reason():
    with _process(free_port(), 0.1, "the weights are not there") as process:
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        assert any("the weights are not there" in json.loads(line)["message"] for line in log.decode().splitlines())


def test_port_is_free_while_server_drains():
    """So a restart need not wait for the last answer: the next server takes new requests while this one ends its own."""
    with _process(port := free_port(), 1000) as old:
        _wait_ready(port)
        with _open_stream(port):
            old.send_signal(signal.SIGTERM)
            _wait_closed(port)
            with _process(port, 0.1) as new:
                _wait_ready(port)
                assert new.poll() is None
                assert old.poll() is None, "it drains"
                old.send_signal(signal.SIGTERM)
                assert old.wait(30) == 0
                assert httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
