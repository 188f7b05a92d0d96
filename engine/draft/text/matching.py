"""Matches of a request's texts, and the distribution of the next token by them: by the native library or, without it, in Python.

The distribution is a mixture of the continuations of the longest match in each source. The weights are the observed confidence
in such matches. Both matchers learn and predict alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.core.enums import DraftSource, Origin
from engine.draft.text.agreement import Agreement, TextSource
from engine.draft.text.suffix_counts import MAX_CONTEXT, ContextTree, Match, merged
from engine.native import library, texts

SURE_CONFIDENCE = 0.8  # a cached distribution with this confidence needs no model


@dataclass(frozen=True, slots=True)
class CachedDistribution:
    """Probabilities of the next token according to cached text, the confidence in them, and the client's predicted tokens.

    `confidence` estimates the probability that a draw equals the unedited model's token. The distribution `is_sure` if the
    confidence is high and the request's logit edits cannot suppress any of its tokens. Then no model is queried.
    """

    probs: dict[int, float]
    confidence: float
    predicted: frozenset[int]
    is_sure: bool = False

    def source_of(self, token_id: int) -> DraftSource:
        """Return the source of a token: the client's prediction if it contains the token, else the cache."""
        return DraftSource.PREDICTION if token_id in self.predicted else DraftSource.CACHE

    @property
    def origins(self) -> dict[int, Origin]:
        """The origin of each token where no model proposes."""
        return {token_id: Origin(self.source_of(token_id), True) for token_id in self.probs}

    def origins_beside(self, is_rather_cached: Iterable[bool]) -> dict[int, Origin]:
        """Return the origins in a mixture with a model; for each token in order, whether most of its weight is the cache's."""
        return {
            token_id: Origin(self.source_of(token_id), is_rather)
            for token_id, is_rather in zip(self.probs, is_rather_cached, strict=True)
            if is_rather or token_id in self.predicted
        }


class TextTree(Protocol):
    """Several texts, of which the last can grow, as a matcher stores them."""

    def begin(self, context: Sequence[int] = ()) -> None:
        """Begin another text. Its first token follows `context`, which is not counted itself."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the last text."""
        ...


class RequestTexts(Protocol):
    """The texts of one request: its prediction, prompt and output, of which none need exist, and `recent` texts of its tenant.

    Prompt and output are matched as one text.
    """

    recent: tuple[TextTree, ...]

    def learn(self, history: Sequence[int], first: int, end: int) -> bool:
        """Learn the committed tokens of a history from `first` to `end`, each with the matches before it. Add them to the output.

        Return whether a source is confident of the token after them.
        """
        ...

    def distribution(self, tokens: Sequence[int]) -> CachedDistribution | None:
        """Return the distribution after these tokens, of which the last MAX_CONTEXT are read; None without a match."""
        ...


class TextMatcher(Protocol):
    """Makes the texts of requests, which share the observed confidence, and the trees of texts."""

    def new_tree(self) -> TextTree:
        """Return a tree without texts."""
        ...

    def texts_of(
        self, prediction: TextTree | None = None, prompt: TextTree | None = None, output: TextTree | None = None
    ) -> RequestTexts:
        """Return the texts of a request."""
        ...


def matcher_of(min_tokens: int) -> TextMatcher:
    """Return the fastest matcher. Matches outside predictions have at least `min_tokens` tokens."""
    return NativeMatcher(min_tokens) if library.is_available() else PythonMatcher(min_tokens)


class NativeMatcher:
    """The matcher of the library, which also grows trees with it."""

    new_tree = texts.NativeTree

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self.rates = texts.no_rates()

    def texts_of(
        self, prediction: TextTree | None = None, prompt: TextTree | None = None, output: TextTree | None = None
    ) -> "NativeTexts":
        """Return the texts of a request."""
        return NativeTexts((prediction, prompt, output), self._min_tokens, self.rates, SURE_CONFIDENCE)


class NativeTexts(texts.TextsHandle):
    """The texts of a request in the library."""

    def learn(self, history: Sequence[int], first: int, end: int) -> bool:
        """Learn the committed tokens of a history from `first` to `end`."""
        return self.learn_last(history[max(0, first - MAX_CONTEXT) : end], end - first)

    def distribution(self, tokens: Sequence[int]) -> CachedDistribution | None:
        """Return the distribution after these tokens."""
        found = self.continuation(tokens)
        if not found.token_ids:
            return None
        predicted = frozenset(token_id for token_id, is_predicted in zip(found.token_ids, found.is_predicted) if is_predicted)
        return CachedDistribution(dict(zip(found.token_ids, found.probs)), found.confidence, predicted)


class PythonMatcher:
    """The matcher of machines without the library."""

    new_tree = ContextTree

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self.agreement = Agreement()

    def texts_of(
        self, prediction: TextTree | None = None, prompt: TextTree | None = None, output: TextTree | None = None
    ) -> "PythonTexts":
        """Return the texts of a request."""
        return PythonTexts(self.agreement, self._min_tokens, prediction, prompt, output)


class _SourceMatch(NamedTuple):
    """A match in one source."""

    source: TextSource
    match: Match


@dataclass(slots=True)
class PythonTexts:
    """The texts of a request in Python. A single matching token is informative in a prediction, but hardly in other sources."""

    agreement: Agreement
    min_tokens: int
    prediction: TextTree | None
    prompt: TextTree | None
    output: TextTree | None
    recent: tuple[TextTree, ...] = ()

    def learn(self, history: Sequence[int], first: int, end: int) -> bool:
        """Learn the committed tokens of a history from `first` to `end`."""
        for position in range(first, end):
            for source, match in self._matches(_ending(history, position)):
                self.agreement.observe(source, match, history[position])
            if self.output is not None:
                self.output.extend(history[position : position + 1])
        return any(self.agreement.confidence(*one) >= SURE_CONFIDENCE for one in self._matches(_ending(history, end)))

    def distribution(self, tokens: Sequence[int]) -> CachedDistribution | None:
        """Return the distribution after these tokens."""
        matches = self._matches(tokens)
        return mixture([(*one, self.agreement.confidence(*one)) for one in matches]) if matches else None

    def _matches(self, tokens: Sequence[int]) -> list[_SourceMatch]:
        def match(tree: TextTree | None, min_length: int) -> Match | None:
            return tree.match(tokens, min_length=min_length) if isinstance(tree, ContextTree) else None

        own = [one for tree in (self.prompt, self.output) if (one := match(tree, self.min_tokens)) is not None]
        found = [
            (TextSource.PREDICTION, match(self.prediction, 1)),
            (TextSource.OWN, merged(*own) if len(own) == 2 else own[0] if own else None),
            *((TextSource.RECENT, match(tree, self.min_tokens)) for tree in self.recent),
        ]
        return [_SourceMatch(source, one) for source, one in found if one is not None]


def _ending(history: Sequence[int], end: int) -> Sequence[int]:
    """Return the tokens before a position that are compared."""
    return history[max(0, end - MAX_CONTEXT) : end]


def mixture(matches: Sequence[tuple[TextSource, Match, float]]) -> CachedDistribution:
    """Mix the sources' continuations, each weighted by the odds of its confidence. A prediction's tokens are all `predicted`."""
    weights = [confidence / (1.0 - confidence) for _, _, confidence in matches]
    total_weight = sum(weights)
    probs: dict[int, float] = {}
    predicted: set[int] = set()
    for (source, match, _), weight in zip(matches, weights, strict=True):
        share = weight / total_weight / sum(match.counts.values())
        for token_id, count in match.counts.items():
            probs[token_id] = probs.get(token_id, 0.0) + share * count
        if source is TextSource.PREDICTION:
            predicted.update(match.counts)
    confidence = sum(confidence * weight for (_, _, confidence), weight in zip(matches, weights, strict=True)) / total_weight
    return CachedDistribution(probs, confidence, frozenset(predicted))
