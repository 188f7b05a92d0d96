"""The report of the probes. Live: the process serves. Healthy: the engine's last heartbeat is recent. Ready: a request would be
accepted now, which needs both and a tokenizer (see Runtime).
"""

from pydantic import BaseModel

from engine.core.service import EngineState
from server.http.errors import MAX_MESSAGE_CHARS, clipped
from server.runtime import Runtime


class HealthReport(BaseModel):
    """Body of /ready and /health with any status."""

    status: str
    state: str
    heartbeat_age_s: float | None
    restarts: int
    reason: str | None = None


def health_report(runtime: Runtime, has_detail: bool) -> HealthReport:
    """Return the engine's state. `has_detail` includes the engine's own error text, which may name paths."""
    engine = runtime.engine.health
    is_silent = engine.state is EngineState.READY
    status = "ready" if runtime.is_ready else "healthy" if runtime.is_healthy else "silent" if is_silent else "unavailable"
    return HealthReport(
        status=status,
        state=engine.state,
        heartbeat_age_s=engine.heartbeat_age_s,
        restarts=engine.num_restarts,
        reason=None if runtime.is_ready else _reason(runtime, has_detail),
    )


def _reason(runtime: Runtime, has_detail: bool) -> str:
    """Return why no request would be accepted now."""
    engine = runtime.engine.health
    if engine.state is not EngineState.READY:
        detail = engine.detail if has_detail else ""
        return clipped(f"the engine is {engine.state}: {detail}".rstrip(": "), MAX_MESSAGE_CHARS)
    if runtime.is_healthy:
        return "the server is not ready yet, or shuts down"
    if engine.heartbeat_age_s is None:
        return "the engine has sent no heartbeat yet"
    return f"the engine has sent no heartbeat for {engine.heartbeat_age_s:.1f} s"
