"""Expected distributions of tokens: from a model's weights, or from the server's own log-probabilities.

Rows are raw: before bias, penalties, temperature and cuts. Shape key: N tokens of one text, V columns.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.reference import Reference
from engine.core.types import SamplingParams
from engine.sampling.distributions import truncates
from server.audit_url.client import UNREADABLE, AnswerText, Name
from server.audit_url.dialect import Offer

Ids = tuple[int, ...]
_NUM_SHARES = 1000  # equal columns for the rest of a distribution, so that none is larger than a listed token
_ALL = 1.0 - 1e-6  # a sum of probabilities that leaves nothing out


@dataclass(frozen=True, slots=True)
class Draw:
    """A text after a prompt, with the reported log-probabilities of its tokens and of the likeliest ones, if compared."""

    prompt: Ids
    token_ids: Ids
    logprobs: tuple[float | None, ...] = ()
    tops: tuple[tuple[float, ...], ...] = ()


class ModelSource:
    """The weights' own distributions, by transformers' plain forward.

    Tokens of one group count as one, their first: end tokens, and those that the server does not name. Texts end there.
    """

    rest: int | None = None  # the column of all tokens without a column of their own
    has_weights = True

    def __init__(self, reference: Reference, tokenizer: Any, end_ids: Ids) -> None:
        self._reference, self._tokenizer, self._end_ids = reference, tokenizer, end_ids
        self.groups: tuple[Ids, ...] = (end_ids,) if end_ids else ()
        self.about = f"the weights, by transformers' plain forward ({reference.dtype}); tokens: "

    def learn(self, offer: Offer) -> None:
        """Note how the server names tokens. If it lists no ids, tokens of equal or of unreadable text are hidden."""
        self._num_top = offer.num_top
        self._by_text: dict[str, int] = {}
        self._hidden: Ids = ()
        if not offer.first.names:
            self.about += "text encoded again"
        elif offer.first.has_ids:
            self.about += "ids"
        else:
            self.about += "those of log-probabilities"
            before = self._tokenizer("a", add_special_tokens=False)["input_ids"]  # else a leading space may be dropped
            length = len(self._tokenizer.decode(before))
            texts = [self._tokenizer.decode([*before, token_id])[length:] for token_id in range(len(self._tokenizer))]
            counts = Counter(texts)
            self._by_text = {text: i for i, text in enumerate(texts) if counts[text] == 1 and UNREADABLE not in text}
            self._by_text |= {self._tokenizer.decode([token_id]): token_id for token_id in self._end_ids}
            named = {*self._by_text.values(), *self._end_ids}
            self._hidden = tuple(i for i in range(len(texts)) if i not in named)
            self.groups += (self._hidden,) if self._hidden else ()

    def draw(self, prompt: Ids, sample: AnswerText) -> Draw | None:
        """Return a text by its ids, each group's first for the others; None if they are not known."""
        if sample.names:
            ids = [name if isinstance(name, int) else self._by_text.get(name, -1) for name in sample.names]
        else:
            ids = list(self._tokenizer(sample.text, add_special_tokens=False)["input_ids"])
        is_stopped, num_missing = sample.finish == "stop", None if sample.num_tokens is None else sample.num_tokens - len(ids)
        ids = [self._end_ids[0] if token_id in self._end_ids else token_id for token_id in ids]
        hidden = [place for place, i in enumerate(ids) if i < 0 or i in self._hidden] if self._hidden else []
        allowed = [None] if sample.names else []
        if hidden or (self._hidden and (num_missing or 0) > is_stopped):
            ids = [*ids[: min(hidden, default=len(ids))], self._hidden[0]]
        elif min(ids, default=0) < 0 or (num_missing not in (0, int(is_stopped), *allowed) and not self._hidden):
            return None
        elif is_stopped and self._end_ids and ids[-1:] != [self._end_ids[0]]:
            ids.append(self._end_ids[0])
        return Draw(prompt, tuple(ids), sample.logprobs, tuple(map(self._likeliest, sample.tops)) or ((),) * len(ids))

    def _likeliest(self, top: Mapping[Name, float]) -> tuple[float, ...]:
        """Return a list's values as far as they are single tokens': tokens of one text share an entry, and unreadable ones do."""
        num = self._num_top if all(isinstance(name, int) for name in top) else 0 if any(map(_is_unreadable, top)) else 1
        return tuple(sorted(top.values(), reverse=True)[:num])

    def rows(self, draws: Sequence[Draw], sampling: SamplingParams) -> list[Float[Tensor, "N V"]]:  # noqa: ARG002
        """Return the model's logits before each token."""
        longest = max(len(draw.token_ids) for draw in draws)
        found = self._reference.logits([(*draw.prompt, *draw.token_ids[:-1]) for draw in draws], longest)
        return [rows_NV[len(rows_NV) - len(draw.token_ids) :] for rows_NV, draw in zip(found, draws, strict=True)]


class ServerSource:
    """The server's own log-probabilities, for the likeliest tokens that it lists. The rest is column 0."""

    about = "the server's own log-probabilities. Samples are compared with them, and they with nothing"
    groups: tuple[Ids, ...] = ()
    rest = 0
    has_weights = False

    def __init__(self) -> None:
        self._num_top = self.num_lists = self.num_empty = 0
        self.widest_deviation = 0.0  # between probabilities that the server gives for one token after one text
        self._columns: dict[Name, int] = {}
        self._rows: dict[tuple[Ids, Ids], Mapping[int, float]] = {}

    def learn(self, offer: Offer) -> None:
        """Note the length of the server's lists."""
        self._num_top = offer.num_top

    def draw(self, prompt: Ids, sample: AnswerText) -> Draw | None:
        """Return the tokens' columns up to one that is not listed, and keep the distribution before each."""
        listed = list(takewhile(lambda name: not _is_unreadable(name), sample.names))
        num_missing = 0 if sample.num_tokens is None else sample.num_tokens - len(sample.names)
        is_whole = len(listed) == len(sample.names)
        if not sample.names or not sample.tops or (is_whole and num_missing and sample.finish == "stop"):
            return None
        ids = tuple(map(self._column, listed))
        for place, top in enumerate(sample.tops[: len(listed)]):
            self.num_lists += 1
            self.num_empty += not top
            likeliest = sorted(top.items(), key=lambda pair: -pair[1])[: self._num_top]
            row = {self._column(name): value for name, value in likeliest if not _is_unreadable(name)}
            parts = sum(math.exp(value) for name, value in likeliest if _is_unreadable(name))
            row |= {self.rest: math.log(parts)} if parts else {}
            known = self._rows[prompt, ids[:place]] = self._rows.get((prompt, ids[:place])) or row
            gaps = [abs(math.exp(known[i]) - math.exp(row[i])) for i in known.keys() & row.keys()]
            self.widest_deviation = max([self.widest_deviation, *gaps])
        return Draw(prompt, ids if is_whole and not num_missing else (*ids, self.rest))

    def _column(self, name: Name) -> int:
        return self._columns.setdefault(name, len(self._columns) + 1)

    def rows(self, draws: Sequence[Draw], sampling: SamplingParams) -> list[Float[Tensor, "N V"]]:
        """Return rows of log-probabilities. Tokens outside a list share column 0 if nothing is cut."""
        of_draw = [[self._row(one.prompt, one.token_ids[:n], sampling) for n in range(len(one.token_ids))] for one in draws]
        return [torch.stack(rows) for rows in of_draw]

    def _row(self, prompt: Ids, prefix: Ids, sampling: SamplingParams) -> Tensor:
        """Return a row, NaN if the list does not determine the distribution under `sampling`."""
        known = self._rows.get((prompt, prefix))
        row_V = torch.full((1 + len(self._columns) + _NUM_SHARES,), float("-inf"), dtype=torch.float64)
        is_shared = not sampling.is_greedy and not truncates(sampling)  # the rest is one column
        if not known or not _is_known(known, prefix, sampling) or (not is_shared and self.rest in known):
            return row_V.fill_(float("nan"))
        row_V[torch.tensor(list(known))] = torch.tensor(list(known.values()), dtype=torch.float64)
        rest = 1.0 - sum(math.exp(value) for column, value in known.items() if column != self.rest)
        if rest > 1.0 - _ALL:
            share = math.log(rest) if is_shared else min(math.log(rest / _NUM_SHARES), min(known.values()) - 1e-9)
            row_V[self.rest if is_shared else slice(-_NUM_SHARES, None)] = share
        return row_V


def _is_unreadable(name: Name) -> bool:
    """Return whether a token's text is only a part of a character."""
    return isinstance(name, str) and UNREADABLE in name


def _is_known(known: Mapping[int, float], prefix: Ids, sampling: SamplingParams) -> bool:
    """Return whether a list of likeliest tokens determines the distribution under `sampling`."""
    values = sorted(map(math.exp, known.values()), reverse=True)
    if sampling.has_penalties and not set(prefix) <= known.keys():
        return False
    holds_top_p = sampling.top_p >= 1.0 or sum(values) > sampling.top_p + 0.01
    holds_min_p = not sampling.min_p or values[-1] < 0.9 * sampling.min_p * values[0]
    return sum(values) > _ALL or (sampling.top_k < len(values) and holds_top_p and holds_min_p)


Source = ModelSource | ServerSource
