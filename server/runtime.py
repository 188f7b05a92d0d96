"""The parts of one running server, and its lifecycle: load in the background, serve, drain.

Knows settings, engine, tokenizer and metrics. Does not know HTTP.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from engine.core.service import EngineService, EngineState, EngineUnavailable
from engine.structured_output.grammars import VocabularySource, source_of
from engine.weights import UnsupportedModel, WeightsError
from server.grammar.check import GrammarCheck
from server.http.time_limits import TimeLimits
from server.metrics import ServerMetrics
from server.reasoning.support import ReasoningSupport, reasoning_support
from server.responses.store import ResponseStore, StoreUnusable
from server.settings import Settings, SettingsError
from server.text.codec import TextCodec, Tokenizer
from server.tool_calls.support import ToolSupport, tool_support

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5

T = TypeVar("T")


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`. Unlike an executor's thread, this one does not delay the process's exit: fetching weights can
    take minutes.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():  # done: the waiting task was cancelled
            method(value)

    def post(method: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, method, value)

    def run() -> None:
        try:
            post(outcome.set_result, work())
        except Exception as error:
            log.debug("the loader failed", exc_info=True)
            post(outcome.set_exception, error)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return await outcome


def _store(settings: Settings) -> ResponseStore:
    try:
        return ResponseStore(settings.store_limits, settings.stored_responses_file)
    except StoreUnusable as error:
        raise SettingsError(f"stored_responses_file: {error}") from error


class Runtime:
    """Owns the lifecycle of engine and tokenizer. `fatal` is the reason why the server cannot continue, once it cannot.

    `is_model_refused` is set for an unsupported model: another start would fail too. `on_loaded` is called before it is ready.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineService,
        load_tokenizer: Callable[[], Tokenizer],
        on_fatal: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = ServerMetrics(settings.served_name, settings.max_model_len, lambda: engine.health)
        self.created_s = int(time.time())
        self.time_limits = TimeLimits(settings.first_token_limit_s, settings.request_limit_s)
        self.fatal: str | None = None
        self.is_model_refused = False
        self.on_loaded: Callable[[], None] = lambda: None
        self._load_tokenizer = load_tokenizer
        self._on_fatal = on_fatal
        self._tokenizer: Tokenizer | None = None
        self._codec: TextCodec | None = None
        self._tool_support = ToolSupport()
        self.responses = _store(settings)
        self.grammars = GrammarCheck(self._describe_vocabulary)
        self.reasoning_support = ReasoningSupport()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        engine.add_listener(self.metrics.steps.on_step)
        engine.add_listener(self.metrics.audit.on_step)

    @property
    def codec(self) -> TextCodec:
        """The tokenizer; raises EngineUnavailable until tokenizer and engine are ready, and while stopping."""
        if self._codec is None or self._is_stopping:
            raise EngineUnavailable("the server is shutting down" if self._is_stopping else "the model is loading")
        return self._codec

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads; none until the tokenizer is loaded."""
        return frozenset() if self._codec is None else self._codec.template_variables

    @property
    def tool_support(self) -> ToolSupport:
        """What the chat template supports of tools; raises EngineUnavailable whenever `codec` does."""
        _ = self.codec
        return self._tool_support

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted and answered now. An engine without heartbeats hangs."""
        return self._codec is not None and not self._is_stopping and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is ready and its last heartbeat is recent. The state alone does not show a hang."""
        health = self.engine.health
        if health.state is not EngineState.READY or health.heartbeat_age_s is None:
            return False
        return health.heartbeat_age_s <= self.settings.max_heartbeat_age_s

    async def _describe_vocabulary(self) -> VocabularySource:
        """Return the vocabulary that grammars need, read on the tokenizer's thread."""
        tokenizer, model = self._tokenizer, self.engine.model
        return await self.codec.thread.run(0, lambda: source_of(tokenizer, model.vocab_size, model.eos_token_ids))

    def begin(self) -> None:
        """Start loading and return at once, so that the probes can report its progress."""
        self._task = asyncio.create_task(self._run(), name="runtime")

    async def _run(self) -> None:
        """Load, then watch for an engine that has failed for good. Every error ends in `fatal`."""
        try:
            tokenizer = await _in_daemon_thread(self._load_tokenizer)
            await self.engine.start()
            codec = TextCodec(tokenizer)
            self.on_loaded()
            self._tool_support = tool_support(codec, self.settings.tool_call_parser)
            self.reasoning_support = reasoning_support(codec, self.settings.reasoning_parser)
            self._tokenizer, self._codec = tokenizer, codec
            self.metrics.steps.on_model(self.engine.model, self.settings.prefix_cache != "off")
            log.info("serving %s", self.settings.served_name)
            await self._failure()
            self._fail(self.engine.health.detail or "the engine failed for good")
        except Exception as error:
            _, mark, refusal = str(error).rpartition(f"{UnsupportedModel.__name__}: ")  # a worker's error arrives as text
            self.is_model_refused = isinstance(error, UnsupportedModel) or bool(mark)
            if not self.is_model_refused and not isinstance(error, WeightsError):
                log.exception("the server cannot start")
            self._fail(refusal or repr(error))

    async def _failure(self) -> None:
        """Return when the engine has failed for good. Polls, because EngineService has no event for it."""
        while self.engine.health.state is not EngineState.FAILED:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _fail(self, reason: str) -> None:
        if self._is_stopping:
            return
        self.fatal = reason
        log.critical("giving up: %s", reason)
        if self._on_fatal is not None:
            self._on_fatal(reason)

    async def stop(self, drain_s: float) -> None:
        """Admit no more requests, let the running ones finish for up to `drain_s`, end the rest. A later call may shorten it."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.stop(drain_s)
        if self._codec is not None:
            self._codec.thread.close()
        self.grammars.close()
