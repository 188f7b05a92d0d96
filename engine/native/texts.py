"""Cached text in the library (texts.h): trees of texts by context, what is learned from committed tokens, and predictions."""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from engine.native import library
from engine.utils.host_transfer import as_longs

_NUM_RATES = 3 * 10 * 5 * 2  # sources, classes of lengths and of shares, sums (texts.h)
_MOST_TOKENS = 1024  # of a continuation that is read at once


class NativeTree:
    """Several texts, of which the last can grow."""

    def __init__(self) -> None:
        self._library = library.library()
        self.handle: int = self._library.latebranch_new_texts()

    def __del__(self) -> None:
        """Free the texts."""
        if hasattr(self, "handle"):
            self._library.latebranch_free_texts(self.handle)

    def begin(self, context: Sequence[int] = ()) -> None:
        """Begin another text. Its first token follows `context`, which is not counted itself."""
        numbers = as_longs(context)
        self._library.latebranch_begin_text(self.handle, library.address_of(numbers), len(numbers))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the last text."""
        numbers = as_longs(token_ids)
        self._library.latebranch_append_text(self.handle, library.address_of(numbers), len(numbers))


class Continuation(NamedTuple):
    """Tokens that may follow, their probabilities, whether the client predicted them, and the confidence in all of them."""

    token_ids: list[int]
    probs: list[float]
    is_predicted: list[int]
    confidence: float


def no_rates() -> library.Numbers:
    """Return rates of agreement before the first observation."""
    return library.empty_array("d", _NUM_RATES)


def request_texts(
    prediction: object,
    prompt: object,
    output: object,
    recent: Sequence[object],
    tokens: Sequence[int],
    num_new: int,
    least: int,
    rates: library.Numbers,
    sure: float,
) -> library.RequestTexts:
    """Return the texts of a request. The trees are NativeTrees or None; they and `rates` must outlive the structure."""
    numbers = as_longs(tokens)
    structure = library.RequestTexts(
        *(_handle(prediction), _handle(prompt), _handle(output), (ctypes.c_void_p * 2)(*map(_handle, recent))),
        *(least, library.address_of(rates), sure, library.address_of(numbers), len(numbers), num_new),
    )
    structure.keeps = numbers
    return structure


def learn(requests: Sequence[library.RequestTexts]) -> list[bool]:
    """Learn the new tokens of requests. Return whether a source is sure of the token after each."""
    is_sure = array("B", bytes(len(requests)))
    structures = (library.RequestTexts * len(requests))(*requests)
    library.library().latebranch_learn_texts(structures, len(requests), library.address_of(is_sure))
    return [*map(bool, is_sure)]


def continuation(request: library.RequestTexts, most: int = _MOST_TOKENS) -> Continuation:
    """Return the distribution of the token after a request's tokens."""
    tokens, probs, is_predicted = (library.empty_array(kind, most) for kind in "qdB")
    confidence = ctypes.c_double()
    count = library.library().latebranch_continue_text(
        *(ctypes.byref(request), most, *map(library.address_of, (tokens, probs, is_predicted))), ctypes.byref(confidence)
    )
    if count > most:
        return continuation(request, count)
    return Continuation(tokens[:count].tolist(), probs[:count].tolist(), is_predicted[:count].tolist(), confidence.value)


def _handle(tree: object) -> int | None:
    return tree.handle if isinstance(tree, NativeTree) else None
