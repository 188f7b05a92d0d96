"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the served model's tokenizer, for clients that count tokens."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.core.types import group_of
from server.generation.encoding import encoded, encoded_chat, encoded_text, longest_text, require_served
from server.http.auth import tenant_of
from server.http.errors import InvalidRequest
from server.routes.common import ERRORS, runtime_of, unless_gone
from server.routes.json_bodies import StrictRoute
from server.runtime import Runtime
from server.schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from server.text.tokenizer_info import TokenizerInfo
from server.tool_calls.request_tools import require_shown

router = APIRouter(tags=["tokenizer"])
_bodies = APIRouter(route_class=StrictRoute, tags=["tokenizer"])


@_bodies.post("/tokenize", response_model=TokenizeAnswer, responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a text or of a conversation, as the generation endpoints encode them."""
    return await unless_gone(request, _tokenized(runtime_of(request), body, _key_of(request)))


@_bodies.post("/detokenize", response_model=DetokenizeAnswer, responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens."""
    return await unless_gone(request, _detokenized(runtime_of(request), body, _key_of(request)))


@router.get("/tokenizer_info", responses={status: ERRORS[status] for status in (401, 403, 500, 503)})
async def get_tokenizer_info(request: Request) -> TokenizerInfo:
    """Describe the tokenizer."""
    return runtime_of(request).codec.info


router.include_router(_bodies)


def _key_of(request: Request) -> str:
    return group_of(tenant_of(request, None))


async def _tokenized(runtime: Runtime, body: TokenizeRequest, key: str) -> Response:
    if body.model is not None:
        require_served(runtime, body.model)
    codec = runtime.codec
    if body.messages is not None:
        require_shown(runtime.tool_support, body.messages, body.tools or ())
        ids = await encoded_chat(runtime, key, body.messages, body.tools or (), body.form)
    else:
        ids = await encoded_text(runtime, key, body.prompt or "", "prompt", body.add_special_tokens is not False)
    strings = None
    if body.return_token_strs:
        strings = await encoded(runtime, key, len(ids), lambda: codec.token_strings(ids), "prompt")
    longest = longest_text(runtime.engine.model)
    answer = TokenizeAnswer(count=len(ids), max_model_len=longest, tokens=list(ids), token_strs=strings)
    return JSONResponse(answer.model_dump())


async def _detokenized(runtime: Runtime, body: DetokenizeRequest, key: str) -> Response:
    if body.model is not None:
        require_served(runtime, body.model)
    codec, vocab_size = runtime.codec, runtime.engine.model.vocab_size
    if (last := max(body.tokens, default=0)) >= vocab_size:
        raise InvalidRequest(f"token id {last} is outside the vocabulary of {vocab_size}", "tokens")
    text = await encoded(runtime, key, len(body.tokens), lambda: codec.decode(body.tokens, skips_special=False), "tokens")
    return JSONResponse(DetokenizeAnswer(prompt=text).model_dump())
