"""Request and response of POST /v1/completions (the OpenAI format, completed by this server's own fields)."""

from typing import Annotated, Literal, Self, cast

from pydantic import BaseModel, Field, model_validator

from server.schemas.answer import Metrics, PromptLogprobs, Usage
from server.schemas.common import MAX_CHOICES, MAX_LOGPROBS, GenerationRequest, TokenId
from server.schemas.strict_model import MAX_INTEGER, misfit
from server.schemas.trace import StepTrace

Prompt = str | list[int]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="One prompt or several, each text or token ids.")
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens that the model expects around a text prompt; default true."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Texts to generate; the n with the highest mean log-probability are returned."
    )
    echo: bool | None = Field(None, description="Return the prompt before the text, in logprobs too.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INTEGER, description="Default 16. 0 beside echo: the prompt alone is returned, with its logprobs."
    )
    suffix: str | None = Field(None, description="The text after the completion, for models with fill-in-the-middle tokens.")

    @model_validator(mode="after")
    def _has_a_best(self) -> Self:
        if self.num_samples < self.num_answers:
            raise misfit("best_of", "best_of must be at least n")
        if self.num_samples > self.num_answers and self.stream:
            raise misfit("best_of", "best_of more than n is not accepted in a stream: which are best is known at the end")
        return self

    @model_validator(mode="after")
    def _returns_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise misfit("max_tokens", "max_tokens must be at least 1, or 0 beside echo: true")
        return self

    @model_validator(mode="after")
    def _fits_a_suffix(self) -> Self:
        if self.suffix is None:
            return self
        if any(not isinstance(prompt, str) for prompt in self.prompts):
            raise misfit("suffix", "suffix is accepted only with prompts that are texts")
        for param in ("echo", "truncate_prompt_tokens"):
            if getattr(self, param):
                raise misfit(param, f"{param} is not accepted with suffix")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list, for each of the four forms."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_token_ids = isinstance(self.prompt[0], int)
        return cast(list[Prompt], [self.prompt] if is_token_ids else self.prompt)

    @property
    def num_samples(self) -> int:
        """Texts that are generated for each prompt."""
        return self.num_answers if self.best_of is None else self.best_of

    @property
    def num_sampled_logprobs(self) -> int | None:
        """Alternatives to each token that are requested from the engine. best_of needs the tokens' own log-probabilities."""
        return 0 if self.logprobs is None and self.num_samples > self.num_answers else self.logprobs

    @property
    def gives_prompt_back(self) -> bool:
        """Whether the prompt is returned before each text."""
        return bool(self.echo)

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to return for each token; None for no log-probabilities at all."""
        return self.logprobs


class CompletionLogprobs(BaseModel):
    """Four lists of equal length, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One sample, or in a stream the part of it in one chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    speculative_trace: StepTrace | None = Field(
        None, description="In a stream with speculative.trace: the step that produced this text."
    )


class Completion(BaseModel):
    """Answer to POST /v1/completions; in a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
