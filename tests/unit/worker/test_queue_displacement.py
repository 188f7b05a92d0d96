"""A full queue is shared by keys, and by whole answers: which answers yield their places, and that none does in vain."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.service import EngineBusy
from engine.core.types import ErrorCode, FinishReason, Request, TokenEvent
from engine.worker import queue_displacement as displacement
from engine.worker.queue_displacement import QueuedShare, displaced_shares
from engine.worker.request_table import RequestTable, Submission, TokenEventStream
from tests.unit.scheduler.test_queue_at_scale import lines_run

Answer = list[Request]


def of_key(key: str, number: int, num_prompt: int = 1, priority: int = 0) -> Request:
    return Request(f"{key}{number}", (1,) * num_prompt, tenant=f"{key}/user", priority=priority)


def choices(key: str, number: int, num_choices: int, num_prompt: int = 1) -> Answer:
    one = of_key(key, number, num_prompt)
    return [replace(one, request_id=f"{one.request_id}-{index}") for index in range(num_choices)]


def each(*requests: Request) -> list[Answer]:
    """Return an answer for each request."""
    return [[request] for request in requests]


class PlacesOnlyTable(RequestTable):
    """The mutant: long prompts are no more than short ones."""

    def __init__(self, limits, *others) -> None:
        super().__init__(replace(limits, max_waiting_tokens=1 << 40), *others)


class SilentTable(RequestTable):
    """The mutant: the engine goes on with displaced requests."""

    def _displace(self, answers) -> None:
        for entry in self._live.values():
            entry.is_posted = entry.is_posted and entry.submission not in answers
        super()._displace(answers)


class OrphaningTable(RequestTable):
    """The mutant: each choice of an answer waits, and goes, for itself."""

    def open(self, requests, is_posted=True):
        streams = super().open(requests, is_posted)
        for stream in streams:
            stream.entry.submission = Submission()
        return streams


class PiecemealTable(RequestTable):
    """The mutant: choices come one after the other, each making its own room."""

    def make_room(self, requests) -> None:
        for request in requests:
            super().make_room([request])


def fill(
    kind: type[RequestTable], limits: SchedulerConfig, answers: Iterable[Answer], begun: Iterable[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Submit answers; return each request's fate (waits, displaced, busy) and the aborts.

    The engine returns one token of each request in `begun`, as soon as it is submitted, and nothing else.
    """

    async def scenario() -> tuple[dict[str, str], list[str]]:
        aborted: list[str] = []
        streams: list[TokenEventStream] = []
        request_table = kind(limits, aborted.append)
        fates: dict[str, str] = {}
        for answer in answers:
            num_living = len(request_table)
            try:
                request_table.make_room(answer)
            except EngineBusy:
                fates.update((request.request_id, "busy") for request in answer)
                assert len(request_table) == num_living, "a refused request has displaced no other"
            else:
                fates.update((request.request_id, "waits") for request in answer)
                streams += request_table.open(answer)
            request_table.deliver(TokenEvent(request.request_id, (9,)) for request in answer if request.request_id in begun)
        for stream in streams:
            mailbox = stream.entry.mailbox
            if any(mailbox.get_nowait().error_code is ErrorCode.DISPLACED for _ in range(mailbox.qsize())):
                fates[stream.entry.request.request_id] = "displaced"
        displaced = list(aborted)
        request_table.abort_all()
        return fates, displaced

    return asyncio.run(scenario())


def of(fates: dict[str, str], fate: str) -> list[str]:
    return [name for name, theirs in fates.items() if theirs == fate]


def check_a_late_key_has_its_half(kind: type[RequestTable]) -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=8)
    greedy = [of_key("a", number, priority=-1 if number == 8 else 0) for number in range(1000)]
    late = [of_key("b", number) for number in range(6)]
    fates, aborted = fill(kind, limits, each(*greedy, *late))
    assert of(fates, "displaced") == ["a4", "a5", "a6", "a7"]
    assert [fates[f"b{number}"] for number in range(6)] == ["waits"] * 4 + ["busy"] * 2
    assert fates["a8"] == "waits", "the most urgent of its key"
    assert aborted == ["a7", "a6", "a5", "a4"]


def test_key_filling_queue_yields_to_others(monkeypatch) -> None:
    check_a_late_key_has_its_half(RequestTable)
    with pytest.raises(AssertionError):
        check_a_late_key_has_its_half(SilentTable)
    monkeypatch.setattr("engine.worker.request_table.displaced_shares", lambda queue, new_request, limits: None)
    with pytest.raises(AssertionError):
        check_a_late_key_has_its_half(RequestTable)


def check_tokens_are_bounded(kind: type[RequestTable]) -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=100, max_waiting_tokens=50)
    fates, _ = fill(kind, limits, each(*(of_key("a", number, 20) for number in range(5)), of_key("a", 5, 10)))
    assert list(fates.values()) == ["waits", "waits", "waits", "busy", "busy", "waits"]
    fates, _ = fill(kind, limits, each(of_key("a", 0), of_key("a", 1, 1000), of_key("a", 2)))
    assert list(fates.values()) == ["waits", "waits", "busy"], "a request that waits alone may be of any length"
    fates, _ = fill(kind, limits, [choices("a", 0, 3, 1000), *each(of_key("a", 1))])
    assert list(fates.values()) == ["waits"] * 3 + ["busy"], "also with siblings"
    sent = [of_key("a", 0), *(of_key("a", number, 20) for number in (1, 2)), of_key("b", 0, 5), of_key("b", 1, 10)]
    fates, _ = fill(kind, limits, each(*sent))
    assert fates == {"a0": "waits", "a1": "waits", "a2": "displaced", "b0": "waits", "b1": "waits"}


def test_the_tokens_that_wait_are_bounded_too() -> None:
    check_tokens_are_bounded(RequestTable)
    with pytest.raises(AssertionError):
        check_tokens_are_bounded(PlacesOnlyTable)


def test_refused_request_displaces_nothing() -> None:
    """The bug: many short requests went one after the other for a long one, which was then too long all the same."""
    limits = SchedulerConfig(max_running=1, max_waiting=100, max_waiting_tokens=1000)
    fates, aborted = fill(RequestTable, limits, each(*(of_key("a", number, 95) for number in range(11)), of_key("b", 0, 900)))
    assert aborted == []
    assert list(fates.values()) == ["waits"] * 11 + ["busy"]


def check_refused_choices_displace_nothing(kind: type[RequestTable]) -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=8)
    fates, aborted = fill(kind, limits, [*each(*(of_key("a", number) for number in range(9))), choices("b", 0, 6)])
    assert aborted == []
    assert of(fates, "busy") == [f"b0-{index}" for index in range(6)]


def test_refused_choices_displace_nothing() -> None:
    """The bug: the first of an answer's choices displaced others, and the last one was refused, and they with it."""
    check_refused_choices_displace_nothing(RequestTable)
    with pytest.raises(AssertionError):
        check_refused_choices_displace_nothing(PiecemealTable)


def check_choices_go_together(kind: type[RequestTable]) -> None:
    limits = SchedulerConfig(max_running=2, max_waiting=8)
    requested = [
        *each(of_key("a", 0), of_key("a", 1), of_key("a", 2)),
        choices("a", 3, 4),
        choices("a", 4, 3),
        *each(of_key("b", 0)),
    ]
    fates, aborted = fill(kind, limits, requested)
    assert of(fates, "displaced") == aborted == ["a4-0", "a4-1", "a4-2"]
    fates, aborted = fill(kind, limits, [choices("a", 3, 10), *each(of_key("b", 0))], begun=["a3-0", "a3-1"])
    assert of(fates, "displaced") == aborted == [f"a3-{index}" for index in range(10)], "the running choices would have no reader"


def test_the_choices_of_an_answer_go_together() -> None:
    """The bug: one waiting choice was displaced, which ended the stream of all, and the others had run for nothing."""
    check_choices_go_together(RequestTable)
    with pytest.raises(AssertionError):
        check_choices_go_together(OrphaningTable)


def check_what_has_begun_stays(kind: type[RequestTable]) -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=8)
    requested = [
        choices("a", 0, 2),
        *each(*(of_key("c", number) for number in range(2))),
        choices("a", 1, 5),
        *each(of_key("b", 0)),
    ]
    fates, _ = fill(kind, limits, requested, begun=["a0-0"])
    assert of(fates, "displaced") == [f"a1-{index}" for index in range(5)]
    requested = [choices("a", 0, 7), *each(*(of_key("c", number) for number in range(2))), *each(of_key("b", 0))]
    fates, _ = fill(kind, limits, requested, begun=["a0-0"])
    assert of(fates, "displaced") == ["c1"], "of a key that has less, but without output so far"
    fates, _ = fill(kind, limits, [choices("a", 0, 9), *each(of_key("b", 0))], begun=["a0-0"])
    assert len(of(fates, "displaced")) == 9, "no key is locked out"


def test_an_answer_that_has_begun_goes_last(monkeypatch) -> None:
    check_what_has_begun_stays(RequestTable)
    with pytest.raises(AssertionError):
        check_what_has_begun_stays(OrphaningTable)

    def blind(queue, new_request, limits):
        return displaced_shares([replace(claim, has_begun=False) for claim in queue], new_request, limits)

    monkeypatch.setattr("engine.worker.request_table.displaced_shares", blind)
    with pytest.raises(AssertionError):
        check_what_has_begun_stays(RequestTable)


async def test_answer_with_finished_choice_has_begun() -> None:
    request_table = RequestTable(SchedulerConfig(max_running=1, max_waiting=3), lambda request_id: None)
    streams = [
        *request_table.open([of_key("c", 0)]),
        *request_table.open([of_key("a", 0)]),
        *request_table.open(choices("a", 1, 3)),
    ]
    request_table.deliver([TokenEvent("a1-0", (9,), finish=FinishReason.STOP)])
    request_table.make_room([of_key("b", 0)])
    assert [stream.entry.request.request_id for stream in streams if not request_table.has(stream.entry)] == ["a0", "a1-0"]
    request_table.abort_all()


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=40))
def test_key_with_fewer_places_is_admitted(keys: list[str]) -> None:
    fates, _ = fill(RequestTable, SchedulerConfig(max_running=1, max_waiting=6), each(*map(of_key, keys, range(len(keys)))))
    places = Counter(name[0] for name in of(fates, "waits")[1:])  # one of them runs
    assert places.total() <= 6
    if list(fates.values())[-1] == "busy":
        assert places[keys[-1]] + 1 >= max(places.values())


requested = st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 20))


@given(st.lists(requested, min_size=2, max_size=20))
def test_an_answer_has_one_fate(requested: list[tuple[str, int, int]]) -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=8, max_waiting_tokens=60)
    answers = [choices(key, number, num, num_prompt) for number, (key, num, num_prompt) in enumerate(requested)]
    fates, _ = fill(RequestTable, limits, answers)
    assert all(len({fates[request.request_id] for request in answer}) == 1 for answer in answers)
    waiting = [answer for answer in answers if fates[answer[0].request_id] == "waits"]
    assert len(list(chain(*waiting))) <= 9  # one of them runs


def check_requests_that_fit_stay() -> None:
    limits = SchedulerConfig(max_running=1, max_waiting=8)
    requested = [*each(of_key("a", 0)), choices("a", 1, 5), *each(of_key("a", 2)), choices("c", 0, 2), choices("b", 0, 3)]
    fates, aborted = fill(RequestTable, limits, requested)
    assert of(fates, "displaced") == aborted == [f"a1-{index}" for index in range(5)]
    limits = SchedulerConfig(max_running=1, max_waiting=20, max_waiting_tokens=40)
    requested = each(of_key("r", 0), of_key("c", 0, 10), of_key("c", 1, 10), *(of_key("a", number) for number in range(11)))
    _, aborted = fill(RequestTable, limits, [*requested, *each(of_key("b", 0, 14))])
    assert aborted == ["c1"], "what is short are tokens, and of those a key with many places has few"


def test_requests_that_fit_are_not_displaced(monkeypatch) -> None:
    """The bug: a short answer went first, made too little room, and was not let back when the next one made enough alone."""
    check_requests_that_fit_stay()
    monkeypatch.setattr(displacement, "_needed", lambda candidates, queue, usage: candidates)
    with pytest.raises(AssertionError):
        check_requests_that_fit_stay()


claims = st.builds(QueuedShare, st.sampled_from("abcd"), st.integers(-2, 2), st.integers(1, 3), st.integers(1, 9), st.booleans())


@given(st.lists(claims, max_size=20), claims)
def test_displacement_is_minimal_and_spares_begun(queue: list[QueuedShare], new_request: QueuedShare) -> None:
    limits = SchedulerConfig(max_waiting=12, max_waiting_tokens=40)
    in_turn = displacement._candidates(queue, new_request.group, displacement._QueueUsage([*queue, new_request], limits))
    victims = displaced_shares(queue, new_request, limits)
    if in_turn is None or victims is None:
        assert in_turn is victims
        return
    assert len(set(in_turn)) == len(in_turn)
    for count, victim in enumerate(in_turn):
        left = [claim for index, claim in enumerate(queue) if index not in in_turn[:count]]
        shares = displacement._QueueUsage([*left, new_request], limits)
        assert shares.num_places > 12 or shares.num_tokens > 40, "there was no room yet"
        givers = [claim for claim in left if shares[claim.group] > shares[new_request.group]]
        assert queue[victim] in givers
        assert not queue[victim].has_begun or all(claim.has_begun for claim in givers)
        of_its_key = [claim.priority for claim in givers if claim.group == queue[victim].group and not claim.has_begun]
        assert queue[victim].priority == max(of_its_key, default=queue[victim].priority)
    assert victims == [victim for victim in in_turn if victim in victims]
    for spared in [None, *victims]:
        left = [claim for index, claim in enumerate(queue) if index not in victims or index == spared]
        shares = displacement._QueueUsage([*left, new_request], limits)
        has_room = shares.num_places <= 12 and (shares.num_tokens <= 40 or not left)
        assert has_room == (spared is None), "there is room once all have gone, and not before"


def test_displacing_many_counts_once() -> None:
    """The bug: shares were counted anew for each that went, so that one long request cost the square of the queue."""

    def work(num_waiting: int) -> int:
        queue = [QueuedShare("a", 0, 1, 1)] * num_waiting
        return lines_run(
            lambda: displaced_shares(queue, QueuedShare("b", 0, num_waiting // 3, 1), SchedulerConfig(max_waiting=num_waiting))
        )

    assert work(1600) < 5 * work(400)
