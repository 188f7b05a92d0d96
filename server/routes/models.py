"""GET /v1/models and GET /v1/models/{id}."""

from fastapi import APIRouter, Request

from engine.core.service import EngineUnavailable
from server.generation.encoding import require_served
from server.routes.common import ERRORS, runtime_of
from server.runtime import Runtime
from server.schemas.answer import ModelCard, ModelList

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", responses={status: ERRORS[status] for status in (401, 403, 500)})
async def list_models(request: Request) -> ModelList:
    """List the one served model, under each of its names."""
    runtime = runtime_of(request)
    return ModelList(data=[_card(runtime, name) for name in runtime.settings.served_names])


@router.get("/models/{model_id:path}", responses={status: ERRORS[status] for status in (401, 403, 404, 500, "default")})
async def get_model(model_id: str, request: Request) -> ModelCard:
    """Describe the served model."""
    runtime = runtime_of(request)
    require_served(runtime, model_id)
    return _card(runtime, model_id)


def _card(runtime: Runtime, name: str) -> ModelCard:
    try:
        max_model_len = runtime.engine.model.max_model_len
    except EngineUnavailable:
        max_model_len = None
    return ModelCard(id=name, created=runtime.created_s, max_model_len=max_model_len)
