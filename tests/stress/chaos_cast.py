"""The parts of a chaos run: the engine, its streams and the tokens that each brings undisturbed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.types import FinishReason, Request, SamplingParams, TokenEvent
from engine.worker.engine_loop import EngineFactory, SteppedEngine
from server.adaptive_engine import served_engine
from server.settings import Settings

SCHEDULER = SchedulerConfig(max_running=16, max_waiting=1000, max_step_tokens=160, num_slots=1200, max_model_len=256)


def build_tiny(config: EngineConfig) -> SteppedEngine:
    """Return a tiny target with a drafter that often agrees."""
    from engine.testing import tiny_engine, tiny_pair  # here, so that the process that kills needs no torch

    return tiny_engine(*tiny_pair(), config=config.scheduler, has_canary=config.kv_canary)


@dataclass(frozen=True, slots=True)
class Cast:
    """The parts: an engine, the streams, and how many workers are killed."""

    factory: EngineFactory
    config: EngineConfig
    requests: tuple[Request, ...]
    num_kills: int

    @classmethod
    def tiny(cls, num_streams: int, num_kills: int, most_tokens: int = 60) -> "Cast":
        """Return a cast for the tiny model."""
        return cls(
            build_tiny, EngineConfig("tiny", kv_canary=True, scheduler=SCHEDULER), _requests(num_streams, most_tokens), num_kills
        )

    @classmethod
    def served(cls, num_streams: int, num_kills: int, most_tokens: int, **settings: Any) -> "Cast":
        """Return a cast for what the server would serve."""
        config = replace(Settings(kv_canary=True, **settings).to_engine_config(), scheduler=SCHEDULER)
        return cls(served_engine, config, _requests(num_streams, most_tokens), num_kills)


def _requests(count: int, most_tokens: int) -> tuple[Request, ...]:
    return tuple(chaos_request(number, most_tokens) for number in range(count))


def chaos_request(number: int, most_tokens: int) -> Request:
    """Return one of ever other requests: greedy, seeded, penalised, masked, scored; its text is a function of the number."""
    draw = random.Random(number)
    kind = number % 4
    sampling = SamplingParams(
        temperature=0.0 if kind == 0 else 0.9,
        seed=number,
        max_tokens=draw.randint(most_tokens // 3, most_tokens),
        min_tokens=most_tokens // 4 if kind == 2 else 0,
        ignore_eos=kind < 2,
        frequency_penalty=0.4 if kind == 2 else 0.0,
        repetition_penalty=1.2 if kind == 2 else 1.0,
        bad_words=((7,), (8, 9)) if kind == 3 else (),
        num_logprobs=1 if kind == 3 else None,
        num_prompt_logprobs=1 if kind == 3 else None,
    )
    return Request(f"r{number}", tuple(draw.randint(3, 60) for _ in range(draw.randint(1, 30))), sampling)


def leaves_after(number: int) -> int | None:
    """Return after how many events the reader of a stream leaves; None if it stays."""
    return 1 + number % 5 if number % 10 == 7 else None


def reads_slowly(number: int) -> bool:
    """Return whether a stream's reader takes its time."""
    return number % 10 == 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one stream."""

    token_ids: tuple[int, ...]
    num_logprobs: int
    num_prompt_logprobs: int
    finish: FinishReason | None
    error: str | None

    def begins(self, whole: "Outcome") -> bool:
        """Return whether this is how the whole begins."""
        return whole.token_ids[: len(self.token_ids)] == self.token_ids


def outcome_of(events: Sequence[TokenEvent]) -> Outcome:
    """Sum a stream's events up."""
    return Outcome(
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        num_logprobs=sum(len(event.logprobs) for event in events),
        num_prompt_logprobs=sum(len(event.prompt_logprobs) for event in events),
        finish=events[-1].finish,
        error=events[-1].error,
    )


def undisturbed(cast: Cast) -> list[Outcome]:
    """Return what an engine of this process brings."""
    engine = cast.factory(cast.config)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in cast.requests}
    for request in cast.requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step().events:
            events[event.request_id].append(event)
    engine.check_integrity()
    return [outcome_of(events[request.request_id]) for request in cast.requests]
