"""Dynamo's LLMEngine over our engine process. Importing this module imports Dynamo, which the extra `dynamo` installs.

Dynamo's frontend sends a request to another worker after CannotConnect and StreamIncomplete, up to its migration limit. Only
the text of InvalidArgument reaches the client.
"""

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, closing, nullcontext
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, Worker, WorkerConfig
from dynamo.common.backend.engine import LlmRegistration
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.llm.exceptions import CannotConnect, DynamoException, InvalidArgument, StreamIncomplete, Unknown

from engine.core.config import BLOCK_TOKENS
from engine.core.refusal import Refusal
from engine.core.service import EngineError
from engine.core.types import ErrorCode, FinishReason, Request, TokenEvent
from engine.utils.run_folder import run_folder
from engine.weights import resolve
from server.dynamo.token_request import engine_request
from server.engine_process import engine_process, tokenizer_of
from server.generation.encoding import longest_text
from server.http.errors import ApiError, InvalidRequest, as_api_error
from server.kv_events import KvEventPublisher
from server.metrics.requests import SampleMeter
from server.runtime import Runtime
from server.settings import Settings
from server.text.codec import Tokenizer
from server.text.token_entry import entry_of

log = logging.getLogger(__name__)

_FINISHES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class DynamoEngine(LLMEngine):
    """Owns the runtime of one worker. Dynamo calls `start` once, `generate` for each request, and `cleanup` at the end.

    `events` publishes changes of the prefix cache at the settings' endpoint, for Dynamo's router.
    """

    def __init__(self, settings: Settings, folder: str, tokenizer: Tokenizer, events: KvEventPublisher | None) -> None:
        self._folder = folder
        process = engine_process(settings, events.publish if events is not None else None)
        self._runtime = Runtime(settings, process, lambda: tokenizer, self._on_fatal)
        self._runtime.on_ready = lambda: self._is_loaded.set()
        self._is_loaded = asyncio.Event()
        self._request_ids: dict[str, str] = {}  # of live requests, by the frontend's id

    @property
    def fatal(self) -> str | None:
        """The reason why the worker cannot continue, once it cannot."""
        return self._runtime.fatal

    @property
    def is_refused(self) -> bool:
        """Whether another start would fail too."""
        return self._runtime.is_refused

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Not used: the command line of latebranch is parsed already."""
        raise NotImplementedError

    def _on_fatal(self, reason: str) -> None:
        """Leave: requests of a failed engine are sent to other workers."""
        log.critical("giving up: %s", reason)
        if not self._is_loaded.is_set():
            self._is_loaded.set()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model and return the model card."""
        del worker_id
        self._runtime.begin()
        await self._is_loaded.wait()
        if self._runtime.fatal is not None:
            raise Unknown(self._runtime.fatal)
        self._token_text = self._runtime.codec.token_text  # also while the worker drains, when the runtime has no codec
        settings, model = self._runtime.settings, self._runtime.engine.model
        card = LlmRegistration(
            context_length=longest_text(model),
            kv_cache_block_size=BLOCK_TOKENS,
            total_kv_blocks=model.num_slots // BLOCK_TOKENS,
            max_num_seqs=settings.max_running,
            max_num_batched_tokens=settings.max_step_tokens,
        )
        return EngineConfig(model=self._folder, served_model_name=settings.served_name, llm=card)

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens of each step. The last chunk has the finish reason. The frontend counts usage."""
        if (request.get("stop_conditions") or {}).get("max_tokens") == 0:  # sent again when all tokens were generated
            yield {"token_ids": [], "index": 0, "finish_reason": "length"}
            return
        try:
            accepted = await self._accepted(request, context.id())
            async with aclosing(self._chunks(accepted, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (ApiError, EngineError) as error:
            raise _raised(as_api_error(error)) from error
        except asyncio.CancelledError:  # the worker stops
            raise StreamIncomplete("the worker is shutting down") from None

    async def _accepted(self, request: Mapping[str, Any], context_id: str) -> Request:
        """Return the engine's request, whose grammar compiles."""
        request_id = f"{context_id}-{uuid.uuid4().hex[:8]}"  # a request may return to its worker before its first stream ends
        accepted = engine_request(request, context_id, request_id, self._runtime.engine.model)
        if accepted.sampling.grammar is not None:
            if self._runtime.reasoning_support.markers is not None:
                raise InvalidRequest("Dynamo does not mark where a constrained text begins behind reasoning", "guided_decoding")
            await self._runtime.grammars.require(accepted.sampling.grammar, "guided_decoding", "")
        return accepted

    async def _chunks(self, accepted: Request, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        runtime, request_id = self._runtime, accepted.request_id
        meter = runtime.metrics.requests.meter(1, accepted.sampling.max_tokens)
        sample = meter.sample(len(accepted.prompt_ids))
        try:
            (stream,) = runtime.engine.submit([accepted])
        except EngineError as error:
            meter.reject(as_api_error(error).code or "engine_error")
            raise
        self._request_ids[context.id()] = request_id
        try:
            async for event in stream:
                if context.is_stopped():
                    return
                if (chunk := self._chunk(event, sample, accepted.sampling.num_logprobs)) is not None:
                    yield chunk
        finally:
            if self._request_ids.get(context.id()) == request_id:  # not a later stream of a request that came back
                del self._request_ids[context.id()]
            runtime.engine.abort(request_id)
            meter.close(FinishReason.ABORT)

    def _chunk(self, event: TokenEvent, sample: SampleMeter, num_top: int | None) -> dict[str, Any] | None:
        """Return Dynamo's form of an event, None for one without tokens. Raises Dynamo's error of a failed request."""
        sample.on_event(event)
        if event.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise _error_of(event)
        sample.keep(len(event.token_ids))
        if event.finish is not None:
            sample.end(event.finish)
        elif not event.token_ids:
            return None
        finish = {"finish_reason": _FINISHES[event.finish]} if event.finish else {}
        return {"token_ids": list(event.token_ids), "index": 0, **finish, **self._logprobs(event, num_top)}

    def _logprobs(self, event: TokenEvent, num_top: int | None) -> dict[str, Any]:
        if num_top is None or not event.logprobs:
            return {}
        rows = [
            (entry_of(self._token_text, token_id, found, num_top, 0), found)
            for token_id, found in zip(event.token_ids, event.logprobs, strict=True)
        ]
        return {
            "log_probs": [entry.logprob for entry, _ in rows],
            "top_logprobs": [
                [
                    {"rank": rank, "token_id": token_id, "token": token.text, "logprob": logprob, "bytes": list(token.raw)}
                    for rank, (token_id, (token, logprob)) in enumerate(zip(found.top_ids, entry.top, strict=False), 1)
                ]
                for entry, found in rows
            ],
        }

    async def abort(self, context: Any) -> None:
        """Free the place of a request whose client is gone, or whose text the frontend has ended at a stop string."""
        if (request_id := self._request_ids.get(context.id())) is not None:
            self._runtime.engine.abort(request_id)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where Dynamo reads which prefixes are cached here. It sends them on to its routers."""
        endpoint = self._runtime.settings.kv_events
        return [] if endpoint is None else [ZmqSource(endpoint)]

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the server's metrics to Dynamo's /metrics of this process."""
        register_engine_registry(metrics, self._runtime.metrics.registry, exclude_prefixes=["python_", "process_"])

    async def cleanup(self) -> None:
        """Let the streams finish for `drain_s`. The others are sent to another worker."""
        await self._runtime.stop(self._runtime.settings.drain_s)


def _error_of(event: TokenEvent) -> DynamoException:
    """Return the exception of a request that the engine ended. A request that may have killed its engine is not sent on."""
    text = event.error or "the worker is shutting down"
    if event.error_code in (ErrorCode.REFUSED, ErrorCode.NO_POSSIBLE_TOKEN):
        return InvalidArgument(text)
    if event.error_code is ErrorCode.DISPLACED:
        return CannotConnect(text)
    return StreamIncomplete(text) if event.error_code in (None, ErrorCode.ENGINE_FAILED) else Unknown(text)


def _raised(error: ApiError) -> DynamoException:
    """Return the exception of a request that was not accepted; another worker may accept it unless the request is wrong."""
    if isinstance(error, InvalidRequest):
        name = error.param
        return InvalidArgument(str(error) if name is None or name in str(error) else f"{name}: {error}")
    return CannotConnect(str(error)) if error.status == 503 else Unknown(str(error))


def serve_dynamo(settings: Settings, namespace: str, has_kv_routing: bool) -> str | None:
    """Serve until a signal stops the worker; return why it could not continue, or None. Raises Refusal and WeightsError.

    `has_kv_routing`: publish changes of the prefix cache. Dynamo does so on all interfaces of the machine.
    """
    folder = str(resolve(settings.model).folder)  # Dynamo would look for a name at a hub
    tokenizer = tokenizer_of(settings.model)
    if not tokenizer.chat_template:
        log.warning("%s has no chat template: Dynamo serves /v1/completions alone", settings.served_name)
    config = WorkerConfig(
        namespace=namespace,
        model_name=folder,
        served_model_name=settings.served_name,
        endpoint_types="chat,completions" if tokenizer.chat_template else "completions",
        discovery_backend="file",
        request_plane="tcp",
        event_plane="zmq",
        enable_kv_routing=has_kv_routing,
    )

    async def run(settings: Settings, events: KvEventPublisher | None) -> DynamoEngine:
        engine = DynamoEngine(settings, folder, tokenizer, events)
        try:
            await Worker(engine, config).run()
        except Exception:
            if engine.fatal is None:
                raise
        return engine

    with run_folder() as sockets:
        endpoint = f"ipc://{sockets}/kv" if has_kv_routing else None
        events = None if endpoint is None else KvEventPublisher(endpoint)
        with nullcontext() if events is None else closing(events):
            engine = asyncio.run(run(settings.model_copy(update={"kv_events": endpoint}), events))
    if engine.is_refused:
        raise Refusal(engine.fatal)
    return engine.fatal
