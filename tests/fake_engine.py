"""An EngineService without a model: it returns the tokens of a script, a given number at a time.

It implements the engine's interface and records. It is deterministic, and everything runs on the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from msgspec import structs

from engine.core.service import EngineBusy, EngineHealth, EngineState, EngineUnavailable
from engine.core.tree import Expansion
from engine.core.types import ErrorCode, FinishReason, ModelInfo, Request, RequestDefaults, StepStats, TokenEvent, TokenLogprobs

Script = Callable[[Request], Sequence[int]]


def emits(token_ids: Sequence[int]) -> Script:
    """Return a script that gives the same ids for all requests."""
    return lambda _: token_ids


def counting(request: Request) -> list[int]:
    """Return ids that depend on the prompt and the seed, so that completions differ."""
    start = sum(request.prompt_ids) + (request.sampling.seed or 0) % 1009
    return [5 + (start + 7 * i) % 200 for i in range(request.sampling.max_tokens)]


@dataclass
class FakeEngine:
    """`chunks` are the numbers of tokens of successive events, over and over. `gate` holds back every event but the first
    `num_free_events`; `fail_after` ends each request with an error after so many events.
    """

    script: Script = counting
    chunks: Sequence[int] = (1,)
    vocab_size: int = 400
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = ()
    drafter: str = "ngram"
    defaults: RequestDefaults = RequestDefaults()
    max_living: int = 1000
    fail_after: int | None = None
    fail_code: ErrorCode = ErrorCode.WORKER_CRASHED
    gate: asyncio.Event | None = None
    num_free_events: int = 1
    num_cached_tokens: int = 0
    start_gate: asyncio.Event | None = None
    start_error: str | None = None
    state: EngineState = EngineState.STOPPED
    heartbeat_age_s: float | None = 0.0
    num_restarts: int = 0
    requests: list[Request] = field(default_factory=list)
    living: dict[str, asyncio.Event] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    num_steps: int = 0
    listeners: list[Callable[[StepStats], None]] = field(default_factory=list)

    @property
    def model(self) -> ModelInfo:
        if self.state is not EngineState.READY:
            raise EngineUnavailable("the engine has not been ready yet")
        return ModelInfo(
            name="fake",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_slots=4096,
            eos_token_ids=self.eos_token_ids,
            dtype="float32",
            device="cpu",
            drafter=self.drafter,
            verifier="traversal",
            policy="plain",
            defaults=self.defaults,
        )

    @property
    def health(self) -> EngineHealth:
        return EngineHealth(self.state, self.heartbeat_age_s, self.num_restarts, self.start_error or "")

    async def start(self) -> None:
        self.state = EngineState.STARTING
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            self.state = EngineState.FAILED
            raise EngineUnavailable(self.start_error)
        self.state = EngineState.READY

    async def stop(self, drain_s: float = 0.0) -> None:
        self.state = EngineState.STOPPED
        for _ in range(int(drain_s * 100)):
            if not self.living:
                break
            await asyncio.sleep(0.01)
        for aborted in self.living.values():
            aborted.set()

    def submit(self, requests: Sequence[Request]) -> list[AsyncIterator[TokenEvent]]:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}", 7.2)
        if len(self.living) + len(requests) > self.max_living:
            raise EngineBusy("the queue is full", 2.5)
        assert self.living.keys().isdisjoint(request.request_id for request in requests)
        self.requests += requests
        self.living.update((request.request_id, asyncio.Event()) for request in requests)
        return [self._events(request, self.living[request.request_id]) for request in requests]

    def abort(self, request_id: str) -> None:
        if request_id in self.living:
            self.aborted.append(request_id)
            self.living.pop(request_id).set()

    def add_listener(self, listener: Callable[[StepStats], None]) -> None:
        self.listeners.append(listener)

    async def _events(self, request: Request, aborted: asyncio.Event) -> AsyncIterator[TokenEvent]:
        try:
            for number, event in enumerate(self._script_of(request)):
                await self._until_free(number, aborted)
                if aborted.is_set():
                    yield TokenEvent(request.request_id, finish=FinishReason.ABORT)
                    return
                self._step(event)
                if number == self.fail_after:
                    event = TokenEvent(
                        request.request_id, finish=FinishReason.ERROR, error="the step failed", error_code=self.fail_code
                    )
                if event.finish is not None:
                    self.living.pop(request.request_id, None)
                yield event
                if event.finish is not None:
                    return
        finally:
            self.abort(request.request_id)  # closed before its end

    async def _until_free(self, number: int, aborted: asyncio.Event) -> None:
        await asyncio.sleep(0)
        if self.gate is None or number < self.num_free_events:
            return
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _script_of(self, request: Request) -> list[TokenEvent]:
        """Return the events of a request: its tokens, cut at limits and ends, in the chunks."""
        ids, finish, stop_id = self._cut(request)
        events: list[TokenEvent] = []
        sizes = cycle(self.chunks)
        while ids:
            now, ids = ids[: (size := next(sizes))], ids[size:]
            events.append(_event(request, tuple(now), len(events)))
        events = events or [TokenEvent(request.request_id)]
        events[0] = structs.replace(events[0], num_cached_tokens=self.num_cached_tokens)
        if (num_top := request.sampling.num_prompt_logprobs) is not None:
            scores = tuple(_logprobs(token_id, num_top) for token_id in request.prompt_ids[1:])
            half = len(scores) // 2  # as of a prompt that is fed in two chunks
            first_half = TokenEvent(request.request_id, prompt_logprobs=scores[:half])
            events = [first_half, structs.replace(events[0], prompt_logprobs=scores[half:]), *events[1:]]
        return [*events[:-1], structs.replace(events[-1], finish=finish, stop_token_id=stop_id)]

    def _cut(self, request: Request) -> tuple[list[int], FinishReason, int | None]:
        ends = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else set(self.eos_token_ids))
        ids = list(self.script(request))[: request.sampling.max_tokens]
        for at, token_id in enumerate(ids):
            if token_id in ends:
                return ids[: at + 1], FinishReason.STOP, token_id
        return ids, FinishReason.LENGTH, None

    def _step(self, event: TokenEvent) -> None:
        """Report to the listeners a step with this event only."""
        self.num_steps += 1
        stats = StepStats(
            step=self.num_steps,
            num_running=len(self.living),
            num_waiting=0,
            num_used_slots=64,
            num_slots=4096,
            num_generated_tokens=len(event.token_ids),
            num_drafts=int(event.num_draft_tokens > 0),
            num_draft_tokens=event.num_draft_tokens,
            num_accepted_tokens=event.num_accepted_tokens,
            num_decoding_rows=1,
            num_target_tokens=1 + event.num_draft_tokens,
            accepted_per_depth=(1,) * event.num_accepted_tokens,
            expansions={str(event.expansion): 1},
            verify_s=0.01,
            step_s=0.01,
        )
        for listener in self.listeners:
            listener(stats)


def _event(request: Request, ids: tuple[int, ...], number: int) -> TokenEvent:
    """Return an event as a step gives it: the first without drafts, others with one more draft than was accepted.

    Where there is a prediction, all drafts are of it.
    """
    logprobs: tuple[TokenLogprobs, ...] = ()
    if (num_top := request.sampling.num_logprobs) is not None:
        logprobs = tuple(_logprobs(token_id, num_top) for token_id in ids)
    if number == 0:
        return TokenEvent(request.request_id, ids, logprobs, expansion=Expansion(0, 1, 0))
    is_predicted = bool(request.prediction_ids)
    return TokenEvent(
        request.request_id,
        ids,
        logprobs,
        expansion=Expansion(len(ids), 1, 0),
        num_draft_tokens=len(ids),
        num_accepted_tokens=len(ids) - 1,
        num_predicted_tokens=len(ids) if is_predicted else 0,
        predicted_places=tuple(range(len(ids) - 1)) if is_predicted else (),
    )


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Return log-probabilities that name the token: minus a hundredth of its id; the top list leaves it out."""
    top = tuple(range(num_top))
    return TokenLogprobs(-token_id / 100, top, tuple(-(1.0 + i) for i in top))
