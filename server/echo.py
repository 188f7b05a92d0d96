"""The prompt given back before its answer: the text of its tokens, and an entry for each where log-probabilities are asked for.

Knows ids, text and the engine's records. The text is what the tokens decode to: of a prompt that was cut, what the model had.
"""

from collections.abc import Callable, Sequence

from engine.types import TokenLogprobs
from server.detokenizer import Detokenizer
from server.text import TokenText
from server.token_entry import TokenEntry, entry_of


class Echo:
    """One prompt; hears of its tokens as the engine tells of them. `num_top_logprobs` None asks for no entries."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        detokenizer: Detokenizer,
        token_text: Callable[[int], TokenText],
        num_top_logprobs: int | None,
    ) -> None:
        self._ids = prompt_ids
        self._detokenizer = detokenizer
        self._token_text = token_text
        self._num_top = num_top_logprobs
        self._heard: list[TokenLogprobs] = []

    def hear(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take note of the log-probabilities of the next tokens, from the second on."""
        self._heard.extend(logprobs)

    def told(self) -> tuple[str, list[TokenEntry]]:
        """Return the prompt's text and its entries; to be asked once, when all has been heard."""
        text, entries = "", []
        scores = [None, *self._heard]
        for at, token_id in enumerate(self._ids):
            text += self._detokenizer.settle(token_id)
            if self._num_top is not None:
                entries.append(entry_of(self._token_text, token_id, scores[at], self._num_top, len(text)))
            text += self._detokenizer.push(token_id)
        return text + self._detokenizer.close(), entries
