"""Grammars are tried one at a time: a key that asks for many holds up another's by one, and fills no queue but its own."""

import asyncio
import threading
from typing import Any

import pytest

from engine.core.types import Grammar, GrammarKind
from server.grammar.check import _MAX_WAITING_CHARS, GrammarCheck
from server.grammar.process import GrammarProcess
from server.http.errors import Overloaded


class Trials:
    """Stands for the process that tries grammars: each is good, once the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.tried: list[str] = []
        monkeypatch.setattr(GrammarProcess, "check", lambda _process, _source, grammar: self._try(grammar))

    def _try(self, grammar: Grammar) -> None:
        self.gate.wait(60.0)
        self.tried.append(grammar.text)


async def _describe() -> Any:
    return object()


def asked(check: GrammarCheck, text: str, key: str) -> asyncio.Task[None]:
    return asyncio.create_task(check.require(Grammar(GrammarKind.REGEX, text), "structured_outputs", key))


async def test_many_grammars_delay_other_key_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, check = Trials(monkeypatch), GrammarCheck(_describe)
    asking = [asked(check, f"a{number}", "a") for number in range(30)]
    await asyncio.sleep(0)
    asking.append(asked(check, "b", "b"))
    await asyncio.sleep(0)
    trials.gate.set()
    await asyncio.gather(*asking)
    check.close()
    assert trials.tried == ["a0", "a1", "b", *(f"a{number}" for number in range(2, 30))]


async def test_a_keys_own_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, check = Trials(monkeypatch), GrammarCheck(_describe)
    half = "a" * (_MAX_WAITING_CHARS // 2)
    asking = [asked(check, half, "a"), asked(check, half, "a"), asked(check, "b" * _MAX_WAITING_CHARS, "b")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many grammars"):
        await asked(check, "c", "a")
    trials.gate.set()
    await asyncio.gather(*asking)
    await asked(check, "c", "a")
    check.close()
    assert check._waiting_chars.total() == 0
