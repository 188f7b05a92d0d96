"""The supported syntaxes of tool calls, by name."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal

from server.tool_calls import hermes, hermes_grammar
from server.tool_calls.reader import CallReader

ToolCallParser = Literal["auto", "hermes", "none"]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls. `markers` are the strings of its markup, which may be tokens; `opening` begins a call.

    `reader` makes what reads calls of functions of these names, and at most so many of them. The grammars are those of
    server.tool_calls.hermes_grammar.
    """

    markers: tuple[str, ...]
    opening: str
    reader: Callable[[Container[str], int | None], CallReader]
    forced_calls: Callable[[hermes_grammar.Schemas, bool, Container[str]], str]
    free_text_with_calls: Callable[[hermes_grammar.Schemas, Container[str]], str]


_HERMES = CallSyntax(
    (hermes.OPEN, hermes.CLOSE),
    hermes.OPEN,
    hermes.HermesReader,
    hermes_grammar.forced_calls,
    hermes_grammar.free_text_with_calls,
)
SYNTAXES = {"hermes": _HERMES}
