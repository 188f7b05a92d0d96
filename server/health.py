"""What the probes say of the engine. Live, healthy and ready are apart: the process serves; the engine has given a sign of life
lately; and a request would be taken now, which needs both and a tokenizer (Runtime decides).
"""

from pydantic import BaseModel

from engine.service import EngineState
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
    is_silent = engine.state is EngineState.READY
    status = "ready" if runtime.is_ready else "healthy" if runtime.is_healthy else "silent" if is_silent else "unavailable"
    return HealthReport(status=status, state=engine.state, heartbeat_age_s=engine.heartbeat_age_s, restarts=engine.num_restarts)
