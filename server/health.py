"""What the probes say of the engine. Live, ready and healthy are apart: the process serves; a request would be taken now; and
the engine has given a sign of life lately (Runtime decides both).
"""

from pydantic import BaseModel

from server.runtime import Runtime


class HealthReport(BaseModel):
    """Body of /ready and /health, whatever their status."""

    status: str
    state: str
    heartbeat_age_s: float | None
    restarts: int


def health_report(runtime: Runtime) -> HealthReport:
    """Return where the engine stands now."""
    engine = runtime.engine.health
    status = "healthy" if runtime.is_healthy else "ready" if runtime.is_ready else "unavailable"
    return HealthReport(status=status, state=engine.state, heartbeat_age_s=engine.heartbeat_age_s, restarts=engine.num_restarts)
