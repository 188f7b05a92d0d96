"""The process that tries grammars is killed or stopped: only a grammar that is too expensive is the client's error."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from engine.core.types import Grammar, GrammarKind
from engine.structured_output.grammars import BadGrammar, VocabularySource, source_of
from server.grammar import process as grammar_process
from server.grammar.check import GrammarCheck
from server.grammar.process import GrammarProcess, GrammarProcessFailed
from server.http.errors import Overloaded
from tests.api.harness import completion, in_process
from tests.fake_engine import FakeEngine
from tests.model.grammars import EOS, V, tokenizer

SOURCE = source_of(tokenizer(), V, [EOS])
SMALL = Grammar(GrammarKind.REGEX, "[a-c]{5}")
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"type": "string", "pattern": f"a.*b{{{count}}}.*c"} for count in range(30)]})
)


def pid_of(process: GrammarProcess) -> int:
    assert process._process is not None
    assert process._process.pid is not None
    return process._process.pid


class Struck(GrammarProcess):
    """Sends a signal to each process that compiles the endless grammar."""

    number: int = signal.SIGKILL

    def _exchange(self, request: VocabularySource | Grammar, limit_s: float, stall_s: float) -> None:
        if request == ENDLESS:
            threading.Timer(0.3, os.kill, (pid_of(self), self.number)).start()
        super()._exchange(request, limit_s, stall_s)


@pytest.fixture
def process() -> Iterator[Struck]:
    process = Struck()
    yield process
    process.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV], ids=["killed", "stopped", "crashed"])
def test_an_idle_process_that_fails_is_replaced(process: GrammarProcess, number: int, monkeypatch: pytest.MonkeyPatch):
    """A stopped process made `[a-z]{5}` take longer than 4 seconds, a 400."""
    monkeypatch.setattr(grammar_process, "_STALL_S", 1.0)
    process.check(SOURCE, SMALL)
    first = pid_of(process)
    os.kill(first, number)
    process.check(SOURCE, Grammar(GrammarKind.REGEX, "a"))
    assert pid_of(process) != first
    with pytest.raises(BadGrammar, match="unclosed group"):
        process.check(SOURCE, Grammar(GrammarKind.REGEX, "("))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["killed", "terminated", "stopped"])
def test_process_failing_twice_is_no_bad_grammar(process: Struck, number: int, monkeypatch: pytest.MonkeyPatch):
    """A process that was killed while it compiled made the grammar one that the library cannot compile, a 400."""
    monkeypatch.setattr(grammar_process, "_STALL_S", 1.0)
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 30.0)
    process.number = number
    with pytest.raises(GrammarProcessFailed):
        process.check(SOURCE, ENDLESS)
    process.check(SOURCE, SMALL)


def test_grammar_crashing_two_processes_is_bad(process: Struck, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 30.0)
    process.number = signal.SIGSEGV
    with pytest.raises(BadGrammar, match="cannot compile"):
        process.check(SOURCE, ENDLESS)


def test_an_expensive_grammar_is_bad_though_slowed(monkeypatch: pytest.MonkeyPatch):
    """Processor time decides: a process that is stopped again and again for less than the limit is neither late nor stalled."""
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 1.0)
    process = GrammarProcess()
    process.check(SOURCE, SMALL)
    pid, is_over = pid_of(process), threading.Event()

    def slow_down() -> None:
        while not is_over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    return
                time.sleep(0.1)

    thread = threading.Thread(target=slow_down)
    begun_at = time.monotonic()
    thread.start()
    try:
        with pytest.raises(BadGrammar, match="longer than 1 s"):
            process.check(SOURCE, ENDLESS)
    finally:
        is_over.set()
        thread.join()
        process.close()
    assert time.monotonic() - begun_at > 1.5


def test_failed_start_is_no_bad_grammar(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer that took too long to load was a 400."""
    monkeypatch.setattr(grammar_process, "_START_S", 0.0)
    with pytest.raises(GrammarProcessFailed, match="does not start"):
        process.check(SOURCE, SMALL)


def test_process_stopped_while_starting_fails(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch):
    """A vocabulary larger than the pipe was sent to a stopped process for ever, and every later grammar waited behind it."""
    monkeypatch.setattr(grammar_process, "_START_STALL_S", 1.0)
    large = replace(SOURCE, tokenizer_json=SOURCE.tokenizer_json + " " * (1 << 22))
    exchange = process._exchange

    def stop_and_send(question: VocabularySource | Grammar, limit_s: float, stall_s: float) -> None:
        os.kill(pid_of(process), signal.SIGSTOP)
        exchange(question, limit_s, stall_s)

    with monkeypatch.context() as patch:
        patch.setattr(process, "_exchange", stop_and_send)
        with pytest.raises(GrammarProcessFailed, match="does not start"):
            process.check(large, SMALL)
    process.check(large, SMALL)


def test_a_closed_process_is_not_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 30.0)
    process = GrammarProcess()
    process.check(SOURCE, SMALL)
    thread = threading.Timer(0.5, process.close)
    thread.start()
    with pytest.raises(GrammarProcessFailed):
        process.check(SOURCE, ENDLESS)
    thread.join()
    assert process._process is None


async def test_process_failure_is_answered_503(monkeypatch: pytest.MonkeyPatch):
    """It was a 400, which no client tries again."""

    def fail(*_: object) -> None:
        raise GrammarProcessFailed("the process that compiles grammars has stopped")

    monkeypatch.setattr(GrammarProcess, "check", fail)
    async with in_process(FakeEngine(eos_token_ids=(0,))) as client:
        response: httpx.Response = await client.post("/v1/completions", json=completion(structured_outputs={"regex": "[a-z]{5}"}))
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["code"] == "grammars_unavailable"


async def test_a_failure_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch):
    async def describe() -> object:
        return object()

    def fail(*_: object) -> None:
        raise GrammarProcessFailed("it has stopped")

    monkeypatch.setattr(GrammarProcess, "check", fail)
    check = GrammarCheck(describe)  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        await check.require(SMALL, "structured_outputs", "key")
    check.close()
    assert check._waiting_chars.total() == 0
    assert not check._known


def clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "_HAS_PROC", False)


def test_the_clock_alone_kills(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch):
    """Without processor time a stopped process is taken for an expensive grammar."""
    clock_decides(monkeypatch)
    monkeypatch.setattr(grammar_process, "_DEADLINE_S", 1.0)
    process.check(SOURCE, SMALL)
    os.kill(pid_of(process), signal.SIGSTOP)
    with pytest.raises(BadGrammar, match="longer than"):
        process.check(SOURCE, SMALL)
