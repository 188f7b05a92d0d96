"""Changes of the prefix cache from a worker to a router: the router's tree is the engine's, also after a worker's death."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.types import Request, TokenEvent
from engine.worker.client import WorkerClient
from engine.worker.engine_loop import SteppedEngine
from server.kv_events import KvEventPublisher
from tests.clients import running, submitted, until, worker_client
from tests.kv_subscriber import KvSubscriber
from tests.model.driving import greedy, sampled
from tests.model.worker.test_client_faults import until_ready_again
from tests.prefix_tree import read_prefixes, write_prefixes

# Room for few sequences: the engine preempts and evicts.
CONFIG = SchedulerConfig(max_running=4, max_step_tokens=24, num_slots=160, max_model_len=120, has_cache_events=True)
TEXTS = [[3 + (7 * place + text) % 50 for place in range(56)] for text in range(4)]


def build_noting(config: EngineConfig) -> SteppedEngine:
    """Return a tiny engine that writes its cached prefixes whenever it is idle."""
    from engine.engine import Engine
    from engine.testing import tiny_engine, tiny_pair

    class NotingEngine(Engine):
        def check_integrity(self) -> None:
            super().check_integrity()
            write_prefixes(self._scheduler._prefix_cache, Path(config.model))

    engine = tiny_engine(*tiny_pair(), config=config.scheduler)
    engine.__class__ = NotingEngine
    return engine


def requests(turn: int) -> list[Request]:
    """Return requests that share prefixes, under three salts and none, with drafts."""
    made = [sampled(f"{turn} {number}", TEXTS[number % 4][: 20 + 3 * number], seed=number) for number in range(10)]
    made.append(greedy(f"{turn} last", TEXTS[0]))
    salts = ("", "key", "key/salt", None)
    return [replace(request, cache_salt=salts[number % 4]) for number, request in enumerate(made)]


async def finish(client: WorkerClient, turn: int) -> None:
    """Run the requests, of which one is aborted."""
    streams = [submitted(client, request) for request in requests(turn)]
    aborted = streams.pop(3)
    await anext(aborted)
    await aborted.aclose()
    await asyncio.gather(*(_read(stream) for stream in streams))
    await until(lambda: len(client._request_table) == 0)


async def _read(stream: AsyncIterator[TokenEvent]) -> None:
    async for _ in stream:
        pass


def read_all(subscriber: KvSubscriber) -> None:
    while subscriber.read(20):
        pass


def has_tree(subscriber: KvSubscriber, notes: Path) -> bool:
    read_all(subscriber)
    return notes.exists() and bool(subscriber.tree.prefixes) and subscriber.tree.prefixes == read_prefixes(notes)


def is_cleared(subscriber: KvSubscriber) -> bool:
    read_all(subscriber)
    return subscriber.kinds[-1:] == ["AllBlocksCleared"] and not subscriber.tree.prefixes


@pytest.mark.slow
async def test_router_has_the_engines_tree(tmp_path: Path) -> None:
    """After evictions, preemptions, aborts and the end of a worker, which empties the tree."""
    notes = tmp_path / "notes"
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = KvEventPublisher(*endpoints)
    client = worker_client(build_noting, str(notes), CONFIG)
    client.add_cache_listener(publisher.publish)
    with KvSubscriber(*endpoints) as subscriber:
        async with running(client):
            await finish(client, 0)
            await until(lambda: has_tree(subscriber, notes))
            assert "BlockRemoved" in subscriber.kinds
            assert client.worker_pid is not None
            notes.unlink()
            os.kill(client.worker_pid, signal.SIGKILL)
            await until_ready_again(client)
            await until(lambda: is_cleared(subscriber))
            await finish(client, 1)
            await until(lambda: has_tree(subscriber, notes))
        assert is_cleared(subscriber), "the server ended"
    publisher.close()
