"""Reasoning split off from text in pieces: the pieces do not matter, and nothing but markup and space beside it is lost."""

import re
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from server.reasoning.reader import Markers, ReasoningReader
from server.text.parsed_text import PlainReader, ReadText, merged
from server.tool_calls.markup_reader import MarkupReader
from server.tool_calls.syntaxes import SYNTAXES

_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
_WORDS = [
    "<think>",
    "</think>",
    "<th",
    "ink>",
    "</thi",
    "<",
    ">",
    "/",
    "\n",
    "\n\n",
    " ",
    "\t",
    "hello",
    "日😀",
    _CALL,
]
TEXTS = st.tuples(st.sampled_from(["", "<think>a </think>"]), st.lists(st.sampled_from(_WORDS), max_size=12).map("".join)).map(
    "".join
)
EDGES = st.lists(st.integers(0, 100), max_size=6)


def read(
    text: str,
    edges: list[int],
    begins_inside: bool = False,
    reader_type: type[ReasoningReader] = ReasoningReader,
    tools: bool = True,
) -> ReadText:
    """Return what is read of a text that is cut at `edges`."""
    rest = MarkupReader(SYNTAXES["hermes"].forms, {"f": {}}, None) if tools else PlainReader()
    reader = reader_type(rest, Markers(), begins_inside=begins_inside)
    bounds = [0, *sorted(min(edge, len(text)) for edge in edges), len(text)]
    parts = [*(reader.feed(text[a:b]) for a, b in pairwise(bounds)), reader.close()]
    calls = merged(call for part in parts for call in part.calls)
    return ReadText("".join(part.content for part in parts), calls, "".join(part.reasoning for part in parts))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\nWell.\n</think>\n\nHello", "Hm.\nWell.", "Hello"),
        ("\n <think>Hm.</think>Hello", "Hm.", "Hello"),
        ("<think>\n\n</think>\n\nHello", "", "Hello"),
        ("<think></think>", "", ""),
        ("<think>Hm.</think>\n\n\n Hello\n", "Hm.", "\n Hello\n"),
        ("<think>Hm.</think>\n", "Hm.", ""),
        ("<think>Hm.</think>a</think>b<think>c</think>", "Hm.", "a</think>b<think>c</think>"),
        ("<think>a<think>b</think>c", "a<think>b", "c"),
        ("<think>Hm. </thi", "Hm. </thi", ""),
        ("<think>Hm.\n", "Hm.\n", ""),
        ("<think", "", "<think"),
        ("\n\n", "", "\n\n"),
        ("a <think>Hm.</think>", "", "a <think>Hm.</think>"),
        ("Hm.</think>\n\nHello", "", "Hm.</think>\n\nHello"),
        ("", "", ""),
    ],
)
def test_blocks_are_split_off(text: str, reasoning: str, content: str):
    assert read(text, []) == ReadText(content, (), reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nHello", "Hm.", "Hello"),
        ("\nHm.</think>", "Hm.", ""),
        ("<think>\nHm.</think>Hello", "Hm.", "Hello"),  # the model repeats the marker
        ("</think>Hello", "", "Hello"),
        ("<thi", "<thi", ""),
        ("Hm.", "Hm.", ""),
        ("Hm. <think>", "Hm. <think>", ""),
    ],
)
def test_a_block_may_begin_in_the_prompt(text: str, reasoning: str, content: str):
    assert read(text, [], begins_inside=True) == ReadText(content, (), reasoning)


def test_calls_are_read_behind_a_block_alone():
    """Reasoning about a call is no call."""
    found = read(f"<think>Maybe {_CALL}?</think>\n\n{_CALL}", [])
    assert (found.reasoning, found.content) == (f"Maybe {_CALL}?", "")
    assert [(call.name, call.arguments) for call in found.calls] == [("f", ""), (None, '{"x": 1}')]
    assert not read(f"<think>{_CALL}", []).calls


def test_reasoning_can_be_dropped():
    reader = ReasoningReader(PlainReader(), Markers(), begins_inside=False, keeps_reasoning=False)
    assert [reader.feed("<think>Hm.</think>Hel"), reader.feed("lo"), reader.close()] == [
        ReadText("Hel"),
        ReadText("lo"),
        ReadText(),
    ]


def test_text_is_passed_on_at_once():
    reader = ReasoningReader(PlainReader(), Markers(), begins_inside=False)
    assert [reader.feed(text).content for text in ("H", "e ", "<th", "i")] == ["H", "e ", "<th", "i"]
    inside = ReasoningReader(PlainReader(), Markers(), begins_inside=True)
    assert [inside.feed(text).reasoning for text in ("\nH", "e ", "l", "<", "/x")] == ["H", "e", " l", "", "</x"]


def _expected(text: str, begins_inside: bool) -> tuple[str, str]:
    """Return reasoning and content of a whole text."""
    opened = re.fullmatch(r"[ \t\r\n]*<think>(.*)", text, re.DOTALL)
    if not opened and not begins_inside:
        return "", text
    block, closing, rest = (opened[1] if opened else text).partition("</think>")
    reasoning = block.strip(" \t\r\n") if closing else block.lstrip(" \t\r\n")
    return reasoning, re.sub(r"\A\n{1,2}", "", rest)


def _check(reader_type: type[ReasoningReader], num_examples: int, *phases: Phase) -> None:
    @settings(max_examples=num_examples, report_multiple_bugs=False, phases=phases)
    @given(TEXTS, EDGES, st.booleans(), st.booleans())
    def any_cuts_give_the_same(text: str, edges: list[int], begins_inside: bool, tools: bool) -> None:
        whole = read(text, [], begins_inside, reader_type, tools)
        assert read(text, edges, begins_inside, reader_type, tools) == whole
        assert read(text, list(range(len(text))), begins_inside, reader_type, tools) == whole
        if not tools:
            assert (whole.reasoning, whole.content) == _expected(text, begins_inside)

    any_cuts_give_the_same()


def test_any_cuts_give_the_same():
    _check(ReasoningReader, 300, Phase.generate, Phase.shrink)


class _LetsBegunMarkupOut(ReasoningReader):
    """Returns an end that may become the closing marker."""

    def _num_certain(self) -> int:
        return len(self._buffer)


class _DecidesTooEarly(ReasoningReader):
    """Takes an opening marker that has only begun for content."""

    def _at_start(self, is_end: bool) -> bool:
        return super()._at_start(is_end or bool(self._buffer))


class _CountsBreaksAnew(ReasoningReader):
    """Drops two line breaks of each piece."""

    def _at_breaks(self, is_end: bool) -> bool:
        self._num_breaks = 0
        return super()._at_breaks(is_end)


class _LosesTheEnd(ReasoningReader):
    """Forgets what is buffered at the end."""

    def close(self, is_cut: bool = False) -> ReadText:
        self._buffer = ""
        return super().close(is_cut)


class _StripsEachPiece(ReasoningReader):
    """Drops space at the beginning of each piece of reasoning."""

    def _emit_reasoning(self, text: str) -> None:
        self._has_reasoning = False
        super()._emit_reasoning(text)


@pytest.mark.parametrize("mutant", [_LetsBegunMarkupOut, _DecidesTooEarly, _CountsBreaksAnew, _LosesTheEnd, _StripsEachPiece])
def test_mutants_die(mutant: type[ReasoningReader]):
    with pytest.raises(AssertionError):
        _check(mutant, 1500, Phase.generate)
