"""Expected distributions of tokens: from a model's weights, or from the server's own log-probabilities.

Rows are raw: before bias, penalties, temperature and cuts. Shape key: N tokens of one text, V columns.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.reference import Reference
from engine.core.types import SamplingParams
from server.audit_url.client import AnswerText, Name

Ids = tuple[int, ...]
_NUM_SHARES = 1000  # equal columns for the rest of a distribution, so that none is larger than a listed token


class ModelSource:
    """The weights' own distributions, by transformers' plain forward."""

    rest: int | None = None  # the column of all tokens without a column of their own

    def __init__(self, reference: Reference, tokenizer: Any, end_ids: Ids) -> None:
        self._reference, self._tokenizer, self.end_ids = reference, tokenizer, end_ids
        self._by_text: dict[str, int] = {}
        self._kinds: set[str] = set()

    @property
    def about(self) -> str:
        """The source of tokens and distributions, in words."""
        kinds = ", ".join(sorted(self._kinds)) or "unknown"
        return f"the weights, by transformers' plain forward ({self._reference.dtype}); tokens: {kinds}"

    def ids_of(self, sample: AnswerText, prompt: Ids, num_tokens: int | None) -> Ids | None:  # noqa: ARG002
        """Return the ids: reported, else of the reported texts, else of the text encoded again."""
        ids: list[int | None]
        if sample.names:
            kind = "ids" if all(isinstance(name, int) for name in sample.names) else "texts of log-probabilities"
            ids = [name if isinstance(name, int) else self._id_of(name) for name in sample.names]
        else:
            kind, ids = "text encoded again", list(self._tokenizer(sample.text, add_special_tokens=False)["input_ids"])
            if num_tokens is None or num_tokens - len(ids) not in (0, 1 if sample.finish == "stop" else 0):
                return None
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) < len(ids):
            return None
        self._kinds.add(kind)
        known = [self.end_ids[0] if token_id in self.end_ids else token_id for token_id in known]
        has_end = not self.end_ids or known[-1:] == [self.end_ids[0]]
        return tuple(known) if has_end or sample.finish != "stop" else (*known, self.end_ids[0])

    def _id_of(self, name: str) -> int | None:
        """Return the one token with this text."""
        if not self._by_text:
            texts = [self._tokenizer.decode([token_id]) for token_id in range(len(self._tokenizer))]
            counts = Counter(texts)
            self._by_text = {text: token_id for token_id, text in enumerate(texts) if counts[text] == 1}
        return self._by_text.get(name)

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
    rest: int | None = 0

    def __init__(self) -> None:
        self.num_top = 0
        self.num_lists = self.num_empty = 0
        self.widest_deviation = 0.0  # between probabilities that the server gives for one token after one text
        self._columns: dict[Name, int] = {}
        self._rows: dict[tuple[Ids, Ids], Mapping[int, float]] = {}

    def ids_of(self, sample: AnswerText, prompt: Ids, num_tokens: int | None) -> Ids | None:
        """Return the tokens' columns, and keep the distribution before each token."""
        if not sample.names or len(sample.tops) != len(sample.names):
            return None
        if sample.finish == "stop" and num_tokens is not None and num_tokens > len(sample.names):
            return None  # the end token is not listed
        ids = tuple(self._column(name) for name in sample.names)
        for place, top in enumerate(sample.tops):
            self.num_lists += 1
            self.num_empty += not top
            likeliest = sorted(top.items(), key=lambda pair: -pair[1])[: self.num_top]
            row = {self._column(name): value for name, value in likeliest}
            known = self._rows[prompt, ids[:place]] = self._rows.get((prompt, ids[:place])) or row
            gaps = [abs(math.exp(known[i]) - math.exp(row[i])) for i in known.keys() & row.keys()]
            self.widest_deviation = max([self.widest_deviation, *gaps])
        return ids

    def _column(self, name: Name) -> int:
        return self._columns.setdefault(name, len(self._columns) + 1)

    def rows(self, prompt: Ids, texts: Sequence[Ids], sampling: SamplingParams) -> list[Float[Tensor, "N V"]]:
        """Return rows of log-probabilities. Tokens outside a list share column 0 if nothing is cut."""
        return [torch.stack([self._row(prompt, text[:n], sampling) for n in range(len(text))]) for text in texts]

    def _row(self, prompt: Ids, prefix: Ids, sampling: SamplingParams) -> Tensor:
        known = self._rows.get((prompt, prefix))
        row_V = torch.full((1 + len(self._columns) + _NUM_SHARES,), float("-inf"), dtype=torch.float64)
        if not known or not _is_known(known, prefix, sampling):
            return row_V.fill_(float("nan"))
        columns = torch.tensor(list(known))
        row_V[columns] = torch.tensor(list(known.values()), dtype=torch.float64)
        rest = max(0.0, 1.0 - sum(map(math.exp, known.values())))
        if rest > 1e-6 and not sampling.is_greedy and not has_cuts(sampling):
            row_V[0] = math.log(rest)
        elif rest > 1e-6:
            row_V[-_NUM_SHARES:] = min(math.log(rest / _NUM_SHARES), min(known.values()) - 1e-9)
        return row_V

    def offers(self, sampling: SamplingParams) -> bool:
        """Return whether the listed tokens can be enough: a temperature needs all tokens unless a top-k comes first."""
        return (sampling.temperature == 1.0 or bool(sampling.top_k)) and sampling.repetition_penalty == 1.0


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
