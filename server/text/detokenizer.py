"""Incremental detokenisation: the joined pieces are exactly the text of all ids decoded at once.

Knows ids, a decode function and which ids can change their neighbours' text. Does not know stop strings or HTTP.
"""

from collections.abc import Callable, Mapping, Sequence, Set

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # ids; only the last three bytes of a text can still complete a character, and an id has at least one

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Owns the undecided end of one text. Two kinds of text can still change after they are decoded, and both are held back:

    - an incomplete UTF-8 character, which decodes to one U+FFFD at the end and turns into the character later;
    - a run of byte-fallback tokens (`<0xNN>`), which is text only if the run as a whole is UTF-8.

        emitted ... | context ids | pending ids      decode(context + pending) minus decode(context) is the new text

    The context protects against decoders that strip or add a space at the beginning of their input. It may end inside a
    character. The U+FFFD of that character then counts as new text. Otherwise bytes that never become text would all stay
    pending, and be decoded again at every id.
    """

    def __init__(self, decode: Decode, text_ids: Set[int], byte_ids: Mapping[int, int], context: Sequence[int] = ()) -> None:
        """Take a `decode` without cleanup, the ids that are text, the byte of each byte-fallback id among them, and ids before
        the text.

        Other ids (special tokens, padding rows of the vocabulary) are not text and end no run.
        """
        self._decode = decode
        self._text_ids = text_ids
        self._byte_ids = byte_ids
        self._context = list(context)
        self._num_context_chars = len(decode(self._context)) if context else 0
        self._pending: list[int] = []
        self._num_emitted = 0  # characters of the pending ids' text that are emitted already
        self._num_held = self._num_missing = 0  # characters of the byte run at the end; bytes that its last one still needs

    def settle(self, next_id: int) -> str:
        """Return the text before `next_id` that becomes certain with it: a byte run that ends."""
        if not self._ends_in_byte_run or next_id in self._byte_ids or next_id not in self._text_ids:
            return ""
        self._num_held = self._num_missing = 0
        return self._emit(self._pending_text())

    def push(self, token_id: int) -> str:
        """Add an id; return the text that is now certain."""
        if token_id not in self._text_ids:
            return ""
        self._pending.append(token_id)
        if token_id in self._byte_ids:
            self._count(self._byte_ids[token_id])
            return ""
        self._num_held = self._num_missing = 0
        text = self._pending_text()
        certain = text.removesuffix(_REPLACEMENT)
        piece = self._emit(certain)
        if text and certain == text:
            self._advance(num_undecided=0)
        elif len(self._pending) >= _MAX_PENDING:
            self._advance(num_undecided=len(text) - len(certain))
        return piece

    def close(self) -> str:
        """Return the rest of the text: no more ids follow."""
        return self._emit(self._pending_text())

    @property
    def num_held(self) -> int:
        """Characters of a byte run that are held back and whole, if the run is UTF-8. Bytes of the next one do not count."""
        return self._num_held

    @property
    def _ends_in_byte_run(self) -> bool:
        return bool(self._pending) and self._pending[-1] in self._byte_ids

    def _count(self, byte: int) -> None:
        """Count the characters of a byte run without a decoder, which would read the whole run at each byte."""
        if byte & 0xC0 == 0x80 and self._num_missing:
            self._num_missing -= 1
        else:
            self._num_missing = (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        self._num_held += not self._num_missing

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._num_context_chars :]

    def _emit(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _advance(self, num_undecided: int) -> None:
        """Replace the context by the pending ids. All of their text has been emitted but the last `num_undecided` characters,
        which later ids may still change.
        """
        self._context, self._pending, self._num_emitted = self._pending, [], 0
        self._num_context_chars = len(self._decode(self._context)) - num_undecided
