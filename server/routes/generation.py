"""POST /v1/completions and POST /v1/chat/completions."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from msgspec.structs import replace
from starlette.responses import Response

from server.answer_formats.chat import ChatFormat
from server.answer_formats.common import AnswerOptions, Format, joined, streamed
from server.answer_formats.completion import CompletionFormat
from server.generation.best_of import best_of
from server.generation.generation import Generation
from server.generation.submit import chat_generation, completion_generation
from server.http.auth import tenant_of
from server.http.errors import InvalidRequest
from server.http.request_log import log_request
from server.http.streaming import EventStream
from server.routes.common import ERRORS, runtime_of, unless_gone
from server.routes.json_bodies import StrictRoute
from server.schemas.chat import ChatCompletion, ChatRequest
from server.schemas.common import GenerationRequest
from server.schemas.completion import Completion, CompletionRequest

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["generation"])

Generate = Callable[[], Awaitable[Generation]]

ALSO_A_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.post("/completions", response_model=Completion, responses={**ALSO_A_STREAM, **ERRORS})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/v1/completions", body)
    form = CompletionFormat(AnswerOptions.of(body))
    generate = partial(completion_generation, runtime, body, tenant_of(request, body.user))
    return await unless_gone(request, generated_response(body, generate, form))


@router.post("/chat/completions", response_model=ChatCompletion, responses={**ALSO_A_STREAM, **ERRORS})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/v1/chat/completions", body)
    form = ChatFormat(AnswerOptions.of(body), bool(body.offered_tools), bool(body.functions))
    generate = partial(chat_generation, runtime, body, tenant_of(request, body.user))
    try:
        return await unless_gone(request, generated_response(body, generate, form))
    except InvalidRequest as error:
        if body.functions and error.param == "tools":
            error.param = "functions"  # the name that the client sent
        raise


async def generated_response(body: GenerationRequest, generate: Generate, form: Format) -> Response:
    """Return the answer or its stream. The generation is closed in every case."""
    generation = await generate()
    is_handed_over = False
    try:
        response = await (_stream(body, generation, form) if body.stream else _whole(body, generation, form))
        is_handed_over = bool(body.stream)
        return response
    finally:
        if not is_handed_over:
            await generation.close()


async def _whole(body: GenerationRequest, generation: Generation, form: Format) -> Response:
    pieces = await joined(generation.pieces(), generation.num_choices)
    kept = best_of([choice.mean_logprob for choice in generation.choices], body.num_samples, body.num_answers)
    answer = form.answer([replace(pieces[at], index=index) for index, at in enumerate(kept)], generation)
    return JSONResponse(answer.model_dump(mode="json", exclude_unset=True))


async def _stream(body: GenerationRequest, generation: Generation, form: Format) -> Response:
    """Return the stream once the first piece exists. An earlier failure is a plain HTTP error."""
    pieces = generation.pieces()
    first = await anext(pieces)
    return EventStream(streamed(first, pieces, form, generation, body.stream_usage), generation.close, form.ends_with_done)
