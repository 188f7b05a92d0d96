"""Which tokens can come after each node of a tree under a grammar: a pure function of the generated tokens and the node's path.

Knows token ids and matchers. A matcher is kept where each text ends, and masks until the text grows, but only to save work: what
is kept is checked against the text, and made anew from the text where it is missing (after a preemption or a restart).
Shape key: M nodes, W words of 32 tokens.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.core.types import Grammar
from engine.structured_output.grammars import CompiledGrammars
from engine.structured_output.json_bounds import most_digits
from engine.structured_output.number_lengths import NumberLimit

_logger = logging.getLogger(__name__)

Words = Int32[np.ndarray, " W"]
Path = tuple[int, ...]


class GrammarMasks:
    """Owns a matcher for each of the `max_texts` texts asked for last. Not thread-safe."""

    def __init__(self, grammars: CompiledGrammars, max_texts: int = 64) -> None:
        self._grammars = grammars
        self._max_texts = max_texts
        self._standing: OrderedDict[tuple[Grammar, int], _Standing] = OrderedDict()

    def allowed(
        self, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int, paths: Sequence[Path]
    ) -> Int32[np.ndarray, "M W"]:
        """Return a row for each path after the history: bit t % 32 of word t // 32 is set if token t can come.

        Behind a token that cannot come every token can: nothing leads there, and a law is wanted of every node. Where the
        library gives up on a text, none can.
        """
        key = (grammar, id(history))
        standing = self._standing.pop(key, None) or _Standing(self._grammars, grammar)
        self._standing[key] = standing
        if len(self._standing) > self._max_texts:
            self._standing.popitem(last=False)
        standing.stand_after(list(history[num_prompt_tokens:]))
        masks = {path: standing.mask(path) for path in sorted(set(paths))}  # each after the one it begins with
        return np.stack([masks[path] for path in paths])


class _GaveUp(Exception):
    """The library did not say what can come: a limit of it was reached."""


class _Standing:
    """A matcher at the end of one text, and the masks of paths from there.

    Matchers of one grammar share a lexer. Once it is at a limit it fails them all, and refuses tokens that it has just allowed;
    so a text that it fails is tried once more with a lexer of its own.
    """

    def __init__(self, grammars: CompiledGrammars, grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._num_words = (grammars.vocabulary.vocab_size + 31) // 32
        self._eos_token_ids = frozenset(grammars.vocabulary.eos_tokens)
        self._text: list[int] = []
        self._path: list[int] = []  # what the matcher has consumed after the text
        self._masks: dict[Path, Words] = {}
        self._may_retry = True
        has_numbers = grammar.has_known_json
        self._number_limit = NumberLimit(grammars.token_digits, grammar, most_digits(grammar)) if has_numbers else None
        self._matcher = grammars.matcher(grammar)
        self._is_lost = False  # the matcher does not stand after the text

    def stand_after(self, text: list[int]) -> None:
        """Move to the end of a text, from where it was if the text goes on from there."""
        if text == self._text:
            return
        num_known = len(self._text)
        goes_on = text[:num_known] == self._text and not self._is_lost
        self._text, self._masks, self._may_retry = text, {}, True
        if self._number_limit is not None:
            self._number_limit.stand_after(text)
        if goes_on:
            self._go_back(0)
            self._is_lost = self._matcher.try_consume_tokens(text[num_known:]) < len(text) - num_known
        else:
            self._begin(self._grammars.matcher(self._grammar))

    def mask(self, path: Path) -> Words:
        """Return which tokens can come after the path; cheap where the last path began like this one."""
        if path not in self._masks:
            self._masks[path] = self._first_or_second(path)
        return self._masks[path]

    def _first_or_second(self, path: Path) -> Words:
        try:
            return self._found(path)
        except _GaveUp as error:
            if self._may_retry:
                self._may_retry = False
                self._begin(self._grammars.matcher(self._grammar, is_new=True))
                return self._first_or_second(path)
            _logger.warning("a grammar leaves no token after %d of a text: %s", len(self._text) + len(path), error)
            return np.zeros(self._num_words, dtype=np.int32)

    def _found(self, path: Path) -> Words:
        if not self._has_gone_to(path):
            return np.full(self._num_words, -1, dtype=np.int32)
        words_1W = np.zeros((1, self._num_words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, words_1W)
        self._require_sound()
        words_W: Words = words_1W[0]
        return words_W if self._number_limit is None else self._number_limit.restricted(words_W, path)

    def _has_gone_to(self, path: Path) -> bool:
        """Consume the path from where it leaves the one before; return whether it is possible to its end."""
        self._require_sound()
        common = next((at for at, (one, two) in enumerate(zip(self._path, path)) if one != two), min(len(self._path), len(path)))
        self._go_back(common)
        rest = path[common:]
        end = next((at for at, token_id in enumerate(rest) if token_id in self._eos_token_ids), len(rest))
        num_consumed = self._matcher.try_consume_tokens(list(rest[:end]))
        self._path += rest[:num_consumed]
        if num_consumed < end and _is_set(self.mask(path[: common + num_consumed]), rest[num_consumed]):
            raise _GaveUp("a token was allowed and then refused")
        return num_consumed == len(rest)

    def _go_back(self, num_kept: int) -> None:
        self._matcher.rollback(len(self._path) - num_kept)
        del self._path[num_kept:]

    def _begin(self, matcher: LLMatcher) -> None:
        self._matcher, self._path = matcher, []
        self._is_lost = matcher.try_consume_tokens(self._text) < len(self._text)

    def _require_sound(self) -> None:
        if self._is_lost or self._matcher.is_error():
            raise _GaveUp(self._matcher.get_error() or "the text does not match")


def _is_set(words_W: Words, token_id: int) -> bool:
    return bool(words_W.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1)
