"""The composition root: settings, engine, tokenizer, layers and routes become one ASGI app."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from engine.core.service import EngineError, EngineService
from engine.weights import resolve
from server.engine_process import engine_process, tokenizer_of
from server.http.auth import OPEN_PATHS, ApiKeyGate
from server.http.browsers import HostGate, OriginGate
from server.http.errors import ApiError, answer_api_error, answer_http_exception, answer_validation_error
from server.http.hosts import is_bound_to_loopback
from server.http.middleware import BodyLimit, ErrorBoundary, HeadAsGet, HeaderLimit, RequestContext
from server.http.rate_limits import RATE_HEADERS, RateLimiter, RateLimits
from server.kv_events import KvEventPublisher
from server.metrics.http import HttpMeter
from server.openapi import declare_keys
from server.routes import anthropic, docs, generation, infill, models, operations, playground, responses, tokens
from server.routes.json_bodies import IGNORED_HEADER
from server.runtime import Runtime
from server.settings import Settings
from server.text.codec import Tokenizer

log = logging.getLogger(__name__)

_MAX_HEADERS = 100


def create_app(
    settings: Settings,
    engine: EngineService | None = None,
    tokenizer: Tokenizer | None = None,
    on_fatal: Callable[[str], None] | None = None,
) -> FastAPI:
    """Return the app. Without an `engine` it starts a worker process; without a `tokenizer` it loads that of the weights.

    `on_fatal` is called on the event loop with the reason if the server can never serve (again).
    """
    fetch = partial(resolve, settings.model) if engine is None and tokenizer is None else None
    load = partial(tokenizer_of, settings.model) if tokenizer is None else lambda: tokenizer
    publisher = _publisher(settings) if engine is None else None
    service = engine or engine_process(settings, None if publisher is None else publisher.publish)
    runtime = Runtime(settings, service, load, on_fatal, fetch)
    app = FastAPI(title="latebranch", version=version("latebranch"), lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.runtime, app.state.publisher = runtime, publisher
    for routes in (generation, responses, anthropic, infill, models, tokens, operations):
        app.include_router(routes.router)
    pages, paths = _add_pages(app, settings)
    _add_layers(app, runtime, pages, paths)
    if settings.all_api_keys:
        declare_keys(app, OPEN_PATHS)
    _add_error_answers(app)
    return app


def _add_pages(app: FastAPI, settings: Settings) -> tuple[frozenset[str], frozenset[str]]:
    """Add the enabled pages; return their paths, and the paths of the pages with all their files."""
    enabled = [playground] if settings.playground else []
    if settings.docs and docs.is_installed():
        enabled.append(docs)
    elif settings.docs:
        log.warning("there is no /docs: the package fastapi-swagger is not installed")
    for page in enabled:
        app.include_router(page.router)
    return frozenset[str]().union(*(page.PAGES for page in enabled)), frozenset[str]().union(*(page.PATHS for page in enabled))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    runtime: Runtime = app.state.runtime
    runtime.begin()
    yield
    await runtime.stop(0.0)
    runtime.responses.close()
    if app.state.publisher is not None:
        await asyncio.to_thread(app.state.publisher.close)  # after the worker, whose end it publishes
    if (tracing := getattr(app.state, "tracing", None)) is not None:
        await asyncio.to_thread(tracing.shutdown)  # sends the remaining spans


def _add_layers(app: FastAPI, runtime: Runtime, pages: frozenset[str], paths_of_pages: frozenset[str]) -> None:
    """Add the layers from the innermost to the outermost."""
    settings = runtime.settings
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, max_unfinished_bytes=settings.max_unfinished_body_bytes)
    limits = RateLimits(settings.max_requests_per_minute, settings.max_concurrent_requests, settings.max_tokens_per_minute)
    metrics = runtime.metrics
    app.add_middleware(RateLimiter, limits=limits, metrics=metrics.keys, on_refusal=metrics.requests.refuse)
    if settings.all_api_keys:
        app.add_middleware(ApiKeyGate, keys=settings.all_api_keys, also_open=paths_of_pages)
    app.add_middleware(HeaderLimit, max_headers=_MAX_HEADERS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After", "X-Should-Retry", IGNORED_HEADER, *RATE_HEADERS],
        )
    app.add_middleware(OriginGate, origins=settings.cors_origins, pages=pages)
    if is_bound_to_loopback(settings.host):
        app.add_middleware(HostGate, names=(*settings.allowed_hosts, settings.host))
    elif settings.allowed_hosts:
        app.add_middleware(HostGate, names=settings.allowed_hosts)
    app.add_middleware(ErrorBoundary)
    if settings.otlp_endpoint is not None:
        from server.http.otel import Tracing, otlp_provider  # here, because it is an extra

        app.state.tracing = otlp_provider(settings.otlp_endpoint)
        app.add_middleware(Tracing, provider=app.state.tracing, model_name=settings.served_name)
    app.add_middleware(HttpMeter, metrics=runtime.metrics.http)
    app.add_middleware(RequestContext)


def _add_error_answers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(EngineError, answer_api_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(HTTPException, answer_http_exception)


def _publisher(settings: Settings) -> KvEventPublisher | None:
    if settings.kv_events is None:
        return None
    return KvEventPublisher(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic or "")
