"""Items of a conversation in the Responses API: messages, function calls and their outputs, reasoning, and references."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from server.schemas.common import MAX_PARTS
from server.schemas.strict_model import Name, Neutral, Strict
from server.schemas.tools import FunctionCall

FORM = "form-"  # begins the tags of unions, which error messages leave out
NO_VALUE = WithJsonSchema({"not": {}})

Status = Literal["in_progress", "completed", "incomplete"]


def form_of(value: object, kinds: tuple[str, ...], default: str | None = None) -> str:
    """Return the tag of the form that the `type` of an object names; `default` is the type of objects without one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = default if kind is None else kind
    return FORM + str(kind) if kind in kinds else f"{FORM}unknown"


def refused_type(*kinds: str) -> AfterValidator:
    """Return the validator of a `type` that is none of `kinds`: it refuses every value."""

    def refuse(kind: object) -> object:
        raise ValueError(f"{str(kind)[:64]} is not supported by this server; accepted: {', '.join(kinds)}")

    return AfterValidator(refuse)


class UnknownForm(BaseModel):
    """Base of an object whose type is not supported: only the type is reported."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputText(Strict):
    """A part of a text from the client or from an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: object = Field(None, description="Of an earlier answer; changes nothing.")
    logprobs: object = Field(None, description="Of an earlier answer; changes nothing.")
    parsed: object = Field(None, description="Set by the openai client's helpers; changes nothing.")


class UnknownPart(UnknownForm):
    """A part of another type."""

    type: Annotated[object, refused_type("input_text", "output_text"), NO_VALUE]


def _form_of_part(value: object) -> str:
    kind = value.get("type", "input_text") if isinstance(value, dict) else "input_text"
    return f"{FORM}text" if kind in ("input_text", "output_text") else f"{FORM}unknown"


Part = Annotated[
    Annotated[InputText, Tag("form-text")] | Annotated[UnknownPart, Tag("form-unknown")], Discriminator(_form_of_part)
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


class UnknownItem(UnknownForm):
    """An item of another type."""

    type: Annotated[object, refused_type(*_KINDS), NO_VALUE]


def _form_of_item(value: object) -> str:
    is_reference = isinstance(value, dict) and "id" in value and "role" not in value and "content" not in value
    return form_of(value, _KINDS, "item_reference" if is_reference else "message")


Item = Annotated[
    Annotated[InputMessage, Tag("form-message")]
    | Annotated[FunctionCallItem, Tag("form-function_call")]
    | Annotated[FunctionCallOutput, Tag("form-function_call_output")]
    | Annotated[ReasoningItem, Tag("form-reasoning")]
    | Annotated[ItemReference, Tag("form-item_reference")]
    | Annotated[UnknownItem, Tag("form-unknown")],
    Discriminator(_form_of_item),
]


def texts_of(parts: Iterable[Part]) -> list[str]:
    """Return the texts of parts."""
    return [part.text for part in parts if isinstance(part, InputText)]
