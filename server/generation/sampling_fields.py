"""Converts a request's fields to sampling parameters. Null is the model's default or OpenAI's."""

from collections.abc import Sequence
from typing import TypeVar

from engine.core.sampling_limits import NoDistribution, require_probs
from engine.core.types import Grammar, ModelInfo, SamplingParams
from server.http.errors import InvalidRequest
from server.schemas.common import GenerationRequest

T = TypeVar("T", int, float)


def chosen(requested: T | None, of_model: T | None, default: T) -> T:
    """Return the requested value, else that of the model's generation_config.json, else the API's default."""
    if requested is not None:
        return requested
    return default if of_model is None else of_model


def sampling_of(
    model: ModelInfo, body: GenerationRequest, max_tokens: int, grammar: Grammar | None, end_ids: Sequence[int] = ()
) -> SamplingParams:
    """Return the sampling parameters of choice 0, without bad words, which are not encoded yet.

    `end_ids` are more tokens of the model that end this text.
    """
    defaults = model.defaults
    return SamplingParams(
        temperature=chosen(body.temperature, defaults.temperature, 1.0),
        top_p=chosen(body.top_p, defaults.top_p, 1.0),
        top_k=max(0, chosen(body.top_k, defaults.top_k, 0)),
        min_p=chosen(body.min_p, defaults.min_p, 0.0),
        typical_p=1.0 if body.typical_p is None else body.typical_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=chosen(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (body.logit_bias or {}).items()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        grammar=grammar,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=(*(body.stop_token_ids or ()), *(() if body.ignore_eos else end_ids)),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=body.num_sampled_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
    )


def require_distribution(model: ModelInfo, sampling: SamplingParams, grammar_param: str) -> None:
    """Raise InvalidRequest if the parameters leave no distribution; `grammar_param` names the field that requests the grammar."""
    if any(i >= model.vocab_size for i in sampling.stop_token_ids):
        raise InvalidRequest(f"a stop token is outside the vocabulary of {model.vocab_size}", "stop_token_ids")
    try:
        require_probs(sampling, model.vocab_size, model.eos_token_ids)
    except NoDistribution as error:
        raise InvalidRequest(str(error), grammar_param if error.param == "grammar" else error.param) from error
