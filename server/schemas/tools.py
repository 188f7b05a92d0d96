"""Functions that a model may call, the tool choice, and calls of earlier turns (the OpenAI format)."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jsonschema_rs
from pydantic import AfterValidator, BaseModel, Field, StringConstraints
from pydantic_core import from_json

from server.schemas.exact_json import rounded
from server.schemas.strict_model import MAX_INTEGER, Description, Name, Strict, misfit

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_SCHEMA_BYTES = 1 << 16  # of one function
_MAX_NAME = 256  # of a call of an earlier turn, from any server
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# The versions of JSON schema; the library would fetch any other URI from the network.
_DIALECTS = {
    *(f"https://json-schema.org/draft/{version}/schema" for version in ("2020-12", "2019-09")),
    *(f"http://json-schema.org/draft-{version}/schema" for version in ("07", "06", "04")),
}


def _schema_of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Check a JSON schema of arguments, which must be an object."""
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema has at most {MAX_SCHEMA_BYTES} bytes")
    dialect = schema.get("$schema")
    if dialect is not None and str(dialect).removesuffix("#") not in _DIALECTS:
        raise ValueError("$schema names no supported version of JSON schema")
    try:
        jsonschema_rs.meta.validate(rounded(schema))
    except jsonschema_rs.ValidationError as error:
        place = "/".join(map(str, error.instance_path)) or "its root"
        raise ValueError(f"is no JSON schema: at {place}: {error.message}") from error
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object, so the type of their schema must be object")
    return schema


class FunctionDefinition(Strict):
    """A function: `parameters` is the JSON schema of its arguments; without it, the function has no arguments."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Description | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema_of_an_object)] | None = None
    strict: bool | None = Field(None, description="Calls match `parameters` even if the model decides whether to call.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return _NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(Strict):
    """A tool; functions are the only type."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_template(self) -> dict[str, Any]:
        """Return the tool for a chat template (transformers' format), without `strict`, which only the server uses."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        return {"type": "function", "function": {"name": function.name, **described, "parameters": function.schema_of_arguments}}


def _names_differ(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise misfit(f"tools.{at}.function.name", f"two functions have the name {name}")
    return tools


def _function_names_differ(functions: list[FunctionDefinition]) -> list[FunctionDefinition]:
    names = [function.name for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise misfit(f"functions.{at}.name", f"two functions have the name {name}")
    return functions


Functions = Annotated[
    list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_function_names_differ)
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_names_differ)]


def templated_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return functions for a chat template."""
    return [tool.to_template() for tool in tools or ()]


class FunctionName(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(Strict):
    """The called function, with arguments as JSON text."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=_MAX_NAME)]
    arguments: str
    parsed_arguments: object = Field(None, description="Set by the openai client's helpers; changes nothing.")


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: Name
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(None, ge=0, le=MAX_INTEGER, description="Of a streamed call; changes nothing.")

    def to_template(self) -> dict[str, Any]:
        """Return the call for a chat template: the arguments as an object, or as text if they are not a JSON object."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": _object_of(self.function.arguments)},
        }


def _object_of(arguments: str) -> object:
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


class AnswerFunction(BaseModel):
    """The function of a call."""

    name: str
    arguments: str = Field(description="JSON as the model wrote it; invalid if the text was cut off or the model made a mistake.")


class AnswerCall(BaseModel):
    """A call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionDelta(BaseModel):
    """The part of a function call in one chunk."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """The part of call `index` of a message in one chunk; the first chunk of a call has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
