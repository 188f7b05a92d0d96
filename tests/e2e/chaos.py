"""Streams whose worker is killed again and again: `python -m tests.e2e.chaos --streams 200 --kills 20`.

A tiny random model in a real worker process, and `kill -9` at random moments of its work. Each stream must bring the very events'
tokens of an undisturbed engine, its counts must add up, and the last worker's books must balance once it is idle (a leak would
be one more death). The moments are drawn from a seed and counted in events, not in seconds.
"""

import argparse
import asyncio
import os
import random
import signal
from dataclasses import dataclass

from engine.client import WorkerClient
from engine.config import EngineConfig, SchedulerConfig
from engine.desk import SteppedEngine
from engine.service import EngineState
from engine.supervision import Supervision
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from engine.worker import ProcessLauncher

SCHEDULER = SchedulerConfig(max_running=16, max_waiting=1000, max_step_tokens=160, num_slots=1200, max_model_len=128)
_SWIFT = Supervision(min_backoff_s=0.01, max_backoff_s=0.05)


def build_tiny(config: EngineConfig) -> SteppedEngine:
    """Return a tiny target with a drafter that often agrees."""
    from engine.testing import tiny_engine, tiny_pair  # here, so that the process that kills needs no torch

    return tiny_engine(*tiny_pair(), config=config.scheduler)


def chaos_request(number: int) -> Request:
    """Return one of ever other requests: greedy, seeded, penalised, masked, scored; its text is a function of the number."""
    draw = random.Random(number)
    kind = number % 4
    sampling = SamplingParams(
        temperature=0.0 if kind == 0 else 0.9,
        seed=number,
        max_tokens=draw.randint(12, 40),
        min_tokens=10 if kind == 2 else 0,
        ignore_eos=kind == 1,
        frequency_penalty=0.4 if kind == 2 else 0.0,
        repetition_penalty=1.2 if kind == 2 else 1.0,
        bad_words=((7,), (8, 9)) if kind == 3 else (),
        num_logprobs=1 if kind == 3 else None,
        num_prompt_logprobs=1 if kind == 3 else None,
    )
    return Request(f"r{number}", tuple(draw.randint(3, 60) for _ in range(draw.randint(1, 30))), sampling)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one stream brought."""

    token_ids: tuple[int, ...]
    num_logprobs: int
    num_prompt_logprobs: int
    finish: FinishReason | None
    error: str | None


def outcome_of(events: list[TokenEvent]) -> Outcome:
    """Sum a stream's events up."""
    return Outcome(
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        num_logprobs=sum(len(event.logprobs) for event in events),
        num_prompt_logprobs=sum(len(event.prompt_logprobs) for event in events),
        finish=events[-1].finish,
        error=events[-1].error,
    )


def undisturbed(requests: list[Request]) -> list[Outcome]:
    """Return what an engine of this process brings."""
    engine = build_tiny(EngineConfig("tiny", scheduler=SCHEDULER))
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step().events:
            events[event.request_id].append(event)
    return [outcome_of(events[request.request_id]) for request in requests]


async def killed(requests: list[Request], num_kills: int, kind: type[WorkerClient] = WorkerClient) -> tuple[list[Outcome], int]:
    """Return what the streams bring while workers are killed, and how many workers were started again."""
    config = EngineConfig("tiny", scheduler=SCHEDULER)
    client = kind(ProcessLauncher(config, build_tiny), config.scheduler, _SWIFT)
    news = asyncio.Semaphore(0)  # one for each event of any stream

    async def read(request: Request) -> Outcome:
        events = []
        async for event in client.submit(request):
            events.append(event)
            news.release()
        return outcome_of(events)

    await client.start()
    try:
        readers = [asyncio.create_task(read(request)) for request in requests]
        killer = asyncio.create_task(_kill(client, news, num_kills, 6 * len(requests) // num_kills))
        outcomes = list(await asyncio.gather(*readers))
        killer.cancel()
        while client.health.state is EngineState.READY and (client.health.heartbeat_age_s or 0.0) < 0.1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # it falls idle and checks its books
        return outcomes, client.health.num_restarts
    finally:
        await client.stop()


async def _kill(client: WorkerClient, news: asyncio.Semaphore, num_kills: int, most_events: int) -> None:
    """Kill the worker each time when up to `most_events` more events of all streams have come."""
    draw = random.Random(num_kills)
    for _ in range(num_kills):
        for _ in range(draw.randint(1, most_events)):
            await news.acquire()
        await asyncio.sleep(draw.random() * 0.01)  # somewhere in a step
        if client.worker_pid is not None:
            os.kill(client.worker_pid, signal.SIGKILL)


def main() -> None:
    """Run it and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    requests = [chaos_request(number) for number in range(arguments.streams)]
    expected = undisturbed(requests)
    outcomes, num_restarts = asyncio.run(killed(requests, arguments.kills))
    num_equal = sum(one == other for one, other in zip(outcomes, expected, strict=True))
    print(f"{num_equal} of {len(requests)} streams as undisturbed, {num_restarts} workers killed")  # noqa: T201
    raise SystemExit(num_equal != len(requests) or num_restarts != arguments.kills)


if __name__ == "__main__":
    main()
