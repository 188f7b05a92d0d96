"""Requests and answers of POST /tokenize and POST /detokenize (vLLM's format)."""

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from server.schemas.common import TokenId
from server.schemas.messages import Messages, TemplateOptions
from server.schemas.strict_model import Name, Strict, misfit


class TokenizeRequest(TemplateOptions):
    """Body of POST /tokenize: a text or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if self.prompt is None and self.messages is None:
            raise misfit("prompt", "prompt or messages is required")
        if self.prompt is not None and self.messages is not None:
            raise misfit("prompt", "prompt and messages cannot both be given")
        if self.messages is None and (self.add_generation_prompt is not None or self.continue_final_message is not None):
            param = "continue_final_message" if self.add_generation_prompt is None else "add_generation_prompt"
            raise misfit(param, f"{param} is accepted only with messages")
        for field in ("tools", "chat_template_kwargs", "reasoning_effort"):
            if self.messages is None and getattr(self, field):
                raise misfit(field, f"{field} is accepted only with messages")
        return self


class TokenizeAnswer(BaseModel):
    """Answer to POST /tokenize. `token_strs` are the tokenizer's own spellings."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    """Answer to POST /detokenize: the text of all tokens, special tokens spelled out."""

    prompt: str
