"""Functions that a model may call, which of them it should, and calls of earlier turns (the OpenAI format)."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jsonschema_rs
from pydantic import AfterValidator, BaseModel, Field, StringConstraints
from pydantic_core import from_json

from server.schemas.exact_json import rounded
from server.schemas.strict import MAX_INTEGER, Description, Name, Strict, misfit

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_SCHEMA_BYTES = 1 << 16  # of one function
_MAX_NAME = 256  # of a call of an earlier turn, whoever made it
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# The versions of JSON schema; any other URI would be looked for in the network.
_DIALECTS = {
    *(f"https://json-schema.org/draft/{version}/schema" for version in ("2020-12", "2019-09")),
    *(f"http://json-schema.org/draft-{version}/schema" for version in ("07", "06", "04")),
}


def _schema_of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema of an object's fields; any text but an object is no arguments."""
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema has at most {MAX_SCHEMA_BYTES} bytes")
    dialect = schema.get("$schema")
    if dialect is not None and str(dialect).removesuffix("#") not in _DIALECTS:
        raise ValueError("$schema names no version of JSON schema that is known here")
    try:
        jsonschema_rs.meta.validate(rounded(schema))
    except jsonschema_rs.ValidationError as error:
        place = "/".join(map(str, error.instance_path)) or "its root"
        raise ValueError(f"is no JSON schema: at {place}: {error.message}") from error
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object, so the type of their schema must be object")
    return schema


class FunctionDefinition(Strict):
    """A function: `parameters` is the JSON schema of its arguments; left out, it has none."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Description | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_schema_of_an_object)] | None = None
    strict: bool | None = Field(None, description="Calls match `parameters` also where the model decides whether to call.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return _NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(Strict):
    """What a model may use; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_template(self) -> dict[str, Any]:
        """Return what a chat template reads (transformers' form); `strict` is between client and server."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        return {"type": "function", "function": {"name": function.name, **described, "parameters": function.schema_of_arguments}}


def _names_differ(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise misfit(f"tools.{at}.function.name", f"two functions have the name {name}")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_names_differ)]


def templated_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return what a chat template reads of functions."""
    return [tool.to_template() for tool in tools or ()]


class FunctionName(Strict):
    """A function by its name."""

    name: Name


class NamedTool(Strict):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(Strict):
    """What was called, with arguments as JSON text."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=_MAX_NAME)]
    arguments: str
    parsed_arguments: object = Field(None, description="What the openai client's helpers read from the text; changes nothing.")


class ToolCall(Strict):
    """A call that an assistant's message made."""

    id: Name
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(None, ge=0, le=MAX_INTEGER, description="Of a streamed call; changes nothing.")

    def to_template(self) -> dict[str, Any]:
        """Return what a chat template reads: the arguments as an object, or as the text they are if they are no JSON object."""
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
    """What is called."""

    name: str
    arguments: str = Field(description="JSON as the model wrote it; no JSON where it was cut off, or wrote none.")


class AnswerCall(BaseModel):
    """A call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionDelta(BaseModel):
    """What a chunk adds to what is called."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """What a chunk adds to call `index` of a message; id, type and name come with the first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
