"""Parts of answers that both generation endpoints share, the error body, and the model list."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """Tokens of the reasoning, and acceptance of a prediction, summed over the choices.

    Reasoning is part of the completion. The others count drafted tokens of the prediction. Accepted ones are in the completion.
    Rejected ones are not, and no other count includes them.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a request, summed over the choices. A prompt counts once, whatever its number of samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(BaseModel):
    """Acceptance of drafts behind the returned tokens.

    `acceptance_histogram[j]` counts steps of which j drafted tokens were returned. Its sum is `num_spec_steps`; weighted with j,
    its sum is `num_accepted_draft_tokens`. The drafted tokens of a tree are its nodes.
    """

    mean_acceptance_length: float = Field(description="Tokens of a drafting step, the verifier's own included; 1 without drafts.")
    draft_acceptance_rate: float = Field(description="Accepted over drafted tokens; 0 without drafts.")
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="Most tokens that one of the steps could have accepted: the deepest tree's levels.")
    acceptance_histogram: list[int] = Field(description="`num_spec_tokens` + 1 counts of steps.")
    trees: dict[str, int] = Field(description="Drafting steps by tree: trunk.branches.depth of a delayed one, another's name.")


class Metrics(BaseModel):
    """Statistics of this request."""

    speculative_decoding: SpeculativeDecoding


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the request field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """What went wrong. The message names the field; `details` has the code of the error, if it has one."""

    type: str
    message: str
    details: dict[str, str]


class MessagesError(BaseModel):
    """Every error's body for clients of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class ModelCard(BaseModel):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "latebranch"
    parent: str | None = Field(None, description="The base model, of a LoRA adapter.")
    max_model_len: int | None = Field(None, description="Prompt and answer together, in tokens; null while the engine starts.")


class PromptLogprob(BaseModel):
    """A possible token at a position of the prompt, in vLLM's format."""

    logprob: float
    rank: int = Field(description="1 is the likeliest.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ModelList(BaseModel):
    """Answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class AnthropicModel(BaseModel):
    """One served model, for clients of Anthropic's API."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = Field(description="Prompt and answer together; null while the engine starts.")
    max_tokens: int | None = Field(description="The longest answer; null while the engine starts.")


class AnthropicModelList(BaseModel):
    """Answer to GET /v1/models with the header `anthropic-version`."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class Load(BaseModel):
    """Answer to GET /load."""

    server_load: int = Field(description="Open requests, streams included, probes excluded.")


class WorkerLoad(BaseModel):
    """The load of one engine. SGLang's gateway drops a report with a null, or with a float in place of a count."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int = Field(description="Cache slots of live requests. Prefixes kept for later requests are not counted.")
    max_total_num_tokens: int
    token_usage: float = Field(description="Share of the cache's slots in use.")


class Loads(BaseModel):
    """Answer to GET /v1/loads, in SGLang's form."""

    timestamp: str
    dp_rank_count: int = 1
    loads: list[WorkerLoad]


class Version(BaseModel):
    """Answer to GET /version."""

    version: str
