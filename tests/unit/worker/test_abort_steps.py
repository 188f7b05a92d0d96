"""An abort that has arrived takes effect before the next step, however many requests there are. Counted in steps, not in time."""

from collections.abc import Sequence

import pytest

from engine.worker.messages import Abort, Add, Command, Ready, Shutdown, StepResult, WorkerEvent
from engine.worker.process import Worker
from tests.counting_engine import CountingEngine, counting_request

NUM = 20


class ReadsNowAndThen(Worker):
    """The mutant: letters are read every other round."""

    _round = 0

    def _handle_commands(self) -> bool:
        self._round += 1
        return self._round % 2 == 0 or super()._handle_commands()


def late_steps(kind: type[Worker]) -> int:
    """Abort a request in each round; return in how many steps one took part whose abort had arrived before."""
    engine = CountingEngine(NUM)
    arrived: set[str] = set()
    late: list[str] = []
    adds: list[Command] = [Add(counting_request(str(number), 1, max_tokens=99)) for number in range(NUM)]
    aborts: list[list[Command]] = [[Abort(str(number))] for number in range(NUM)]
    rounds = iter([adds, *aborts])
    engine.add_step_listener(lambda note: late.extend(note.request_ids & arrived))
    unread: list[Command] = []

    def read(_wait_s: float) -> list[Command]:
        taken, unread[:] = list(unread), []
        return taken

    def arrive() -> None:
        commands = next(rounds, [Shutdown()])
        unread.extend(commands)
        arrived.update(command.request_id for command in commands if isinstance(command, Abort))

    def send(events: Sequence[WorkerEvent]) -> None:
        if any(isinstance(event, Ready | StepResult) for event in events):
            arrive()

    kind(engine, read, send).serve()
    return len(late)


def test_aborted_request_gets_no_further_step() -> None:
    assert late_steps(Worker) == 0


def test_late_message_reading_is_detected() -> None:
    with pytest.raises(AssertionError):
        assert late_steps(ReadsNowAndThen) == 0
