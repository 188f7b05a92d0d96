"""Conversations, and the options with which a chat template renders them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from server.schemas.common import TextParts
from server.schemas.strict_model import Ignored, Name, Neutral, Strict, misfit
from server.schemas.tools import MAX_CALLS, FunctionCall, ToolCall, Tools
from server.text.codec import ChatForm

MAX_MESSAGES = 2048
MAX_VARIABLES = 32
MAX_VARIABLES_CHARS = 1 << 14  # of all variables as JSON
MAX_VARIABLES_DEPTH = 8
# Names that a template gets from transformers itself, parameters of its functions, and names of the template language.
RESERVED_VARIABLES = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "extra_special_tokens"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range"),
    }
)


def _few_and_flat(variables: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a template: their names, depth and size."""
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise misfit(f"chat_template_kwargs.{name}", "is passed to the template by the server")
    if _depth(variables) > MAX_VARIABLES_DEPTH:
        raise ValueError(f"is nested more than {MAX_VARIABLES_DEPTH} deep")
    if len(json.dumps(variables)) > MAX_VARIABLES_CHARS:
        raise ValueError(f"has at most {MAX_VARIABLES_CHARS} characters as JSON")
    return variables


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


_VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
TemplateVariables = Annotated[dict[_VariableName, Any], Field(max_length=MAX_VARIABLES), AfterValidator(_few_and_flat)]


class Message(Strict):
    """One message. Fields of an answer that this server never fills are accepted if they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | TextParts | None = Field(None, description="Required, unless an assistant calls tools.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        None, description="Calls that the assistant made."
    )
    tool_call_id: Name | None = Field(None, description="Which call a tool's message answers.")
    name: Name | None = Field(None, description="The author, for a chat template that shows it.")
    reasoning_content: str | None = Field(None, description="Reasoning of an assistant, for a chat template that shows it.")
    reasoning: str | None = Field(None, description="The same under vLLM's name.")
    refusal: Annotated[object, Neutral()] = None
    function_call: FunctionCall | None = Field(None, description="The call of an assistant, in the form before tool_calls.")
    audio: Annotated[object, Neutral()] = None
    annotations: Annotated[object, Neutral([])] = None

    @property
    def misfit(self) -> tuple[str, str] | None:
        """The field that does not fit the role, and the reason."""
        if self.tool_calls and self.role != "assistant":
            return "tool_calls", "only an assistant calls tools"
        if self.function_call is not None and (self.role != "assistant" or self.tool_calls):
            return "function_call", "is accepted only in an assistant's message without tool_calls"
        if self.role == "function" and not self.name:
            return "name", "is required in a function's message"
        if self._reasoning is not None and self.role != "assistant":
            return "reasoning_content" if self.reasoning is None else "reasoning", "only an assistant reasons"
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            return "reasoning", "differs from reasoning_content"
        if self.content is None and not self.tool_calls and self.function_call is None and not self._reasoning:
            return "content", "is required"
        if self.tool_call_id is None and self.role == "tool":
            return "tool_call_id", "is required in a tool's message"
        if self.tool_call_id is not None and self.role != "tool":
            return "tool_call_id", "is accepted only in a tool's message"
        return None

    @property
    def _reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def to_template(self) -> dict[str, Any]:
        """Return the message for a chat template: `developer` becomes `system`, parts become lines, no field is null."""
        content = self.content if not isinstance(self.content, list) else "\n".join(part.text for part in self.content)
        content = "" if content is None and not self.tool_calls else content
        calls = [call.to_template() for call in self.tool_calls or ()]
        return {
            "role": "system" if self.role == "developer" else self.role,
            **({} if self.name is None else {"name": self.name}),
            **({} if content is None else {"content": content}),
            **({"reasoning_content": self._reasoning} if self._reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            **({} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}),
        }


def _fit(messages: list[Message]) -> list[Message]:
    for at, message in enumerate(messages):
        if message.misfit is not None:
            field, reason = message.misfit
            raise misfit(f"messages.{at}.{field}", reason)
    return _with_tools(messages)


def _with_tools(messages: list[Message]) -> list[Message]:
    """Return the messages with a call of a tool for each function_call, and a tool's message for each message of a function.

    A function's message answers the last call. Ids have nine letters and digits, because templates of Mistral require it.
    """
    found, call_id = list[Message](), "call00000"
    for at, message in enumerate(messages):
        if message.function_call is not None:
            call_id = f"call{at:05}"
            call = ToolCall(id=call_id, type="function", function=message.function_call, index=None)
            message = message.model_copy(update={"function_call": None, "tool_calls": [call]})
        elif message.role == "function":
            message = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        found.append(message)
    return found


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(_fit)]


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation for a chat template."""
    return [message.to_template() for message in messages]


class TemplateOptions(Strict):
    """How a conversation becomes a prompt. The template is always the model's own."""

    add_generation_prompt: bool | None = Field(
        None, description="End where the assistant's text begins; default true, unless the last message is continued."
    )
    continue_final_message: bool | None = Field(None, description="End inside the last message, which the answer continues.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add the special tokens that the model expects around a text; default false with messages.",
    )
    tools: Tools | None = Field(None, description="Functions that the model may call, as the chat template shows them.")
    chat_template: Annotated[object, Neutral()] = None
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables that the chat template reads, as enable_thinking of Qwen3; others change nothing."
    )

    reasoning_effort: Annotated[
        Name | None,
        Ignored(is_variable=True),
        Field(description="Variable of the chat template; a template that does not read it ignores it."),
    ] = None

    @model_validator(mode="after")
    def _has_one_effort(self) -> Self:
        variables = self.chat_template_kwargs or {}
        if (
            self.reasoning_effort is not None
            and variables.get("reasoning_effort", self.reasoning_effort) != self.reasoning_effort
        ):
            raise misfit("reasoning_effort", "differs from reasoning_effort of chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            reason = "continue_final_message ends the prompt inside the last message, add_generation_prompt behind it"
            raise misfit("continue_final_message", reason)
        return self

    @property
    def form(self) -> ChatForm:
        """The form of the prompt."""
        continues = bool(self.continue_final_message)
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return ChatForm(opens, continues, bool(self.add_special_tokens), self.template_variables)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The request's own variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}
