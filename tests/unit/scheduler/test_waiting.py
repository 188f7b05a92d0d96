"""The queue: the order of turns, and work that does not grow with those that wait."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.types import Request
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting_queue import WaitingQueue, _Place

_ACTIONS = st.lists(st.tuples(st.sampled_from(["push", "push", "return", "remove", "take"]), st.integers(-3, 3)), max_size=60)


def sequence(name: int, priority: int = 0) -> Sequence:
    return Sequence(Request(str(name), (5,), priority=priority), 0, "traversal")


@given(_ACTIONS)
def test_queue_order_equals_sorted_list(actions):
    """Against a list that is sorted anew after every action."""
    queue = WaitingQueue()
    model: list[tuple[tuple[int, int, int], Sequence]] = []
    taken: list[Sequence] = []
    for number, (action, value) in enumerate(actions):
        if action == "push":
            one = sequence(number, value)
            queue.push(one)
            place = sum(kind == "push" for kind, _ in actions[: number + 1])
            model.append(((1, place + value, place), one))
        elif action == "return" and taken:
            queue.push_back(one := taken.pop())
            model.append(((0, -number, 0), one))
        elif action == "remove" and model:
            place, one = model.pop(value % len(model))
            queue.remove(one)
        elif action == "take" and (first := queue.first) is not None:
            queue.remove(first)
            model.remove(min(model, key=lambda entry: entry[0]))
            taken.append(first)
        model.sort(key=lambda entry: entry[0])
        assert list(queue) == [one for _, one in model]
        assert queue.first is (model[0][1] if model else None)
        assert len(queue) == len(model)


@pytest.mark.parametrize("kind", ["oldest first", "newest first", "any"])
def test_work_does_not_grow_with_the_queue(kind, monkeypatch):
    """Thousands wait with all kinds of priority; a sequence comes and goes with a few comparisons, whatever its place."""
    comparisons = 0

    class Counted(_Place):
        def __lt__(self, other):
            nonlocal comparisons
            comparisons += 1
            return tuple(self) < tuple(other)

    monkeypatch.setattr("engine.scheduler.waiting_queue._Place", Counted)
    rng, queue = random.Random(0), WaitingQueue()
    waiting = [sequence(number, rng.randrange(-1000, 1000)) for number in range(3_000)]
    for one in waiting:
        queue.push(one)
    assert comparisons < 3_000 * 20
    order = {"oldest first": waiting, "newest first": waiting[::-1], "any": rng.sample(waiting, len(waiting))}[kind]
    comparisons = 0
    for one in order:
        queue.remove(one)
        assert queue.first is not one
    assert comparisons < 3_000 * 40
    assert len(queue._heap) < 100, "removed sequences are freed"
