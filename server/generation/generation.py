"""The samples of one HTTP request, from submission to their merged pieces. `close` ends every sample in the engine.

Knows EngineService and choices. Does not know the wire format.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from engine.core.service import UNKNOWN_RETRY_S, EngineService
from engine.core.types import ErrorCode, FinishReason, Request, TokenEvent
from server.generation.sample import AcceptanceCounts, Choice, Piece
from server.http.errors import ApiError, GenerationFailed, InvalidRequest, Overloaded, as_api_error
from server.http.rate_limits import current_spender
from server.http.request_trace import SampleTimes, current_trace
from server.http.time_limits import TimeLimits
from server.metrics.requests import RequestMeter, SampleMeter


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine request, the choice that its tokens become, and its meter."""

    request: Request
    choice: Choice
    meter: SampleMeter


_UNLIMITED = TimeLimits()

_Arrival = tuple[Sample, TokenEvent]


class Generation:
    """Owns the samples of one HTTP request: `start`, iterate over `pieces`, and `close` in every case."""

    def __init__(
        self,
        engine: EngineService,
        samples: Sequence[Sample],
        meter: RequestMeter,
        prompts: Sequence[Sequence[int]],
        limits: TimeLimits = _UNLIMITED,
    ) -> None:
        """Take as many samples for each of `prompts`, in the order of the prompts."""
        self.num_prompt_tokens = sum(map(len, prompts))
        self._num_prompts = len(prompts)
        self.is_prompt_cut = False  # set for a prompt of which something was left out to make it fit
        self._engine = engine
        self._samples = tuple(samples)
        self._meter = meter
        self._limits = limits
        self._spender = current_spender.get()
        self._began_s = asyncio.get_running_loop().time()
        self._streams: Sequence[AsyncIterator[TokenEvent]] = ()
        self._arrivals: asyncio.Queue[_Arrival | Exception] = asyncio.Queue()  # of several streams
        self._pumps: list[asyncio.Task[None]] = []
        self._unfinished = FinishReason.ABORT  # the reason of samples that have not ended at `close`

    @property
    def choices(self) -> Iterator[Choice]:
        """The choices in the order of their indices."""
        return (sample.choice for sample in self._samples)

    @property
    def num_choices(self) -> int:
        """Samples, all prompts together."""
        return len(self._samples)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all choices so far."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens served from the prefix cache (minimum over the choices of each prompt)."""
        cached = [choice.num_cached_tokens for choice in self.choices]
        num_samples = len(cached) // self._num_prompts  # of each prompt, side by side
        return sum(min(cached[at : at + num_samples]) for at in range(0, len(cached), num_samples))

    @property
    def acceptance(self) -> AcceptanceCounts:
        """The counts of drafted and accepted tokens, all choices together."""
        total = AcceptanceCounts()
        for choice in self.choices:
            total.add(choice.acceptance)
        return total

    @property
    def times(self) -> list[SampleTimes]:
        """The times of the samples so far, in the order of their indices."""
        return self._meter.times()

    def start(self) -> Self:
        """Submit every sample, or none. Errors are raised here, before any answer began."""
        try:
            self._streams = self._engine.submit([sample.request for sample in self._samples])
        except Exception as error:
            self._meter.reject(as_api_error(error).code or "engine_error")
            raise
        if self._spender is not None:
            self._spender.spend(num_prompt_tokens=self.num_prompt_tokens)
        if len(self._streams) == 1:  # read without a task between
            return self
        for sample, stream in zip(self._samples, self._streams, strict=True):
            pump = asyncio.create_task(self._pump(sample, stream))
            pump.add_done_callback(self._on_pump_end)
            self._pumps.append(pump)
        return self

    async def _pump(self, sample: Sample, stream: AsyncIterator[TokenEvent]) -> None:
        """Move one sample's events to the common queue."""
        async for event in stream:
            self._arrivals.put_nowait((sample, event))
            if event.finish is not None:
                return
        raise _ended_early()

    def _on_pump_end(self, pump: asyncio.Task[None]) -> None:
        """Pass the error of a failed pump to the reader of `pieces`."""
        if not pump.cancelled() and isinstance(error := pump.exception(), Exception):
            self._arrivals.put_nowait(error)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the piece of each event, until every choice has finished. Raises the error of a failed choice."""
        while any(sample.choice.finish is None for sample in self._samples):
            try:
                sample, event = await self._next_arrival()
            except Exception:
                self._unfinished = FinishReason.ERROR
                raise
            if sample.choice.finish is None:
                piece = self._take(sample, event)
                if event.token_ids or piece.finish is not None:
                    yield piece

    async def _next_arrival(self) -> _Arrival:
        """Return the next event or error; raise if the request exceeds a time limit."""
        has_begun = all(sample.meter.num_tokens or sample.choice.finish for sample in self._samples)
        deadline_s = self._limits.deadline_s(self._began_s, has_begun)
        if deadline_s is None:
            return await self._arrival()
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._arrival()
        except TimeoutError:
            late = self._limits.lateness(asyncio.get_running_loop().time() - self._began_s)
            self._meter.fail(late.code or "")
            raise late from None

    async def _arrival(self) -> _Arrival:
        """Return the next event; raise the error of its stream."""
        if self._pumps:
            arrival = await self._arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            return arrival
        event = await anext(self._streams[0], None)
        if event is None:
            raise _ended_early()
        return self._samples[0], event

    def _take(self, sample: Sample, event: TokenEvent) -> Piece:
        sample.meter.on_event(event)
        if self._spender is not None:
            self._spender.spend(num_generated_tokens=len(event.token_ids))
        if event.finish is FinishReason.ERROR:
            self._unfinished = FinishReason.ERROR
            raise _error_of(event)
        if event.finish is FinishReason.ABORT:
            raise Overloaded("the server is shutting down", "engine_unavailable", 1.0)
        piece = sample.choice.take(event)
        sample.meter.keep(len(piece.token_ids))
        if sample.choice.is_cut and event.finish is None:
            self._engine.abort(sample.request.request_id)
        if piece.finish is not None:
            sample.meter.end(piece.finish)
        return piece

    async def close(self) -> None:
        """Abort the samples that still run, release their streams and close the meter. Can be called again."""
        streams, self._streams = self._streams, ()
        if not streams:
            return
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in streams:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        for sample in self._samples:
            if not sample.meter.is_ended:
                self._engine.abort(sample.request.request_id)
        self._meter.close(self._unfinished)
        if (trace := current_trace.get()) is not None:
            trace.generated(self.times)


def _ended_early() -> ApiError:
    return GenerationFailed("the engine ended a request without a reason")


def _error_of(event: TokenEvent) -> ApiError:
    """Return the error of a request that the engine ended. A 400 if the request itself is the cause: a retry would fail too."""
    text = event.error or "the engine failed on this request"
    if event.error_code is ErrorCode.DISPLACED:
        return Overloaded(text, "engine_busy", UNKNOWN_RETRY_S)
    if event.error_code in (ErrorCode.REFUSED, ErrorCode.NO_POSSIBLE_TOKEN):
        return InvalidRequest(text, None, event.error_code)
    return GenerationFailed(text, code=event.error_code)
