"""Spellings of control tokens are found as an alternation of all of them would, the longest first."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.text.chat_text import ControlMask
from server.text.control_tokens import ControlFinder, TextSegment

_texts = st.text("<|ab>", max_size=12)
_controls = st.lists(st.text("<|ab>", max_size=4), max_size=6)


def _expected(controls: list[str], text: str) -> list[TextSegment]:
    """Return the parts as one regular expression of all controls finds them."""
    longest_first = sorted(filter(None, controls), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text)
    return [TextSegment(piece, bool(index % 2)) for index, piece in enumerate(pieces) if piece]


class _ShortestFirst(ControlFinder):
    """The mutant: it stops at the first spelling that ends."""

    def _end(self, text: str, start: int) -> int | None:
        ends = range(start + 1, len(text) + 1)
        found = (ControlFinder._end(self, text[:end], start) for end in ends)
        return next((end for end in found if end is not None), None)


def _check(finder: type[ControlFinder]) -> None:
    @given(_controls, _texts)
    @example(["<a", "<ab"], "<ab")  # the shorter one ends inside the longer
    def holds(controls: list[str], text: str) -> None:
        assert list(finder(controls).parts(text)) == _expected(controls, text)

    holds()


def test_finder_equals_an_alternation():
    _check(ControlFinder)


def test_stopping_at_the_shortest_is_detected():
    with pytest.raises(AssertionError):
        _check(_ShortestFirst)


def test_shared_beginning_is_searched_once(monkeypatch: pytest.MonkeyPatch):
    """The bug: each of 6249 spellings was tried at each of 4000 `<`, which stopped the event loop for 0.2 s."""
    num_looks = 0
    end_of = ControlFinder._end

    def counted(finder: ControlFinder, text: str, start: int) -> int | None:
        nonlocal num_looks
        num_looks += 1
        return end_of(finder, text, start)

    monkeypatch.setattr(ControlFinder, "_end", counted)
    text = "<" * 4000
    assert list(ControlFinder(f"<unused{i}>" for i in range(6249)).parts(text)) == [TextSegment(text, False)]
    assert num_looks == len(text)


def test_mark_in_message_is_not_reused(monkeypatch: pytest.MonkeyPatch):
    drawn = iter(["a", "a", "b"])
    monkeypatch.setattr("server.text.chat_text.secrets.token_hex", lambda _: next(drawn))
    message = {"role": "user", "content": "\ue000a\ue0010; <s>"}
    mask = ControlMask([message], ControlFinder(["<s>"]))
    assert mask.masked(message)["content"] == "\ue000a\ue0010; \ue000b\ue0010;"
    assert mask.parts(mask.masked(message)["content"]) == [TextSegment(message["content"], False)]


def test_unmasked_message_draws_no_mark(monkeypatch: pytest.MonkeyPatch):
    """The bug: a message of numbered marks made the search for a free number quadratic, though it spelled out no token."""
    monkeypatch.setattr("server.text.chat_text.secrets.token_hex", None)
    messages = [{"role": "user", "content": "".join(f"\ue000{i}\ue001" for i in range(9))}]
    mask = ControlMask(messages, ControlFinder(["<s>"]))
    assert not mask.is_needed
    assert [mask.masked(message) for message in messages] == messages
