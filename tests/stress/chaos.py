"""Streams whose worker is killed again and again: `python -m tests.stress.chaos --streams 200 --kills 20`.

A model in a real worker process with the canary among its slots, and `kill -9` at moments spread over all the tokens that there
are to report. Some streams are left early, some are read slowly, and requests that cannot run come in between. Each stream must
bring the very tokens of an undisturbed engine, each token must count once, and the last worker must fall idle with every
slot free and sound books. A tiny random model, or with --model one that the server would serve, drafter and all; its texts are
only then the same for certain if its rows are, in any batch (docs/precision.md).
"""

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.service import EngineState
from engine.core.types import ErrorCode, Request, TokenEvent
from engine.worker.client import WorkerClient
from engine.worker.messages import Heartbeat, StepResult, WorkerEvent
from engine.worker.process import ProcessLauncher
from engine.worker.restart_limits import Supervision
from tests.clients import submitted
from tests.stress.chaos_cast import Cast, Outcome, leaves_after, outcome_of, reads_slowly, undisturbed

# A busy machine is no fault, and a request is not the cause of our kills.
_SUPERVISION = Supervision(600.0, 600.0, min_backoff_s=0.01, max_backoff_s=0.05, max_deaths=100)
_LAST_KILL = 0.95  # of the tokens: what is killed has work left
_SLOW_READ_S = 0.01


class CountingClient(WorkerClient):
    """Counts the tokens of its workers, and notes when one has become idle, before which it checks its books."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_reported = self.num_counted = self.num_used_slots = 0
        self.is_idle = asyncio.Event()

    def _handle_event(self, event: WorkerEvent) -> None:
        super()._handle_event(event)
        match event:
            case StepResult(events, stats):
                self.num_reported += sum(len(event.token_ids) for event in events)
                if stats is not None:
                    self.num_counted += stats.num_generated_tokens
                    self.num_used_slots = stats.num_used_slots
            case Heartbeat() if not len(self._request_table):
                self.is_idle.set()


@dataclass(frozen=True, slots=True)
class Run:
    """The result. `kills`: the share of all tokens of remaining streams that was reported at each kill."""

    outcomes: tuple[Outcome, ...]
    refusals: tuple[ErrorCode | None, ...]
    kills: tuple[float, ...]
    num_restarts: int
    num_resumed: int
    num_reported: int
    num_counted: int
    num_used_slots: int

    def faults(self, cast: Cast, expected: Sequence[Outcome]) -> list[str]:
        """Return the faults, a line each."""
        faults = [f"stream {n} differs" for n, one in enumerate(self.outcomes) if not _is_right(n, one, expected[n])]
        faults += [f"a request that cannot run ended with {code}" for code in self.refusals if code != "request_refused"]
        if (len(self.kills), self.num_restarts) != (cast.num_kills, cast.num_kills):
            faults.append(f"{len(self.kills)} kills, {self.num_restarts} restarts, {cast.num_kills} wanted")
        if self.num_reported != self.num_counted:
            faults.append(f"{self.num_reported} tokens reported, {self.num_counted} counted")
        if self.num_used_slots:
            faults.append(f"{self.num_used_slots} slots are in use at the end")
        return faults

    def __str__(self) -> str:
        kills = ", ".join(f"{share:.0%}" for share in self.kills)
        return (
            f"{len(self.outcomes)} streams, {sum(leaves_after(n) is not None for n in range(len(self.outcomes)))} left early, "
            f"{sum(map(reads_slowly, range(len(self.outcomes))))} read slowly; {len(self.refusals)} requests refused\n"
            f"{len(self.kills)} workers killed, at {kills} of the tokens; {self.num_restarts} restarts, "
            f"{self.num_resumed} requests resumed\n"
            f"{self.num_reported} tokens reported, {self.num_counted} counted; {self.num_used_slots} slots in use at the end"
        )


def _is_right(number: int, outcome: Outcome, expected: Outcome) -> bool:
    return outcome == expected if leaves_after(number) is None else outcome.begins(expected)


async def disturbed(cast: Cast, expected: Sequence[Outcome]) -> Run:
    """Return the tokens of the streams while workers are killed. Undisturbed they would be the expected ones."""
    num_tokens = sum(len(one.token_ids) for number, one in enumerate(expected) if leaves_after(number) is None)
    client = CountingClient(ProcessLauncher(cast.config, cast.factory), cast.config.scheduler, _SUPERVISION)
    kills: list[float] = []
    await client.start()
    try:
        refused = [asyncio.create_task(_refused(client, number)) for number in range(1 + len(cast.requests) // 10)]
        readers = [asyncio.create_task(_read(client, number, one)) for number, one in enumerate(cast.requests)]
        killer = asyncio.create_task(_kill(client, cast.num_kills, num_tokens, kills))
        outcomes = await asyncio.gather(*readers)
        refusals = await asyncio.gather(*refused)
        killer.cancel()
        client.is_idle.clear()
        await client.is_idle.wait()
        health = client.health
    finally:
        await client.stop()
    counts = (client.num_reported, client.num_counted, client.num_used_slots)
    return Run(tuple(outcomes), tuple(refusals), tuple(kills), health.num_restarts, health.num_resumed, *counts)


async def _read(client: WorkerClient, number: int, request: Request) -> Outcome:
    """Return the tokens that a stream brings to its reader, which may be slow and may leave."""
    events: list[TokenEvent] = []
    stream = submitted(client, request)
    async for event in stream:
        events.append(event)
        if len(events) == leaves_after(number):
            break
        if reads_slowly(number):
            await asyncio.sleep(_SLOW_READ_S)
    await stream.aclose()
    return outcome_of(events)


async def _refused(client: WorkerClient, number: int) -> ErrorCode | None:
    """Return how a request ends that can never run."""
    bad = Request(f"bad{number}", (10**9,))
    events = [event async for event in submitted(client, bad)]
    return events[-1].error_code


async def _kill(client: CountingClient, num_kills: int, num_tokens: int, kills: list[float]) -> None:
    """Kill a worker in each of `num_kills` equal parts of the tokens, somewhere in it; note when."""
    draw = random.Random(num_kills)
    for number in range(num_kills):
        moment = (number + draw.random()) / num_kills * _LAST_KILL * num_tokens
        while client.num_reported < moment or client.health.state is not EngineState.READY or client.worker_pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(draw.random() * 0.01)  # somewhere in a step
        os.kill(client.worker_pid, signal.SIGKILL)
        kills.append(client.num_reported / num_tokens)
        while client.health.num_restarts < len(kills):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def main() -> None:
    """Run it and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=60, help="of the longest stream")
    parser.add_argument("--model", help="a preset, for example smollm2-135m; unset: a tiny random model")
    parser.add_argument("--dtype", default="int8", help="of that model")
    args = parser.parse_args()
    if args.model is None:
        cast = Cast.tiny(args.streams, args.kills, args.tokens)
    else:
        cast = Cast.served(args.streams, args.kills, args.tokens, model=args.model, dtype=args.dtype, num_threads=1)
    expected = undisturbed(cast)
    run = asyncio.run(disturbed(cast, expected))
    faults = run.faults(cast, expected)
    print("\n".join([str(run), *faults, f"{len(faults)} faults"]))  # noqa: T201
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
