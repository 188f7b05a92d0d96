"""Endpoints for operators: /live, /ready, /health, /load, /v1/loads, /metrics, /version."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from server.metrics import CONTENT_TYPE
from server.routes.common import ERRORS, runtime_of
from server.routes.health import HealthReport, health_report
from server.schemas.answer import Load, Loads, Version, WorkerLoad

router = APIRouter(tags=["operations"])

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_CLOSED: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 403)}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthReport, "description": "The engine is not in that state; the body gives the state"}
}


@router.get("/live")
async def live() -> dict[str, str]:
    """Answer 200 as long as the process serves."""
    return {"status": "live"}


@router.get("/ready", response_model=HealthReport, responses={**_NOT_READY, **_CLOSED})
async def ready(request: Request) -> Response:
    """Answer 200 if a request would be accepted now; 503 also without heartbeats, so that a balancer picks another replica."""
    runtime = runtime_of(request)
    return JSONResponse(health_report(runtime, has_detail=True).model_dump(), 200 if runtime.is_ready else 503)


@router.get("/health", response_model=HealthReport, responses={**_NOT_READY})
async def health(request: Request) -> Response:
    """Answer 200 if the engine is ready and its last heartbeat is recent."""
    runtime = runtime_of(request)
    return JSONResponse(health_report(runtime, has_detail=False).model_dump(), 200 if runtime.is_healthy else 503)


@router.get("/load", responses=_CLOSED)
async def load(request: Request) -> Load:
    """Answer with the number of open requests, which a load balancer compares between replicas."""
    return Load(server_load=runtime_of(request).metrics.http.num_open)


@router.get("/v1/loads", responses=_CLOSED)
async def loads(request: Request) -> Loads:
    """Answer with the engine's load in SGLang's form, for gateways. `include` is accepted: the report has all that there is."""
    load = runtime_of(request).metrics.steps.load
    one = WorkerLoad(
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.num_used_slots,
        max_total_num_tokens=load.num_slots,
        token_usage=load.cache_usage,
    )
    return Loads(timestamp=datetime.now(UTC).isoformat(), loads=[one])


@router.get("/metrics", response_class=Response, responses={**_TEXT, **_CLOSED})
async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus's text format."""
    return Response(runtime_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version", responses=_CLOSED)
async def get_version() -> Version:
    """Answer with the version of the server."""
    return Version(version=version("latebranch"))
