"""Keys take turns by the tokens that they are served, whatever each of them requests; a key's own requests keep their order."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import PLAIN, ROOT, TokenTree
from engine.core.types import Request, SamplingParams
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence


def waiting(name: str, key: str = "", num_prompt: int = 10, priority: int = 0) -> Sequence:
    return Sequence(Request(name, (5,) * num_prompt, tenant=f"{key}/user", priority=priority), 0, "traversal")


class Fifo(FairQueue):
    """The mutant: all keys are one."""

    def push(self, sequence):
        sequence.group = ""
        super().push(sequence)


class ChargesNoKey(FairQueue):
    """The mutant: the oldest request is always next."""

    def pop(self):
        counts = {key: group.num_served for key, group in self._groups.items()}
        sequence = super().pop()
        self._groups[sequence.group].num_served = counts[sequence.group]
        return sequence


class CountsRequests(FairQueue):
    """The mutant: a long prompt costs what a short one does."""

    def pop(self):
        sequence = super().pop()
        self._groups[sequence.group].num_served += 1 - sequence.num_uncached
        return sequence


class GivesCredit(FairQueue):
    """The mutant: silence is saved up."""

    def push(self, sequence):
        self._num_served_last = 0
        super().push(sequence)


Arrivals = list[tuple[int, str, int]]  # steps since the last one, key, tokens of the prompt


def gap(queue: FairQueue, arrivals: Arrivals) -> int:
    """Play arrivals, one admission a step; return by how many tokens two keys that waited all the time were served apart."""
    served = dict.fromkeys("abc", 0)
    since: dict[str, dict[str, int]] = {}  # what each had been served when this key began to wait
    steps: dict[int, list[tuple[str, str, int]]] = {}
    due = 0
    for number, (pause, key, num_prompt) in enumerate(arrivals):
        due += pause
        steps.setdefault(due, []).append((f"{key}{number}", key, num_prompt))
    worst = step = 0
    while len(queue) or step <= due:
        for name, key, num_prompt in steps.get(step, []):
            queue.push(waiting(name, key, num_prompt))
            since.setdefault(key, dict(served))
        if len(queue):
            sequence = queue.pop()
            served[sequence.request_id[0]] += sequence.num_uncached
        backlog = {sequence.request_id[0] for sequence in queue}
        since = {key: then for key, then in since.items() if key in backlog}
        for one, other in combinations(sorted(backlog), 2):
            got = [served[key] - max(since[one][key], since[other][key]) for key in (one, other)]
            worst = max(worst, abs(got[0] - got[1]))
        step += 1
    return worst


arrivals = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(1, 50)), max_size=60)


@given(arrivals)
def test_keys_that_wait_together_are_served_alike(sent: Arrivals) -> None:
    """The bound of the paper's Theorem 4.4: twice the longest prompt."""
    assert gap(FairQueue(), sent) <= 2 * 50


FLOOD = [(0, "a", 10)] * 100
ATTACKS = {
    Fifo: [*FLOOD, *((0, "b", 10) for _ in range(20))],
    ChargesNoKey: [*FLOOD, *((0, "b", 10) for _ in range(20))],
    CountsRequests: [*((0, "a", 50) for _ in range(50)), *((0, "b", 1) for _ in range(50))],
    GivesCredit: [*FLOOD, *((40 if not number else 0, "b", 10) for number in range(40))],
}


@pytest.mark.parametrize("mutant", list(ATTACKS))
def test_mutants_are_detected(mutant: type[FairQueue]) -> None:
    assert gap(FairQueue(), ATTACKS[mutant]) <= 2 * 50
    assert gap(mutant(), ATTACKS[mutant]) > 2 * 50


def test_many_requests_do_not_starve_other_key() -> None:
    """With one place in the engine, a new request of another key runs next."""
    scheduler = Scheduler(SchedulerConfig(max_running=1), Feeding.TARGET_CACHE)
    for number in range(1000):
        scheduler.add(_short(f"a{number}", "a"))
    _run(scheduler, 20)
    scheduler.add(_short("b", "b"))
    began = _run(scheduler, 20)
    assert began.index("b") <= 1
    assert began[2:] == sorted(began[2:], key=lambda name: int(name[1:])), "its own order"
    scheduler.check_integrity()


def test_output_tokens_are_charged_too() -> None:
    """A key with short prompts and long answers is no cheaper than one with long prompts."""
    scheduler = Scheduler(SchedulerConfig(max_running=1), Feeding.TARGET_CACHE)
    for number in range(20):
        scheduler.add(_short(f"a{number}", "a", num_prompt=1, max_tokens=19))
        scheduler.add(_short(f"b{number}", "b", num_prompt=10, max_tokens=1))
    began = _run(scheduler, 120)
    assert abs(20 * _num_of("a", began) - 11 * _num_of("b", began)) <= 40


def test_priority_is_among_a_keys_own_requests() -> None:
    queue = FairQueue()
    for name, key, priority in (("a0", "a", 0), ("a1", "a", 0), ("a2", "a", -5), ("b0", "b", 0), ("b1", "b", -1000)):
        queue.push(waiting(name, key, priority=priority))
    assert [queue.pop().request_id for _ in range(5)] == ["a2", "b1", "a0", "b0", "a1"]


def test_preempted_request_comes_first_without_charge() -> None:
    queue = FairQueue()
    for name in ("a0", "a1", "b0"):
        queue.push(waiting(name, name[0]))
    old, young = queue.pop(), queue.pop()
    queue.push_back(young)
    queue.push_back(old)
    assert [sequence.request_id for sequence in queue] == ["a0", "b0", "a1"]
    assert queue.first is old
    assert (queue.pop(), queue.pop()) == (old, young)
    assert {key: group.num_served for key, group in queue._groups.items()} == {"a": 10, "b": 10}
    assert not queue.remove(old)
    assert queue.remove(queue.pop()) is False
    assert len(queue) == 0


def _short(name: str, key: str, num_prompt: int = 4, max_tokens: int = 1) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request(name, (5,) * num_prompt, sampling, tenant=f"{key}/user"), 0, "traversal")


def _run(scheduler: Scheduler, num_steps: int) -> list[str]:
    """Run plain steps; return the requests in the order in which they began."""
    began: dict[str, None] = {}
    for _ in range(num_steps):
        scheduler.admit()
        for row in scheduler.plan([PLAIN] * scheduler.num_running).rows:
            began[row.request_id] = None
            scheduler.commit(row, RowResult(TokenTree.single(row.certain_ids[-1]), (ROOT,), 9, 0))
    return list(began)


def _num_of(key: str, began: list[str]) -> int:
    return sum(name.startswith(key) for name in began)
