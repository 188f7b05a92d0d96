"""Reads tool calls in any markup of the table in server.tool_calls.syntaxes, from text that arrives in pieces. Knows text only.

A call is certain once its arguments begin. Before that the markup may be no call (an unknown name, no arguments): then all of its
text is content. If a limit of tokens cuts the markup there, a call with a whole name has empty arguments. A shorter beginning is
left out, unless it may be text. Whitespace beside the markup belongs to the markup, as chat templates write it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import from_json

from server.text.parsed_text import CallPiece, ReadText, merged
from server.tool_calls.arguments import ArgumentsReader, Schema
from server.tool_calls.json_end import JsonEnd
from server.tool_calls.patterns import compiled

_SPACE = " \t\r\n"
_OTHER_FIELDS = {"id", "type"}  # of a call, beside its name and arguments


@dataclass(frozen=True, slots=True)
class Form:
    """How calls look, as patterns (server.tool_calls.patterns).

    `opening` begins calls anywhere in a text, or only at its start. Forms may share an opening; the first that matches counts.
    `head` matches up to the first call's arguments, `whole` up to an object that is a call with its fields in any order. After a
    call the first match of `tails` counts; a match with a name begins another call. `may_begin_text`: other answers have the
    opening too.
    """

    opening: str
    head: str
    arguments: Callable[[Schema], ArgumentsReader]
    tails: tuple[str, ...] = ()
    whole: str | None = None
    is_at_start: bool = False
    may_begin_text: bool = False


class MarkupReader:
    """Parses calls of `functions` (the schema of each one's arguments), at most `max_calls` of them.

    If calls are forced, no other text is expected. With `is_either` a text that does not begin with a call has none: its strings
    may contain the markup.

        text -> head -> arguments -> tail -> text
             <-      -> object ----->
             <---------

    Each state is a method that consumes buffered text. It returns whether the next state can continue with the rest.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        functions: Mapping[str, Schema],
        max_calls: int | None = None,
        is_forced: bool = False,
        is_either: bool = False,
    ) -> None:
        self._forms = tuple(forms)
        self._is_forced = is_forced
        self._is_either = is_either
        self._functions = functions
        self._max_calls = max_calls
        self._num_calls = 0
        self._text, self._at = "", 0  # buffered text is read up to `_at`
        self._is_end = self._is_cut = False
        self._state: Callable[[], bool] = self._in_text
        self._candidates: Sequence[Form] = ()  # forms that have the opening of the text
        self._end_of_opening = 0
        self._start_of_object = 0
        self._end_of_scan = 0  # of the object's text that `_json` has read
        self._json = JsonEnd()
        self._is_at_start = True  # with only whitespace before
        self._is_behind_call = False  # with only whitespace since the call
        self._has_text = False  # that is content and no whitespace
        self._content = ""
        self._calls: list[CallPiece] = []

    @property
    def is_done(self) -> bool:
        """Whether `max_calls` calls have been read."""
        return self._num_calls == self._max_calls and self._state == self._in_text

    def feed(self, text: str) -> ReadText:
        """Add text; return the content and calls that are now certain."""
        self._text += text
        return self._read()

    def close(self, is_cut: bool = False) -> ReadText:
        """Return the rest: no more text follows. `is_cut`: a limit of tokens cut the text."""
        self._is_end, self._is_cut = True, is_cut
        return self._read()

    def _read(self) -> ReadText:
        while not self.is_done and self._state():
            pass
        self._text = self._text[self._at :]
        self._end_of_opening -= self._at
        self._start_of_object -= self._at
        self._end_of_scan -= self._at
        self._at = 0
        read = ReadText(self._content, merged(self._calls))
        self._content, self._calls = "", []
        return read

    def _in_text(self) -> bool:
        pattern = compiled(_openings(self._forms, self._is_at_start))
        may_go_on = not self._is_end or (self._is_cut and self._is_forced)
        match = pattern.search(self._text, self._at, partial=may_go_on)
        end = match.start() if match else len(self._text)
        if self._is_either and not self._num_calls and (self._has_text or self._text[self._at : end].strip(_SPACE)):
            match, end = None, len(self._text)
        if match is not None or not self._is_behind_call or self._text[self._at :].strip(_SPACE):
            self._emit_content(end)
        if match is None or match.partial:
            return False
        opening = self._forms[int(match.lastgroup.removeprefix("form_"))].opening
        self._candidates = [form for form in self._forms if form.opening == opening]
        self._end_of_opening = match.end()
        self._state = self._at_head
        return True

    def _emit_content(self, end: int) -> None:
        """Emit the text up to `end` as content."""
        if end > self._at:
            self._is_at_start = self._is_behind_call = False
            text, self._at = self._text[self._at : end], end
            self._has_text = self._has_text or bool(text.strip(_SPACE))
            self._content += text

    def _at_head(self) -> bool:
        for form in self._candidates:
            for pattern in filter(None, (form.head, form.whole)):
                match = compiled(pattern).match(self._text, self._at, partial=not self._is_end or self._is_cut)
                if match is None:
                    continue
                if match.partial and not self._is_end:
                    return False
                if match.partial and match["name"] is None and not self._is_certain(form):
                    continue
                if match["name"] is not None and match["name"] not in self._functions:
                    return self._reject()
                if match.partial:
                    return self._end_in_head(match["name"])
                self._form = form
                is_whole = pattern == form.whole
                return self._begin_object(match.end()) if is_whole else self._begin_arguments(match["name"], match.end())
        return self._reject()

    def _reject(self) -> bool:
        """Treat the opening as content, since it opens no call, and parse the text after it again."""
        self._emit_content(self._end_of_opening)
        self._state = self._in_text
        return True

    def _is_certain(self, form: Form) -> bool:
        """Whether the opening of a form is that of a call."""
        return self._is_forced or not (form.is_at_start or form.may_begin_text)

    def _end_in_head(self, name: str | None) -> bool:
        """End a text that was cut before the arguments of a call. The call is reported if the name is whole."""
        if name is not None:
            self._begin_call(name, self._at)
        self._at = len(self._text)
        self._state = self._at_head  # so that the call does not count as read
        return False

    def _begin_object(self, at: int) -> bool:
        self._start_of_object = self._end_of_scan = at
        self._json = JsonEnd(is_strict=True)
        self._state = self._in_object
        return True

    def _begin_arguments(self, name: str, at: int) -> bool:
        self._begin_call(name, at)
        self._arguments = self._form.arguments(self._functions[name])
        self._state = self._in_arguments
        return True

    def _begin_call(self, name: str, at: int) -> None:
        self._calls.append(CallPiece(self._num_calls, name))
        self._num_calls += 1
        self._is_at_start = False
        self._at = at

    def _add(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallPiece(self._num_calls - 1, arguments=arguments))

    def _in_object(self) -> bool:
        num_chars = self._json.feed(self._text[self._end_of_scan :])
        if num_chars is None and not self._is_end:
            self._end_of_scan = len(self._text)
            return False
        end = len(self._text) if num_chars is None else self._end_of_scan + num_chars
        call = _call_of(self._text[self._start_of_object : end])
        if call is not None and call[0] in self._functions:
            self._begin_call(call[0], end)
            self._add(json.dumps(call[1], ensure_ascii=False))
            self._state = self._at_tail
        elif num_chars is None and self._is_cut and self._is_certain(self._form):
            return self._end_in_head(None)
        else:  # all of the object is content: reading it again for calls inside could take quadratic time
            self._emit_content(len(self._text[:end].rstrip(_SPACE)))
            self._state = self._in_text
        return True

    def _in_arguments(self) -> bool:
        arguments, self._at, has_ended = self._arguments.feed(self._text, self._at, self._is_end)
        self._add(arguments)
        if has_ended:
            self._state = self._at_tail
        return has_ended

    def _at_tail(self) -> bool:
        self._state, self._is_behind_call = self._in_text, True
        for pattern in map(compiled, self._form.tails):
            begins_call = "name" in pattern.groupindex
            match = pattern.match(self._text, self._at, partial=True)
            if match is None or (begins_call and self._num_calls == self._max_calls):
                continue
            if match.partial and not self._is_end:
                self._state = self._at_tail
                return False
            if match.partial and self._is_cut and begins_call and match["name"] in (None, *self._functions):
                return self._end_in_head(match["name"])
            if not begins_call:
                self._at = match.end()
                return True
            if not match.partial and match["name"] in self._functions:
                return self._begin_arguments(match["name"], match.end())
        return True


@cache
def _openings(forms: tuple[Form, ...], is_at_start: bool) -> str:
    """Return the pattern of the openings of forms. Its groups have the places of the forms in their names."""
    groups = {(form.is_at_start, form.opening): f"(?P<form_{at}>{form.opening})" for at, form in enumerate(forms)}
    anywhere = "|".join(group for (only_at_start, _), group in groups.items() if not only_at_start)
    start = "|".join(group for (only_at_start, _), group in groups.items() if only_at_start)
    parts = [rf"\A~(?:{start})"] if start and is_at_start else []
    return "|".join([*parts, f"~(?:{anywhere})"] if anywhere else parts or ["(?!)"])


def _call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a JSON text, None if it is no call."""
    try:
        call = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    if isinstance(call, dict) and call.get("type") == "function" and isinstance(call.get("function"), dict):
        call = call["function"]  # as OpenAI's API has it
    if not isinstance(call, dict) or not all(isinstance(call[field], str) for field in _OTHER_FIELDS & call.keys()):
        return None
    fields = call.keys() - _OTHER_FIELDS
    arguments = call.get("parameters" if "parameters" in fields else "arguments", {})
    is_call = fields <= {"name", "arguments"} or fields <= {"name", "parameters"}
    return (call["name"], arguments) if is_call and isinstance(call.get("name"), str) and isinstance(arguments, dict) else None
