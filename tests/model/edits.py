"""A request's edits by transformers: its own logits processors, and OpenAI's formula as one more."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.core.types import SamplingParams


class GeneratedTokenPenalties(LogitsProcessor):
    """Less frequency_penalty for each time a token was generated, less presence_penalty if it was: by hand, a text at a time."""

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            for token_id, count in Counter(text[self._num_prompt_tokens :]).items():
                scores[row, token_id] -= count * self._sampling.frequency_penalty + self._sampling.presence_penalty
        return scores


class BadWords(LogitsProcessor):
    """Transformers' own, but for a word whose other tokens are the whole text: that one it lets pass."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._inner = NoBadWordsLogitsProcessor([[*word] for word in words])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        edited: Tensor = self._inner(torch.nn.functional.pad(input_ids, (1, 0), value=_NO_TOKEN), scores)
        return edited


_NO_TOKEN = -1


def processors_of(sampling: SamplingParams, num_prompt_tokens: int) -> LogitsProcessorList:
    """Return the processors in the order of `generate`: bias, penalties, masks."""
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], float(bias)] for token_id, bias in sampling.logit_bias]))
    processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    processors.append(GeneratedTokenPenalties(sampling, num_prompt_tokens))
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
    processors.append(MinNewTokensLengthLogitsProcessor(num_prompt_tokens, sampling.min_tokens, stops))
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda batch, text: allowed, 1))
    if sampling.bad_words:
        processors.append(BadWords(sampling.bad_words))
    return processors
