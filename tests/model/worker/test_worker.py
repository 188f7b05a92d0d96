"""A real worker process, spoken to over its sockets as a client would."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import zmq

from engine.core.config import EngineConfig
from engine.core.types import FinishReason
from engine.worker.engine_loop import EngineFactory
from engine.worker.messages import (
    Add,
    Addresses,
    Command,
    Failed,
    Heartbeat,
    Ready,
    Shutdown,
    StepResult,
    WorkerEvent,
    decode_event,
    encode_message,
)
from engine.worker.process import ProcessLauncher
from tests.counting_engine import Trick, build_counting, build_once_marked, build_without_weights, counting_request

ENDLESS = 500_000
_PATIENCE_MS = 60_000


@dataclass
class Talk:
    """Both ends of a worker's streets."""

    process: BaseProcess
    commands: "zmq.Socket[bytes]"
    events: "zmq.Socket[bytes]"

    def post(self, command: Command) -> None:
        self.commands.send(encode_message(command))

    def next_event(self) -> WorkerEvent:
        assert self.events.poll(_PATIENCE_MS), "the worker is silent"
        return decode_event(self.events.recv())

    def until(self, is_wanted: Callable[[WorkerEvent], bool]) -> list[WorkerEvent]:
        """Return the reports up to the wanted one."""
        events = [self.next_event()]
        while not is_wanted(events[-1]):
            events.append(self.next_event())
        return events

    def exit_code(self) -> int | None:
        self.process.join(_PATIENCE_MS / 1000)
        return self.process.exitcode


@contextmanager
def worker(folder: Path, factory: EngineFactory = build_counting, model: str = "counting") -> Iterator[Talk]:
    addresses = Addresses(f"ipc://{folder}/l", f"ipc://{folder}/r", f"{folder}/s")
    with zmq.Context() as context, context.socket(zmq.PUSH) as commands, context.socket(zmq.PULL) as events:
        commands.linger = 0
        events.bind(addresses.events)
        commands.connect(addresses.commands)
        process = ProcessLauncher(EngineConfig(model), factory).launch(addresses)
        try:
            yield Talk(process, commands, events)
        finally:
            process.kill()
            process.join()
            process.close()


def is_ready(event: WorkerEvent) -> bool:
    return isinstance(event, Ready)


def is_failed(event: WorkerEvent) -> bool:
    return isinstance(event, Failed)


def test_worker_loads_serves_and_exits_on_command(tmp_path: Path) -> None:
    with worker(tmp_path) as talk:
        *before, ready = talk.until(is_ready)
        assert all(isinstance(event, Heartbeat) for event in before)
        assert isinstance(ready, Ready)
        assert ready.info.name == "counting"
        talk.post(Add(counting_request("a", 10, max_tokens=3)))
        turns = [event for event in talk.until(_ends("a")) if isinstance(event, StepResult)]
        assert [event.token_ids for turn in turns for event in turn.events] == [(11,), (12,), (13,)]
        assert [turn.stats.step for turn in turns if turn.stats] == [1, 2, 3]
        talk.post(Shutdown())
        assert talk.exit_code() == 0


def _ends(request_id: str) -> Callable[[WorkerEvent], bool]:
    def ends(event: WorkerEvent) -> bool:
        return isinstance(event, StepResult) and any(e.request_id == request_id and e.finish is not None for e in event.events)

    return ends


def test_beats_while_loading_and_while_idle(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"
    with worker(tmp_path, build_once_marked, str(marker)) as talk:
        assert [talk.next_event() for _ in range(3)] == [Heartbeat()] * 3
        marker.touch()
        talk.until(is_ready)
        assert [talk.next_event() for _ in range(3)] == [Heartbeat()] * 3


def test_step_is_one_message_with_all_events(tmp_path: Path) -> None:
    with worker(tmp_path) as talk:
        talk.until(is_ready)
        for request_id, max_tokens in (("a", ENDLESS), ("b", ENDLESS), ("c", 20)):
            talk.post(Add(counting_request(request_id, Trick.PACE, max_tokens=max_tokens)))
        turns = [event for event in talk.until(_ends("c")) if isinstance(event, StepResult)]
        steps = [turn.stats.step for turn in turns if turn.stats]
        assert steps == list(range(1, len(turns) + 1))
        assert max(len(turn.events) for turn in turns) == 3


def test_refused_request_is_answered_without_side_effects(tmp_path: Path) -> None:
    with worker(tmp_path) as talk:
        talk.until(is_ready)
        talk.post(Add(counting_request("long", 1, max_tokens=10**9)))
        turn = talk.until(_ends("long"))[-1]
        assert isinstance(turn, StepResult)
        assert turn.events[0].error == "too long"
        talk.post(Add(counting_request("a", 1)))
        talk.until(_ends("a"))


@pytest.mark.parametrize(
    ("trick", "error"), [(Trick.RAISE, "RuntimeError: an evil forward"), (Trick.LEAK, "IntegrityError: a slot leaked")]
)
def test_failure_ends_with_message_and_status(tmp_path: Path, trick: Trick, error: str) -> None:
    with worker(tmp_path) as talk:
        talk.until(is_ready)
        talk.post(Add(counting_request("a", trick, max_tokens=1)))
        assert talk.until(is_failed)[-1] == Failed(error)
        assert talk.exit_code() == 1


def test_failed_start_ends_with_message_and_status(tmp_path: Path) -> None:
    with worker(tmp_path, build_without_weights) as talk:
        assert talk.until(is_failed)[-1] == Failed("FileNotFoundError: no weights at 'counting'")
        assert talk.exit_code() == 1


def test_worker_ignores_interrupt_and_obeys_terminate(tmp_path: Path) -> None:
    with worker(tmp_path) as talk:
        talk.until(is_ready)
        pid = talk.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        talk.post(Add(counting_request("a", 1, max_tokens=2)))
        assert _finish_of("a", talk) is FinishReason.LENGTH
        os.kill(pid, signal.SIGTERM)
        assert talk.exit_code() == -signal.SIGTERM


def _finish_of(request_id: str, talk: Talk) -> FinishReason | None:
    turn = talk.until(_ends(request_id))[-1]
    assert isinstance(turn, StepResult)
    return turn.events[-1].finish


_PARENT = """
import sys, time
from pathlib import Path
from engine.core.config import EngineConfig
from engine.worker.messages import Addresses
import engine.worker.process
from engine.worker.process import ProcessLauncher
from tests.counting_engine import build_counting, build_forever

# PATCH
if __name__ == "__main__":
    folder, moment = sys.argv[1:]
    factory = {"ready": build_counting, "loading": build_forever}[moment]
    addresses = Addresses(f"ipc://{folder}/l", f"ipc://{folder}/r", f"{folder}/s")
    worker = ProcessLauncher(EngineConfig("counting"), factory).launch(addresses)
    print(worker.pid, flush=True)
    time.sleep(600)
"""


def check_a_killed_parent_takes_the_worker_along(
    folder: Path, moment: str, script: str = _PARENT, patience_ms: int = _PATIENCE_MS
) -> None:
    path = folder / "parent.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with zmq.Context() as context, context.socket(zmq.PULL) as events:
        events.bind(f"ipc://{folder}/r")
        command = [sys.executable, str(path), str(folder), moment]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
            assert parent.stdout is not None
            worker_pid = int(parent.stdout.readline())
            assert events.poll(_PATIENCE_MS), "the worker is silent"  # it beats: the watch over its parent has begun
            parent.kill()
        _wait_gone(worker_pid, patience_ms)


@pytest.mark.parametrize("moment", ["ready", "loading"])
def test_a_killed_parent_takes_the_worker_along(tmp_path: Path, moment: str) -> None:
    """Daemons die only with a parent that exits in order. After kill -9 the parent cannot stop them."""
    check_a_killed_parent_takes_the_worker_along(tmp_path, moment)


def test_an_orphan_is_noticed(tmp_path: Path) -> None:
    """The mutant: a worker that trusts in being a daemon. The child imports the parent's script, and with it the patch."""
    trusting = _PARENT.replace("# PATCH", "engine.worker.process.die_with_parent = lambda: None")
    with pytest.raises(AssertionError, match="outlives its parent"):
        check_a_killed_parent_takes_the_worker_along(tmp_path, "loading", trusting, patience_ms=1000)


def _wait_gone(pid: int, patience_ms: int) -> None:
    """Wait until a process that is no child of ours has ended; if it does not end, end it and raise."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = zmq.Poller()
        poller.register(pidfd, zmq.POLLIN)
        if not poller.poll(patience_ms):
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the worker outlives its parent")
    finally:
        os.close(pidfd)
