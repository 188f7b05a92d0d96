"""The tools of one request: how its answers are parsed, and which grammar constrains them. Refuses unsupported combinations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.types import Grammar, GrammarKind
from server.http.errors import InvalidRequest
from server.reasoning.request_reasoning import NO_REASONING, ReasoningUse
from server.schemas.chat import ChatRequest
from server.schemas.messages import Message
from server.schemas.tools import NamedTool, Tool
from server.text.parsed_text import CallReader, PlainReader
from server.tool_calls.answers import answer_or_calls
from server.tool_calls.arguments import Schema
from server.tool_calls.grammars import Schemas, forced_calls, free_text_with_calls
from server.tool_calls.markup_reader import Form, MarkupReader
from server.tool_calls.support import ToolSupport
from server.tool_calls.syntaxes import CallSyntax

_ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a request's answers may call, in which syntax, and how many at most (None: any number).

    `functions` are the schemas of their arguments. Without a syntax all text is content. `forms` are the forms of its calls that
    are read, after the `reasoning`. `grammar` constrains the text; None leaves it free. `is_forced`: the text is calls alone.
    `is_either`: it is calls alone, or an answer without calls.
    """

    functions: Mapping[str, Schema] = field(default_factory=dict)
    syntax: CallSyntax | None = None
    forms: tuple[Form, ...] = ()
    max_calls: int | None = None
    grammar: Grammar | None = None
    is_forced: bool = False
    is_either: bool = False
    reasoning: ReasoningUse = NO_REASONING

    @property
    def grammar_param(self) -> str | None:
        """The field that requests the grammar, if there is one."""
        return "tools" if self.grammar else None

    @property
    def markers(self) -> tuple[str, ...]:
        """The markup that detokenizing must keep in the text."""
        return (*(self.syntax.markers if self.syntax else ()), *self.reasoning.kept_tokens)

    def reader(self) -> CallReader:
        """Return the parser of one text."""
        if not self.forms:
            return self.reasoning.reader(PlainReader())
        return self.reasoning.reader(MarkupReader(self.forms, self.functions, self.max_calls, self.is_forced, self.is_either))


NO_TOOLS = ToolUse()


def require_shown(support: ToolSupport, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Refuse tools, calls of earlier turns and their results if the model's template would leave them out."""
    if tools and not support.shows_tools:
        raise InvalidRequest("this model's chat template shows no tools to the model; tool_choice none leaves them out", "tools")
    for at, message in enumerate(messages):
        if not support.shows_calls and (message.tool_calls or message.role == "tool"):
            field = "tool_calls" if message.tool_calls else "role"
            raise InvalidRequest("this model's chat template shows no calls of tools to the model", f"messages.{at}.{field}")


def tool_use(support: ToolSupport, body: ChatRequest) -> ToolUse:
    """Return the tool use of a request; raise InvalidRequest if this model does not support it."""
    require_shown(support, body.messages, body.offered_tools)
    if not body.offered_tools:
        return NO_TOOLS
    if support.syntax is None:
        reason = "this model's chat template does not show how it writes calls of tools; set tool_call_parser"
        raise InvalidRequest(reason, "tools")
    if body.structured_outputs is not None:
        reason = "a text with this constraint calls no tools; tool_choice none leaves them out"
        raise InvalidRequest(reason, "structured_outputs")
    if body.grammar is not None and support.syntax.forms[0].is_at_start:  # JSON of the answer could be read as a call
        reason = "calls of this model look like JSON, so a text in this format calls no tools; tool_choice none leaves them out"
        raise InvalidRequest(reason, body.grammar_param)
    is_one = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
    functions = {tool.function.name: tool.function.schema_of_arguments for tool in body.offered_tools}
    try:
        grammar = _grammar(support, support.syntax, body, is_one)
    except ValueError as error:
        raise InvalidRequest(f"tools: {error}", "tools") from error
    is_forced = body.tool_choice not in (None, "auto")
    free_forms = support.syntax.forms if grammar is None else support.syntax.strict_forms
    forms = support.syntax.forced_forms if is_forced or body.grammar is not None else free_forms
    is_either = not is_forced and body.grammar is not None
    return ToolUse(functions, support.syntax, forms, 1 if is_one else None, grammar, is_forced, is_either)


def _grammar(support: ToolSupport, syntax: CallSyntax, body: ChatRequest, is_one: bool) -> Grammar | None:
    """Return the grammar of calls that tool_choice forces, or of an answer in the requested format or calls. With a strict
    function it is of free text with calls.
    """
    functions = [tool.function for tool in body.offered_tools]
    if body.tool_choice not in (None, "auto"):
        chosen = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        forced = {one.name: one.schema_of_arguments for one in functions if chosen in (None, one.name)}
        return Grammar(GrammarKind.LARK, forced_calls(syntax, forced, is_one, support.marker_tokens), _forced_marks(syntax))
    if body.grammar is None and not any(function.strict for function in functions):
        return None
    if body.grammar is None and syntax.opening not in support.marker_tokens and not syntax.forms[0].is_at_start:
        reason = "strict needs a model whose calls begin with a single token, unless tool_choice forces a call"
        raise InvalidRequest(reason, "tools")
    schemas: Schemas = {function.name: function.schema_of_arguments if function.strict else _ANY_OBJECT for function in functions}
    if body.grammar is not None:
        calls = forced_calls(syntax, schemas, is_one, support.marker_tokens)
        text = answer_or_calls(body.grammar.text or json.dumps(_ANY_OBJECT), calls)
        return Grammar(GrammarKind.LARK, text, _forced_marks(syntax))
    marks = syntax.json_marks
    if marks is not None and not all(mark in support.marker_tokens for mark in marks if mark):
        marks = None
    return Grammar(GrammarKind.LARK, free_text_with_calls(syntax, schemas, support.marker_tokens), marks)


def _forced_marks(syntax: CallSyntax) -> tuple[str, str] | None:
    """Return the marks of JSON in a text that is calls alone: all of it, or none if arguments are raw text."""
    return None if syntax.writing.values == "raw" else ("", "")
