"""Calls read out of text in pieces, in each markup: pieces change nothing, only markup is lost, other text is content."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from server.text.parsed_text import ReadText, merged
from server.tool_calls.json_end import JsonEnd
from server.tool_calls.markup_reader import MarkupReader
from server.tool_calls.syntaxes import SYNTAXES
from tests.tool_templates import rendered_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKUPS = list(SYNTAXES)
FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["object", "null"]}}},
    "get_it": {},
}
_HEAD = '{"name": "f", "arguments": '
_WORDS = {
    "json": [
        *(_HEAD, '{{"name":"get_it" ,"arguments":', '{"name": "unknown", "arguments": ', '{"name": "f"}'),
        *('{"x": 1}', '{"x": "a<b}\\""}', '{"arguments": {"y": [{}]}, "name": "f"}', '{"name": "f", "parameters": {'),
        *("{}", "}", "}}", ", ", "; ", "[", "]", "```", "```json\n"),
        *(f'{OPEN}{_HEAD}{{"x": "a}}b"}}}}{end}' for end in (CLOSE, "]", f"{CLOSE}]")),
        *(f'```json\n{_HEAD}{{"x": 1}}}}\n```', f'[TOOL_CALLS] [{_HEAD}{{}}, "id": "abc"}}, {_HEAD}{{"x": "]"}}}}]'),
    ],
    "fields": [
        *("<function=f>", "\n<parameter=s>\n", "<parameter=n>\n", "\n</parameter>", "\n</function>\n", " 12", "Tru", "e", "None"),
        *("f(", "[f(", "[get_it()", "s=", "n = ", '"a\\x4', "1\\", "'", '"""', "\\u65e5", "\\ud83d", ")", ", ", "1."),
        *("{'k': (1,)}", "x1"),
        "<tool_call>\n<function=f>\n<parameter=s>\na</parameter>b\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>",
        "<function_calls>\nf(s='a\\'b', n=1)\nget_it()\n</function_calls>",
        '[f(s="a\\n", o={"k": [None, 1e5,]}), get_it()]',
    ],
}  # fmt: skip
_MARKERS = sorted({marker for syntax in SYNTAXES.values() for marker in syntax.markers})


def texts(markup: str) -> st.SearchStrategy[str]:
    """Return texts of the pieces of a markup, whole and cut."""
    markers = [*SYNTAXES[markup].markers, *(_MARKERS[:1])]
    pieces = [*markers, *(marker[: len(marker) // 2] for marker in markers), *(marker[len(marker) // 3 :] for marker in markers)]
    written = [
        rendered_calls(markup, calls) for calls in ([("f", {"s": "a", "n": 1})], [("get_it", {}), ("f", {"o": {"k": 'x"'}})])
    ]
    words = [
        *pieces,
        *_WORDS["json"],
        *_WORDS["fields"],
        *written,
        *written,
        "hello",
        "日😀",
        " ",
        "\n",
        '"',
        "\\",
        "<",
        "f",
        "`",
    ]
    return st.lists(st.sampled_from(words), max_size=12).map("".join)


class Cut:
    """Reads a text that is cut at `edges`."""

    def __init__(self, reader: MarkupReader) -> None:
        self._reader = reader

    def __call__(self, text: str, edges: Sequence[int] = ()) -> ReadText:
        bounds = [0, *sorted(min(edge, len(text)) for edge in edges), len(text)]
        read = [*(self._reader.feed(text[a:b]) for a, b in pairwise(bounds)), self._reader.close()]
        return ReadText("".join(one.content for one in read), merged(piece for one in read for piece in one.calls))


def _read(
    text: str, edges: Sequence[int] = (), markup: str = "hermes", max_calls: int | None = None,
    reader_type: type[MarkupReader] = MarkupReader, functions: Mapping[str, Any] = FUNCTIONS,
) -> ReadText:  # fmt: skip
    return Cut(reader_type(SYNTAXES[markup].forms, functions, max_calls))(text, edges)


def _calls(read: ReadText) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for piece in read.calls:
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append([piece.name, piece.arguments])
        else:
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    return [(name, arguments) for name, arguments in calls]


def _check_cuts(markup: str, reader_type: type[MarkupReader], num_examples: int, *phases: Phase) -> None:
    @settings(report_multiple_bugs=False, max_examples=num_examples, phases=phases)
    @given(texts(markup), st.lists(st.integers(0, 300), max_size=6), st.sampled_from([None, 1]))
    def any_cuts_give_the_same(text: str, edges: list[int], max_calls: int | None) -> None:
        whole = _read(text, [], markup, max_calls, reader_type)
        assert _read(text, edges, markup, max_calls, reader_type) == whole
        assert _read(text, range(len(text)), markup, max_calls, reader_type) == whole

    any_cuts_give_the_same()


@pytest.mark.parametrize("markup", MARKUPS)
def test_any_cuts_give_the_same(markup: str):
    _check_cuts(markup, MarkupReader, 60, Phase.generate, Phase.shrink)


class _EmitsBegunMarkup(MarkupReader):
    """Emits text that may become markup."""

    def _in_text(self) -> bool:
        has_call = super()._in_text()
        if not has_call:
            self._emit_content(len(self._text))
        return has_call


class _EndsAtEachPiece(MarkupReader):
    """Treats a part that the rest may follow as complete."""

    def _in_arguments(self) -> bool:
        self._is_end = True
        has_ended = super()._in_arguments()
        self._is_end = False
        return has_ended or super()._in_arguments()

    def _at_tail(self) -> bool:
        self._is_end = True
        super()._at_tail()
        self._is_end = False
        return True


@pytest.mark.parametrize("mutant", [_EmitsBegunMarkup, _EndsAtEachPiece])
@pytest.mark.parametrize("markup", MARKUPS)
def test_readers_that_depend_on_cuts_fail(markup: str, mutant: type[MarkupReader]):
    if mutant is _EndsAtEachPiece and markup == "mistral_v11":
        pytest.skip("nothing is behind its arguments")
    with pytest.raises(AssertionError):
        _check_cuts(markup, mutant, 400, Phase.generate)


_ANY_HEAD = r'\{{1,2}~"name"~:~"\w+"~,~"(?:arguments|parameters)"~:'.replace("~", r"[ \t\r\n]*")
_ATOMS = re.compile(rf"[ \t\r\n]|{OPEN}|{CLOSE}|\}}|```(?:json)?|\[|\]|[,;]|,~\"id\": \"abc\"|{_ANY_HEAD}")  # of what may be lost


def _behind_markup(text: str, places: set[int]) -> set[int]:
    """Return the places with those behind any markup that follows them."""
    found, waiting = set(places), list(places)
    while waiting:
        match = _ATOMS.match(text, waiting.pop())
        if match is not None and match.end() not in found:
            found.add(match.end())
            waiting.append(match.end())
    return found


def _check_loss(reader_type: type[MarkupReader]) -> None:
    @settings(report_multiple_bugs=False)
    @given(texts("hermes").filter(lambda text: '"arguments": {"y"' not in text and '"f"}' not in text and '"id"' not in text))
    def only_markup_is_lost(text: str) -> None:
        """The output is the text, one character behind the other, with nothing but markup between them."""
        reader = reader_type(SYNTAXES["hermes"].forms, FUNCTIONS)
        read = [*map(reader.feed, text), reader.close()]
        parts = [part for one in read for part in (one.content, *(piece.arguments for piece in one.calls))]
        if not any(one.calls for one in read):
            assert "".join(parts) == text
        places = {0}
        for part in filter(None, parts):
            places = {at + len(part) for at in _behind_markup(text, places) if text.startswith(part, at)}
        assert any(CLOSE.startswith(text[at:]) or "```".startswith(text[at:]) for at in _behind_markup(text, places))

    only_markup_is_lost()


def test_only_markup_is_lost():
    _check_loss(MarkupReader)


class _DropsRejectedMarkup(MarkupReader):
    """Drops the opening marker of text that is no call."""

    def _reject(self) -> bool:
        self._at = self._end_of_opening
        self._state = self._in_text
        return True


class _DropsTextBehindCalls(MarkupReader):
    """Treats the first text behind a call as a part of its end."""

    def _emit_content(self, end: int) -> None:
        if self._is_behind_call and end > self._at:
            self._at, self._is_behind_call = end, False
        super()._emit_content(end)


@pytest.mark.parametrize("mutant", [_DropsRejectedMarkup, _DropsTextBehindCalls])
def test_readers_that_lose_text_fail(mutant: type[MarkupReader]):
    with pytest.raises(AssertionError):
        _check_loss(mutant)


_CONTENTS = st.text("he <o日\n", max_size=8).map(lambda text: text.strip(" \n"))
_STRINGS = st.lists(
    st.sampled_from(
        [*"a\"\\<{}]日\n\t'`=,)(", *_MARKERS, "</parameter>", "</function>", "```", "[", "😀", " ", "\x00", "None", "12"]
    ),
    max_size=5,
).map("".join)
_SCALARS = st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS | _STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from(["a", "b_1", "größe"])
_ARGUMENTS = st.lists(
    st.tuples(st.sampled_from([*FUNCTIONS]), st.dictionaries(_KEYS, _VALUES, max_size=3)), min_size=1, max_size=3
)
# What the markup cannot write: an end of a value that more markup follows.
_END_OF_VALUE = re.compile(r"</parameter>\s*(?:<parameter=|</function>|</tool_call>)")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def _typed(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return functions whose schemas have the types of the arguments; the calls of one function may differ in them."""
    schemas: dict[str, Any] = {name: {"properties": {}} for name in FUNCTIONS}
    for name, arguments in calls:
        for key, value in arguments.items():
            schemas[name]["properties"].setdefault(key, {"type": []})["type"].append(_TYPES[type(value)])
    return {name: _simplified(schema) for name, schema in schemas.items()}


def _simplified(schema: dict[str, Any]) -> dict[str, Any]:
    types = {key: value["type"] for key, value in schema["properties"].items()}
    return {"properties": {key: {"type": names[0] if len(names) == 1 else names} for key, names in types.items()}}


def _is_ambiguous(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether a value has a spelling that the schema gives another type too, or that ends a value."""
    properties = {name: schema["properties"] for name, schema in _typed(calls).items()}
    return any(
        isinstance(value, str) and (bool(_END_OF_VALUE.search(value)) or isinstance(properties[name][key]["type"], list))
        for name, arguments in calls
        for key, value in arguments.items()
    )


@pytest.mark.parametrize("markup", MARKUPS)
def test_calls_of_a_template_are_read_back(markup: str):
    """Strings may hold brackets, quotes and markers. Fields are typed by the schema."""

    @settings(max_examples=50)
    @given(_CONTENTS, _ARGUMENTS, st.lists(st.integers(0, 200), max_size=4))
    def check(content: str, calls: list[tuple[str, dict[str, Any]]], edges: list[int]) -> None:
        if markup == "qwen3_coder" and _is_ambiguous(calls):
            return
        is_alone = SYNTAXES[markup].forms[0].is_at_start
        before = "" if is_alone or not content else f"{content}\n"
        read = _read(before + rendered_calls(markup, calls), edges, markup, functions=_typed(calls))
        assert read.content == before.rstrip("\n")
        assert [(name, json.loads(arguments)) for name, arguments in _calls(read)] == calls

    check()


def test_arguments_of_json_are_unchanged():
    """In JSON the arguments are what the model wrote, character by character."""
    for arguments in ('{"x":  1.50, "y":"\\u00e9"}', "{ }"):
        assert _calls(_read(f'{OPEN}{{"name": "f", "arguments": {arguments}}}{CLOSE}')) == [("f", arguments)]


CALL = f'{OPEN}{{"name": "f", "arguments": {{"x": 1}}}}{CLOSE}'
FENCED = '```json\n{"name": "f", "arguments": {"x": 1}}\n```'
BARE = '{"name": "f", "arguments": {"x": 1}}'
XML = "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>"
V31 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
ONE = [("f", '{"x": 1}')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see.\n{CALL}", "Let me see.", ONE),
        (f"\n\n{CALL}\n{CALL}\n", "", ONE * 2),
        (f"{CALL} and then", " and then", ONE),
        (" \n", " \n", []),
        # fields in another order, left out, or doubled braces, as one of Qwen's templates prescribes
        (f'{OPEN}{{"arguments": {{"x":1}}, "name": "f"}}{CLOSE}', "", ONE),
        (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [("f", "{}")]),
        (f'{OPEN}{{{{"name": "f", "arguments": {{"x":1}}}}}}{CLOSE}', "", [("f", '{"x":1}')]),
        # no calls: an unknown name, no JSON, arguments that are no object, a field that is none, nothing more
        *((text, text, []) for text in [
            f'{OPEN}{{"name": "g", "arguments": {{}}}}{CLOSE}', f'{OPEN}{{"name": "f", "arguments": "x"}}{CLOSE}',
            f"{OPEN}f(x=1){CLOSE}", f'{OPEN}{{"name": "f", "id": 1}}{CLOSE}', f"{OPEN}[]{CLOSE}", f"{OPEN} {CLOSE}",
            OPEN, OPEN[:-1], f'{OPEN}{{"name": "f"', CLOSE,
        ]),
        # one that is no call does not hide the next
        (f"{OPEN}oh{CALL}", f"{OPEN}oh", ONE),
        (f'{OPEN}{{"name": {CALL}', f'{OPEN}{{"name":', ONE),
        (f'{OPEN}{{"arguments": "oh\n{CALL}', f'{OPEN}{{"arguments": "oh', ONE),
        # a call that was not closed, and arguments that are no JSON or were cut off: as the model wrote them
        (CALL.removesuffix(CLOSE), "", ONE),
        (CALL.removesuffix("}" + CLOSE), "", ONE),
        (CALL[:-3], "", ONE),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": {CLOSE}oh', "oh", [("f", '{"x": ')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "a', "", [("f", '{"x": "a')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "{CLOSE}"}}}}{CLOSE}', "", [("f", f'{{"x": "{CLOSE}"}}')]),
    ],
)  # fmt: skip
def test_calls_and_content(text: str, content: str, calls: list[tuple[str, str]]):
    read = _read(text)
    assert (read.content, _calls(read)) == (content, calls)


@pytest.mark.parametrize("markup", MARKUPS)
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (FENCED, "", ONE),
        (f"Sure:\n\n{FENCED}\n\nDone.", "Sure:\n\nDone.", ONE),
        (FENCED.replace("json", ""), "", ONE),
        (f"{FENCED}\n{FENCED}", "", ONE * 2),
        (FENCED.replace("}}", "}}\n" + BARE), "", ONE * 2),
        (FENCED.replace("{", "[{", 1).replace("}}", "}}, " + BARE + "]"), "", ONE * 2),
        (FENCED.removesuffix("```"), "", ONE),
        (BARE, "", ONE),
        (f"\n{BARE}\n", "", ONE),
        (f"{BARE}\n{BARE}", "", ONE * 2),
        (f"[{BARE}, {BARE}]", "", ONE * 2),
        ('{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}', "", ONE),
        ('{"id": "c", "name": "f", "parameters": {"x": 1}}', "", ONE),
        (f"{{{BARE}}}", "", ONE),  # doubled braces: the last one was content, which the model then repeated in the next turn
        (f"{{{BARE}}}\n{{{BARE}}}", "", ONE * 2),
        (f"```json\n{{{BARE}}}\n```", "", ONE),
        *((text, text, []) for text in [
            FENCED.replace('"f"', '"g"'), BARE.replace('"f"', '"g"'), f"So: {BARE}", '```json\n{"f": 1}\n```',
            '```json\n{"name": "f", "age": 1}\n```', "```python\nf(x=1)\n```", '{"name": "Ann", "age": 1}', '{"name": "Ann Lee"',
            "[]", "{}", "```", "[f]", "{",
        ]),
    ],
)  # fmt: skip
def test_fallback_reads_json_without_markup(markup: str, text: str, content: str, calls: list[tuple[str, str]]):
    """Qwen2.5-Coder writes a fenced object where its template shows Hermes' markup. It was content, and no client saw a call."""
    read = _read(text, range(len(text)), markup)
    assert (read.content, _calls(read)) == (content, calls)


@pytest.mark.parametrize(
    ("markup", "text", "content", "calls"),
    [
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", ONE),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; {"name": "g"}', '; {"name": "g"}', ONE),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]get_it[CALL_ID]abc123DEF[ARGS]{}', "", [*ONE, ("get_it", "{}")]),
        ("mistral_v11", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', "", ONE),
        ("mistral", "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", []),
        ("deepseek_v3", V31, "", ONE),
        ("deepseek_v31", V31.replace("<｜tool▁calls▁begin｜>", "so "), "so", ONE),
        ("deepseek_v31", V31.replace("<｜tool▁calls▁end｜>", "\nso"), "\nso", ONE),
        ("qwen3_coder", XML.replace("<tool_call>\n", ""), "", [("f", '{"s": "a"}')]),
        ("qwen3_coder", CALL, "", ONE),
        # a string is raw text; a wrong spelling of a number is a string; an argument of no type is what it spells
        ("qwen3_coder", XML.replace("\na\n", "\n12\n"), "", [("f", '{"s": "12"}')]),
        ("qwen3_coder", XML.replace("=s", "=n"), "", [("f", '{"n": "a"}')]),
        ("qwen3_coder", XML.replace("=s", "=n").replace("\na\n", "\n 12\n"), "", [("f", '{"n": 12}')]),
        ("qwen3_coder", XML.replace("=s", "=o").replace("\na\n", "\nNone\n"), "", [("f", '{"o": null}')]),
        ("qwen3_coder", XML.replace("=s", "=z").replace("\na\n", "\n[1, 2]\n"), "", [("f", '{"z": [1, 2]}')]),
        ("qwen3_coder", XML.replace("\na\n", "a"), "", [("f", '{"s": "a"}')]),
        ("qwen3_coder", XML.replace("\n</function>", ""), "", [("f", '{"s": "a"}')]),
        # text where a field must come ends the arguments, whose JSON stays open
        ("qwen3_coder", XML.replace("\n</function>", "\n<parameter=>"), "\n<parameter=>\n</tool_call>", [("f", '{"s": "a"')]),
        ("qwen3_coder", XML.replace("<parameter=s>", "oh"), XML.replace("<parameter=s>", "oh"), []),
        ("qwen3_coder", XML[: XML.index("\na\n") + 2], "", [("f", '{"s": "a')]),
        ("pythonic", "<|python_start|>[f(s='a')]", "", [("f", '{"s": "a"}')]),
        ("pythonic", "[f(n=0x1F, m=1_000, p=.5, q=+1)]", "", [("f", '{"n": 31, "m": 1000, "p": 0.5, "q": 1}')]),
        ("pythonic", "[f(s='''a'\"b''')]", "", [("f", json.dumps({"s": "a'\"b"}))]),
        ("pythonic", r"[f(t='\x41\101\u65e5\U0001F600\q\n')]", "", [("f", r'{"t": "AA日😀\\q\n"}')]),
        ("pythonic", "[f(s='\\ud83d')]", "", [("f", r'{"s": "\ud83d"}')]),
        ("pythonic", "[f(o={'k': (1, 2,), 'l': [True, None]},)]", "", [("f", '{"o": {"k": [1, 2], "l": [true, null]}}')]),
        ("pythonic", "[f(s='a', 2)]", ", 2)]", [("f", '{"s": "a"')]),
        ("pythonic", "[f(s=1 2)]", "", [("f", '{"s": 1 2}')]),
        ("pythonic", "So [f(s='a')]", "So [f(s='a')]", []),
        ("pythonic", "[f('a')]", "[f('a')]", []),
    ],
)  # fmt: skip
def test_calls_of_other_markups(markup: str, text: str, content: str, calls: list[tuple[str, str]]):
    read = _read(text, range(len(text)), markup)
    assert (read.content, _calls(read)) == (content, calls)


def test_arguments_are_sent_as_they_arrive():
    pieces = {
        "hermes": [
            (f'hm {OPEN}{{"name": "f", ', ""),
            ('"arguments": {"x', '{"x'),
            ('": [1, ', '": [1, '),
            ("2]}", "2]}"),
            ("}", ""),
        ],
        "qwen3_coder": [
            ("hm <tool_call>\n<function=f>\n", ""),
            *(("<parameter=s>\na", '{"s": "a'), ('"b', '\\"b'), ("c\n</par", "c"), ("ameter>\n</function>", '"}')),
        ],
        "pythonic": [("[f(s", ""), ("='a", '{"s": "a'), ("b", "b"), ("', n=[1, ", '", "n": [1'), ("2]", ", 2]"), (")", "}")],
    }
    for markup, fed in pieces.items():
        reader = MarkupReader(SYNTAXES[markup].forms, FUNCTIONS)
        for text, arguments in fed:
            read = reader.feed(text)
            assert "".join(piece.arguments for piece in read.calls) == arguments


def test_last_allowed_call_ends_the_reading():
    reader = MarkupReader(SYNTAXES["hermes"].forms, FUNCTIONS, max_calls=1)
    ends = [(bool(reader.feed(text).calls), reader.is_done) for text in (f"so {CALL}"[:-1], ">oh")]
    assert ends == [(True, False), (False, True)]
    assert (reader.feed(CALL), reader.close()) == (ReadText(), ReadText())


@pytest.mark.parametrize("markup", MARKUPS)
def test_reading_ends_at_a_forced_call(markup: str):
    """The end of the text that a grammar of one call writes is certain, so that the engine can stop there."""
    reader = MarkupReader(SYNTAXES[markup].forced_forms, FUNCTIONS, 1)
    reader.feed(rendered_calls(markup, [("f", {"s": "a"})]))
    assert reader.is_done


def _either(markup: str, text: str, is_either: bool, step: int) -> ReadText:
    reader = MarkupReader(SYNTAXES[markup].forced_forms, FUNCTIONS, is_either=is_either)
    pieces = [reader.feed(text[at : at + step]) for at in range(0, len(text), step)] + [reader.close()]
    return ReadText("".join(piece.content for piece in pieces), merged([call for piece in pieces for call in piece.calls]))


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_markup_in_an_answers_strings_is_content(step: int):
    """The bug: a JSON answer with the markup of a call in a string was read as that call, and its content broke off there."""
    num_read = 0
    for markup in MARKUPS:
        calls = rendered_calls(markup, [("get_it", {}), ("f", {"n": 1})])
        answer = f' {{"example": "{calls}"}}'
        assert _either(markup, answer, True, step) == ReadText(answer)
        assert _calls(_either(markup, calls, True, step)) == _calls(_either(markup, calls, False, step)) != []
        num_read += bool(_either(markup, answer, False, step).calls)
    assert num_read, "without `is_either` the answer is read as calls"


def _check_ends(markup: str, is_forced: bool, reader_type: type[MarkupReader]) -> None:
    syntax, markers = SYNTAXES[markup], [*SYNTAXES[markup].markers, OPEN]
    text = rendered_calls(markup, [("f", {"s": "a"}), ("get_it", {})])
    for end in range(1, len(text) + 1):
        found = []
        for step in (1, end):
            reader = reader_type(syntax.forced_forms if is_forced else syntax.forms, FUNCTIONS, None, is_forced)
            pieces = [reader.feed(text[at : min(at + step, end)]) for at in range(0, end, step)]
            pieces.append(reader.close(is_cut=True))
            calls = tuple(call for piece in pieces for call in piece.calls)
            found.append(("".join(piece.content for piece in pieces), _calls(ReadText(calls=calls))))
        (content, read), other = found
        assert (content, read) == other
        assert bool(read) == (re.search(r"\bf\W", text[:end]) is not None), text[:end]
        begins_marker = any(marker.startswith(content.strip()) and marker != content.strip() for marker in markers)
        may_be_text = begins_marker or (syntax.forms[0].is_at_start and not read)
        assert not content or (may_be_text and not is_forced), text[:end]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("markup", MARKUPS)
def test_cut_calls_are_no_content(markup: str, is_forced: bool):
    """Markup was content where a limit of tokens cut it before a call's arguments, or in the name of a field."""
    _check_ends(markup, is_forced, MarkupReader)


class _LeavesCutsInText(MarkupReader):
    """Treats a text that a limit cut as one that ended."""

    def close(self, is_cut: bool = False) -> ReadText:
        return super().close()


@pytest.mark.parametrize("markup", MARKUPS)
def test_readers_that_ignore_cuts_fail(markup: str):
    with pytest.raises(AssertionError):
        _check_ends(markup, False, _LeavesCutsInText)


_HOSTILE = [
    f'{OPEN}{{"a\\"',
    f'{OPEN}{{"type": "',
    OPEN,
    '```json\n{"type":"',
    "```",
    " ",
    "[f(s=",
    "(",
    '"""',
    "</parameter> ",
    "\\u12",
    "f(",
    "1",
]


@pytest.mark.parametrize("markup", MARKUPS)
def test_reading_takes_linear_time(markup: str):
    """An object that never ended was read again from each opening inside of it: 100,000 characters took minutes."""
    prefixes = ("", "[f(s=", '[f(s="""', "<tool_call>\n<function=f>\n<parameter=s>\n")
    start = time.process_time()
    for hostile in _HOSTILE:
        for prefix in prefixes if len(hostile) < 4 else ("",):
            text = prefix + hostile * (20_000 // len(hostile))
            _read(text, range(0, len(text), 29), markup)
    assert time.process_time() - start < 20


@given(_VALUES.map(lambda value: json.dumps({"a": value})), st.text(max_size=5), st.integers(0, 50))
def test_end_of_an_object_is_found(text: str, behind: str, edge: int):
    place, head = JsonEnd(), (text + behind)[:edge]
    end = place.feed(head)
    if end is None:
        later = place.feed((text + behind)[edge:])
        end = None if later is None else len(head) + later
    assert end == len(text)
