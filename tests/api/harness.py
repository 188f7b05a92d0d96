"""An app over a fake engine, spoken to in process or through a real server on a loopback port."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from engine.core.service import EngineService
from server.app import create_app
from server.runtime import Runtime
from server.settings import Settings
from server.text.codec import Tokenizer
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import byte_level

MODEL = "fake"


def make_app(engine: EngineService, tokenizer: Tokenizer | None = None, **settings: Any) -> FastAPI:
    return create_app(Settings(model=MODEL, **settings), engine, tokenizer or byte_level())


async def until(is_true: Any) -> None:
    """Wait for something that other tasks bring about."""
    for _ in range(30_000):
        if is_true():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come about")


@contextlib.asynccontextmanager
async def in_process(engine: EngineService, waits: bool = True, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an app in this event loop; `settings` may have a `tokenizer` too."""
    app = make_app(engine, **settings)
    runtime: Runtime = app.state.runtime
    async with app.router.lifespan_context(app):
        if waits:
            await until(lambda: runtime.is_ready)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def over_loopback(engine: FakeEngine, **settings: Any) -> AsyncIterator[str]:
    """Yield the address of a real server that runs in this event loop."""
    app = make_app(engine, **settings)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started and app.state.runtime.is_ready)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


def data_of(body: str) -> list[Any]:
    """Return the objects of an event stream, which must end with [DONE] and have nothing but data lines."""
    events = body.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events), body
    *objects, done = [event.removeprefix("data: ") for event in events]
    assert done == "[DONE]"
    return [json.loads(item) for item in objects]


async def sample(client: httpx.AsyncClient, path: str = "/metrics") -> dict[str, float]:
    """Return the samples of a scrape by name and labels."""
    lines = (await client.get(path)).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
