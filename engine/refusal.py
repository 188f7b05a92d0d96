"""Which requests can never run: one check, made before a request gets a place in the queue."""

import math

from engine.types import ModelInfo, Request, SamplingParams
from engine.verify.rules import TreeKind, require_exact


class RequestRefused(ValueError):
    """The request can never run here; the text says why."""


def require_runnable(request: Request, info: ModelInfo) -> None:
    """Raise RequestRefused for an impossible length, token, sampling parameter or verifier."""
    num_prompt, sampling = len(request.prompt_ids), request.sampling
    if not request.prompt_ids or sampling.max_tokens < 1:
        raise RequestRefused("a request needs a prompt of at least one token and max_tokens of at least 1")
    if num_prompt + sampling.max_tokens > info.max_model_len:
        raise RequestRefused(
            f"{num_prompt} prompt tokens and {sampling.max_tokens} to generate exceed {info.max_model_len} tokens"
        )
    if any(not 0 <= token_id < info.vocab_size for token_id in request.prompt_ids):
        raise RequestRefused(f"prompt token ids must lie in [0, {info.vocab_size})")
    _require_law(sampling)
    if request.speculation.verifier is not None:
        try:
            require_exact(TreeKind.IID, request.speculation.verifier)
        except ValueError as error:
            raise RequestRefused(str(error)) from error


def _require_law(sampling: SamplingParams) -> None:
    """Raise RequestRefused unless the parameters make a law. Comparisons are written so that NaN fails them."""
    if not 0.0 <= sampling.temperature < math.inf:
        raise RequestRefused(f"temperature must be a finite number of at least 0, not {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestRefused(f"top_p must lie in (0, 1], not {sampling.top_p}")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise RequestRefused(f"min_p must lie in [0, 1], not {sampling.min_p}")
    if sampling.top_k < 0 or (sampling.num_logprobs or 0) < 0:
        raise RequestRefused("top_k and num_logprobs must not be negative")
