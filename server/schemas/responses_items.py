"""Items of a conversation in the Responses API: messages, function calls and their outputs, reasoning, and references."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from server.schemas.common import MAX_PARTS
from server.schemas.forms import OTHER, OtherForm, by_type, form, refused_type
from server.schemas.strict_model import Name, Neutral, Strict
from server.schemas.tools import FunctionCall

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """A part of a text from the client or from an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: object = Field(None, description="Of an earlier answer; changes nothing.")
    logprobs: object = Field(None, description="Of an earlier answer; changes nothing.")
    parsed: object = Field(None, description="Set by the openai client's helpers; changes nothing.")


class OtherPart(OtherForm):
    """A part of another type."""

    type: Annotated[object, refused_type("input_text", "output_text")]


Part = Annotated[
    Annotated[InputText, form("input_text")]
    | Annotated[SkipJsonSchema[InputText], form("output_text")]
    | Annotated[SkipJsonSchema[OtherPart], OTHER],
    by_type("input_text", "output_text", default="input_text"),
]
_Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class _Item(Strict):
    id: Name | None = None
    status: Status | None = None


class InputMessage(_Item):
    """One message of the conversation."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Accepted; changes nothing.")


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: Annotated[str, *FunctionCall.model_fields["name"].metadata]
    arguments: str
    namespace: Annotated[object, Neutral()] = None
    caller: Annotated[object, Neutral({"type": "direct"})] = None
    async_: Annotated[object, Neutral(False)] = Field(None, alias="async")
    parsed_arguments: object = Field(None, description="Set by the openai client's helpers; changes nothing.")


class FunctionCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | _Parts
    name: Name | None = None
    namespace: Annotated[object, Neutral()] = None
    caller: Annotated[object, Neutral({"type": "direct"})] = None


class ReasoningPart(Strict):
    """A part of the model's reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


_ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: _ReasoningParts | None = None
    content: _ReasoningParts | None = None
    encrypted_content: object = Field(None, description="Accepted; changes nothing.")


class ItemReference(Strict):
    """An item of a stored answer's output."""

    type: Literal["item_reference"] | None = "item_reference"
    id: Name


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class OtherItem(OtherForm):
    """An item of another type."""

    type: Annotated[object, refused_type(*_KINDS)]


def _kind_of_untyped(value: object) -> str:
    is_reference = isinstance(value, dict) and "id" in value and "role" not in value and "content" not in value
    return "item_reference" if is_reference else "message"


Item = Annotated[
    Annotated[InputMessage, form("message")]
    | Annotated[FunctionCallItem, form("function_call")]
    | Annotated[FunctionCallOutput, form("function_call_output")]
    | Annotated[ReasoningItem, form("reasoning")]
    | Annotated[ItemReference, form("item_reference")]
    | Annotated[SkipJsonSchema[OtherItem], OTHER],
    by_type(*_KINDS, default=_kind_of_untyped),
]


def texts_of(parts: Iterable[Part]) -> list[str]:
    """Return the texts of parts."""
    return [part.text for part in parts if isinstance(part, InputText)]
