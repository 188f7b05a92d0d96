"""Clients that vanish leave nothing behind, inside the engine and out: a small storm of `python -m tests.stress.storm`."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.structured_output.grammars import CompiledGrammars, source_of
from engine.testing import tiny_engine, tiny_pair
from engine.worker.inprocess import InProcessEngine
from tests.conformance.served import app_of, served
from tests.stress.fuzz import unrest_of
from tests.stress.storm import CALM, STORMY, Plan, storm
from tests.tokenizers_for_tests import byte_level

LIMITS = SchedulerConfig(max_running=4, max_waiting=8, num_slots=1024, max_model_len=256)
_PATIENCE_S = 60.0


@dataclass
class Stage:
    """A server of this process, and what can be seen of it from inside."""

    url: str
    service: InProcessEngine
    engine: Engine
    texts: TextCache

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {CALM}"})

    def resources(self) -> dict[str, object]:
        """Return the resources that must be equal before and after."""
        assert self.service._loop is not None
        scheduler = self.engine._scheduler
        return {
            "tasks": len(asyncio.all_tasks(self.service._loop)),
            "threads": {thread.name for thread in threading.enumerate()},
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "request_table": len(self.service._request_table),
            "slots": scheduler.num_used_slots,
            "sequences": scheduler.num_running + scheduler.num_waiting,
            "pending_grammars": self.engine._pending_grammars.request_ids,
            "followed": len(self.texts._tracked),
            "unrest": unrest_of(self.get),
        }


@contextlib.contextmanager
def staged(texts: TextCache | None = None) -> Iterator[Stage]:
    """Yield a server over a tiny engine that drafts from cached text, with room for few."""
    texts = texts or TextCache()
    built: list[Engine] = []

    def build() -> Engine:
        target, _ = tiny_pair(vocab_size=400)
        grammars = CompiledGrammars(source_of(byte_level(), 400, target.eos_token_ids).load)
        drafter = TextDrafter(400, torch.device("cpu"), texts)
        built.append(tiny_engine(target, drafter, FixedExpansion(Expansion(2, 1, 0)), config=LIMITS, grammars=grammars))
        return built[0]

    service = InProcessEngine(build, LIMITS)
    with served(app_of(service, api_keys=(STORMY, CALM))) as url:
        yield Stage(url, service, built[0], texts)


def leak_of(stage: Stage, num_clients: int) -> dict[str, object]:
    """Return the resources that differ once a storm is over and nothing changes or patience ends."""
    few = Plan(8, -1, least_calm=1, spread_s=0.2, patience_s=1.5, has_grammars=False)
    asyncio.run(storm(stage.url, few))  # what is made when first needed is
    before = _at_rest(stage.resources, lambda resources: resources["unrest"] == [] and resources["request_table"] == 0)
    passed = asyncio.run(storm(stage.url, replace(few, num_clients=num_clients, seed=0, spread_s=0.5)))
    assert passed.calm.problems + passed.storm.problems == []
    after = _at_rest(stage.resources, lambda resources: not _more(before, resources))
    return _more(before, after)


def _more(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    """Return what differs; a count may be lower, since what the first few clients left could still be closing before."""
    return {
        name: value
        for name, value in after.items()
        if (value > before[name] if isinstance(value, int) else value != before[name])  # type: ignore[operator]
    }


def _at_rest(look: Callable[[], dict[str, object]], is_at_rest: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    end_s = time.monotonic() + _PATIENCE_S
    while not is_at_rest(seen := look()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return seen


def test_a_storm_leaves_nothing_behind() -> None:
    with staged() as stage:
        assert leak_of(stage, 60) == {}
        assert stage.engine._scheduler.num_used_slots == 0


class RemembersTheAborted(TextCache):
    """The mutant: the texts of requests that have ended are kept."""

    def end(self, request_id: str) -> None:
        """Do nothing."""


def test_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stress.test_storm._PATIENCE_S", 0.5)
    with staged(RemembersTheAborted()) as stage:
        assert "followed" in leak_of(stage, 8)
