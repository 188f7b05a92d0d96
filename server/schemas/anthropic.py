"""Requests and answers of POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's Messages API, for text and tools."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.schemas.common import MAX_STOP_STRINGS, CacheSalt, StopString
from server.schemas.forms import OTHER, OtherForm, by_type, form, refused_type
from server.schemas.messages import MAX_MESSAGES
from server.schemas.speculative import UntracedOptions
from server.schemas.strict_model import MAX_INTEGER, Description, Name, Neutral, Strict, misfit
from server.schemas.tools import MAX_TOOLS

MAX_BLOCKS = 4096  # of one message
THINKING_SWITCH, EFFORT = "enable_thinking", "reasoning_effort"  # variables of chat templates
THREAD_REFUSED = "thread_unsupported_request"  # the official client repeats the request without a thread


class Cacheable(Strict):
    """A block or tool after which a client can end a cached prefix. This server caches every prefix."""

    cache_control: dict[str, Any] | None = Field(None, description="Accepted; changes nothing.")


class TextBlock(Cacheable):
    """A text of the client, or of an earlier answer."""

    type: Literal["text"]
    text: str
    citations: Annotated[object, Neutral([])] = None


class ThinkingBlock(Strict):
    """Thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted thinking of an earlier answer of another server."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cacheable):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    caller: Annotated[object, Neutral({"type": "direct"})] = None
    toolset_name: Annotated[object, Neutral()] = None


class OtherText(OtherForm):
    """A block of another type, where texts alone are accepted."""

    type: Annotated[object, refused_type("text")]


_Text = Annotated[Annotated[TextBlock, form("text")] | Annotated[SkipJsonSchema[OtherText], OTHER], by_type("text")]
TextBlocks = Annotated[list[_Text], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class ToolResultBlock(Cacheable):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | TextBlocks | None = None
    is_error: bool | None = Field(None, description="True: the result begins with `Error: ` in the prompt.")
    toolset_name: Annotated[object, Neutral()] = None


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class OtherBlock(OtherForm):
    """A block of another type."""

    type: Annotated[object, refused_type(*_KINDS)]


Block = Annotated[
    Annotated[TextBlock, form("text")]
    | Annotated[ThinkingBlock, form("thinking")]
    | Annotated[RedactedThinkingBlock, form("redacted_thinking")]
    | Annotated[ToolUseBlock, form("tool_use")]
    | Annotated[ToolResultBlock, form("tool_result")]
    | Annotated[SkipJsonSchema[OtherBlock], OTHER],
    by_type(*_KINDS),
]
_ROLES: Mapping[type[BaseModel], tuple[str, ...]] = {
    **dict.fromkeys((ThinkingBlock, RedactedThinkingBlock, ToolUseBlock), ("assistant",)),
    ToolResultBlock: ("user",),
    TextBlock: ("user", "assistant", "system"),
}


class Turn(Strict):
    """One message of the conversation. The answer continues a last message of the assistant."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True)]


def _blocks_fit(turns: list[Turn]) -> list[Turn]:
    """Check that a role may have its blocks. An assistant may have answered with nothing."""
    for at, turn in enumerate(turns):
        if turn.content == [] and turn.role != "assistant":
            raise misfit(f"messages.{at}.content", "must not be empty")
        for number, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if turn.role not in (roles := _ROLES[type(block)]):
                place = f"messages.{at}.content.{number}.type"
                raise misfit(place, f"{block.type} is accepted only in messages of role {' or '.join(roles)}")
    return turns


class ClientTool(Cacheable):
    """A function that the client runs. Tools of Anthropic's servers and tools without a schema are not supported."""

    type: Literal["custom"] | None = None
    name: Name
    description: Description | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Calls match `input_schema` even if the model decides whether to call.")
    input_examples: list[dict[str, Any]] | None = Field(None, description="Shown to the model as `examples` of the schema.")
    eager_input_streaming: bool | None = Field(None, description="Accepted; arguments are always streamed as they are generated.")
    defer_loading: Annotated[object, Neutral(False)] = None
    allowed_callers: Annotated[object, Neutral(["direct"])] = None


class OtherClientTool(OtherForm):
    """A tool of another type."""

    type: Annotated[object, refused_type("custom")]


_Tool = Annotated[
    Annotated[ClientTool, form("custom")] | Annotated[SkipJsonSchema[OtherClientTool], OTHER],
    by_type("custom", default="custom"),
]
ClientTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoiceParam(Strict):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="Of the one tool to call, with type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: at most one call.")


class ThinkingConfig(Strict):
    """Whether the model thinks before it answers, for a chat template that has a switch."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    display: Literal["summarized", "omitted", "updates"] | None = Field(None, description="omitted: no thinking in the answer.")
    block_binding: dict[str, Any] | None = None


class OutputSchema(Strict):
    """A JSON schema that the text matches."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer."""

    format: OutputSchema | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For a chat template that reads it."
    )
    task_budget: Annotated[object, Neutral()] = None


class ContextEdit(BaseModel):
    """An edit of earlier turns. Only thinking can be cleared, which changes nothing: it is in no prompt."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Strict):
    """Edits of earlier turns."""

    edits: Annotated[list[ContextEdit], Field(max_length=MAX_BLOCKS, fail_fast=True)] | None = None


class Metadata(Strict):
    """The user of the request."""

    user_id: Name | None = Field(None, description="The user whose earlier answers may be drafted from.")


class PromptRequest(Strict):
    """The fields that become a prompt. They are all that is counted."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True), AfterValidator(_blocks_fit)]
    system: str | TextBlocks | None = Field(None, description="A system message before the conversation.")
    tools: ClientTools | None = Field(None, description="Functions that the model may call, as the chat template shows them.")
    tool_choice: ToolChoiceParam | None = Field(None, description="Default auto.")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[object, Neutral([])] = None
    container: Annotated[object, Neutral()] = None
    compaction: Annotated[object, Neutral()] = None
    output_format: Annotated[object, Neutral()] = Field(None, description="Replaced by output_config.format.")
    thread: object = Field(
        None, description="Refused; clients then send whole conversations.", json_schema_extra={"type": "null"}
    )

    @model_validator(mode="after")
    def _chosen_tools_are_given(self) -> Self:
        choice, names = self.tool_choice, [tool.name for tool in self.client_tools]
        if choice is None:
            return self
        if choice.type in ("any", "tool") and not names:
            raise misfit("tool_choice", f"{choice.type} is accepted only with tools")
        if choice.type == "tool" and choice.name not in names:
            raise misfit("tool_choice.name", "is required with type tool" if choice.name is None else "no tool has this name")
        if choice.type != "tool" and choice.name is not None:
            raise misfit("tool_choice.name", "is accepted only with type tool")
        return self

    @property
    def client_tools(self) -> list[ClientTool]:
        """The tools. Others have been refused."""
        return [tool for tool in self.tools or () if isinstance(tool, ClientTool)]

    @property
    def effort(self) -> str | None:
        """The effort in words that chat templates know."""
        effort = None if self.output_config is None else self.output_config.effort
        return "high" if effort in ("xhigh", "max") else effort

    def ignored(self, variables: Collection[str]) -> list[str]:
        """Return the accepted fields that change nothing, although a client may expect an effect.

        `variables` are the variables that the chat template reads.
        """
        found = {
            "cache_control": any(one.cache_control for one in self._cacheable()),
            "thinking": self.thinking and THINKING_SWITCH not in variables,
            "output_config.effort": self.effort and EFFORT not in variables,
            "context_management": self.context_management and self.context_management.edits,
        }
        return [name for name, is_given in found.items() if is_given]

    def _cacheable(self) -> Iterator[Cacheable]:
        yield from self.client_tools
        for content in (self.system, *(turn.content for turn in self.messages)):
            for block in content if isinstance(content, list) else ():
                if isinstance(block, Cacheable):
                    yield block
                if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                    yield from (part for part in block.content if isinstance(part, TextBlock))


class CountRequest(PromptRequest):
    """Body of POST /v1/messages/count_tokens."""


class MessagesRequest(PromptRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_INTEGER, description="Fewer if less room is left, or by max_answer_tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INTEGER, description="0 is off.")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    cache_salt: CacheSalt | None = None
    speculative: UntracedOptions | None = None
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")


class AnswerBlock(BaseModel):
    """A part of an answer, with the fields of its type: text, thinking or tool_use."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "thinking", "tool_use"]


class MessagesUsage(BaseModel):
    """Tokens of prompt and answer. The prompt has the sum of the three counts of input tokens."""

    input_tokens: int = Field(description="Prompt tokens that were not cached.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="Prompt tokens served from the prefix cache.")
    output_tokens: int
    output_tokens_details: dict[str, int]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesAnswer(BaseModel):
    """Answer to POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(BaseModel):
    """One event of a stream, with the fields that belong to its type."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokenCount(BaseModel):
    """Answer to POST /v1/messages/count_tokens."""

    input_tokens: int
