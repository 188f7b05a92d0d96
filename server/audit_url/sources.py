"""Expected distributions of tokens: from a model's weights, or from the server's own log-probabilities.

Rows are raw: before bias, penalties, temperature and cuts. Shape key: N tokens of one text, V columns.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.reference import Reference
from engine.core.types import SamplingParams
from server.audit_url.client import UNREADABLE, AnswerText, Name
from server.audit_url.dialect import Offer

Ids = tuple[int, ...]
_NUM_SHARES = 1000  # equal columns for the rest of a distribution, so that none is larger than a listed token


class ModelSource:
    """The weights' own distributions, by transformers' plain forward.

    Tokens of one group count as one, their first: end tokens, and those that the server does not name. Texts end there.
    """

    rest: int | None = None  # the column of all tokens without a column of their own
    has_weights = True

    def __init__(self, reference: Reference, tokenizer: Any, end_ids: Ids) -> None:
        self._reference, self._tokenizer, self.end_ids = reference, tokenizer, end_ids
        self._by_text: dict[str, int] = {}
        self._hidden: Ids = ()
        self._kind = "text encoded again"

    @property
    def about(self) -> str:
        """The source of tokens and distributions, in words."""
        return f"the weights, by transformers' plain forward ({self._reference.dtype}); tokens: {self._kind}"

    @property
    def groups(self) -> tuple[Ids, ...]:
        """The groups of tokens."""
        return tuple(group for group in (self.end_ids, self._hidden) if group)

    def learn(self, offer: Offer) -> None:
        """Note how the server names tokens. If it lists no ids, tokens of equal or of unreadable text are hidden."""
        if offer.first.has_ids:
            self._kind = "ids"
        elif offer.first.names:
            self._kind = "those of log-probabilities"
            before = self._tokenizer("a", add_special_tokens=False)["input_ids"]  # else a leading space may be dropped
            length = len(self._tokenizer.decode(before))
            texts = [self._tokenizer.decode([*before, token_id])[length:] for token_id in range(len(self._tokenizer))]
            counts = Counter(texts)
            self._by_text = {text: i for i, text in enumerate(texts) if counts[text] == 1 and UNREADABLE not in text}
            self._by_text |= {self._tokenizer.decode([token_id]): token_id for token_id in self.end_ids}
            named = {*self._by_text.values(), *self.end_ids}
            self._hidden = tuple(i for i in range(len(texts)) if i not in named)

    def ids_of(self, sample: AnswerText, prompt: Ids, num_tokens: int | None) -> Ids | None:  # noqa: ARG002
        """Return the ids, each group's first for the others; None if they are not known."""
        is_stopped = sample.finish == "stop"
        if sample.names:
            ids = [name if isinstance(name, int) else self._by_text.get(name, -1) for name in sample.names]
        else:
            ids = list(self._tokenizer(sample.text, add_special_tokens=False)["input_ids"])
        num_missing = None if num_tokens is None else num_tokens - len(ids)
        ids = [self.end_ids[0] if token_id in self.end_ids else token_id for token_id in ids]
        if self._hidden:
            hidden = [place for place, token_id in enumerate(ids) if token_id < 0 or token_id in self._hidden]
            if hidden or (num_missing or 0) > is_stopped:
                return (*ids[: min(hidden, default=len(ids))], self._hidden[0])
        elif num_missing not in (None, 0, int(is_stopped)) or (num_missing is None and not sample.names):
            return None
        if min(ids, default=0) < 0:
            return None
        has_end = not self.end_ids or ids[-1:] == [self.end_ids[0]]
        return tuple(ids) if has_end or not is_stopped else (*ids, self.end_ids[0])

    def rows(self, prompt: Ids, texts: Sequence[Ids], sampling: SamplingParams) -> list[Float[Tensor, "N V"]]:  # noqa: ARG002
        """Return the model's logits."""
        return self._reference.logits([(*prompt, *text[:-1]) for text in texts], len(texts[0]))

    def offers(self, sampling: SamplingParams) -> bool:  # noqa: ARG002
        """Return True: all logits are known."""
        return True


class ServerSource:
    """The server's own log-probabilities, for the likeliest tokens that it lists. The rest is column 0."""

    about = "the server's own log-probabilities. Samples are compared with them, and they with nothing"
    end_ids: Ids = ()
    groups: tuple[Ids, ...] = ()
    rest = 0
    has_weights = False

    def __init__(self) -> None:
        self._num_top = 0
        self.num_lists = self.num_empty = 0
        self.widest_deviation = 0.0  # between probabilities that the server gives for one token after one text
        self._columns: dict[Name, int] = {}
        self._rows: dict[tuple[Ids, Ids], Mapping[int, float]] = {}

    def learn(self, offer: Offer) -> None:
        """Note the length of the server's lists."""
        self._num_top = offer.num_top

    def ids_of(self, sample: AnswerText, prompt: Ids, num_tokens: int | None) -> Ids | None:
        """Return the tokens' columns up to one that is not listed, and keep the distribution before each."""
        listed = list(takewhile(lambda name: not is_unreadable(name), sample.names))
        num_missing = 0 if num_tokens is None else num_tokens - len(sample.names)
        is_whole = len(listed) == len(sample.names)
        if not sample.names or len(sample.tops) != len(sample.names) or (is_whole and num_missing and sample.finish == "stop"):
            return None
        ids = tuple(self._column(name) for name in listed)
        for place, top in enumerate(sample.tops[: len(listed)]):
            self.num_lists += 1
            self.num_empty += not top
            likeliest = sorted(top.items(), key=lambda pair: -pair[1])[: self._num_top]
            row = {self._column(name): value for name, value in likeliest if not is_unreadable(name)}
            parts = sum(math.exp(value) for name, value in likeliest if is_unreadable(name))
            row |= {self.rest: math.log(parts)} if parts else {}
            known = self._rows[prompt, ids[:place]] = self._rows.get((prompt, ids[:place])) or row
            gaps = [abs(math.exp(known[i]) - math.exp(row[i])) for i in known.keys() & row.keys()]
            self.widest_deviation = max([self.widest_deviation, *gaps])
        return ids if is_whole and not num_missing else (*ids, self.rest)

    def _column(self, name: Name) -> int:
        return self.rest if is_unreadable(name) else self._columns.setdefault(name, len(self._columns) + 1)

    def rows(self, prompt: Ids, texts: Sequence[Ids], sampling: SamplingParams) -> list[Float[Tensor, "N V"]]:
        """Return rows of log-probabilities. Tokens outside a list share column 0 if nothing is cut."""
        return [torch.stack([self._row(prompt, text[:n], sampling) for n in range(len(text))]) for text in texts]

    def _row(self, prompt: Ids, prefix: Ids, sampling: SamplingParams) -> Tensor:
        known = self._rows.get((prompt, prefix))
        row_V = torch.full((1 + len(self._columns) + _NUM_SHARES,), float("-inf"), dtype=torch.float64)
        if not known or not _is_known(known, prefix, sampling):
            return row_V.fill_(float("nan"))
        is_shared = not sampling.is_greedy and not has_cuts(sampling)  # the rest is one column
        if not is_shared and self.rest in known:
            return row_V.fill_(float("nan"))
        row_V[torch.tensor(list(known))] = torch.tensor(list(known.values()), dtype=torch.float64)
        rest = max(0.0, 1.0 - sum(math.exp(value) for column, value in known.items() if column != self.rest))
        if is_shared and rest > 1e-6:
            row_V[self.rest] = math.log(rest)
        elif rest > 1e-6:
            row_V[-_NUM_SHARES:] = min(math.log(rest / _NUM_SHARES), min(known.values()) - 1e-9)
        return row_V

    def offers(self, sampling: SamplingParams) -> bool:
        """Return whether the listed tokens can be enough: a temperature needs all tokens unless a top-k comes first."""
        return (sampling.temperature == 1.0 or bool(sampling.top_k)) and sampling.repetition_penalty == 1.0


def is_unreadable(name: Name) -> bool:
    """Return whether a token's text is only a part of a character."""
    return isinstance(name, str) and UNREADABLE in name


def _is_known(known: Mapping[int, float], prefix: Ids, sampling: SamplingParams) -> bool:
    """Return whether a list of likeliest tokens determines the distribution under `sampling`."""
    values = sorted((math.exp(value) for value in known.values()), reverse=True)
    is_all = sum(values) > 1.0 - 1e-6
    if sampling.has_penalties and not set(prefix) <= known.keys():
        return False
    holds_top_k = sampling.top_k < len(values)
    holds_top_p = sampling.top_p >= 1.0 or sum(values) > sampling.top_p + 0.01
    holds_min_p = not sampling.min_p or values[-1] < 0.9 * sampling.min_p * values[0]
    return is_all or (holds_top_k and holds_top_p and holds_min_p)


def has_cuts(sampling: SamplingParams) -> bool:
    """Return whether tokens are cut off by rank or probability."""
    return bool(sampling.top_k or sampling.min_p) or sampling.top_p < 1.0


Source = ModelSource | ServerSource
