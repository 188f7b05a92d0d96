"""Request and answer of POST /infill, llama.cpp's route for editors: the text between a prefix and a suffix."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.schemas.common import MAX_STOP_STRINGS, CacheSalt, GenerationRequest, StopString, StreamUsage
from server.schemas.speculative import UntracedOptions
from server.schemas.strict_model import MAX_INTEGER, Name, Neutral, Strict

MAX_FILES = 1024
MAX_RESPONSE_FIELDS = 64


class InfillFile(Strict):
    """Another file of the repository, or a part of it. Editors send more fields of it, which change nothing."""

    model_config = ConfigDict(extra="ignore")

    text: str
    filename: Name = "tmp"


class InfillRequest(Strict):
    """Body of POST /infill."""

    # Editors always send `samplers`, with one that exists in llama.cpp alone.
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"samplers"})

    input_prefix: str = Field(description="The text before the cursor.")
    input_suffix: str = Field(description="The text after the cursor.")
    prompt: str | None = Field(None, description="More text before the cursor: the end of the prefix.")
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES, fail_fast=True)] | None = Field(
        None, description="Other files, which the model reads before the prefix. The first ones are left out if all do not fit."
    )
    model: Name | None = None
    n_predict: int | None = Field(None, ge=-1, le=MAX_INTEGER, description="Default -1: the room that is left.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER, description="0 and -1 are off.")
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description="-1: another text each time.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    n_indent: int | None = Field(None, ge=0, le=MAX_INTEGER, description="A line that is indented less ends the text.")
    t_max_predict_ms: int | None = Field(
        None, ge=-1, le=MAX_INTEGER, description="The first line that ends so long after the first token is the last; 0 is off."
    )
    presence_penalty: Annotated[object, Neutral(0)] = None
    frequency_penalty: Annotated[object, Neutral(0)] = None
    stream: bool | None = None
    cache_prompt: bool | None = Field(None, description="Accepted; the setting prefix_cache decides.")
    return_tokens: bool | None = Field(None, description="Return the token ids of the text too.")
    response_fields: Annotated[list[Name], Field(max_length=MAX_RESPONSE_FIELDS, fail_fast=True)] | None = Field(
        None, description="The only fields of the answer; a/b is the field b of a."
    )
    speculative: UntracedOptions | None = None
    user: Name | None = None
    cache_salt: CacheSalt | None = None
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")

    @property
    def prefix(self) -> str:
        """All text before the cursor."""
        return self.input_prefix + (self.prompt or "")

    @property
    def files(self) -> list[tuple[str, str]]:
        """Name and text of each of the other files."""
        return [(file.filename, file.text) for file in self.input_extra or ()]

    def to_generation(self, served: str, longest: int) -> "FillRequest":
        """Return the request as this server's own; a limit of tokens beyond the `longest` text is none."""
        same = ("temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "ignore_eos", "stream", "user", "cache_salt")
        num_wanted = -1 if self.n_predict is None else self.n_predict
        return FillRequest(
            model=self.model or served,
            max_tokens=num_wanted if 0 <= num_wanted < longest else None,
            seed=None if self.seed == -1 else self.seed,
            speculative=self.speculative,
            timeout_s=self.timeout_s,
            **{name: getattr(self, name) for name in same},
        )


class FillRequest(GenerationRequest):
    """An infill request with the fields of the other endpoints."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_INTEGER)

    @property
    def stream_usage(self) -> StreamUsage:
        """The last chunk of every stream has the counts."""
        return StreamUsage.AT_THE_END

    @property
    def num_top_logprobs(self) -> int | None:
        """No log-probabilities are returned."""
        return None


class InfillTimings(BaseModel):
    """How many tokens took how long."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(BaseModel):
    """Answer to POST /infill; in a stream, one chunk, of which the last has `stop`. `response_fields` may leave out any field."""

    model_config = ConfigDict(extra="allow")

    index: int = 0
    content: str = ""
    tokens: list[int] = []
    id_slot: int = Field(-1, description="This server has no slots.")
    stop: bool = False
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = Field(0, description="Tokens of the prompt.")
    tokens_cached: int = Field(0, description="Tokens of the prompt that were cached.")
    truncated: bool = Field(False, description="Something was left out of the prompt to make it fit.")
    has_new_line: bool = False
    prompt: str = Field("", description="What the model read.")
    generation_settings: dict[str, Any] = {}
    stop_type: Literal["none", "eos", "limit", "word"] = "none"
    stopping_word: str = ""
    timings: InfillTimings | None = None
