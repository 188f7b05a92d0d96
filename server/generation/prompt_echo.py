"""What a request is told of its own prompt: its text and entries before the answer (echo), its tokens' candidates beside it.

Knows ids, text and the engine's records. The text is what the tokens decode to: of a prompt that was cut, what the model had.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.types import TokenLogprobs
from server.text.codec import TokenText
from server.text.detokenizer import Detokenizer
from server.text.token_entry import TokenEntry, entry_of, finite


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have come at a place of the prompt. `rank` 1 is the likeliest."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be told: `echo` gives the text, with entries of so many alternatives each unless `num_top` is None;
    `num_candidates` are told of each token beside itself, None for nothing.
    """

    echo: bool = False
    num_top: int | None = None
    num_candidates: int | None = None


class ToldPrompt:
    """One prompt; hears of its tokens as the engine tells of them."""

    def __init__(self, ids: Sequence[int], token_text: Callable[[int], TokenText], wishes: Wishes) -> None:
        self._ids = ids
        self._token_text = token_text
        self._wishes = wishes
        self._heard: list[TokenLogprobs] = []

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(self._ids)

    def hear(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take note of the log-probabilities of the next tokens, from the second on."""
        self._heard.extend(logprobs)

    def echo(self, detokenizer: Detokenizer) -> tuple[str, list[TokenEntry]]:
        """Return the prompt's text and its entries, if they are wished for; to be asked once, when all has been heard.

        What the end of the prompt is to mean may hang on the answer: `detokenizer` is the answer's own, which goes on from here.
        """
        text = ""
        entries: list[TokenEntry] = []
        if not self._wishes.echo:
            return text, entries
        scores = [None, *self._heard]
        for at, token_id in enumerate(self._ids):
            text += detokenizer.settle(token_id)
            if self._wishes.num_top is not None:
                entries.append(entry_of(self._token_text, token_id, scores[at], self._wishes.num_top, len(text)))
            text += detokenizer.push(token_id)
        return text, entries

    def candidates(self) -> tuple[tuple[Candidate, ...], ...] | None:
        """Return for each token itself and the likeliest, if they are wished for; the first token has none."""
        if self._wishes.num_candidates is None:
            return None
        return ((), *(self._of(token_id, scores) for token_id, scores in zip(self._ids[1:], self._heard, strict=True)))

    def _of(self, token_id: int, scores: TokenLogprobs) -> tuple[Candidate, ...]:
        num_top = self._wishes.num_candidates
        likeliest = zip(scores.top_ids[:num_top], scores.top_logprobs[:num_top], strict=True)
        found = {token_id: self._candidate(token_id, scores.logprob, scores.rank)}
        for rank, (top_id, logprob) in enumerate(likeliest, 1):
            found.setdefault(top_id, self._candidate(top_id, logprob, rank))
        return tuple(found.values())

    def _candidate(self, token_id: int, logprob: float, rank: int) -> Candidate:
        return Candidate(token_id, self._token_text(token_id).text, finite(logprob), rank)
