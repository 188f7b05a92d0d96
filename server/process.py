"""The server process: uvicorn around the app, signals, draining and the exit status.

SIGTERM, SIGINT    stop listening, admit nothing more, drain, end
a second signal    end now
the engine fails   end with a reason and a status that is not 0
"""

import asyncio
import contextlib
import gc
import json
import logging
import math
import resource
import shlex
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine.core.refusal import Refusal
from server.app import create_app
from server.http.protocol import http_protocol
from server.runtime import Runtime
from server.settings import Settings

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_BYTES_S = 5.0  # for answers on their way out, after the drain has ended the requests
_ACCEPTED_AT_ONCE = 64  # connections that asyncio accepts at a time, before it closes any
_OTHER_DESCRIPTORS = 128 + 4 * _ACCEPTED_AT_ONCE  # files, the worker, and connections that are being accepted or closed
_BACKLOG = 1024  # connections that wait in the kernel to be accepted; beyond it a client tries again after a second
_FORCED_S = 0.5  # _LAST_BYTES_S after a second signal


class Server(uvicorn.Server):
    """uvicorn that drains the engine together with the connections, and does not raise signals again."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, drain_s: float) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._drain_s = drain_s
        self._latest_signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. uvicorn's own handler raises them again at the end, which prevents a clean exit."""
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at the second signal, at once."""
        del frame
        self.force_exit = self.should_exit
        self.should_exit = True
        self._latest_signal = sig

    @property
    def url(self) -> str:
        """The address to open in a browser on this machine."""
        names = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
        host = names.get(self.config.host, f"[{self.config.host}]" if ":" in self.config.host else self.config.host)
        ports = [one.getsockname()[1] for server in self.servers for one in server.sockets]
        return f"{'https' if self.config.is_ssl else 'http'}://{host}:{next(iter(ports), self.config.port)}"

    def give_up(self) -> None:
        """Stop because the engine failed for good."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long queue: asyncio would also accept as many connections at a time as the queue is long."""
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine while uvicorn waits for the connections. The engine's ABORTs end answers that outlast the drain."""
        if num_answers := len(self.server_state.tasks):
            again = "Ctrl-C again ends" if self._latest_signal == signal.SIGINT else "a second signal ends"
            waited = "1 answer gets" if num_answers == 1 else f"{num_answers} answers get"
            log.info("stopping: %s %g s to finish; %s them now", waited, self._drain_s, again)
        draining = asyncio.create_task(self._runtime.stop(self._drain_s))
        await super().shutdown(sockets)
        await self._runtime.stop(0.0)
        await draining
        if self.force_exit:  # uvicorn then leaves the lifespan to be cancelled, and logs that as an error
            await self._end_answers()
            await self.lifespan.shutdown()

    async def _end_answers(self) -> None:
        """Give answers a moment to send the end event of the engine. The rest is cut off."""
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=_FORCED_S)


def serve(settings: Settings) -> str | None:
    """Serve until a signal stops the server; return why it could not continue, or None. Raises Refusal."""

    def on_fatal(_: str) -> None:
        server.give_up()

    for text in settings.warnings:
        log.warning("%s", text)
    if settings.all_api_keys:
        counts = Counter(f"{key.name} ({key.role})" for key in settings.all_api_keys)
        log.info("API keys: %s", ", ".join(f"{num} x {name}" if num > 1 else name for name, num in counts.items()))
    app = create_app(settings, on_fatal=on_fatal)
    runtime: Runtime = app.state.runtime
    runtime.on_loaded = _freeze_loaded
    server = Server(_uvicorn_config(app, settings), runtime, settings.drain_s)
    runtime.on_ready = lambda: log.info("ready: open %s, or %s", server.url, _first_request(server.url, runtime))
    log.info("loading %s; /ready answers 200 once it is served", settings.model)
    server.run()
    if runtime.is_refused:
        raise Refusal(runtime.fatal)
    return runtime.fatal


def _freeze_loaded() -> None:
    """Exempt loaded objects from later collections, which would delay every stream and probe."""
    gc.collect()
    gc.freeze()


def _first_request(url: str, runtime: Runtime) -> str:
    """Return a command that sends a request to the model."""
    has_template = bool(runtime.codec.info.chat_template)
    body = {"messages": [{"role": "user", "content": "Hello"}]} if has_template else {"prompt": "Once upon a time"}
    path = "/v1/chat/completions" if has_template else "/v1/completions"
    key = ' -H "Authorization: Bearer $KEY"' if runtime.settings.all_api_keys else ""
    text = json.dumps({"model": runtime.settings.served_name, **body})
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(text)}"


def _max_connections(wanted: int) -> int:
    """Return the wanted number of connections, reduced below the process's limit of file descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, max(most // 4, most - _OTHER_DESCRIPTORS)))


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    runtime: Runtime = app.state.runtime
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,  # our own, set up by the command line
        access_log=False,  # RequestContext writes it, with the request's id
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ws="none",
        lifespan="on",
        http=http_protocol(settings.client_limit_s, _max_connections(settings.max_connections), runtime.metrics.http.cut_off_at),
        backlog=_ACCEPTED_AT_ONCE,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=math.ceil(settings.drain_s + _LAST_BYTES_S),
    )
