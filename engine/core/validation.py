"""Rejects requests that can never run, before they are queued."""

from engine.core.sampling_limits import NoDistribution, require_probs
from engine.core.tree import PLAIN
from engine.core.types import ErrorCode, FinishReason, ModelInfo, Request, Speculation, TokenEvent
from engine.core.verifier_table import InexactPairError, UnknownVerifierError, require_exact


class RequestRefused(ValueError):
    """The request can never run here; the text is the reason."""


def refusal_event(request_id: str, why: str) -> TokenEvent:
    """Return the only event of a request that cannot run."""
    return TokenEvent(request_id, finish=FinishReason.ERROR, error=why, error_code=ErrorCode.REFUSED)


def require_runnable(request: Request, info: ModelInfo) -> None:
    """Raise RequestRefused for an impossible length, token, sampling parameter or verifier."""
    num_prompt, sampling = len(request.prompt_ids), request.sampling
    if not request.prompt_ids or sampling.max_tokens < 0:
        raise RequestRefused("a request needs a prompt of at least one token and max_tokens of at least 0")
    if num_prompt + sampling.max_tokens > info.max_model_len:
        raise RequestRefused(
            f"{num_prompt} prompt tokens and {sampling.max_tokens} to generate exceed {info.max_model_len} tokens"
        )
    if len(request.prediction_ids) > info.max_model_len:
        raise RequestRefused(f"a prediction of {len(request.prediction_ids)} tokens exceeds {info.max_model_len} tokens")
    if request.progress.token_ids and len(request.progress.token_ids) >= sampling.max_tokens:
        raise RequestRefused(f"{len(request.progress.token_ids)} of {sampling.max_tokens} tokens have been generated already")
    if request.adapter is not None and request.adapter not in info.adapters:
        raise RequestRefused(f"there is no adapter {request.adapter!r}")
    token_ids = (*request.prompt_ids, *request.prediction_ids, *request.progress.token_ids)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise RequestRefused(f"prompt, prediction and generated token ids must be in [0, {info.vocab_size})")
    try:
        require_probs(sampling, info.vocab_size, info.eos_token_ids)
    except NoDistribution as error:
        raise RequestRefused(str(error)) from error
    _require_exact_pair(request.speculation)


def _require_exact_pair(speculation: Speculation) -> None:
    if speculation.verifier is None:
        return
    try:
        require_exact(speculation.expansion or PLAIN, speculation.verifier)
    except (InexactPairError, UnknownVerifierError) as error:
        raise RequestRefused(str(error)) from error
