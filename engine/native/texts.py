"""Cached text in the library (texts.h): trees of texts by context, what is learned from committed tokens, and predictions."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.native import library
from engine.utils.host_transfer import as_longs

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
    return library.empty_array("d", library.NUM_RATES)


class TextsHandle:
    """The texts of a request. `structure` is for the library.

    `trees` are its prediction, prompt and output, NativeTrees or None. Matches outside the prediction have at least `least`
    tokens. `rates` are shared by all requests. A source is sure from the confidence `sure` on.
    """

    def __init__(self, trees: Sequence[object], least: int, rates: library.Numbers, sure: float) -> None:
        self._kept = (trees, rates)
        self._recent: tuple[object, ...] = ()
        self.structure = library.RequestTextsStructure(
            *(_handle(tree) for tree in trees), least=least, rates=library.address_of(rates), sure=sure
        )
        self._learn = library.library().latebranch_learn_text

    @property
    def recent(self) -> tuple[Any, ...]:
        """The trees of its tenant's recent texts, at most 2."""
        return self._recent

    @recent.setter
    def recent(self, trees: tuple[Any, ...]) -> None:
        if trees != self._recent:
            self._recent = trees
            self.structure.recent[:] = [*map(_handle, trees), None, None][:2]

    def set_tokens(self, tokens: Sequence[int], num_new: int = 0) -> None:
        """Set the last tokens, of which the last `num_new` are not learned yet."""
        structure = self.structure
        self._tokens = numbers = as_longs(tokens)
        structure.tokens, structure.num_tokens, structure.num_new = library.address_of(numbers), len(numbers), num_new

    def learn_last(self, tokens: Sequence[int], num_new: int) -> bool:
        """Learn the last `num_new` of these tokens. Return whether a source is sure of the token after them."""
        self.set_tokens(tokens, num_new)
        return bool(self._learn(ctypes.byref(self.structure)))

    def continuation(self, tokens: Sequence[int], most: int = _MOST_TOKENS) -> Continuation:
        """Return the distribution of the token after these tokens."""
        self.set_tokens(tokens)
        found, probs, is_predicted = (library.empty_array(kind, most) for kind in "qdB")
        confidence = ctypes.c_double()
        count = library.library().latebranch_continue_text(
            *(ctypes.byref(self.structure), most, *map(library.address_of, (found, probs, is_predicted))),
            ctypes.byref(confidence),
        )
        if count > most:
            return self.continuation(tokens, count)
        return Continuation(found[:count].tolist(), probs[:count].tolist(), is_predicted[:count].tolist(), confidence.value)


def _handle(tree: object) -> int | None:
    return tree.handle if isinstance(tree, NativeTree) else None
