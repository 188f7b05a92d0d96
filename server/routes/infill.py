"""Routes for editors: POST /infill, llama.cpp's, and POST /v1/fim/completions, Mistral's."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer_formats.chat import ChatFormat
from server.answer_formats.common import AnswerOptions
from server.answer_formats.infill import InfillFormat
from server.generation.encoding import longest_text
from server.generation.line_limits import LineLimits
from server.generation.submit import completion_generation, infill_generation
from server.http.auth import tenant_of
from server.http.request_log import log_request
from server.routes.common import ERRORS, runtime_of, unless_gone
from server.routes.generation import ALSO_A_STREAM, generated_response
from server.routes.json_bodies import StrictRoute
from server.schemas.chat import ChatCompletion
from server.schemas.fim import FimRequest
from server.schemas.infill import InfillAnswer, InfillRequest

router = APIRouter(route_class=StrictRoute, tags=["generation"])


@router.post("/infill", response_model=InfillAnswer, responses={**ALSO_A_STREAM, **ERRORS})
async def fill_in(body: InfillRequest, request: Request) -> Response:
    """Write the text between a prefix and a suffix."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/infill", body)
    limits = LineLimits(body.n_indent or 0, (body.t_max_predict_ms or 0) / 1000)
    form = InfillFormat(
        body, body.model or runtime.settings.served_name, limits, partial(runtime.codec.decode, skips_special=False)
    )
    filling = body.to_generation(runtime.settings.served_name, longest_text(runtime.engine.model))
    generate = partial(infill_generation, runtime, body, filling, tenant_of(request, body.user), limits)
    return await unless_gone(request, generated_response(filling, generate, form))


@router.post("/v1/fim/completions", response_model=ChatCompletion, responses={**ALSO_A_STREAM, **ERRORS})
async def complete_fim(body: FimRequest, request: Request) -> Response:
    """Write the text between a prompt and a suffix. The answer is a chat's."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/v1/fim/completions", body)
    filling = body.to_completion()
    generate = partial(completion_generation, runtime, filling, tenant_of(request, body.user), default_tokens=None)
    return await unless_gone(request, generated_response(filling, generate, ChatFormat(AnswerOptions.of(filling))))
