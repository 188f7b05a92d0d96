"""POST /v1/messages and POST /v1/messages/count_tokens: chats in the format of Anthropic's Messages API."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.core.types import group_of
from server.answer_formats.anthropic import MessagesFormat
from server.generation.anthropic_chat import TranslatedChat, translated
from server.generation.encoding import encoded_chat, require_served
from server.generation.generation import Generation
from server.generation.submit import chat_generation
from server.http.auth import tenant_of
from server.http.errors import InvalidRequest
from server.http.request_log import log_request
from server.routes.common import ERRORS, runtime_of, unless_gone
from server.routes.generation import ALSO_A_STREAM, generated_response
from server.routes.json_bodies import StrictRequest, StrictRoute
from server.runtime import Runtime
from server.schemas.answer import MessagesError
from server.schemas.anthropic import CountRequest, MessagesAnswer, MessagesRequest, TokenCount
from server.tool_calls.request_tools import require_shown

router = APIRouter(prefix="/v1/messages", route_class=StrictRoute, tags=["generation"])

_ERRORS: dict[int | str, dict[str, Any]] = {
    529 if status == 503 else status: {**error, "model": MessagesError} for status, error in ERRORS.items()
}


@router.post("", response_model=MessagesAnswer, responses={**ALSO_A_STREAM, **_ERRORS})
async def create_message(body: MessagesRequest, request: StrictRequest) -> Response:
    """Answer a conversation in the format of Anthropic's Messages API."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/v1/messages", body)
    variables = runtime.template_variables
    request.ignored += body.ignored(variables)
    chat = translated(body, variables)
    limit = min(body.max_tokens, runtime.settings.max_answer_tokens or body.max_tokens)
    generate = partial(_generation, runtime, chat, tenant_of(request, chat.chat.user), limit)
    return await unless_gone(request, generated_response(chat.chat, generate, MessagesFormat(body.model, limit)))


@router.post("/count_tokens", response_model=TokenCount, responses=_ERRORS)
async def count_tokens(body: CountRequest, request: StrictRequest) -> Response:
    """Return the number of tokens in the prompt of a conversation."""
    runtime = runtime_of(request)
    variables = runtime.template_variables
    request.ignored += body.ignored(variables)
    return await unless_gone(request, _count(runtime, translated(body, variables), group_of(tenant_of(request, None))))


async def _generation(runtime: Runtime, chat: TranslatedChat, tenant: str, limit: int) -> Generation:
    try:
        return await chat_generation(runtime, chat.chat, tenant, most_tokens=limit)
    except InvalidRequest as error:
        raise chat.named(error) from error


async def _count(runtime: Runtime, chat: TranslatedChat, key: str) -> Response:
    body = chat.chat
    require_served(runtime, body.model)
    try:
        require_shown(runtime.tool_support, body.messages, body.offered_tools)
        ids = await encoded_chat(runtime, key, body.messages, body.offered_tools, body.form)
    except InvalidRequest as error:
        raise chat.named(error) from error
    return JSONResponse(TokenCount(input_tokens=len(ids)).model_dump())
