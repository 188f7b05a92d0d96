"""Calls read out of text in pieces: the pieces do not matter, nothing but markup is lost, and what is no call is content."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tool_calls.hermes import CLOSE, OPEN, HermesReader
from server.tool_calls.json_end import JsonEnd
from server.tool_calls.reader import CallPiece, ReadText, merged

NAMES = ["f", "get_it"]
_HEAD = '{"name": "f", "arguments": '
_WORDS = [
    *(OPEN, CLOSE, OPEN[:5], CLOSE[3:], f"\n{OPEN}\n", f"\n{CLOSE}\n", "hello", "日😀", " ", "\n"),
    *(_HEAD, '{{"name":"get_it" ,"arguments":', '{"name": "unknown", "arguments": ', '{"name": "f"}'),
    *('{"x": 1}', '{"x": "a<b}\\""}', '{"arguments": {"y": [{}]}, "name": "f"}', "{}", "}", "}}", '"', "\\", "<", "[", "]"),
    *(f'{OPEN}{_HEAD}{{"x": "a}}b"}}}}{end}' for end in (CLOSE, "]", f"{CLOSE}]")),
]
TEXTS = st.lists(st.sampled_from(_WORDS), max_size=12).map("".join)
_ANY_HEAD = r'\{{1,2}~"name"~:~"\w+"~,~"arguments"~:'.replace("~", r"[ \t\r\n]*")
_ATOMS = re.compile(rf"[ \t\r\n]|{OPEN}|{CLOSE}|\}}|{_ANY_HEAD}")  # of what may be lost


def _read(text: str, edges: list[int], reader_type: type[HermesReader] = HermesReader, max_calls: int | None = None) -> ReadText:
    """Return what is read of a text that is cut at `edges`."""
    reader = reader_type(NAMES, max_calls)
    bounds = [0, *sorted(min(edge, len(text)) for edge in edges), len(text)]
    said = [*(reader.feed(text[a:b]) for a, b in pairwise(bounds)), reader.close()]
    return ReadText("".join(one.content for one in said), merged(piece for one in said for piece in one.calls))


def _calls(said: ReadText) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for piece in said.calls:
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append([piece.name, piece.arguments])
        else:
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    return [(name, arguments) for name, arguments in calls]


def _check_cuts(reader_type: type[HermesReader]) -> None:
    @settings(report_multiple_bugs=False)
    @given(TEXTS, st.lists(st.integers(0, 200), max_size=6), st.sampled_from([None, 1]))
    def any_cuts_give_the_same(text: str, edges: list[int], max_calls: int | None) -> None:
        whole = _read(text, [], reader_type, max_calls)
        assert _read(text, edges, reader_type, max_calls) == whole
        assert _read(text, list(range(len(text))), reader_type, max_calls) == whole

    any_cuts_give_the_same()


def test_any_cuts_give_the_same():
    _check_cuts(HermesReader)


class _LetsBegunMarkupOut(HermesReader):
    """Says an end that may become markup."""

    def _num_certain(self, is_end: bool) -> int:
        return len(self._buffer)


class _ForgetsTheString(HermesReader):
    """Looks for the end of the arguments in each piece anew."""

    def feed(self, text: str) -> ReadText:
        self._json._is_in_string = False
        return super().feed(text)


class _ClosesByAnyEnd(HermesReader):
    """Takes a closing marker that has only begun for one that has come."""

    def _at_tail(self, is_end: bool) -> bool:
        return super()._at_tail(True)


@pytest.mark.parametrize("mutant", [_LetsBegunMarkupOut, _ForgetsTheString, _ClosesByAnyEnd])
def test_readers_that_hang_on_the_cuts_die(mutant: type[HermesReader]):
    with pytest.raises(AssertionError):
        _check_cuts(mutant)


def _behind_markup(text: str, places: set[int]) -> set[int]:
    """Return the places with those behind any markup that follows them."""
    found, waiting = set(places), list(places)
    while waiting:
        match = _ATOMS.match(text, waiting.pop())
        if match is not None and match.end() not in found:
            found.add(match.end())
            waiting.append(match.end())
    return found


def _check_loss(reader_type: type[HermesReader]) -> None:
    @settings(report_multiple_bugs=False)
    @given(TEXTS.filter(lambda text: '"arguments": {"y"' not in text and '"f"}' not in text))
    def only_markup_is_lost(text: str) -> None:
        """What is said is the text, one character behind the other, with nothing but markup between them."""
        reader = reader_type(NAMES)
        said = [*map(reader.feed, text), reader.close()]
        parts = [part for one in said for part in (one.content, *(piece.arguments for piece in one.calls))]
        if not any(one.calls for one in said):
            assert "".join(parts) == text
        places = {0}
        for part in filter(None, parts):
            places = {at + len(part) for at in _behind_markup(text, places) if text.startswith(part, at)}
        assert any(CLOSE.startswith(text[at:]) for at in _behind_markup(text, places))

    only_markup_is_lost()


def test_only_markup_is_lost():
    _check_loss(HermesReader)


class _DropsWhatIsNoCall(HermesReader):
    """Keeps the opening marker of what turns out to be no call."""

    def _reject(self) -> bool:
        self._take(self._buffer.index(OPEN) + len(OPEN))
        self._state = self._in_text
        return True


class _DropsBehindACall(HermesReader):
    """Takes whatever stands between the arguments and the next space for the end of the call."""

    def _at_tail(self, is_end: bool) -> bool:
        is_over = super()._at_tail(is_end)
        self._buffer = self._buffer.lstrip("]") if is_over else self._buffer
        return is_over


@pytest.mark.parametrize("mutant", [_DropsWhatIsNoCall, _DropsBehindACall])
def test_readers_that_lose_text_die(mutant: type[HermesReader]):
    with pytest.raises(AssertionError):
        _check_loss(mutant)


_CONTENTS = st.text("he <o日\n", max_size=8).map(lambda text: text.strip(" \n"))
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.booleans() | st.none() | st.text('a"\\<{}]日' + CLOSE, max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=3), _VALUES, max_size=3)), max_size=3)


@given(_CONTENTS, _CALLS, st.lists(st.integers(0, 200), max_size=4), st.booleans())
def test_what_a_template_writes_is_read_back(
    content: str, calls: list[tuple[str, dict[str, Any]]], edges: list[int], is_ascii: bool
):
    """Qwen's template: a line for each marker. Strings may hold brackets and markers."""
    dumped = [(name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in calls]
    lines = [f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}' for name, arguments in dumped]
    said = _read("\n".join([*([content] if content else []), *lines]), edges)
    assert (said.content, _calls(said)) == (content, dumped)


CALL = f'{OPEN}{{"name": "f", "arguments": {{"x": 1}}}}{CLOSE}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see.\n{CALL}", "Let me see.", [("f", '{"x": 1}')]),
        (f"\n\n{CALL}\n{CALL}\n", "", [("f", '{"x": 1}')] * 2),
        (f"{CALL} and then", " and then", [("f", '{"x": 1}')]),
        (" \n", " \n", []),
        # fields in another order, left out, or doubled braces, as one of Qwen's templates asks for
        (f'{OPEN}{{"arguments": {{"x":1}}, "name": "f"}}{CLOSE}', "", [("f", '{"x": 1}')]),
        (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [("f", "{}")]),
        (f'{OPEN}{{{{"name": "f", "arguments": {{"x":1}}}}}}{CLOSE}', "", [("f", '{"x":1}')]),
        # no calls: an unknown name, no JSON, arguments that are no object, a field that is none, nothing more
        *((text, text, []) for text in [
            f'{OPEN}{{"name": "g", "arguments": {{}}}}{CLOSE}', f'{OPEN}{{"name": "f", "arguments": "x"}}{CLOSE}',
            f"{OPEN}f(x=1){CLOSE}", f'{OPEN}{{"name": "f", "id": 1}}{CLOSE}', f"{OPEN}[]{CLOSE}", f"{OPEN} {CLOSE}",
            OPEN, OPEN[:-1], f'{OPEN}{{"name": "f"', CLOSE,
        ]),
        # one that is no call does not hide the next
        (f"{OPEN}oh{CALL}", f"{OPEN}oh", [("f", '{"x": 1}')]),
        (f'{OPEN}{{"name": {CALL}', f'{OPEN}{{"name":', [("f", '{"x": 1}')]),
        # a call that was not closed, and arguments that are no JSON or were cut off: as the model wrote them
        (CALL.removesuffix(CLOSE), "", [("f", '{"x": 1}')]),
        (CALL.removesuffix("}" + CLOSE), "", [("f", '{"x": 1}')]),
        (CALL[:-3], "", [("f", '{"x": 1}')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": {CLOSE}oh', "oh", [("f", '{"x": ')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "a', "", [("f", '{"x": "a')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "{CLOSE}"}}}}{CLOSE}', "", [("f", f'{{"x": "{CLOSE}"}}')]),
    ],
)  # fmt: skip
def test_calls_and_content(text: str, content: str, calls: list[tuple[str, str]]):
    said = _read(text, [])
    assert (said.content, _calls(said)) == (content, calls)


def test_arguments_come_as_they_are_written():
    reader = HermesReader(NAMES)
    pieces = [reader.feed(text) for text in (f'hm {OPEN}{{"name": "f", ', '"arguments": {"x', '": [1, ', "2]}", "}", CLOSE)]
    calls = [
        (),
        (CallPiece(0, "f"), CallPiece(0, arguments='{"x')),
        (CallPiece(0, arguments='": [1, '),),
        (CallPiece(0, arguments="2]}"),),
    ]
    assert [said.calls for said in pieces] == [*calls, (), ()]
    assert [said.content for said in pieces] == ["hm", *[""] * 5]


def test_the_last_call_that_may_come_is_the_end():
    reader = HermesReader(NAMES, max_calls=1)
    ends = [(bool(reader.feed(text).calls), reader.is_done) for text in (f"so {CALL}"[:-1], ">oh")]
    assert ends == [(True, False), (False, True)]
    assert (reader.feed(CALL), reader.close()) == (ReadText(), ReadText())


@given(_VALUES.map(lambda value: json.dumps({"a": value})), st.text(max_size=5), st.integers(0, 50))
def test_the_end_of_an_object_is_where_json_has_it(text: str, behind: str, edge: int):
    place, head = JsonEnd(), (text + behind)[:edge]
    end = place.feed(head)
    if end is None:
        later = place.feed((text + behind)[edge:])
        end = None if later is None else len(head) + later
    assert end == len(text)
