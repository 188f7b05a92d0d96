"""Translates between two tokenizers by the bytes of their tokens. Knows no models.

A drafter with another tokenizer reads the text of a sequence as its own tokenizer encodes it. A sequence grows by tokens whose
bytes can end inside a character or inside a word of the drafter. So the last tokens of the drafter are encoded again with the new
bytes, from a token that begins a character. An encoding that differs from that of the whole text affects acceptance alone.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from llguidance import LLTokenizer

from engine.weights import WeightsError
from engine.weights.facts import read_facts
from engine.weights.stored_tokenizer import load_tokenizer

_MOST_REENCODED = 8  # tokens of the drafter
_LONGEST_CHARACTER = 4  # bytes


class TokenMap:
    """The tokens that two tokenizers share, and the encoding of the target's tokens for the drafter.

    Two tokens are the same if they have the same bytes, and if both or neither are special. `prefix_ids` are the tokens that the
    drafter's tokenizer puts before a text.
    """

    def __init__(self, target: LLTokenizer, draft: LLTokenizer, prefix_ids: Sequence[int] = ()) -> None:
        self._target, self._draft, self.prefix_ids = target, draft, tuple(prefix_ids)
        self.draft_id_of = _shared_tokens(target, draft)
        self.target_id_of = {draft_id: token_id for token_id, draft_id in self.draft_id_of.items()}

    def runs(self, token_ids: Sequence[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the target's tokens as bytes of text and the drafter's special tokens, in turn; one of both is empty.

        Special tokens that the drafter lacks are left out.
        """
        for is_special, run in groupby(token_ids, self._target.is_special_token):
            if is_special:
                yield b"", [self.draft_id_of[token_id] for token_id in run if token_id in self.draft_id_of]
            else:
                yield self._target.decode_bytes([*run]), []

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of the drafter."""
        return int(self._draft.vocab_size)

    def is_special(self, draft_id: int) -> bool:
        """Return whether a token of the drafter is no text."""
        return self._draft.is_special_token(draft_id)

    def encoded(self, text: bytes) -> list[int]:
        """Return the drafter's tokens of a text. Bytes outside a character are tokens of their own."""
        return self._draft.tokenize_bytes(text)

    def decoded(self, draft_ids: Sequence[int]) -> bytes:
        """Return the bytes of the drafter's tokens."""
        return self._draft.decode_bytes([*draft_ids])

    def target_ids(self, text: bytes) -> list[int]:
        """Return the target's tokens of a text."""
        return self._target.tokenize_bytes(text)

    def num_bytes(self, token_id: int) -> int:
        """Return the length of a token of the target."""
        return len(self._target.decode_bytes([token_id]))


@lru_cache(maxsize=1)
def token_map(target: Path, draft: Path) -> TokenMap:
    """Return the map of two model folders. Raises WeightsError if the bytes of a tokenizer's tokens are unknown."""
    return TokenMap(_vocabulary(target), _vocabulary(draft), _prefix(draft))


class TranslatedText:
    """A sequence's committed text in the drafter's tokens. It grows with the sequence."""

    def __init__(self, tokens: TokenMap) -> None:
        self._tokens = tokens
        self.draft_ids = [*tokens.prefix_ids]
        self.num_read = 0  # tokens of the target
        self._num_final = len(self.draft_ids)  # tokens of the drafter up to the last special one

    def follow(self, history: Sequence[int]) -> None:
        """Encode the tokens that the sequence has more than at the last call."""
        for text, special_ids in self._tokens.runs([*history[self.num_read :]]):
            if text:
                self._append(text)
            else:
                self.draft_ids += special_ids
                self._num_final = len(self.draft_ids)
        prefix = [*self._tokens.prefix_ids]
        if not self.num_read and self.draft_ids[: 2 * len(prefix)] == 2 * prefix:  # the sequence begins with the prefix itself
            self.draft_ids, self._num_final = self.draft_ids[len(prefix) :], self._num_final - len(prefix)
        self.num_read = len(history)

    def _append(self, text: bytes) -> None:
        """Encode bytes, after the last tokens again. These begin with a character, unless the text has none there."""
        first = max(self._num_final, len(self.draft_ids) - _MOST_REENCODED)
        earliest = max(self._num_final, first - _LONGEST_CHARACTER)
        before = self._tokens.decoded(self.draft_ids[first:])
        while first > earliest and _continues_character(before):
            first -= 1
            before = self._tokens.decoded(self.draft_ids[first:])
        self.draft_ids[first:] = self._tokens.encoded(before + text)


def _continues_character(text: bytes) -> bool:
    return bool(text) and text[0] & 0xC0 == 0x80


def _shared_tokens(target: LLTokenizer, draft: LLTokenizer) -> dict[int, int]:
    """Return the drafter's id of each token of the target that it has."""
    draft_ids = _ids_by_token(draft)
    return {token_id: draft_ids[token] for token, token_id in _ids_by_token(target).items() if token in draft_ids}


def _ids_by_token(tokenizer: LLTokenizer) -> dict[tuple[bool, bytes], int]:
    """Return the id of each token but padding. Of several tokens with the same bytes, the id is that by which text is encoded."""
    ids: dict[tuple[bool, bytes], int] = {}
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.is_special_token(token_id), tokenizer.decode_bytes([token_id])
        is_padding = token[1] in (b"", f"<[{token_id}]>".encode())
        if not is_padding and (token not in ids or tokenizer.tokenize_bytes(token[1]) == [token_id]):
            ids[token] = token_id
    return ids


def _vocabulary(folder: Path) -> LLTokenizer:
    """Return a folder's tokens. Rows of the output head beyond them are special tokens."""
    tokenizer = load_tokenizer(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise WeightsError(f"the tokenizer of {folder} is not a fast tokenizer")
    try:
        return LLTokenizer(backend.to_str(), n_vocab=max(read_facts(folder).vocab_size, len(tokenizer)), slices=[])
    except ValueError as error:
        raise WeightsError(f"the bytes of the tokens of {folder} are unknown: {error}") from error


def _prefix(folder: Path) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    tokenizer = load_tokenizer(folder)
    plain = tokenizer.encode("a", add_special_tokens=False)
    with_special = tokenizer.encode("a", add_special_tokens=True)
    first = next((index for index in range(len(with_special)) if with_special[index : index + len(plain)] == plain), 0)
    return [*with_special[:first]]
