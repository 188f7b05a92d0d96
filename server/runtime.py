"""The parts of one running server, and its lifecycle: load in the background, serve, drain.

Knows settings, engine, tokenizer and metrics. Does not know HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from engine.core.refusal import Refusal
from engine.core.service import EngineService, EngineState, EngineUnavailable
from engine.structured_output.grammars import VocabularySource, source_of
from engine.utils.daemon_thread import in_daemon_thread
from engine.utils.free_memory import return_free_memory
from engine.weights import WeightsError
from server.grammar.check import GrammarCheck
from server.http.time_limits import TimeLimits
from server.metrics import ServerMetrics
from server.reasoning.support import ReasoningSupport, reasoning_support
from server.settings import Settings, SettingsError
from server.stored_responses.store import ResponseStore, StoreUnusable
from server.text.codec import TextCodec, Tokenizer
from server.tool_calls.support import ToolSupport, tool_support

log = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5


def _store(settings: Settings) -> ResponseStore:
    try:
        return ResponseStore(settings.store_limits, settings.stored_responses_file)
    except StoreUnusable as error:
        raise SettingsError(f"stored_responses_file: {error}") from error


class Runtime:
    """Owns the lifecycle of engine and tokenizer. `fatal` is the reason why the server cannot continue, once it cannot.

    `fetch` gets the weights ready for tokenizer and engine, which then load at the same time.
    `is_refused` is set if the settings or the model cannot be served: another start would fail too.
    `on_loaded` is called before it is ready.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineService,
        load_tokenizer: Callable[[], Tokenizer],
        on_fatal: Callable[[str], None] | None = None,
        fetch: Callable[[], object] | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = ServerMetrics(settings.served_name, settings.max_model_len, lambda: engine.health, len(settings.adapters))
        self.created_s = int(time.time())
        self.time_limits = TimeLimits(settings.first_token_limit_s, settings.request_limit_s)
        self.fatal: str | None = None
        self.on_ready: Callable[[], None] = lambda: log.info("serving %s", settings.served_name)
        self.is_refused = False
        self.on_loaded: Callable[[], None] = lambda: None
        self._fetch, self._load_tokenizer = fetch, load_tokenizer
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
        """The chat template's support of tools; raises EngineUnavailable whenever `codec` does."""
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
            if self._fetch is not None:  # before the worker would do it too
                await in_daemon_thread(self._fetch, "fetcher")
            (tokenizer, codec), _ = await asyncio.gather(in_daemon_thread(self._loaded, "loader"), self.engine.start())
            self.on_loaded()
            self._tool_support = tool_support(codec, self.settings.tool_call_parser)
            self.reasoning_support = reasoning_support(codec, self.settings.reasoning_parser)
            self._tokenizer, self._codec = tokenizer, codec
            self.metrics.steps.on_model(self.engine.model, self.settings.prefix_cache != "off")
            self.on_ready()
            await self._failure()
            self._fail(self.engine.health.detail or "the engine failed for good")
        except Exception as error:
            self.is_refused = isinstance(error, Refusal)
            if not isinstance(error, Refusal | WeightsError):
                log.exception("the server cannot start")
            self._fail(str(error) if isinstance(error, Refusal | WeightsError | EngineUnavailable) else repr(error))

    def _loaded(self) -> tuple[Tokenizer, TextCodec]:
        tokenizer = self._load_tokenizer()
        codec = TextCodec(tokenizer)
        return_free_memory()
        return tokenizer, codec

    async def _failure(self) -> None:
        """Return when the engine has failed for good. Polls, because EngineService has no event for it."""
        while self.engine.health.state is not EngineState.FAILED:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _fail(self, reason: str) -> None:
        if self._is_stopping:
            return
        self.fatal = reason
        if not self.is_refused:  # the command line reports a refusal
            log.critical("giving up: %s", reason)
        if self._on_fatal is not None:
            self._on_fatal(reason)

    async def stop(self, drain_s: float) -> None:
        """Admit no more requests, let running requests finish for up to `drain_s`, end the rest. A later call may shorten it."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.stop(drain_s)
        if self._codec is not None:
            self._codec.thread.close()
        self.grammars.close()
