"""Conversations, and how a chat template makes one prompt of them."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from server.schemas.common import TextParts
from server.schemas.strict import Neutral, Strict, misfit
from server.text import ChatForm

MAX_MESSAGES = 2048


class Message(Strict):
    """One message. What an assistant's message carries beside its text is accepted where it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | TextParts
    name: Annotated[object, Neutral()] = None
    refusal: Annotated[object, Neutral()] = None
    tool_calls: Annotated[object, Neutral([])] = None
    function_call: Annotated[object, Neutral()] = None
    audio: Annotated[object, Neutral()] = None
    annotations: Annotated[object, Neutral([])] = None

    def to_template(self) -> dict[str, str]:
        """Return what a chat template reads: `developer` is the newer name of `system`, parts are lines."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def templated(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return what a chat template reads of a conversation."""
    return [message.to_template() for message in messages]


class TemplateOptions(Strict):
    """How a conversation becomes a prompt. The template is the model's own."""

    add_generation_prompt: bool | None = Field(
        None, description="End where the assistant speaks; default true, unless the last message is continued."
    )
    continue_final_message: bool | None = Field(None, description="End inside the last message, which the answer goes on with.")
    add_special_tokens: bool | None = Field(
        None, description="The tokens that the model expects around a text; a chat template writes its own: default false there."
    )
    chat_template: Annotated[object, Neutral()] = None
    chat_template_kwargs: Annotated[object, Neutral({})] = None

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
        return ChatForm(opens, continues, bool(self.add_special_tokens))
