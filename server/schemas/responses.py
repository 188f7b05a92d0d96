"""Request and answer of POST /v1/responses: OpenAI's newer API, for text from a conversation. Nothing is stored."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.schemas.answer import Metrics
from server.schemas.chat import ChatRequest
from server.schemas.common import MAX_PARTS, CacheSalt
from server.schemas.messages import MAX_MESSAGES
from server.schemas.speculative import SpeculativeOptions
from server.schemas.strict import MAX_INTEGER, Name, Neutral, Strict, misfit


class InputText(Strict):
    """A part of a text from the client or from an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[object, Neutral([])] = None
    logprobs: Annotated[object, Neutral([])] = None


class InputMessage(Strict):
    """One message of the conversation, or an item of an earlier answer's `output`."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Annotated[object, Neutral()] = None

    def to_message(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        text = self.content
        parts = text if isinstance(text, str) else [{"type": "text", "text": part.text} for part in text]
        return {"role": self.role, "content": parts}


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    model: Name
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER, description="Default: the room that is left.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    user: Name | None = None
    cache_salt: CacheSalt | None = None
    metadata: dict[Name, Name] | None = Field(None, max_length=16, description="Accepted; changes nothing.")
    speculative: SpeculativeOptions | None = None
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    parallel_tool_calls: bool | None = Field(None, description="Accepted; there are no tools.")
    truncation: Annotated[object, Neutral("disabled")] = None
    text: Annotated[object, Neutral({}, {"format": {"type": "text"}})] = None
    tools: Annotated[object, Neutral([])] = None
    tool_choice: Annotated[object, Neutral("none", "auto")] = None
    service_tier: Annotated[object, Neutral("auto", "default")] = None
    background: Annotated[object, Neutral(False)] = None
    include: Annotated[object, Neutral([])] = None
    reasoning: Annotated[object, Neutral({})] = None
    top_logprobs: Annotated[object, Neutral(0)] = None
    stream_options: Annotated[object, Neutral({})] = None
    previous_response_id: Annotated[object, Neutral()] = None
    conversation: Annotated[object, Neutral()] = None
    prompt: Annotated[object, Neutral()] = None
    max_tool_calls: Annotated[object, Neutral()] = None

    @model_validator(mode="after")
    def _is_not_traced(self) -> Self:
        if self.speculative is not None and self.speculative.trace:
            raise misfit("speculative.trace", "trace is accepted only in streams of completions and chat completions")
        return self

    def to_chat(self) -> ChatRequest:
        """Return the request as a chat request."""
        text = self.input
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else [item.to_message() for item in text]
        same = ("model", "temperature", "top_p", "stream", "user", "cache_salt", "speculative", "timeout_s")
        fields = {name: getattr(self, name) for name in same}
        fields["stream_options"] = {"include_usage": True} if self.stream else None  # the last event has it
        return ChatRequest.model_validate(
            {**fields, "messages": [*instructions, *messages], "max_completion_tokens": self.max_output_tokens}
        )


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    """The one item of an answer."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ResponsesUsage(BaseModel):
    """Tokens of prompt and answer."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(BaseModel):
    """Answer to POST /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metrics: Metrics | None = None


class ResponsesEvent(BaseModel):
    """One event of a stream, with the fields that belong to its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
