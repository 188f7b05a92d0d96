"""POST /v1/responses, and the stored responses: GET, DELETE and their input items."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine.core.service import EngineError
from server.answer_formats.responses import ResponsesFormat
from server.generation.generation import Generation
from server.generation.sample import Piece
from server.generation.submit import chat_generation
from server.http.auth import owner_of, tenant_of
from server.http.errors import ApiError, InvalidRequest, UnknownResponse, as_api_error
from server.http.request_log import log_request
from server.http.streaming import EventStream
from server.routes.common import ERRORS, runtime_of, unless_gone
from server.routes.generation import ALSO_A_STREAM
from server.routes.json_bodies import StrictRequest, StrictRoute
from server.schemas.messages import MAX_MESSAGES
from server.schemas.responses import ResponsesRequest
from server.schemas.responses_answer import DeletedResponse, InputItems, ResponsesAnswer, ResponsesEvent
from server.stored_responses.conversation import Conversation, items_of
from server.stored_responses.store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

router = APIRouter(tags=["responses"])
_bodies = APIRouter(route_class=StrictRoute, tags=["responses"])
_ONE = "/v1/responses/{response_id}"
_STORED: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 403, 404, 500, "default")}


@_bodies.post("/v1/responses", response_model=ResponsesAnswer, responses={**ALSO_A_STREAM, **ERRORS})
async def create_response(body: ResponsesRequest, request: StrictRequest) -> Response:
    """Answer a text or a conversation in the format of OpenAI's Responses API."""
    runtime = runtime_of(request)
    log_request(runtime.settings.log_requests, "/v1/responses", body)
    request.ignored += body.ignored(runtime.template_variables)
    return await unless_gone(request, _created(body, request))


router.include_router(_bodies)


@router.get(_ONE, response_model=ResponsesAnswer, responses=_STORED)
async def get_response(
    response_id: str,
    request: Request,
    stream: Annotated[bool, Query(description="Streams of stored responses are not supported.")] = False,
) -> Response:
    """Return a stored response."""
    if stream:
        raise InvalidRequest("stream: stored responses are not streamed; accepted: false", "stream")
    stored = await _stored(request, response_id)
    return Response(stored.answer, media_type="application/json")


@router.delete(_ONE, responses=_STORED)
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Remove a stored response. Responses that continue it cannot be continued after that."""
    if not await runtime_of(request).responses.delete(owner_of(request), response_id):
        raise _unknown(response_id)
    return DeletedResponse(id=response_id)


@router.get(f"{_ONE}/input_items", responses=_STORED)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="The id of the item before the page.")] = None,
) -> InputItems:
    """List the items from which a stored response was generated, items of earlier responses included."""
    chain = await runtime_of(request).responses.chain(owner_of(request), response_id, MAX_MESSAGES)
    if isinstance(chain, str):
        raise _unknown(chain)
    earlier = [item for one in chain[:-1] for item in items_of(one.input, one.answer)]
    items = [*earlier, *json.loads(chain[-1].input)]
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest("after: no item of this response has this id", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItems(data=page, first_id=first_id, last_id=last_id, has_more=begin + limit < len(items))


async def _created(body: ResponsesRequest, request: Request) -> Response:
    """Return the answer or its stream. The generation is closed in every case."""
    runtime, owner = runtime_of(request), owner_of(request)
    conversation = await Conversation.of(body, runtime.responses, owner)
    chat = conversation.chat()
    with conversation.own_names():
        generation = await chat_generation(runtime, chat, tenant_of(request, body.user), "input")
    form = ResponsesFormat(body, runtime.engine.model.defaults, body.is_stored and runtime.responses.limits.num_responses > 0)
    keeper = _Keeper(runtime.responses, owner, conversation)
    is_handed_over = False
    try:
        pieces = generation.pieces()
        if body.stream:
            first = await anext(pieces)  # an earlier failure is a plain HTTP error
            response: Response = EventStream(_events(first, pieces, form, generation, keeper), generation.close)
            is_handed_over = True
            return response
        async for piece in pieces:
            for _ in form.events(piece):
                pass
        return JSONResponse(await keeper.kept(form, form.answer(generation)))
    finally:
        if not is_handed_over:
            await generation.close()


async def _events(
    first: Piece, rest: AsyncIterator[Piece], form: ResponsesFormat, generation: Generation, keeper: "_Keeper"
) -> AsyncIterator[ResponsesEvent]:
    """Yield the events of a whole stream, also of a failure."""
    try:
        for event in form.events(first):
            yield event
        async for piece in rest:
            for event in form.events(piece):
                yield event
        last = form.last_event(generation)
        await keeper.kept(form, form.answer(generation))
        yield last
    except Exception as error:
        if not isinstance(error, ApiError | EngineError):
            log.exception("unhandled error in a stream")
        for event in form.failure(as_api_error(error)):
            yield event


class _Keeper:
    """Stores the response of one conversation."""

    def __init__(self, store: ResponseStore, owner: str, conversation: Conversation) -> None:
        self._store = store
        self._owner = owner
        self._conversation = conversation

    async def kept(self, form: ResponsesFormat, answer: ResponsesAnswer) -> dict[str, Any]:
        """Store the answer if the request allows it; return it as JSON."""
        body = self._conversation.request
        shown = answer.model_dump(mode="json", exclude_unset=True)
        if body.is_stored:
            texts = (self._conversation.stored_input(), json.dumps(shown, ensure_ascii=False))
            await self._store.add(self._owner, StoredResponse(form.id, body.previous_response_id, *texts, form.item_ids))
        return shown


async def _stored(request: Request, response_id: str) -> StoredResponse:
    stored = await runtime_of(request).responses.get(owner_of(request), response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"Response with id '{response_id[:64]}' not found.")
