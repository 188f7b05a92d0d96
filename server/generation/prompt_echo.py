"""The part of an answer about the prompt: its text and entries before the answer (echo), and candidates of its tokens.

Knows ids, text and the engine's records. The text is decoded from the tokens: for a truncated prompt, the part that the model
received.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.types import TokenLogprobs
from server.text.codec import TokenText
from server.text.detokenizer import Detokenizer
from server.text.token_entry import TokenEntry, entry_of, finite


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible token at a position of the prompt. `rank` 1 is the likeliest."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """`echo` returns the text of the prompt, with entries of `num_top` alternatives each, None for no entries. `num_candidates`
    is the number of likeliest candidates returned beside each token, None for no candidates.
    """

    echo: bool = False
    num_top: int | None = None
    num_candidates: int | None = None


class PromptEcho:
    """One prompt, and the log-probabilities of its tokens as the engine reports them."""

    def __init__(self, ids: Sequence[int], token_text: Callable[[int], TokenText], options: EchoOptions) -> None:
        self._ids = ids
        self._token_text = token_text
        self._options = options
        self._logprobs: list[TokenLogprobs] = []

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(self._ids)

    def add_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of the next tokens, from the second token on."""
        self._logprobs.extend(logprobs)

    def echo(self, detokenizer: Detokenizer) -> tuple[str, list[TokenEntry]]:
        """Return the prompt's text and its entries, empty without `echo`. Call it once, after all log-probabilities are added.

        The text of the prompt's last tokens may depend on the answer, so `detokenizer` is the answer's own and continues there.
        """
        text = ""
        entries: list[TokenEntry] = []
        if not self._options.echo:
            return text, entries
        scores = [None, *self._logprobs]
        for at, token_id in enumerate(self._ids):
            text += detokenizer.settle(token_id)
            if self._options.num_top is not None:
                offset = len(text) + detokenizer.num_held
                entries.append(entry_of(self._token_text, token_id, scores[at], self._options.num_top, offset))
            text += detokenizer.push(token_id)
        return text, entries

    def candidates(self) -> tuple[tuple[Candidate, ...], ...] | None:
        """Return for each token itself and the likeliest tokens, or None if not requested. The first token has no candidates."""
        if self._options.num_candidates is None:
            return None
        return ((), *(self._of(token_id, scores) for token_id, scores in zip(self._ids[1:], self._logprobs, strict=True)))

    def _of(self, token_id: int, scores: TokenLogprobs) -> tuple[Candidate, ...]:
        num_top = self._options.num_candidates
        likeliest = zip(scores.top_ids[:num_top], scores.top_logprobs[:num_top], strict=True)
        found = {token_id: self._candidate(token_id, scores.logprob, scores.rank)}
        for rank, (top_id, logprob) in enumerate(likeliest, 1):
            found.setdefault(top_id, self._candidate(top_id, logprob, rank))
        return tuple(found.values())

    def _candidate(self, token_id: int, logprob: float, rank: int) -> Candidate:
        return Candidate(token_id, self._token_text(token_id).text, finite(logprob), rank)
