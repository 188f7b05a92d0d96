"""GET /v1/models and GET /v1/models/{id}."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request

from engine.core.service import EngineUnavailable
from server.generation.encoding import require_served
from server.http.anthropic_errors import is_anthropic
from server.routes.common import ERRORS, runtime_of
from server.runtime import Runtime
from server.schemas.answer import AnthropicModel, AnthropicModelList, ModelCard, ModelList

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", responses={status: ERRORS[status] for status in (401, 403, 500)})
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """List the served model, under each of its names, and its adapters; with anthropic-version in Anthropic's format."""
    runtime = runtime_of(request)
    cards = [_card(runtime, name) for name in (*runtime.settings.served_names, *runtime.settings.adapters)]
    if is_anthropic(request.scope):
        return AnthropicModelList(data=[*map(_anthropic, cards)], first_id=cards[0].id, last_id=cards[-1].id)
    return ModelList(data=cards)


@router.get("/models/{model_id:path}", responses={status: ERRORS[status] for status in (401, 403, 404, 500, "default")})
async def get_model(model_id: str, request: Request) -> ModelCard | AnthropicModel:
    """Describe the served model, with the header anthropic-version in Anthropic's format."""
    runtime = runtime_of(request)
    require_served(runtime, model_id)
    card = _card(runtime, model_id)
    return _anthropic(card) if is_anthropic(request.scope) else card


def _card(runtime: Runtime, name: str) -> ModelCard:
    try:
        max_model_len = runtime.engine.model.max_model_len
    except EngineUnavailable:
        max_model_len = None
    parent = runtime.settings.served_name if name in runtime.settings.adapters else None
    return ModelCard(id=name, created=runtime.created_s, parent=parent, max_model_len=max_model_len)


def _anthropic(card: ModelCard) -> AnthropicModel:
    created_at, longest = datetime.fromtimestamp(card.created, UTC), card.max_model_len
    return AnthropicModel(id=card.id, display_name=card.id, created_at=created_at, max_input_tokens=longest, max_tokens=longest)
