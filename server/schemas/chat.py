"""Request and response of POST /v1/chat/completions (the OpenAI format, completed by this server's own fields)."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from server.schemas.answer import Metrics, PromptLogprobs, Usage
from server.schemas.common import MAX_LOGPROBS, GenerationRequest
from server.schemas.messages import Messages, TemplateOptions
from server.schemas.strict_model import MAX_INTEGER, Ignored, Name, misfit
from server.schemas.tools import (
    AnswerCall,
    AnswerFunction,
    CallDelta,
    FunctionDelta,
    FunctionName,
    Functions,
    NamedTool,
    Tool,
    ToolChoice,
)
from server.schemas.trace import StepTrace

_NO_EFFECT = Field(description="Accepted; changes no text.")

ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]


class ChatRequest(TemplateOptions, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INTEGER, description="Overrides max_tokens; default: the room that is left."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice | None = Field(None, description="Whether tools are called, and which; default auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call; default true.")
    functions: Functions | None = Field(None, description="The form before tools. At most one is called, in function_call.")
    function_call: Literal["none", "auto"] | FunctionName | None = Field(None, description="The form before tool_choice.")
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out of the answer; default true.")
    separate_reasoning: bool | None = Field(None, description="False: reasoning stays in the content; default true.")
    service_tier: Annotated[Name | None, Ignored("auto", "default"), _NO_EFFECT] = None
    store: Annotated[bool | None, Ignored(False), _NO_EFFECT] = None
    metadata: Annotated[dict[Name, Name] | None, Field(max_length=16), Ignored({}), _NO_EFFECT] = None
    verbosity: Annotated[Name | None, Ignored("medium"), _NO_EFFECT] = None
    safety_identifier: Annotated[Name | None, Ignored(), _NO_EFFECT] = None
    prompt_cache_key: Annotated[Name | None, Ignored(), _NO_EFFECT] = None
    prompt_cache_retention: Annotated[Name | None, Ignored("in_memory", "in-memory"), _NO_EFFECT] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise misfit("top_logprobs", "top_logprobs is accepted only with logprobs: true")
        return self

    @model_validator(mode="after")
    def _functions_are_tools(self) -> Self:
        """Return the request with tools for its functions. It keeps the functions: they set the form of the answer."""
        chosen, functions = self.function_call, self.functions or []
        if isinstance(chosen, FunctionName) and chosen.name not in [function.name for function in functions]:
            raise misfit("function_call.name", "no function of functions has this name")
        if not functions:
            return self
        for field in ("tools", "tool_choice", "parallel_tool_calls"):
            if getattr(self, field):
                raise misfit(field, f"{field} is not accepted beside functions")
        choice = NamedTool(type="function", function=chosen) if isinstance(chosen, FunctionName) else chosen
        tools = [Tool(type="function", function=function) for function in functions]
        return self.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})

    @model_validator(mode="after")
    def _chosen_tools_are_given(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise misfit("tool_choice.function.name", "no function of tools has this name")
        if self.tool_choice == "required" and not names:
            raise misfit("tool_choice", "required is accepted only with tools")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools in the prompt: none if the model must not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to return for each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; None for the room that is left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TopLogprob(BaseModel):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """One returned token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the returned tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same text as reasoning_content.")
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | None = None
    function_call: AnswerFunction | None = Field(None, description="The call, if the request has functions.")


class ChatChoice(BaseModel):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """Answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(BaseModel):
    """The part of a message in one chunk."""

    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChunkChoice(BaseModel):
    """The part of one sample in one chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    speculative_trace: StepTrace | None = Field(None, description="With speculative.trace: the step that produced this text.")


class ChatChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None
