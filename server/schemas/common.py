"""Request fields that both generation endpoints share, and how a field that is not honoured is refused.

Every model is strict and forbids unknown fields. A field of the OpenAI API that this server does not implement is declared
as `Neutral`: its neutral values change nothing and are accepted, anything else is an error that names the field.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from engine.pairs import InexactPairError, VerifierName, require_exact
from engine.sampling_limits import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from engine.tree import DEFAULT_BRANCHES, DEFAULT_DEPTH, DEFAULT_NODES, DEFAULT_SHAPE, DELAYED_TREES, Expansion, TreeName
from engine.types import Speculation

MAX_INTEGER = 2**31 - 1  # of any count or id; what the engine is sent must fit in 64 bits
MAX_CHOICES = 1024  # whatever the settings say
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 256
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_PARTS = 256


class Neutral:
    """Marks a field that is accepted only where it changes nothing: null, or one of `values`. True is not 1 here."""

    def __init__(self, *values: object) -> None:
        self._values = (None, *values)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate with `_check`."""
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Show the accepted values."""
        return {"enum": list(self._values)}

    def _check(self, value: object) -> object:
        if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self._values):
            return value
        raise ValueError(f"not supported by this server; accepted: {', '.join(map(json.dumps, self._values))}")


def misfit(param: str, reason: str) -> PydanticCustomError:
    """Return the error of a field that is valid alone but not beside the others."""
    return PydanticCustomError("misfit", "{reason}", {"reason": reason, "param": param})


class Strict(BaseModel):
    """Base of every request model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(Strict):
    """A part of a text; text is the only kind that is understood."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class Prediction(Strict):
    """What the client expects to be said, or much of it. It is drafted from: it changes speed, never the law of the text."""

    type: Literal["content"]
    content: str | TextParts

    @property
    def text(self) -> str:
        """The expected text; parts follow each other without a gap."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted; this server pads nothing.")


class SpeculativeOptions(Strict):
    """A request's wishes about speculation. They change speed, never the law of the text."""

    enabled: bool = Field(True, description="False decodes one token a step.")
    verifier: VerifierName | None = Field(None, description="Rule that accepts drafted tokens; null: the server's.")
    tree: TreeName | None = Field(None, description="Which tree; null: a delayed one if its shape is given, else the server's.")
    trunk: int | None = Field(None, ge=0, le=64, description="Tokens drafted before a delayed tree branches.")
    branches: int | None = Field(None, ge=1, le=16, description="Paths below a delayed tree's trunk; else children a node.")
    depth: int | None = Field(None, ge=0, le=64, description="Tokens of each path below the trunk; levels of the other trees.")
    max_nodes: int | None = Field(None, ge=1, le=MAX_INTEGER, description="Most drafted tokens of a tree.")

    @model_validator(mode="after")
    def _has_one_wish(self) -> Self:
        wishes = (self.verifier, self.tree, self.trunk, self.branches, self.depth, self.max_nodes)
        if not self.enabled and any(wish is not None for wish in wishes):
            raise misfit("speculative", "enabled is false, so no other wish about speculation can be honoured")
        if not self._has_own_shape and (self.branches or 1) > 1 and not self.depth:
            raise misfit("speculative.depth", "branches without depth draft nothing: more than one needs a depth of at least 1")
        if self._has_own_shape and self.trunk:
            raise misfit("speculative.trunk", f"a {self.tree} tree has no trunk")
        if self._has_own_shape and self.depth == 0:
            raise misfit("speculative.depth", f"a {self.tree} tree needs a depth of at least 1")
        return self

    @model_validator(mode="after")
    def _names_an_exact_pair(self) -> Self:
        if self.verifier is not None and self.expansion is not None:
            try:
                require_exact(self.expansion, self.verifier)
            except InexactPairError as error:
                raise misfit("speculative", str(error)) from error
        return self

    @property
    def _has_own_shape(self) -> bool:
        return self.tree is not None and self.tree not in DELAYED_TREES

    @property
    def expansion(self) -> Expansion | None:
        """The tree if any of it was given. What was not: no trunk, one branch, no depth; a tree named alone gets a usual size."""
        if self._has_own_shape:
            assert self.tree is not None
            branches, depth = self.branches or DEFAULT_BRANCHES, self.depth or DEFAULT_DEPTH
            return Expansion(0, branches, depth, self.tree, self.max_nodes or DEFAULT_NODES)
        tree = self.tree or "delayed"
        if self.trunk is None and self.branches is None and self.depth is None:
            return None if self.tree is None else Expansion(*DEFAULT_SHAPE, tree)
        return Expansion(self.trunk or 0, self.branches or 1, self.depth or 0, tree)

    def to_speculation(self) -> Speculation:
        """Return the engine's record."""
        return Speculation(self.enabled, self.expansion, self.verifier, self.max_nodes)


def _token_id_in_decimal(key: str) -> str:
    """Return a key of a map over tokens; JSON has no other keys than strings. One spelling each, so that no token comes twice."""
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise ValueError("its keys must be token ids in decimal digits")
    return key


TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
BiasKey = Annotated[str, AfterValidator(_token_id_in_decimal)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class GenerationRequest(Strict):
    """What completions and chat completions share."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="Off every token generated so far.")
    frequency_penalty: float | None = Field(
        None, ge=-MAX_PENALTY, le=MAX_PENALTY, description="Off a token for each time it was generated."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Divides logits above 0 of the tokens in prompt and text, multiplies those below; 1 is off.",
    )
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = Field(
        None, description="Added to the logits of tokens, by token id."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None = (
        Field(None, description="The only tokens that can come.")
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    min_tokens: int | None = Field(
        None, ge=0, le=MAX_INTEGER, description="No stop token before; stop strings end a text anyway."
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeOptions | None = None
    prediction: Prediction | None = Field(None, description="Text that is expected to come; drafted from.")
    user: str | None = Field(
        None, description="Changes no text: what one user of a key is told is drafted from for that user alone."
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise misfit("stream_options", "stream_options is accepted only with stream: true")
        return self

    @property
    def num_samples(self) -> int:
        """Samples for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to return for each token; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; None leaves it to the endpoint."""
        return self.max_tokens
