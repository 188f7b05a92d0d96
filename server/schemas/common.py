"""Request fields that both generation endpoints share."""

from enum import Enum, auto
from typing import Annotated, Literal, Protocol, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from engine.core.sampling_limits import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from engine.core.types import Grammar
from server.schemas.speculative import SpeculativeOptions
from server.schemas.strict_model import MAX_INTEGER, Name, Strict, misfit
from server.schemas.structured import ResponseFormat, StructuredOutputs

MAX_CHOICES = 1024  # upper bound of the setting max_choices
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 256
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_PARTS = 256
MAX_PRIORITY = 1000
MAX_SALT_CHARS = 1024
REQUEST_ID = r"[A-Za-z0-9._:-]{1,128}"  # characters that are safe in a log line and in a header


class TextPart(Strict):
    """A part of a text; text is the only supported type."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class Prediction(Strict):
    """Text that the client expects in the answer. It is used for drafts: it changes the speed, never the distribution."""

    type: Literal["content"]
    content: str | TextParts

    @property
    def text(self) -> str:
        """The expected text: the parts joined without separators."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamUsage(Enum):
    """The chunks of a stream that report usage."""

    NOWHERE = auto()
    AT_THE_END = auto()
    EVERYWHERE = auto()


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: the usage so far, in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; this server adds no padding.")

    @model_validator(mode="after")
    def _running_usage_is_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            param = "stream_options.continuous_usage_stats"
            raise misfit(param, "continuous_usage_stats is accepted only with include_usage: true")
        return self


def _token_id_in_decimal(key: str) -> str:
    """Check a key of a map over tokens; keys of JSON objects are strings. Each token has one spelling, so none occurs twice."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise ValueError("its keys must be token ids in decimal digits")
    return key


TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
BiasKey = Annotated[str, AfterValidator(_token_id_in_decimal)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)]
BadWord = Annotated[str, StringConstraints(pattern=r"\S", max_length=256)]


class _HasStreamOptions(Protocol):
    stream: bool | None

    @property
    def stream_options(self) -> object: ...


def require_stream(body: _HasStreamOptions) -> None:
    """Raise a validation error for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise misfit("stream_options", "stream_options is accepted only with stream: true")


class GenerationRequest(Strict):
    """The fields that completions and chat completions share."""

    model: Name
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(
        None, gt=0, le=1, description="Probability mass that is kept, most typical tokens first; 1 is off."
    )
    presence_penalty: float | None = Field(
        None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="Subtracted from the logit of every token generated so far."
    )
    frequency_penalty: float | None = Field(
        None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="Subtracted from the logit of a token for each time it was generated."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Divides positive logits of the tokens in prompt and text, multiplies negative ones; 1 is off.",
    )
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = Field(
        None, description="Added to the logits of tokens, by token id."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None = (
        Field(None, description="The only tokens that can be generated.")
    )
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = Field(
        None, description="Never generated, as the tokenizer spells them at the start of a text or after a space."
    )
    response_format: ResponseFormat | None = Field(
        None, description="The format of the text: JSON, JSON of a schema, or any text."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="What the text must match, in vLLM's format.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_INTEGER, description="No stop token or stop string ends a text with fewer tokens."
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string, or the text of the stop token, at the end of the text."
    )
    skip_special_tokens: bool | None = Field(None, description="False: special tokens are spelled out in the text; default true.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_INTEGER,
        description="Keep only the last tokens of a prompt; -1: as many as leave room for max_tokens.",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Number of likeliest tokens at each position of the prompt, returned with its own token.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeOptions | None = None
    prediction: Prediction | None = Field(None, description="Text that is expected in the answer; used for drafts.")
    user: Name | None = Field(
        None, description="Changes no text: answers to a user of a key are used for drafts of that user alone."
    )

    cache_salt: CacheSalt | None = Field(
        None, description="Changes no text: cached prefixes are shared with requests of the same salt alone."
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Queued as if it arrived this many requests later, or earlier if negative; default 0.",
    )
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")
    return_token_ids: bool | None = Field(None, description="Return the token ids of prompt and text too.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name a token `token_id:ID`.")
    request_id: Annotated[str, StringConstraints(pattern=f"^{REQUEST_ID}$")] | None = Field(
        None, description="The end of the answer's id."
    )

    @model_validator(mode="after")
    def _keeps_something_of_a_prompt(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise misfit("truncate_prompt_tokens", "must be at least 1, or -1")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_need_no_stream(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise misfit("prompt_logprobs", "prompt_logprobs are not accepted in a stream")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        require_stream(self)
        return self

    @model_validator(mode="after")
    def _trace_needs_a_stream(self) -> Self:
        if self.is_traced and not self.stream:
            raise misfit("speculative.trace", "trace is accepted only with stream: true")
        return self

    @property
    def is_traced(self) -> bool:
        """Whether the stream has a trace of each step."""
        return self.speculative is not None and self.speculative.trace

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.grammar is not None:
            raise misfit("structured_outputs", "response_format defines already what the text must match")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that a text must match; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar
        return None if self.response_format is None else self.response_format.grammar

    @property
    def grammar_param(self) -> str:
        """The field that defines the grammar."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def num_answers(self) -> int:
        """Choices that are returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Texts that are generated for each prompt."""
        return self.num_answers

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, given as one string or as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stream_usage(self) -> StreamUsage:
        """The chunks of a stream that report usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamUsage.NOWHERE
        return StreamUsage.EVERYWHERE if options.continuous_usage_stats else StreamUsage.AT_THE_END

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to return for each token; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def num_sampled_logprobs(self) -> int | None:
        """Alternatives to each token that are requested from the engine; None for no log-probabilities at all."""
        return self.num_top_logprobs

    @property
    def gives_prompt_back(self) -> bool:
        """Whether the prompt is returned before each text."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to each prompt token that are requested from the engine; None for no log-probabilities of the prompt."""
        echoed = self.num_top_logprobs if self.gives_prompt_back else None
        return max((num for num in (echoed, self.prompt_logprobs) if num is not None), default=None)

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; None leaves it to the endpoint."""
        return self.max_tokens
