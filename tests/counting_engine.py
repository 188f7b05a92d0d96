"""A small deterministic engine for tests without a model. It counts, and misbehaves when the prompt requests it.

A request with prompt (..., p) gets the tokens p + 1, p + 2, ... one a step. A prompt that begins with a Trick causes what the
Trick is named for. A worker process can build the module-level builders by name.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from engine.core.cache_events import CacheEvent
from engine.core.config import EngineConfig
from engine.core.types import FinishReason, ModelInfo, Request, SamplingParams, StepStats, TokenEvent
from engine.scheduler.slot_allocator import IntegrityError
from engine.worker.step_log import RowNote, StepNote

MAX_MODEL_LEN = 1_000_000
_MAX_RUNNING = 64
_PACE_S = 0.002


class Trick(IntEnum):
    """First token ids that cause faults."""

    PACE = 900_001  # every step takes a little while
    RAISE = 900_002
    HANG = 900_003
    KILL = 900_004
    LEAK = 900_005  # the books do not balance once idle
    END_TWICE = 900_006
    NEVER_END = 900_007  # forgotten without a word


@dataclass(frozen=True, slots=True)
class CountingOutput:
    events: tuple[TokenEvent, ...]
    stats: StepStats
    cache_events: tuple[CacheEvent, ...] = ()


class CountingEngine:
    """Counts for up to `max_running` requests at a time."""

    def __init__(self, max_running: int = _MAX_RUNNING) -> None:
        self.info = ModelInfo(
            "counting", 2 * MAX_MODEL_LEN, MAX_MODEL_LEN, MAX_MODEL_LEN, (), "none", "cpu", "none", "none", "plain"
        )
        self._max_running = max_running
        self._living: dict[str, Request] = {}
        self._emitted: dict[str, int] = {}
        self._news: list[TokenEvent] = []
        self._step = 0
        self._has_leaked = False
        self._step_listener: Callable[[StepNote], None] = lambda note: None

    @property
    def has_work(self) -> bool:
        return bool(self._living or self._news)

    def add(self, request: Request) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > MAX_MODEL_LEN:
            raise ValueError("too long")
        self._living[request.request_id] = request
        self._emitted[request.request_id] = len(request.progress.token_ids)

    def add_step_listener(self, listener: Callable[[StepNote], None]) -> None:
        self._step_listener = listener

    def abort(self, request_id: str) -> None:
        if self._living.pop(request_id, None) is not None:
            self._news.append(TokenEvent(request_id, finish=FinishReason.ABORT))

    def step(self) -> CountingOutput:
        self._step += 1
        events, self._news = self._news, []
        running = list(self._living.values())[: self._max_running]
        self._step_listener(StepNote(self._step, tuple(RowNote(one.request_id, 0, 1, None) for one in running)))
        for request in running:
            self._play(request)
            if request.request_id in self._living:
                events.append(self._count(request))
        stats = StepStats(self._step, len(running), len(self._living) - len(running), 0, 0, num_generated_tokens=len(running))
        return CountingOutput(tuple(events), stats)

    def _play(self, request: Request) -> None:
        match request.prompt_ids[0]:
            case Trick.PACE:
                time.sleep(_PACE_S)
            case Trick.RAISE:
                raise RuntimeError("an evil forward")
            case Trick.HANG:
                signal.pause()
            case Trick.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Trick.LEAK:
                self._has_leaked = True
            case Trick.NEVER_END:
                del self._living[request.request_id]

    def _count(self, request: Request) -> TokenEvent:
        request_id = request.request_id
        self._emitted[request_id] += 1
        token_id = request.prompt_ids[-1] + self._emitted[request_id]
        finish = FinishReason.LENGTH if self._emitted[request_id] == request.sampling.max_tokens else None
        event = TokenEvent(request_id, (token_id,), finish=finish)
        if finish is not None:
            del self._living[request_id]
            if request.prompt_ids[0] == Trick.END_TWICE:
                self._news.append(event)
        return event

    def check_integrity(self) -> None:
        if self._has_leaked:
            raise IntegrityError("a slot leaked")


def build_counting(config: EngineConfig) -> CountingEngine:
    return CountingEngine(config.scheduler.max_running)


def build_once_marked(config: EngineConfig) -> CountingEngine:
    """Take until the file named as the model exists."""
    while not Path(config.model).exists():
        time.sleep(_PACE_S)
    return build_counting(config)


def build_forever(config: EngineConfig) -> CountingEngine:
    time.sleep(3600)
    return build_counting(config)


def build_without_weights(config: EngineConfig) -> CountingEngine:
    raise FileNotFoundError(f"no weights at {config.model!r}")


def build_unless_marked(config: EngineConfig) -> CountingEngine:
    """Fail from the moment on at which the file named as the model exists."""
    if Path(config.model).exists():
        return build_without_weights(config)
    return build_counting(config)


def counting_request(request_id: str, *prompt_ids: int, max_tokens: int = 5) -> Request:
    return Request(request_id, prompt_ids or (0,), SamplingParams(max_tokens=max_tokens))
