"""Which sampling parameters make a law: for every text there is a token that can come next, and a number for each that can.

Knows the parameters, the vocabulary and the model's end tokens. Free of torch, so that the front end asks the same question
before it queues a request.
"""

from collections.abc import Sequence

from engine.core.types import SamplingParams

# Bounds of OpenAI's API; a repetition penalty has none there. Within them float32 logits stay finite.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MIN_TEMPERATURE = 1e-30  # below it logits would overflow; the law is a point mass long before
MAX_TEMPERATURE = 1e4  # a law is even long before; one that float32 cannot hold makes masked logits NaN
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BAD_WORD_TOKENS = 4096  # of all bad words together: they travel with every sample

MAX_GRAMMAR_CHARS = 1 << 16


class NoDistribution(ValueError):
    """These parameters make no law; the text says why, `param` names the field."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(reason)
        self.param = param


def require_probs(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise NoLaw unless the parameters make a law. Comparisons are written so that NaN fails them."""
    _require_truncation(sampling)
    _require_penalties(sampling)
    _require_bias(sampling, vocab_size)
    _require_tokens(sampling, vocab_size, eos_token_ids)
    if sampling.grammar is not None:
        _require_end(sampling, eos_token_ids)


def _require_truncation(sampling: SamplingParams) -> None:
    if not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise NoDistribution("temperature", f"temperature must lie in [0, {MAX_TEMPERATURE:g}], not {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise NoDistribution("top_p", f"top_p must lie in (0, 1], not {sampling.top_p}")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise NoDistribution("min_p", f"min_p must lie in [0, 1], not {sampling.min_p}")
    if not 0.0 < sampling.typical_p <= 1.0:
        raise NoDistribution("typical_p", f"typical_p must lie in (0, 1], not {sampling.typical_p}")
    for name in ("top_k", "num_logprobs", "num_prompt_logprobs"):
        if (getattr(sampling, name) or 0) < 0:
            raise NoDistribution(name, f"{name} must not be negative")


def _require_penalties(sampling: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(value := getattr(sampling, name)) <= MAX_PENALTY:
            raise NoDistribution(name, f"{name} must lie in [-{MAX_PENALTY}, {MAX_PENALTY}], not {value}")
    if not MIN_REPETITION_PENALTY <= (value := sampling.repetition_penalty) <= MAX_REPETITION_PENALTY:
        bounds = f"[{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}]"
        raise NoDistribution("repetition_penalty", f"repetition_penalty must lie in {bounds}, not {value}")


def _require_bias(sampling: SamplingParams, vocab_size: int) -> None:
    ids = [token_id for token_id, _ in sampling.logit_bias]
    _require_known("logit_bias", ids, vocab_size)
    if len(set(ids)) < len(ids):
        raise NoDistribution("logit_bias", "logit_bias names a token twice")
    if not all(abs(bias) <= MAX_BIAS for _, bias in sampling.logit_bias):
        raise NoDistribution("logit_bias", f"a bias in logit_bias must lie in [-{MAX_BIAS}, {MAX_BIAS}]")


def _require_tokens(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise NoLaw unless at every position some token can come."""
    allowed = sampling.allowed_token_ids
    _require_known("allowed_token_ids", allowed or (), vocab_size)
    if allowed == ():
        raise NoDistribution("allowed_token_ids", "allowed_token_ids is empty: no token could come")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise NoDistribution(
            "min_tokens", f"min_tokens must lie in [0, max_tokens = {sampling.max_tokens}], not {sampling.min_tokens}"
        )
    _require_known("bad_words", [token_id for word in sampling.bad_words for token_id in word], vocab_size)
    if () in sampling.bad_words:
        raise NoDistribution("bad_words", "a bad word has no tokens: no text is without it")
    if sum(map(len, sampling.bad_words)) > MAX_BAD_WORD_TOKENS:
        raise NoDistribution("bad_words", f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens together")
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    if forbidden and not _leaves_one(forbidden, allowed, vocab_size):
        raise NoDistribution("bad_words", "bad_words forbid every token that could come")
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if sampling.min_tokens and not _leaves_one(forbidden | stops, allowed, vocab_size):
        raise NoDistribution("min_tokens", "min_tokens holds back every token: those that can come all stop the text")


def _require_end(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raise NoLaw unless a text that its grammar completes can end there, and only with a token that ends the model's texts."""
    assert sampling.grammar is not None
    if len(sampling.grammar.text) > MAX_GRAMMAR_CHARS:
        raise NoDistribution(
            "grammar", f"a grammar of {len(sampling.grammar.text)} characters is longer than {MAX_GRAMMAR_CHARS}"
        )
    if sampling.ignore_eos:
        raise NoDistribution("ignore_eos", "a text that is held to a grammar ends with it: ignore_eos cannot be kept beside it")
    if sampling.min_tokens:
        raise NoDistribution("min_tokens", "a grammar says where a text ends: min_tokens cannot be kept beside it")
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    allowed = sampling.allowed_token_ids
    if not any(token_id not in forbidden and (allowed is None or token_id in allowed) for token_id in eos_token_ids):
        raise NoDistribution("grammar", "no token can come that ends a text, so none that is complete by its grammar could end")


def _leaves_one(ruled_out: set[int], allowed: Sequence[int] | None, vocab_size: int) -> bool:
    """Return whether a token can come that is not ruled out."""
    if allowed is not None:
        return not ruled_out.issuperset(allowed)
    return sum(0 <= token_id < vocab_size for token_id in ruled_out) < vocab_size


def _require_known(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise NoDistribution(param, f"token id {unknown[0]} in {param} is outside the vocabulary of {vocab_size}")
