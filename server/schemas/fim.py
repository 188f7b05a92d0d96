"""Request of POST /v1/fim/completions, Mistral's route for editors. Its answer is that of a chat."""

from typing import Annotated

from pydantic import Field

from engine.core.sampling_limits import MAX_PENALTY
from server.schemas.common import MAX_STOP_STRINGS, CacheSalt, StopString
from server.schemas.completion import CompletionRequest
from server.schemas.speculative import UntracedOptions
from server.schemas.strict_model import MAX_INTEGER, Name, Strict


class FimRequest(Strict):
    """Body of POST /v1/fim/completions."""

    model: Name
    prompt: str = Field(description="The text before the cursor.")
    suffix: str | None = Field(None, description="The text after the cursor. Without it the prompt is continued.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default the model's, or 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    random_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER, description="Default the room that is left.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_INTEGER)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    speculative: UntracedOptions | None = None
    user: Name | None = None
    cache_salt: CacheSalt | None = None
    timeout_s: float | None = Field(None, gt=0, description="Seconds after which an unfinished request ends with an error.")

    def to_completion(self) -> CompletionRequest:
        """Return the request as a completion. Every stream ends with the counts."""
        same = {name: getattr(self, name) for name in FimRequest.model_fields if name != "random_seed"}
        return CompletionRequest.model_validate(
            {**same, "seed": self.random_seed, "stream_options": {"include_usage": True} if self.stream else None}
        )
