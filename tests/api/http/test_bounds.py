"""What a server takes of connections, heads and bodies, over real sockets: bounded, and the refusal is read by its client."""

import asyncio
import contextlib
import gc
import http.client
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http.middleware import BodyLimit
from server.http.protocol import MAX_HEAD_BYTES, _BoundedHeads, _LingeringTransport
from server.process import _OTHER_DESCRIPTORS, Server, _max_connections, _uvicorn_config, serve
from server.settings import Settings
from tests.api.harness import MODEL, completion, make_app, until
from tests.api.http.test_process import _wait_ready
from tests.e2e.server import free_port
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections that tests break on purpose

ROOT = Path(__file__).parents[3]
LARGEST = 1 << 16


class _Quiet(Server):
    def capture_signals(self):
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine | None = None, **values: Any):
    """Yield the port of a server as `latebranch serve` configures it."""
    settings = Settings(model=MODEL, port=0, max_body_bytes=LARGEST, **values)
    app = make_app(engine or FakeEngine(), **settings.model_dump(exclude_unset=True, exclude={"model"}))
    server = _Quiet(_uvicorn_config(app, settings), app.state.runtime, 0.0)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started and app.state.runtime.is_ready)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _exchanged(port: int, data: bytes) -> bytes:
    """Return all that is answered to some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def _head(num_bytes: int, filler: bytes = b"a") -> bytes:
    begin = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: "
    return begin + filler * (num_bytes - len(begin) - 5) + b"a\r\n\r\n"


HEADS = [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 400), (70_000, 400), (250_000, 400)]


@pytest.mark.parametrize(("num_bytes", "status"), HEADS)
@pytest.mark.parametrize("before", [b"", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "behind another"])
@pytest.mark.parametrize("filler", [b"a", b" "])
async def test_heads_are_bounded_however_they_come(num_bytes: int, status: int, before: bytes, filler: bytes):
    """The bug: a head that came in one piece was not bounded: 70,000 bytes passed."""
    async with serving() as port:
        answer = await asyncio.to_thread(_exchanged, port, before + _head(num_bytes, filler))
    assert answer.count(b"HTTP/1.1 ") == 1 + bool(before)
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(str(status).encode())


async def test_a_server_without_the_bound_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(_BoundedHeads, "next_event")
    async with serving() as port:
        assert b" 200 " in await asyncio.to_thread(_exchanged, port, _head(70_000))


def _by_urllib(url: str, body: bytes) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def _by_http_client(url: str, body: bytes) -> int:
    client = http.client.HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return client.getresponse().status


def _by_httpx(url: str, body: bytes) -> int:
    return httpx.post(url, content=body, headers={"Content-Type": "application/json"}).status_code


def _by_httpx_in_chunks(url: str, body: bytes) -> int:
    pieces = (body[at : at + 50_000] for at in range(0, len(body), 50_000))
    return httpx.post(url, content=pieces, headers={"Content-Type": "application/json"}).status_code


def _by_curl(url: str, body: bytes) -> int:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = [
        "curl",
        "-sS",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        "Content-Type: application/json",
        "--data-binary",
        "@-",
    ]
    return int(subprocess.run([*command, "-H", "Expect:", url], input=body, capture_output=True, check=True).stdout)


def _by_old_http(url: str, body: bytes) -> int:
    """Send all, then read, over HTTP/1.0."""
    port = int(url.split(":")[2].split("/")[0])
    head = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return int(_exchanged(port, head % len(body) + body).split()[1])


CLIENTS = [_by_urllib, _by_http_client, _by_httpx, _by_httpx_in_chunks, _by_curl, _by_old_http]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("settings", "status"), [({}, 413), ({"api_keys": "0123456789abcdef"}, 401), ({"cors_origins": "x"}, 413)]
)
async def test_a_refusal_is_read_by_every_client(client: Callable[[str, bytes], int], settings: dict[str, Any], status: int):
    """The bug: the connection was closed under a client that was still sending, and the reset took the answer along."""
    async with serving(**settings) as port:
        for _ in range(3):
            body = json.dumps(completion(prompt="x" * 8_000_000)).encode()
            assert await asyncio.to_thread(client, f"http://127.0.0.1:{port}/v1/completions", body) == status


async def test_immediate_close_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_LingeringTransport, "close", lambda self: self._transport.close())
    async with serving() as port:
        url, body = f"http://127.0.0.1:{port}/v1/completions", json.dumps(completion(prompt="x" * 8_000_000)).encode()
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(lambda: [_by_old_http(url, body) for _ in range(20)])


async def test_client_sending_forever_is_cut_off():
    async with serving(client_limit_s=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\nConnection: close\r\n\r\n")
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.01)
                assert time.monotonic() - began_s < 20
        assert reader._buffer.startswith(b"HTTP/1.1 413")  # type: ignore[attr-defined]
        writer.close()


def _limit(max_body_bytes: int, max_unfinished_bytes: int):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return BodyLimit(app, max_body_bytes, max_unfinished_bytes)


class _Upload:
    """A request whose body arrives when the test sends it."""

    def __init__(self, limit: BodyLimit) -> None:
        self._pieces: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.status: int | None = None
        self.task = asyncio.create_task(limit({"type": "http", "path": "/", "headers": []}, self._receive, self._send))

    async def _receive(self):
        num_bytes, is_last = await self._pieces.get()
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": not is_last}

    async def _send(self, message):
        self.status = message.get("status", self.status)

    async def send(self, num_bytes: int, is_last: bool = False) -> int | None:
        self._pieces.put_nowait((num_bytes, is_last))
        for _ in range(5):
            await asyncio.sleep(0)
        return self.status


async def test_unfinished_bodies_are_bounded_together():
    """The bug: each body was bounded, all together were not: a thousand slow ones held 4 GiB."""
    limit = _limit(max_body_bytes=400, max_unfinished_bytes=1000)
    slow = [_Upload(limit) for _ in range(3)]
    assert [await one.send(330) for one in slow] == [None] * 3
    large = _Upload(limit)
    assert await large.send(300) == 503
    assert limit._unfinished_bytes == 990
    small = _Upload(limit)
    assert await small.send(100) is None, "a small one has its share"
    assert await small.send(10, is_last=True) == 200
    assert await slow[0].send(3) is None
    assert await slow[0].send(10, is_last=True) == 200
    assert [await one.send(0, is_last=True) for one in slow[1:]] == [200, 200]
    alone = _Upload(limit)
    assert await alone.send(400) is None
    assert await alone.send(1) == 413
    assert (limit._num_unfinished, limit._unfinished_bytes) == (0, 0)


def test_connections_stay_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch):
    for soft, wanted, most in ((1024, 1000, 1024 - _OTHER_DESCRIPTORS), (1024, 10, 10), (100, 1000, 25), (-1, 1000, 1000)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert _max_connections(wanted) == most


async def test_longest_idle_connection_is_closed_at_limit():
    engine = FakeEngine(gate=(gate := asyncio.Event()), num_free_events=3)
    async with serving(engine, max_connections=3) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as streaming:
            async with streaming.stream("POST", "/v1/completions", json=completion(stream=True, max_tokens=40)) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
                more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
                for reader, _ in [*idle, more[0]]:
                    assert await asyncio.wait_for(reader.read(1), 10) == b""
                more[2][1].write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert (await more[2][0].read()).startswith(b"HTTP/1.1 200")
                gate.set()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            text = (await streaming.get("/metrics")).text
        assert 'latebranch_clients_cut_off_total{at="waiting"} 3.0' in text
        for _, writer in (*idle, *more):
            writer.close()


async def test_a_burst_of_connections_is_queued():
    """The bug: the kernel queued 64 connections; for others, /health among them, a client tried again after a second."""
    async with serving() as port:
        # While this loop is busy the server accepts nothing.
        clients = [socket.create_connection(("127.0.0.1", port), timeout=0.9) for _ in range(500)]
        clients[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await asyncio.to_thread(clients[-1].recv, 100)).startswith(b"HTTP/1.1 200")
        for client in clients:
            client.close()


async def test_a_short_queue_is_detected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("server.process._BACKLOG", 64)
    async with serving() as port:
        with contextlib.ExitStack() as stack:
            connect = partial(socket.create_connection, ("127.0.0.1", port), timeout=0.3)
            with pytest.raises(TimeoutError):
                list(map(stack.enter_context, iter(connect, None)))


def test_loaded_objects_are_collected_once(monkeypatch: pytest.MonkeyPatch):
    """The bug: each full garbage collection visited all that was loaded, and delayed every stream and /health."""
    app = make_app(FakeEngine())
    monkeypatch.setattr("server.process.create_app", lambda *_, **__: app)
    monkeypatch.setattr(Server, "run", lambda self: None)
    assert serve(Settings(model=MODEL)) is None
    gc.unfreeze()
    try:
        app.state.runtime.on_loaded()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


async def test_loading_callback_runs_before_readiness():
    runtime = (app := make_app(FakeEngine())).state.runtime
    seen: list[bool] = []
    runtime.on_loaded = lambda: seen.append(runtime.is_ready)
    async with app.router.lifespan_context(app):
        await until(lambda: runtime.is_ready)
    assert seen == [False]


NUM_SILENT = 3_000


@contextlib.contextmanager
def _process_with_few_descriptors(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    command = [sys.executable, "-m", "tests.api.serve_fake", str(port), "0.5"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, preexec_fn=limit)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_silent_connections_beyond_the_descriptors_stop_nothing(tmp_path: Path):
    """The bug: 1,100 silent connections under a limit of 1,024 stopped /health for 55 s and wrote 188 MB of log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_SILENT + 500:
        pytest.skip("the test itself may not have so many connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_SILENT + 500), hard))
    silent: list[socket.socket] = []
    try:
        with _process_with_few_descriptors(port := free_port(), log := tmp_path / "log") as process:
            _wait_ready(port)
            url = f"http://127.0.0.1:{port}"
            with httpx.stream("POST", url + "/v1/completions", json=completion(stream=True), timeout=60) as stream:
                assert next(lines := stream.iter_lines()).startswith("data: ")
                slowest_s = 0.0
                for number in range(NUM_SILENT):
                    client = socket.socket()
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", port))
                    silent.append(client)
                    if number % 300 == 299:
                        began_s = time.monotonic()
                        assert httpx.get(url + "/health", timeout=30).status_code == 200
                        slowest_s = max(slowest_s, time.monotonic() - began_s)
                assert slowest_s < 10
                assert len(os.listdir(f"/proc/{process.pid}/fd")) < 1000
                process.terminate()
                assert [line for line in lines if line][-1] == "data: [DONE]", "the stream went on to its end"
            assert process.wait(30) == 0
            assert log.stat().st_size < 200_000
    finally:
        for client in silent:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
