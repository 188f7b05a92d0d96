"""Masks the tokens that would make a number in JSON too long: a pure function of the text.

The library does not limit numbers that the schema leaves open. The limit applies to each run of digits: the whole part, the
fraction and the exponent. Shape key: W words of 32 tokens.
"""

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32
from llguidance import LLTokenizer

from engine.core.types import Grammar

Words = Int32[np.ndarray, " W"]
Path = tuple[int, ...]
_DIGITS = b"0123456789"
_QUOTE, _BACKSLASH = b'"\\'
_MAX_EXPONENT_DIGITS = 3  # enough for every double
_LONG_EXPONENT = re.compile(rb"[eE][+-]?[0-9]{%d}" % (_MAX_EXPONENT_DIGITS + 1))


@dataclass(frozen=True, slots=True)
class JsonPosition:
    """The position of a text's end in its JSON: inside a string, or after `num_digits` digits of a number."""

    is_json: bool = True
    is_in_string: bool = False
    is_escaped: bool = False
    num_digits: int = 0
    is_in_exponent: bool = False

    def is_beyond(self, limit: int) -> bool:
        """Return whether the current number exceeds the limit."""
        return self.num_digits > self.limited(limit)

    def limited(self, limit: int) -> int:
        """Return how many consecutive digits are allowed here."""
        return _MAX_EXPONENT_DIGITS if self.is_in_exponent else limit

    def after(self, data: bytes) -> "JsonPosition":
        """Return the position after more bytes."""
        if not self.is_json:
            return self
        in_string, escaped, digits, in_exponent = self.is_in_string, self.is_escaped, self.num_digits, self.is_in_exponent
        for byte in data:
            if in_string:
                in_string, escaped = escaped or byte != _QUOTE, not escaped and byte == _BACKSLASH
            elif byte in _DIGITS:
                digits += 1
            else:
                in_string, digits, in_exponent = byte == _QUOTE, 0, byte in b"eE" or (in_exponent and byte in b"+-")
        return JsonPosition(True, in_string, escaped, digits, in_exponent)


_FREE = JsonPosition(is_json=False)


class TokenDigits:
    """The digits in each token of a vocabulary."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._tokens = [vocabulary.decode_bytes([token_id]) for token_id in range(vocabulary.vocab_size)]
        self._leading = np.zeros((len(self._tokens) + 31) // 32 * 32, dtype=np.int32)
        self._leading[: len(self._tokens)] = [len(data) - len(data.lstrip(_DIGITS)) for data in self._tokens]
        self._longest = np.array([max(map(len, re.findall(rb"[0-9]+", data)), default=0) for data in self._tokens])
        self._most = int(self._longest.max(initial=0))
        self._with_exponent = [token_id for token_id, data in enumerate(self._tokens) if _LONG_EXPONENT.search(data)]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token: of a special token, its name."""
        return self._tokens[token_id]

    def too_long(self, position: JsonPosition, limit: int) -> Words | None:
        """Return a bit for each token that would make a run of digits exceed the limit; None if there is no such token."""
        room = position.limited(limit) - position.num_digits
        if not position.is_json or (self._most <= room and not self._with_exponent):
            return None
        is_long = (self._leading > max(0, room)) & (not position.is_in_string)
        for token_id in {
            *np.flatnonzero(self._longest > limit).tolist(),
            *self._with_exponent,
        }:  # these may begin or end a string
            data = self._tokens[token_id]
            is_long[token_id] = any(position.after(data[:end]).is_beyond(limit) for end in range(1, len(data) + 1))
        words_W: Words = np.packbits(is_long, bitorder="little").view(np.int32)
        return words_W


class NumberLimit:
    """Follows one text and its paths, and removes tokens that make a number too long from masks."""

    def __init__(self, tokens: TokenDigits, grammar: Grammar, limit: int) -> None:
        self._tokens = tokens
        self._limit = limit
        self._marks = tuple(mark.encode() for mark in grammar.json_marks or () if mark)
        block = grammar.block
        self._opening = None if block is None or block.opening is None else block.opening.encode()
        self._closing = None if block is None else block.closing.encode()
        self._constrained_start = JsonPosition(is_json=not self._marks)
        self._start = _FREE if block is not None and block.opening is None else self._constrained_start
        self._text: list[int] = []
        self._positions: dict[Path, JsonPosition] = {(): self._start}

    def move_to(self, text: list[int]) -> None:
        """Move to the end of a text; only its new tokens are read."""
        num_known = len(self._text)
        continues = text[:num_known] == self._text
        position = self._positions[()] if continues else self._start
        for token_id in text[num_known if continues else 0 :]:
            position = self._after(position, token_id)
        self._text, self._positions = text, {(): position}

    def restricted(self, words_W: Words, path: Path) -> Words:
        """Return the mask without tokens that make a number too long, unchanged if no other token is allowed."""
        too_long_W = self._tokens.too_long(self._position(path), self._limit)
        if too_long_W is None:
            return words_W
        left_W: Words = words_W & ~too_long_W
        return left_W if left_W.any() else words_W

    def _position(self, path: Path) -> JsonPosition:
        if path not in self._positions:
            self._positions[path] = self._after(self._position(path[:-1]), path[-1])
        return self._positions[path]

    def _after(self, position: JsonPosition, token_id: int) -> JsonPosition:
        data = self._tokens.bytes_of(token_id)
        if data == self._opening:
            return _FREE
        if data == self._closing:
            return self._constrained_start
        if data in self._marks:
            return JsonPosition(is_json=data == self._marks[0])
        return position.after(data)
