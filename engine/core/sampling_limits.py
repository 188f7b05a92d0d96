"""Checks that sampling parameters define a distribution: after every text, at least one token is possible.

Knows the parameters, the vocabulary and the model's end tokens. Free of torch, so that the front end can run the same check
before it queues a request.
"""

from collections.abc import Sequence

from engine.core.types import SamplingParams

# Bounds of OpenAI's API; a repetition penalty has none there. Within them float32 logits stay finite.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MIN_TEMPERATURE = 1e-30  # logits overflow below it, where the distribution is a point mass anyway
MAX_TEMPERATURE = 1e4  # the distribution is uniform well below it; beyond float32 masked logits would be NaN
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BAD_WORD_TOKENS = 4096  # of all bad words together, since every sample carries them

MAX_GRAMMAR_CHARS = 1 << 16


class NoDistribution(ValueError):
    """These parameters define no distribution; the text is the reason, `param` names the field."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(reason)
        self.param = param


def require_probs(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise NoDistribution unless the parameters define a distribution. Comparisons are written so that NaN fails them."""
    _require_truncation(sampling)
    _require_penalties(sampling)
    _require_bias(sampling, vocab_size)
    _require_tokens(sampling, vocab_size, eos_token_ids)
    if sampling.grammar is not None:
        _require_end(sampling, eos_token_ids)


def _require_truncation(sampling: SamplingParams) -> None:
    if not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise NoDistribution("temperature", f"temperature must be in [0, {MAX_TEMPERATURE:g}], not {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise NoDistribution("top_p", f"top_p must be in (0, 1], not {sampling.top_p}")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise NoDistribution("min_p", f"min_p must be in [0, 1], not {sampling.min_p}")
    if not 0.0 < sampling.typical_p <= 1.0:
        raise NoDistribution("typical_p", f"typical_p must be in (0, 1], not {sampling.typical_p}")
    for name in ("top_k", "num_logprobs", "num_prompt_logprobs"):
        if (getattr(sampling, name) or 0) < 0:
            raise NoDistribution(name, f"{name} must not be negative")


def _require_penalties(sampling: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(value := getattr(sampling, name)) <= MAX_PENALTY:
            raise NoDistribution(name, f"{name} must be in [-{MAX_PENALTY}, {MAX_PENALTY}], not {value}")
    if not MIN_REPETITION_PENALTY <= (value := sampling.repetition_penalty) <= MAX_REPETITION_PENALTY:
        bounds = f"[{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}]"
        raise NoDistribution("repetition_penalty", f"repetition_penalty must be in {bounds}, not {value}")


def _require_bias(sampling: SamplingParams, vocab_size: int) -> None:
    ids = [token_id for token_id, _ in sampling.logit_bias]
    _require_known("logit_bias", ids, vocab_size)
    if len(set(ids)) < len(ids):
        raise NoDistribution("logit_bias", "logit_bias names a token twice")
    if not all(abs(bias) <= MAX_BIAS for _, bias in sampling.logit_bias):
        raise NoDistribution("logit_bias", f"a bias in logit_bias must be in [-{MAX_BIAS}, {MAX_BIAS}]")


def _require_tokens(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise NoDistribution unless at every position some token is possible."""
    allowed = sampling.allowed_token_ids
    _require_known("allowed_token_ids", allowed or (), vocab_size)
    if allowed == ():
        raise NoDistribution("allowed_token_ids", "allowed_token_ids is empty: no token would be possible")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise NoDistribution(
            "min_tokens", f"min_tokens must be in [0, max_tokens = {sampling.max_tokens}], not {sampling.min_tokens}"
        )
    _require_known("bad_words", [token_id for word in sampling.bad_words for token_id in word], vocab_size)
    if () in sampling.bad_words:
        raise NoDistribution("bad_words", "a bad word has no tokens: every text would contain it")
    if sum(map(len, sampling.bad_words)) > MAX_BAD_WORD_TOKENS:
        raise NoDistribution("bad_words", f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens together")
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    if forbidden and not _leaves_a_token(forbidden, allowed, vocab_size):
        raise NoDistribution("bad_words", "bad_words forbid every possible token")
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if sampling.min_tokens and not _leaves_a_token(forbidden | stops, allowed, vocab_size):
        raise NoDistribution("min_tokens", "min_tokens forbids every token: all possible tokens are stop tokens")


def _require_end(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raise NoDistribution unless a text that completes its grammar can end there, with an end token of the model."""
    assert sampling.grammar is not None
    if len(sampling.grammar.text) > MAX_GRAMMAR_CHARS:
        raise NoDistribution(
            "grammar", f"a grammar of {len(sampling.grammar.text)} characters is longer than {MAX_GRAMMAR_CHARS}"
        )
    if sampling.ignore_eos:
        raise NoDistribution("ignore_eos", "a grammar defines where the text ends: ignore_eos cannot be combined with it")
    if sampling.min_tokens:
        raise NoDistribution("min_tokens", "a grammar defines where the text ends: min_tokens cannot be combined with it")
    forbidden = {word[0] for word in sampling.bad_words if len(word) == 1}
    allowed = sampling.allowed_token_ids
    if not any(token_id not in forbidden and (allowed is None or token_id in allowed) for token_id in eos_token_ids):
        raise NoDistribution("grammar", "no end token is possible, so a text that completes its grammar could not end")


def _leaves_a_token(forbidden: set[int], allowed: Sequence[int] | None, vocab_size: int) -> bool:
    """Return whether some allowed token is not forbidden."""
    if allowed is not None:
        return not forbidden.issuperset(allowed)
    return sum(0 <= token_id < vocab_size for token_id in forbidden) < vocab_size


def _require_known(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise NoDistribution(param, f"token id {unknown[0]} in {param} is outside the vocabulary of {vocab_size}")
