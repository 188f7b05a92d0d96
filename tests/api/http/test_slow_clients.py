"""Over real sockets: clients that neither send nor read are cut off, leave nothing behind, and do not delay others."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from server.http.protocol import Http
from server.process import Server, _uvicorn_config
from server.settings import Settings
from tests.api.harness import MODEL, completion, make_app, sample, until
from tests.fake_engine import FakeEngine, emits

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of connections that tests break on purpose

LIMIT_S = 0.3


class _Quiet(Server):
    def capture_signals(self):
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, client_limit_s: float = LIMIT_S) -> AsyncIterator[_Quiet]:
    """Yield a server as `latebranch serve` configures it."""
    settings = Settings(model=MODEL, port=0, client_limit_s=client_limit_s)
    app = make_app(engine, client_limit_s=client_limit_s)
    server = _Quiet(_uvicorn_config(app, settings), app.state.runtime, 0.0)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started and app.state.runtime.is_ready)
    server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections have the same
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def connected(server: Server) -> socket.socket:
    """Return a connected socket that takes little before its sender must wait."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, server.servers[0].sockets[0].getsockname())
    return client


def request_of(body: object) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )


def talkative() -> FakeEngine:
    """Return an engine that emits more than all buffers between two processes hold."""
    return FakeEngine(script=emits([5] * 2_000), chunks=(20,), max_model_len=4096)


BODY = completion(max_tokens=2_000, stream=True, logprobs=5, return_token_ids=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_never_reads_is_cut_off(stream: bool) -> None:
    engine = talkative()
    if stream:  # events are left whenever it is cut off
        engine.gate, engine.num_free_events = asyncio.Event(), 90
    loop = asyncio.get_running_loop()
    async with serving(engine) as server, httpx.AsyncClient(base_url=url_of(server)) as other:
        client = await connected(server)
        await loop.sock_sendall(client, request_of({**BODY, "stream": stream}))
        await until(lambda: engine.requests)
        await until(lambda: not engine.living and not server.server_state.tasks and not server.server_state.connections)
        with pytest.raises(ConnectionResetError):
            await _read_on(client)
        client.close()
        samples = await sample(other)
        assert samples['latebranch_clients_cut_off_total{at="reading"}'] == 1
        assert bool(engine.aborted) == stream, "a whole answer was complete"
        assert (await other.post("/v1/completions", json=completion())).status_code == 200


async def _read_on(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        pass


async def test_slowly_reading_client_keeps_its_stream() -> None:
    """Slower than it comes, but each piece in time: it has every event."""
    loop = asyncio.get_running_loop()
    async with serving(talkative(), client_limit_s=30.0) as server:
        client = await connected(server)
        await loop.sock_sendall(client, request_of(BODY))
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += await loop.sock_recv(client, 1 << 12)
            await asyncio.sleep(0.001)
        client.close()
    assert data.count(b'"token_ids":[') >= 2_000 / 20


async def test_steadily_reading_client_receives_whole_answer() -> None:
    """The bug: a large answer that took longer than the limit in all was cut off, though it was read all the while."""
    loop = asyncio.get_running_loop()
    async with serving(talkative()) as server:
        client = await connected(server)
        await loop.sock_sendall(client, request_of({**BODY, "stream": False}))
        head, _, data = (await loop.sock_recv(client, 1 << 12)).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        began_s = loop.time()
        while len(data) < length:
            await asyncio.sleep(4 * LIMIT_S * (1 << 12) / length)
            data += await loop.sock_recv(client, 1 << 12)
        assert loop.time() - began_s > 2 * LIMIT_S, "as slow as it is meant to be"
        client.close()
    assert json.loads(data)["usage"]["completion_tokens"] == 2_000


HALVES = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost:",
    "half a body": request_of(completion())[:-3],
    "no body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n",
}


@pytest.mark.timeout(60)  # without the limit the client waits for ever
@pytest.mark.parametrize("sent", list(HALVES))
async def test_client_with_incomplete_request_is_cut_off(sent: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    async with serving(engine := FakeEngine()) as server, httpx.AsyncClient(base_url=url_of(server)) as other:
        client = await connected(server)
        await loop.sock_sendall(client, HALVES[sent])
        with contextlib.suppress(ConnectionResetError):
            assert await loop.sock_recv(client, 1) == b""
        client.close()
        samples = await sample(other)
        assert samples['latebranch_clients_cut_off_total{at="sending"}'] == bool(HALVES[sent]), (
            "a client that sent nothing is not counted"
        )
        assert ("cut off" in caplog.text) == bool(HALVES[sent])
        assert not any('status="5xx"' in name for name in samples)
        await until(lambda: len(server.server_state.connections) == 1)
    assert engine.requests == []
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("before", [request_of(completion(max_tokens=3)), b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_incomplete_second_request_is_cut_off(before: bytes) -> None:
    """The bug: what had come before the answer was complete was waited for without end."""
    loop = asyncio.get_running_loop()
    async with serving(FakeEngine()) as server:
        client = await connected(server)
        await loop.sock_sendall(client, before + HALVES["half a body"])
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(10):
                await _read_on(client)
        client.close()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)


@pytest.mark.parametrize("sent", list(HALVES))
async def test_disconnect_during_request_is_no_failure(sent: str, caplog: pytest.LogCaptureFixture) -> None:
    """The bug: it was logged as an unhandled error and counted as a 500."""
    loop = asyncio.get_running_loop()
    async with serving(FakeEngine(), client_limit_s=30.0) as server, httpx.AsyncClient(base_url=url_of(server)) as other:
        client = await connected(server)
        await until(lambda: server.server_state.connections)
        await loop.sock_sendall(client, HALVES[sent])
        client.close()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        assert not any('status="5xx"' in name for name in await sample(other))
    assert "Traceback" not in caplog.text


async def test_kept_connection_is_usable_after_limit() -> None:
    """What a client was slow at is counted from the first byte of each request."""
    async with serving(FakeEngine()) as server, httpx.AsyncClient(base_url=url_of(server)) as client:
        for _ in range(3):
            assert (await client.get("/live")).status_code == 200
            await asyncio.sleep(LIMIT_S * 0.7)
        assert 'at="sending"} 0.0' in (await client.get("/metrics")).text


async def test_a_server_with_endless_patience_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http, "_watch_request", lambda _: None)
    monkeypatch.setattr(Http, "pause_writing", lambda self: self.flow.pause_writing())
    engine = talkative()
    loop = asyncio.get_running_loop()
    async with serving(engine, client_limit_s=0.05) as server:
        silent, deaf = await connected(server), await connected(server)
        await loop.sock_sendall(deaf, request_of(BODY))
        await asyncio.sleep(0.5)
        assert len(server.server_state.connections) == 2
        silent.close()
        deaf.close()
