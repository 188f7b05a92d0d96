"""Edits of raw logits before temperature: bias, penalties and masks, for each row by its own request and its own text.

The order is that of transformers' `generate` and of vLLM:

    1. logit_bias           logit + bias
    2. repetition_penalty   of every token in prompt or text: logit * penalty if negative, else logit / penalty
                            (CTRL, 1909.05858, section 4.1)
    3. frequency_penalty    logit - penalty * how often the token was generated    } as OpenAI's API defines them;
       presence_penalty     logit - penalty if it was generated at all             } transformers has neither
    4. min_tokens           -inf for tokens that stop the text while it is too short
    5. allowed_token_ids    -inf for all others
    6. bad_words            -inf for the last token of each where the text, prompt included, ends with those before it
    7. grammar              -inf for tokens that cannot continue the generated text

The text of a node in a token tree ends with the drafted tokens on its path, so each node has its own edits. Its distribution is
then the one of plain decoding at that position. Except for a copy of the rows, the cost grows with the named or generated tokens,
not with the vocabulary. Requests without edits cost nothing.

Shape key: N rows, M neighbouring rows of one request, V vocabulary, U tokens of their texts, S named tokens.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine.core.step_plan import SamplingContext
from engine.core.types import SamplingParams
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import integers


def edited_logits(
    logits_NV: Float[Tensor, "N V"], contexts: Sequence[SamplingContext], grammars: GrammarMasks | None = None
) -> Float[Tensor, "N V"]:
    """Return each row's logits after its own bias, penalties and masks; the same tensor, unchanged, if no row has any.

    A row may be invalid: all -inf if no token is possible, or an infinity by overflow. The caller must check its maximum.
    `grammars` is needed if a row has a grammar.
    """
    texts = [texts for texts in _by_request(contexts) if texts.sampling.edits_logits]
    if not texts:
        return logits_NV
    edited_NV = logits_NV.clone()
    for rows in texts:
        logits_MV = edited_NV[rows.first : rows.first + len(rows.paths)]  # a view, edited in place
        _add_bias(logits_MV, rows.sampling)
        _penalise(logits_MV, rows)
        _mask_early_stops(logits_MV, rows)
        _allow_only(logits_MV, rows.sampling)
        _forbid_words(logits_MV, rows)
        _mask_by_grammar(logits_MV, rows, grammars)
    return edited_NV


@dataclass(frozen=True, slots=True)
class _RequestRows:
    """The texts of consecutive rows of one request, from row `first` on: a common history, then a path each."""

    first: int
    sampling: SamplingParams
    history: Sequence[int]
    num_prompt_tokens: int
    paths: tuple[tuple[int, ...], ...]


def _by_request(contexts: Sequence[SamplingContext]) -> Iterator[_RequestRows]:
    """Return the rows in order, grouped where consecutive rows share parameters and history (the same object)."""
    first = 0
    for _, group in groupby(contexts, key=lambda one: (id(one.history), one.num_prompt_tokens, one.sampling)):
        rows = list(group)
        yield _RequestRows(
            first, rows[0].sampling, rows[0].history, rows[0].num_prompt_tokens, tuple(row.path_ids for row in rows)
        )
        first += len(rows)


def _index(token_ids: Iterable[int], like: Tensor) -> Int[Tensor, " S"]:
    return integers([*token_ids], like.device)


def _add_bias(logits_MV: Float[Tensor, "M V"], sampling: SamplingParams) -> None:
    if sampling.logit_bias:
        ids_S = _index((token_id for token_id, _ in sampling.logit_bias), logits_MV)
        logits_MV[:, ids_S] += logits_MV.new_tensor([bias for _, bias in sampling.logit_bias])


class _TokenCounts(NamedTuple):
    """Tokens of the texts, how often each row generated each, and whether each row's text or prompt contains it."""

    ids_U: Int[Tensor, " U"]
    counts_MU: Float[Tensor, "M U"]
    is_contained_MU: Bool[Tensor, "M U"]


def _penalise(logits_MV: Float[Tensor, "M V"], texts: _RequestRows) -> None:
    sampling = texts.sampling
    if not sampling.has_penalties:
        return
    tokens = _token_counts(texts, logits_MV)
    values_MU = logits_MV.index_select(-1, tokens.ids_U)
    penalty = sampling.repetition_penalty
    repeated_MU = torch.where(values_MU < 0, values_MU * penalty, values_MU / penalty)
    values_MU = torch.where(tokens.is_contained_MU, repeated_MU, values_MU)
    values_MU -= sampling.frequency_penalty * tokens.counts_MU
    values_MU -= sampling.presence_penalty * (tokens.counts_MU > 0)
    logits_MV.index_copy_(-1, tokens.ids_U, values_MU)


def _token_counts(texts: _RequestRows, like: Tensor) -> _TokenCounts:
    """Count tokens: the history once, then each row's own path on top of it."""
    generated = Counter(texts.history[texts.num_prompt_tokens :])
    prompt = dict.fromkeys(texts.history[: texts.num_prompt_tokens] if texts.sampling.repetition_penalty != 1.0 else ())
    drafted = [(row, token_id) for row, path in enumerate(texts.paths) for token_id in path]
    columns = {token_id: column for column, token_id in enumerate(dict.fromkeys([*prompt, *generated, *(t for _, t in drafted)]))}
    counts_MU = torch.tensor([generated[token_id] for token_id in columns], dtype=like.dtype).repeat(len(texts.paths), 1)
    if drafted:
        where = (torch.tensor([row for row, _ in drafted]), torch.tensor([columns[token_id] for _, token_id in drafted]))
        counts_MU.index_put_(where, torch.ones(len(drafted), dtype=like.dtype), accumulate=True)
    is_prompt_U = torch.tensor([token_id in prompt for token_id in columns], dtype=torch.bool)
    counts_MU = counts_MU.to(like.device)
    return _TokenCounts(_index(columns, like), counts_MU, is_prompt_U.to(like.device) | (counts_MU > 0))


def _mask_early_stops(logits_MV: Float[Tensor, "M V"], texts: _RequestRows) -> None:
    """Mask stop tokens after each text that is shorter than `min_tokens`. Stop ids beyond the vocabulary are ignored."""
    num_generated = len(texts.history) - texts.num_prompt_tokens
    short = [row for row, path in enumerate(texts.paths) if num_generated + len(path) < texts.sampling.min_tokens]
    stops = [token_id for token_id in texts.sampling.stop_token_ids if 0 <= token_id < logits_MV.shape[-1]]
    if short and stops:
        logits_MV[_index(short, logits_MV)[:, None], _index(stops, logits_MV)] = float("-inf")


def _allow_only(logits_MV: Float[Tensor, "M V"], sampling: SamplingParams) -> None:
    if sampling.allowed_token_ids is not None:
        ids_S = _index(sampling.allowed_token_ids, logits_MV)
        allowed_MS = logits_MV.index_select(-1, ids_S)
        logits_MV.fill_(float("-inf")).index_copy_(-1, ids_S, allowed_MS)


def _forbid_words(logits_MV: Float[Tensor, "M V"], texts: _RequestRows) -> None:
    """Mask the token that would complete a bad word after each text."""
    if not texts.sampling.bad_words:
        return
    single, words_after = _words_by_next_to_last(texts.sampling.bad_words)
    if single:
        logits_MV[:, _index(single, logits_MV)] = float("-inf")
    for row, path in enumerate(texts.paths):
        last = path[-1] if path else texts.history[-1]
        completing = [word[-1] for word in words_after.get(last, ()) if _ends_with(texts.history, path, word[:-1])]
        if completing:
            logits_MV[row, _index(completing, logits_MV)] = float("-inf")


@lru_cache(maxsize=256)
def _words_by_next_to_last(words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], dict[int, list[tuple[int, ...]]]]:
    """Return the words of one token, and the others by their next to last token."""
    words_after: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            words_after.setdefault(word[-2], []).append(word)
    return tuple(word[0] for word in words if len(word) == 1), words_after


def _ends_with(history: Sequence[int], path: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Return whether the history followed by the path ends with `end`."""
    num_before = max(0, len(end) - len(path))
    before = tuple(history[len(history) - num_before :]) if num_before else ()
    return num_before <= len(history) and (*before, *path[len(path) - len(end) + num_before :]) == end


def _mask_by_grammar(logits_MV: Float[Tensor, "M V"], texts: _RequestRows, grammars: GrammarMasks | None) -> None:
    """Mask the tokens that the grammar forbids after each text. Masks are made and unpacked on the host, which is cheap."""
    if texts.sampling.grammar is None:
        return
    if grammars is None:
        raise ValueError("a request has a grammar, but there are no grammar masks")
    words_MW = grammars.allowed(texts.sampling.grammar, texts.history, texts.num_prompt_tokens, texts.paths)
    masked = np.unpackbits(~words_MW.view(np.uint8), axis=1, bitorder="little", count=logits_MV.shape[-1])
    logits_MV.masked_fill_(torch.from_numpy(masked.view(np.bool_)).to(logits_MV.device), float("-inf"))
