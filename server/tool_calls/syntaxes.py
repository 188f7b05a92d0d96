"""The markups of tool calls, by name: one row each, of how calls are read and how a grammar writes them.

The names are vLLM's where it has the markup. docs/api.md lists the models.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from server.tool_calls.arguments import JsonArguments, PythonArguments, XmlArguments
from server.tool_calls.markup_reader import Form
from server.tool_calls.patterns import KEY, NAME

Markup = Literal[
    "hermes", "qwen3_coder", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "olmo3", "pythonic", "llama3_json", "json"
]
ToolCallParser = Literal["auto", "none"] | Markup


@dataclass(frozen=True, slots=True)
class Writing:
    """How a grammar writes calls, as parts of Lark rules: `«marker»` is a marker, NAME the function's name, KEY an argument's.

    `values` is how arguments are written: as a JSON object, or each one as raw text or JSON between the parts of `field`.
    """

    head: str
    tail: str
    separator: str = ""
    begin: str = ""
    end: str = ""
    values: Literal["object", "raw", "json"] = "object"
    field: tuple[str, str] = ("", "")
    field_separator: str = ""
    keys: str = ""  # the pattern of the keys that a field can have


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls.

    Forced calls are of the first of `forms`; models may write the others too. `markers` are strings of the markup that may be
    tokens. Calls of the first form begin with `opening`: anywhere in a text, or only at its start. JSON is between the two
    `json_marks`, or up to the end if the second is empty.
    """

    forms: tuple[Form, ...]
    writing: Writing
    opening: str
    markers: tuple[str, ...] = ()
    json_marks: tuple[str, str] | None = None

    @property
    def forced_forms(self) -> tuple[Form, ...]:
        """The form of texts that are calls alone by a grammar."""
        return self.forms[:1]

    @property
    def strict_forms(self) -> tuple[Form, ...]:
        """The forms of calls that a grammar holds to their schemas in free text."""
        is_bare = self.forms[0].is_at_start and self.forms[0].opening == BARE.opening  # read as the fallback is
        return (*self.forms[: not is_bare], *(replace(form, whole=None) for form in _FALLBACKS))


def _call(arguments: str, braces: str = r"\{{1,2}+") -> str:
    """Return the pattern of a JSON object that is a call, up to its arguments. `arguments` is the name of their field.

    Some templates make models double the outer braces.
    """
    return rf'{braces}~"name"~:~"{NAME}"~,~"(?:{arguments})"~:~(?=\{{)'


_ANY_CALL = _call("arguments|parameters")
# The beginning of an object that may be a call with its fields in another order, without arguments, or as OpenAI's API has it.
_ANY_OBJECT = rf'(?=\{{~"(?:(?:arguments|parameters|type|id|function)"~:|name"~:~"{NAME}"~[,}}]))'
_FIELDS_END = r'~(?:,~"(?:id|type)"~:~"[^"\\\n]{0,64}+"~)?+'  # fields behind the arguments
_OBJECT_END = _FIELDS_END + r"(?:\}~){1,2}+"  # where more must follow, as more braces could
_UNCLOSED_END = _FIELDS_END + r"(?:\}~){0,2}+"
_PYTHON_CALL = rf"{NAME}\((?=~(?:\)|{KEY}~=))"


def _objects(opening: str, before: str, after: str, between: str, is_at_start: bool = False) -> Form:
    """Return the form of calls that are JSON objects in a block of markup."""
    tails = (_OBJECT_END + between + _ANY_CALL, _OBJECT_END + after, _UNCLOSED_END)
    return Form(opening, f"~{before}{_ANY_CALL}", JsonArguments, tails, f"~{before}{_ANY_OBJECT}", is_at_start)


def _bare(between: str, call: str, end: str = r"\}") -> Form:
    """Return the form of calls that are JSON objects at the start of the text."""
    tails = (_OBJECT_END + between + _ANY_CALL, _FIELDS_END + end)
    return Form(r"\{", f"~{call}", JsonArguments, tails, f"~{_ANY_OBJECT}", is_at_start=True)


FENCED = replace(_objects("```", r"```(?:json|tool_call)?+~\[?+~", r"~\]?+~```", "~[,;]?+~"), may_begin_text=True)
BARE = _bare("~[,;]?+~", _call("arguments|parameters", r"\{"))
DOUBLED = _bare("~[,;]?+~", _call("arguments|parameters", r"\{~\{"), r"\}~\}")
BARE_LIST = _objects(r"\[~\{", r"\[~", r"~\]", "~,~", is_at_start=True)
_FALLBACKS = (FENCED, BARE, DOUBLED, BARE_LIST)  # markup that models write instead of their template's

_HERMES = Form(
    "<tool_call>",
    rf"~<tool_call>~{_ANY_CALL}",
    JsonArguments,
    (rf"{_UNCLOSED_END}</tool_call>", _UNCLOSED_END),
    rf"~<tool_call>~{_ANY_OBJECT}",
)
_XML_CALL = rf"<function={NAME}>(?=~<(?:parameter=|/function>))"
_XML = Form("<tool_call>", f"~<tool_call>~{_XML_CALL}", XmlArguments, ("~</tool_call>",))
_BARE_XML = replace(_XML, opening="<function=", head=f"~{_XML_CALL}")

_LLAMA3 = replace(_bare(r"~;~(?:<\|python_tag\|>~)?+", _call("parameters", r"\{")), whole=None)
_TAGGED_LLAMA3 = replace(_LLAMA3, opening=r"<\|python_tag\|>", head=rf"~<\|python_tag\|>~{_ANY_CALL}", is_at_start=False)

_MISTRAL = _objects(r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\]~\[~", r"~\]", "~,~")
_MISTRAL_V11 = Form(
    r"\[TOOL_CALLS\]",
    rf"~\[TOOL_CALLS\]~{NAME}~(?:\[CALL_ID\][A-Za-z0-9]{{0,64}}+)?+(?:\[ARGS\])?+~(?=\{{)",
    JsonArguments,
)

_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>")
_BEGIN, _END, _ALL_BEGIN, _ALL_END, _SEP = _DEEPSEEK
_DEEPSEEK_HEAD = f"~(?:{_ALL_BEGIN}~)?{_BEGIN}~"
_DEEPSEEK_TAILS = (f"~(?:```)?+~{_END}~{_ALL_END}", f"~(?:```)?+~{_END}", "~(?:```)?+")
_DEEPSEEK_V3 = Form(
    f"{_ALL_BEGIN}|{_BEGIN}",
    rf"{_DEEPSEEK_HEAD}function{_SEP}{NAME}~```json~(?=\{{)",
    JsonArguments,
    _DEEPSEEK_TAILS,
)
_DEEPSEEK_V31 = replace(_DEEPSEEK_V3, head=rf"{_DEEPSEEK_HEAD}{NAME}{_SEP}~(?=\{{)")

_PYTHONIC = Form(r"\[~[A-Za-z0-9_-]", rf"~\[~{_PYTHON_CALL}", PythonArguments, (rf"~,~{_PYTHON_CALL}", r"~\]"), is_at_start=True)
_TAGGED_PYTHONIC = replace(
    _PYTHONIC, opening=r"<\|python_start\|>", head=rf"~<\|python_start\|>~\[~{_PYTHON_CALL}", is_at_start=False
)
_OLMO3 = Form(
    "<function_calls>",
    rf"~<function_calls>~{_PYTHON_CALL}",
    PythonArguments,
    (rf"~,?+~{_PYTHON_CALL}", "~</function_calls>"),
)

# Templates are compared in this order; the last two have no markup of their own, so they would match others too.
SYNTAXES: dict[str, CallSyntax] = {
    "hermes": CallSyntax(
        (_HERMES, *_FALLBACKS),
        Writing(r'«<tool_call>» "\n{\"name\": \"NAME\", \"arguments\": "', r'"}\n" «</tool_call>»', r'"\n"'),
        "<tool_call>",
        ("<tool_call>", "</tool_call>"),
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": CallSyntax(
        (_XML, _BARE_XML, _HERMES, *_FALLBACKS),
        Writing(
            r'«<tool_call>» "\n<function=NAME>\n"', r'"</function>\n" «</tool_call>»', r'"\n"',
            values="raw", field=(r'"<parameter=KEY>\n"', r'"\n"'), keys=r"[^<>\n]{1,256}",
        ),
        "<tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    "mistral": CallSyntax(
        (_MISTRAL, _MISTRAL_V11, *_FALLBACKS),
        Writing(
            r'"{\"name\": \"NAME\", \"arguments\": "', '"}"', '", "', begin='«[TOOL_CALLS]» " "? "["', end='"]"'
        ),
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", ""),
    ),
    "mistral_v11": CallSyntax(
        (_MISTRAL_V11, _MISTRAL, *_FALLBACKS),
        Writing('«[TOOL_CALLS]» "NAME" «[ARGS]»', ""),
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ("[TOOL_CALLS]", ""),
    ),
    "deepseek_v3": CallSyntax(
        (_DEEPSEEK_V3, _DEEPSEEK_V31, *_FALLBACKS),
        Writing(
            rf'«{_BEGIN}» "function" «{_SEP}» "NAME\n```json\n"', rf'"\n```" «{_END}»', r'"\n"',
            f"«{_ALL_BEGIN}»", f"«{_ALL_END}»",
        ),
        _BEGIN,
        _DEEPSEEK,
        (_BEGIN, _END),
    ),
    "deepseek_v31": CallSyntax(
        (_DEEPSEEK_V31, _DEEPSEEK_V3, *_FALLBACKS),
        Writing(f'«{_BEGIN}» "NAME" «{_SEP}»', f"«{_END}»", begin=f"«{_ALL_BEGIN}»", end=f"«{_ALL_END}»"),
        _BEGIN,
        _DEEPSEEK,
        (_BEGIN, _END),
    ),
    "olmo3": CallSyntax(
        (_OLMO3, _PYTHONIC, *_FALLBACKS),
        Writing(
            '"NAME("', '")"', r'"\n"', r'«<function_calls>» "\n"', r'"\n" «</function_calls>»',
            values="json", field=('"KEY="', ""), field_separator='", "', keys=KEY,
        ),
        "<function_calls>",
        ("<function_calls>", "</function_calls>"),
    ),
    "pythonic": CallSyntax(
        (_PYTHONIC, _TAGGED_PYTHONIC, *_FALLBACKS),
        Writing('"NAME("', '")"', '", "', '"["', '"]"', values="json", field=('"KEY="', ""), field_separator='", "', keys=KEY),
        "[",
        ("<|python_start|>",),
    ),
    "llama3_json": CallSyntax(
        (_LLAMA3, _TAGGED_LLAMA3, *_FALLBACKS),
        Writing(r'"{\"name\": \"NAME\", \"parameters\": "', '"}"', '"; "'),
        "{",
        ("<|python_tag|>",),
    ),
    "json": CallSyntax(
        (BARE, DOUBLED, FENCED, BARE_LIST),
        Writing(r'"{\"name\": \"NAME\", \"arguments\": "', '"}"', r'"\n"'),
        "{",
    ),
}  # fmt: skip
assert tuple(SYNTAXES) == get_args(Markup)
