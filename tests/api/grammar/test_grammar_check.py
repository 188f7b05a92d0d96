"""Grammars are checked one at a time: a key with many grammars delays another key by one, and fills only its own queue."""

import asyncio
import threading
from typing import Any

import pytest

from engine.core.types import Grammar, GrammarKind
from server.grammar.check import _MAX_WAITING_CHARS, GrammarCheck
from server.grammar.process import GrammarProcess
from server.http.errors import Overloaded


class Trials:
    """Replaces the process that checks grammars: each is good, once the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.tried: list[str] = []
        monkeypatch.setattr(GrammarProcess, "check", lambda _process, _source, grammar: self._try(grammar))

    def _try(self, grammar: Grammar) -> None:
        self.gate.wait(60.0)
        self.tried.append(grammar.text)


async def _describe() -> Any:
    return object()


def check_task(check: GrammarCheck, text: str, key: str) -> asyncio.Task[None]:
    return asyncio.create_task(check.require(Grammar(GrammarKind.REGEX, text), "structured_outputs", key))


async def test_many_grammars_delay_other_key_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, check = Trials(monkeypatch), GrammarCheck(_describe)
    tasks = [check_task(check, f"a{number}", "a") for number in range(30)]
    await asyncio.sleep(0)
    tasks.append(check_task(check, "b", "b"))
    await asyncio.sleep(0)
    trials.gate.set()
    await asyncio.gather(*tasks)
    check.close()
    assert trials.tried == ["a0", "a1", "b", *(f"a{number}" for number in range(2, 30))]


async def test_a_keys_own_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, check = Trials(monkeypatch), GrammarCheck(_describe)
    half = "a" * (_MAX_WAITING_CHARS // 2)
    tasks = [check_task(check, half, "a"), check_task(check, half, "a"), check_task(check, "b" * _MAX_WAITING_CHARS, "b")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many grammars"):
        await check_task(check, "c", "a")
    trials.gate.set()
    await asyncio.gather(*tasks)
    await check_task(check, "c", "a")
    check.close()
    assert check._waiting_chars.total() == 0
