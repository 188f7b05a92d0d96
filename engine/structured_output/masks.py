"""The tokens that a grammar allows after each node of a tree: a pure function of the generated tokens and the node's path.

A matcher is cached at the end of each text, and masks until the text grows. The cache only saves work: it is checked against the
text, and rebuilt from the text if it is missing (after a preemption or a restart).
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
    """Owns a matcher for each of the `max_texts` most recently used texts. Not thread-safe."""

    def __init__(self, grammars: CompiledGrammars, max_texts: int = 64) -> None:
        self._grammars = grammars
        self._max_texts = max_texts
        self._matchers: OrderedDict[tuple[Grammar, int], _TextMatcher] = OrderedDict()

    def allowed(
        self, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int, paths: Sequence[Path]
    ) -> Int32[np.ndarray, "M W"]:
        """Return a row for each path after the history: bit t % 32 of word t // 32 is set if token t is allowed.

        After a forbidden token all tokens are allowed: such a node is never reached, but every node needs a distribution. If the
        library reaches a limit, no token is allowed.
        """
        key = (grammar, id(history))
        matcher = self._matchers.pop(key, None) or _TextMatcher(self._grammars, grammar)
        self._matchers[key] = matcher
        if len(self._matchers) > self._max_texts:
            self._matchers.popitem(last=False)
        matcher.move_to(list(history[num_prompt_tokens:]))
        masks = {path: matcher.mask(path) for path in sorted(set(paths))}  # prefixes first
        return np.stack([masks[path] for path in paths])


class _LimitReached(Exception):
    """The library reached a limit and returned no mask."""


class _TextMatcher:
    """A matcher at the end of one text, and the masks of paths from there.

    Matchers of one grammar share a lexer. If the lexer reaches a limit, all of them fail, and it may refuse tokens that it has
    just allowed. So after a failure the text is tried once more with a new lexer.
    """

    def __init__(self, grammars: CompiledGrammars, grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._num_words = (grammars.vocabulary.vocab_size + 31) // 32
        self._eos_token_ids = frozenset(grammars.vocabulary.eos_tokens)
        self._text: list[int] = []
        self._path: list[int] = []  # the tokens that the matcher has consumed after the text
        self._masks: dict[Path, Words] = {}
        self._may_retry = True
        has_numbers = grammar.has_known_json
        self._number_limit = NumberLimit(grammars.token_digits, grammar, most_digits(grammar)) if has_numbers else None
        self._matcher = grammars.matcher(grammar)
        self._is_lost = False  # the matcher is not at the end of the text

    def move_to(self, text: list[int]) -> None:
        """Move to the end of a text, from the current position if the text continues there."""
        if text == self._text:
            return
        num_known = len(self._text)
        continues = text[:num_known] == self._text and not self._is_lost
        self._text, self._masks, self._may_retry = text, {}, True
        if self._number_limit is not None:
            self._number_limit.move_to(text)
        if continues:
            self._go_back(0)
            self._is_lost = self._matcher.try_consume_tokens(text[num_known:]) < len(text) - num_known
        else:
            self._begin(self._grammars.matcher(self._grammar))

    def mask(self, path: Path) -> Words:
        """Return the tokens allowed after the path; cheap if it shares a prefix with the previous path."""
        if path not in self._masks:
            self._masks[path] = self._mask_with_retry(path)
        return self._masks[path]

    def _mask_with_retry(self, path: Path) -> Words:
        try:
            return self._computed_mask(path)
        except _LimitReached as error:
            if self._may_retry:
                self._may_retry = False
                self._begin(self._grammars.matcher(self._grammar, is_new=True))
                return self._mask_with_retry(path)
            _logger.warning("a grammar leaves no token after %d of a text: %s", len(self._text) + len(path), error)
            return np.zeros(self._num_words, dtype=np.int32)

    def _computed_mask(self, path: Path) -> Words:
        if not self._advance_to(path):
            return np.full(self._num_words, -1, dtype=np.int32)
        words_1W = np.zeros((1, self._num_words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, words_1W)
        self._require_valid()
        words_W: Words = words_1W[0]
        return words_W if self._number_limit is None else self._number_limit.restricted(words_W, path)

    def _advance_to(self, path: Path) -> bool:
        """Consume the path from its common prefix with the previous one; return whether all of its tokens are allowed."""
        self._require_valid()
        common = next((at for at, (one, two) in enumerate(zip(self._path, path)) if one != two), min(len(self._path), len(path)))
        self._go_back(common)
        rest = path[common:]
        end = next((at for at, token_id in enumerate(rest) if token_id in self._eos_token_ids), len(rest))
        num_consumed = self._matcher.try_consume_tokens(list(rest[:end]))
        self._path += rest[:num_consumed]
        if num_consumed < end and _is_set(self.mask(path[: common + num_consumed]), rest[num_consumed]):
            raise _LimitReached("a token was allowed and then refused")
        return num_consumed == len(rest)

    def _go_back(self, num_kept: int) -> None:
        self._matcher.rollback(len(self._path) - num_kept)
        del self._path[num_kept:]

    def _begin(self, matcher: LLMatcher) -> None:
        self._matcher, self._path = matcher, []
        self._is_lost = matcher.try_consume_tokens(self._text) < len(self._text)

    def _require_valid(self) -> None:
        if self._is_lost or self._matcher.is_error():
            raise _LimitReached(self._matcher.get_error() or "the text does not match")


def _is_set(words_W: Words, token_id: int) -> bool:
    return bool(words_W.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1)
