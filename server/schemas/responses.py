"""Request of POST /v1/responses, in OpenAI's format. Its answer is in responses_answer.py."""

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.schemas.common import MAX_LOGPROBS, CacheSalt, require_stream
from server.schemas.forms import OTHER, OtherForm, by_type, form, refused_type
from server.schemas.messages import MAX_MESSAGES
from server.schemas.responses_items import Item
from server.schemas.speculative import UntracedOptions
from server.schemas.strict_model import MAX_INTEGER, Description, Name, Neutral, Strict, misfit
from server.schemas.structured import JsonSchema
from server.schemas.tools import MAX_TOOLS, FunctionDefinition, FunctionName, Tool

MAX_INCLUDED = 16
LOGPROBS = "message.output_text.logprobs"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")  # safe in a header


class FunctionTool(FunctionDefinition):
    """A function, as the Responses API writes it: without an object of its own for the definition."""

    type: Literal["function"]
    defer_loading: Annotated[object, Neutral(False)] = None
    allowed_callers: Annotated[object, Neutral(["direct"])] = None
    output_schema: dict[str, Any] | None = Field(None, description="Accepted; changes nothing.")

    def to_chat(self) -> Tool:
        """Return the tool of a chat."""
        return Tool(type="function", function=self)


class OtherTool(OtherForm):
    """A tool of another type: tools that OpenAI runs are not supported."""

    type: Annotated[object, refused_type("function")]


ResponsesTool = Annotated[
    Annotated[FunctionTool, form("function")] | Annotated[SkipJsonSchema[OtherTool], OTHER],
    by_type("function", default="function"),
]


class NamedFunction(FunctionName):
    """The choice of one function."""

    type: Literal["function"]


class AllowedTools(Strict):
    """The given functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class OtherChoice(OtherForm):
    """A choice of another type."""

    type: Annotated[object, refused_type("function", "allowed_tools")]


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], form("word")]
    | Annotated[NamedFunction, form("function")]
    | Annotated[AllowedTools, form("allowed_tools")]
    | Annotated[SkipJsonSchema[OtherChoice], OTHER],
    by_type("word", "function", "allowed_tools", default=lambda value: "word" if isinstance(value, str) else ""),
]


class TextFormat(Strict):
    """The format of the text: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, *JsonSchema.model_fields["name"].metadata] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Description | None = None
    strict: bool | None = Field(None, description="Accepted; every schema is enforced.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                raise misfit(f"text.format.{name}", f"{name} is given with type json_schema, and only then")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """The format as a chat's."""
        return {
            "type": self.type,
            **({"json_schema": {"name": self.name, "schema": self.schema_}} if self.schema_ is not None else {}),
        }


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored, and named in X-Ignored-Parameters.")


class ReasoningOptions(Strict):
    """Options of reasoning."""

    effort: Name | None = Field(
        None, description="The variable reasoning_effort of the chat template; ignored, and named, by a template without it."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Ignored, and named: reasoning is returned whole."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="The older name of summary.")


class ResponsesStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="Accepted; this server adds no padding.")


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    model: Name
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = Field(None, description="A system message before the conversation; of this request alone.")
    previous_response_id: Name | None = Field(None, description="The stored response that the input continues.")
    store: bool | None = Field(None, description="Keep the response for later requests of the same key; default true.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER, description="Default: the room that is left.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = Field(None, description="Whether functions are called, and which; default auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call; default true.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Name], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = Field(
        None, description=f"{LOGPROBS}; others are ignored and named in X-Ignored-Parameters."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    user: Name | None = None
    cache_salt: CacheSalt | None = None
    metadata: dict[Name, Name] | None = Field(None, max_length=16, description="Returned with the response; changes nothing.")
    speculative: UntracedOptions | None = None
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto: what does not fit is refused all the same.")
    service_tier: Annotated[object, Neutral("auto", "default")] = None
    background: Annotated[object, Neutral(False)] = None
    conversation: Annotated[object, Neutral()] = None
    prompt: Annotated[object, Neutral()] = None
    max_tool_calls: Annotated[object, Neutral()] = None
    context_management: Annotated[object, Neutral([])] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        require_stream(self)
        return self

    @model_validator(mode="after")
    def _function_names_differ(self) -> Self:
        names = [tool.name for tool in self.functions]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise misfit(f"tools.{at}.name", f"two functions have the name {name}")
        return self

    @model_validator(mode="after")
    def _chosen_functions_are_given(self) -> Self:
        names = {tool.name for tool in self.functions}
        if isinstance(self.tool_choice, NamedFunction) and self.tool_choice.name not in names:
            raise misfit("tool_choice.name", "no function of tools has this name")
        for at, allowed in enumerate(self.tool_choice.tools if isinstance(self.tool_choice, AllowedTools) else ()):
            if allowed.name not in names:
                raise misfit(f"tool_choice.tools.{at}.name", "no function of tools has this name")
        if self.tool_choice == "required" and not names:
            raise misfit("tool_choice", "required is accepted only with tools")
        return self

    @model_validator(mode="after")
    def _included_names_are_plain(self) -> Self:
        for at, name in enumerate(self.include or ()):
            if not _PLAIN_NAME.fullmatch(name):
                raise misfit(f"include.{at}", "is no name of an output")
        return self

    @model_validator(mode="after")
    def _logprobs_are_of_texts(self) -> Self:
        """Without this rule a stream could not divide the log-probabilities of a step between a text and calls."""
        if self.top_logprobs and not self.has_logprobs:
            raise misfit("top_logprobs", f"top_logprobs is accepted only with {LOGPROBS} in include")
        if self.has_logprobs and self.offered:
            at = (self.include or []).index(LOGPROBS)
            raise misfit(f"include.{at}", "log-probabilities are not returned with tools; tool_choice none leaves them out")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The given functions."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def offered(self) -> list[int]:
        """The places in `tools` of the functions that the model may call."""
        if self.tool_choice == "none":
            return []
        allowed = {one.name for one in self.tool_choice.tools} if isinstance(self.tool_choice, AllowedTools) else None
        return [at for at, tool in enumerate(self.functions) if allowed is None or tool.name in allowed]

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return LOGPROBS in (self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept."""
        return self.store is not False

    def ignored(self, variables: Collection[str]) -> list[str]:
        """Return the names of the options that are accepted and not honoured. `variables` are the chat template's."""
        reasoning = self.reasoning
        options = {
            "text.verbosity": self.text and self.text.verbosity,
            "reasoning.effort": (reasoning and "reasoning_effort" not in variables and reasoning.effort) or None,
            "reasoning.summary": reasoning and (reasoning.summary or reasoning.generate_summary),
        }
        included = [f"include.{name}" for name in dict.fromkeys(self.include or ()) if name != LOGPROBS]
        return [*included, *(name for name, value in options.items() if value is not None)]

    @property
    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat request that this request becomes, all but its messages."""
        same = (
            "model",
            "temperature",
            "top_p",
            "stream",
            "user",
            "cache_salt",
            "speculative",
            "timeout_s",
            "parallel_tool_calls",
        )
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        offered = self.offered
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        elif isinstance(choice, AllowedTools):
            choice = choice.mode
        return fields | {
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "tools": [self.functions[at].to_chat() for at in offered] or None,
            "tool_choice": choice if offered else None,
            "response_format": self.text.format.response_format if self.text and self.text.format else None,
            "logprobs": self.has_logprobs or None,
            "top_logprobs": (self.top_logprobs or 0) if self.has_logprobs else None,
        }
