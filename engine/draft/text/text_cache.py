"""Cached text of each request: its own tokens, its prediction, and its tenant's recent outputs. No other text is used.

Each text is in a ContextTree, as far as it is indexed. The distribution after a request's tokens is a mixture of the
continuations of the longest match in each source. The weights are the observed confidence in such matches. Weights and
distributions depend on committed tokens, on the path, and on the steps and queries so far. They never depend on a draw from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row, SamplingContext
from engine.core.types import Request
from engine.draft.text.agreement import Agreement, TextSource
from engine.draft.text.edited import may_suppress
from engine.draft.text.recent_texts import RecentLimits, RecentTexts
from engine.draft.text.suffix_counts import MAX_CONTEXT, ContextTree, Match, merged
from engine.draft.text.text_index import Indexer, TextIndex, text_with_context

SURE_CONFIDENCE = 0.8  # a cached distribution with this confidence needs no model
MAX_INDEXED_PER_STEP = 512  # tokens of all texts: a few milliseconds, and as fast as prompts are prefilled
_LEARNED_TOGETHER = 8  # tokens of a request that is not queried
_NO_RECENT_TEXTS = RecentLimits()


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


class _SourceMatch(NamedTuple):
    """A match in one source."""

    source: TextSource
    match: Match


class _Trees(NamedTuple):
    """The trees that one request may draft from besides its output's, by source."""

    prediction: ContextTree | None = None
    prompt: ContextTree | None = None
    recent: tuple[ContextTree, ...] = ()

    def matches(self, text: Sequence[int], end: int, min_tokens: int, own: Match | None) -> list[_SourceMatch]:
        """Return each source's match of the first `end` tokens of a text; `own` is the match in the request's output.

        A single matching token is informative in a prediction, but hardly in other sources.
        """
        prediction, prompt, recent = self
        found: list[_SourceMatch] = []
        if prediction is not None and (match := prediction.match(text, end)) is not None:
            found.append(_SourceMatch(TextSource.PREDICTION, match))
        if prompt is not None and (match := prompt.match(text, end, min_tokens)) is not None:
            own = match if own is None else merged(match, own)
        if own is not None:
            found.append(_SourceMatch(TextSource.OWN, own))
        for tree in recent:
            if (match := tree.match(text, end, min_tokens)) is not None:
                found.append(_SourceMatch(TextSource.RECENT, match))
        return found


class _NextTokenMatches(NamedTuple):
    """The matches of all sources before a position, and whether one of them was confident when they were found."""

    position: int = -1
    matches: Sequence[_SourceMatch] = ()
    is_sure: bool = False


@dataclass(slots=True)
class _TrackedRequest:
    """A live request: its history, which only grows, and the indexes of its texts.

    `output` is the request's own and contains the first `num_learned` tokens of the history. `prompt` and `prediction` are
    indexed in turns and may be shared. While a request `is_queried`, its tokens are learned in each step, else several together.
    """

    request: Request
    history: Sequence[int]
    prediction: TextIndex | None
    prompt: TextIndex | None
    output: ContextTree
    num_learned: int
    next_matches: _NextTokenMatches = _NextTokenMatches()
    is_queried: bool = True

    @property
    def is_free(self) -> bool:
        """Whether the request leaves the choice of a tree to the policy."""
        return self.request.speculation.expansion is None

    @property
    def num_unlearned(self) -> int:
        """Committed tokens that are not learned yet."""
        return len(self.history) - self.num_learned

    def trees(self, recent: tuple[ContextTree, ...]) -> _Trees:
        """Return the trees that the request may draft from, with its tenant's `recent` trees."""
        prediction = None if self.prediction is None else self.prediction.tree
        prompt = None if self.prompt is None else self.prompt.tree
        return _Trees(prediction, prompt, recent)


class TextCache:
    """Cached text of all requests. `begin` and `end` bound a request's life; `advance` is called before a policy chooses.

    A match in own or recent text has at least `min_tokens` tokens. `recent` limits the stored outputs; by default none are
    stored. If `has_own_texts` is False, only predictions are drafted from. Distributions change in `advance` alone.
    """

    def __init__(self, min_tokens: int = 2, recent: RecentLimits = _NO_RECENT_TEXTS, has_own_texts: bool = True) -> None:
        self._min_tokens = min_tokens
        self.has_own_texts = has_own_texts
        self._agreement = Agreement()
        self._indexer = Indexer()
        self._recent = RecentTexts(recent if has_own_texts else _NO_RECENT_TEXTS, self._indexer)
        self._tracked: dict[str, _TrackedRequest] = {}

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Track a request; `history` is its committed tokens and grows with them."""
        if request.speculation.is_enabled and (self.has_own_texts or request.prediction_ids):
            self._tracked[request.request_id] = self._tracked_request(request, history)
            self._recent.touch(request.tenant)

    def _tracked_request(self, request: Request, history: Sequence[int]) -> _TrackedRequest:
        tenant, prompt_ids = request.tenant, request.prompt_ids
        prompt = prediction = None
        if request.prediction_ids:
            # The context lets the prediction match right after the prompt. Later its own tokens match, so that an output that
            # deviated can return to it.
            prediction = self._indexer.index_of(tenant, text_with_context(prompt_ids, request.prediction_ids))
        if self.has_own_texts:
            prompt = self._indexer.index_of(tenant, text_with_context((), prompt_ids))
        output = ContextTree()
        output.begin(prompt_ids)
        return _TrackedRequest(request, history, prediction, prompt, output, len(prompt_ids))

    def end(self, request_id: str) -> None:
        """Stop tracking a request and store its output for its tenant."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            prompt_len = len(tracked.request.prompt_ids)
            self._recent.add(tracked.request.tenant, tracked.request.prompt_ids, tracked.history[prompt_len:])

    def advance(self, running: Iterable[str]) -> bool:
        """Learn the newly committed tokens of these requests, and index a bounded number of pending tokens.

        Return whether a long chain may start after the new tokens of a request that leaves the choice of a tree to the policy.
        For requests whose tokens are learned the next matches are found here, because they will be queried again. A request that
        was not queried then counts as queried. For a queried request without new tokens a long chain may always start.
        """
        may_start_chain, grown, num_left = False, [], MAX_INDEXED_PER_STEP
        for request_id in running if self._tracked else ():
            one = self._tracked.get(request_id)
            if one is None or not (one.is_queried or one.num_unlearned >= _LEARNED_TOGETHER):
                continue
            if (is_queried := one.is_queried) and not one.num_unlearned:  # a new request
                may_start_chain, one.is_queried = may_start_chain or one.is_free, False
                continue
            num_left -= self._learn_committed(one, num_left)
            if one.num_unlearned:
                one.is_queried = True
            else:
                # The next token is learned too, since a match that is used must be observed.
                one.is_queried = not is_queried
                grown.append(one)
        self._indexer.advance(MAX_INDEXED_PER_STEP)
        for one in grown:
            may_start_chain = (self._next_matches(one).is_sure and one.is_free) or may_start_chain
        return may_start_chain

    def _learn_committed(self, tracked: _TrackedRequest, max_tokens: int) -> int:
        """Learn at most so many committed tokens, each with the matches before it; return how many.

        Matches found by a query are reused.
        """
        trees, history = self._trees_of(tracked), tracked.history
        cached = tracked.next_matches
        matches = cached.matches if cached.position == tracked.num_learned else None
        first, end = tracked.num_learned, min(len(history), tracked.num_learned + max_tokens)
        for position in range(first, end):
            token_id = history[position]
            own = None if tracked.prompt is None else tracked.output.append_and_match(token_id, self._min_tokens)
            if matches is None:
                matches = trees.matches(history, position, self._min_tokens, own)
            for source, match in matches:
                self._agreement.observe(source, match, token_id)
            matches = None
        tracked.num_learned, tracked.next_matches, tracked.is_queried = end, _NextTokenMatches(), False
        return end - first

    def _trees_of(self, tracked: _TrackedRequest) -> _Trees:
        return tracked.trees(self._recent.trees_of(tracked.request.tenant))

    def distribution_after(self, row: Row, path_ids: Sequence[int]) -> CachedDistribution | None:
        """Return the distribution after a row's committed tokens and a drafted path, or None without a match.

        The last tokens of a request that was not queried lately may not be learned yet. Such tokens are matched as a context, but
        not counted as continuations. A row of a request that is not tracked (in tests and tools) has its own tokens alone, which
        are then indexed for each call.
        """
        tracked, context = self._tracked.get(row.request_id), row.sampling_context(tuple(path_ids))
        if tracked is not None:
            tracked.is_queried = True
            return self._distribution(self._matches_after(tracked, context.path_ids), context)
        if not self.has_own_texts:
            return None
        return self._distribution(self._find_matches(_Trees(), _tree_of(row.history), row.history, context.path_ids), context)

    def distributions_after(self, places: Iterable[tuple[Row, Sequence[int]]]) -> list[CachedDistribution | None]:
        """Return the distributions at the nodes of one round: after the committed tokens of a row and a drafted path each."""
        return [self.distribution_after(row, path_ids) for row, path_ids in places]

    def chain_length(self, request_id: str, max_tokens: int, min_probability: float) -> int:
        """Return how many tokens after a request's history can be drafted as one chain.

        The cache must be confident of each token, given the tokens before it. The probability that all are accepted must be at
        least `min_probability`. The length is 0 while newly committed tokens are not learned.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not self.can_start_chain(request_id):
            return 0
        path_ids: tuple[int, ...] = ()
        probability = 1.0
        while len(path_ids) < max_tokens:
            context = SamplingContext(tracked.request.sampling, tracked.history, len(tracked.request.prompt_ids), path_ids)
            matches = self._matches_after(tracked, path_ids)
            if path_ids and not self._is_sure(matches):
                break
            distribution = self._distribution(matches, context)
            if distribution is None or not distribution.is_sure:
                break
            probability *= distribution.confidence
            if probability < min_probability:
                break
            path_ids += (max(distribution.probs, key=distribution.probs.__getitem__),)
        if path_ids:
            tracked.is_queried = True
        return len(path_ids)

    def can_start_chain(self, request_id: str) -> bool:
        """Return whether a source is confident of the token after a request's history. Otherwise no chain can start."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and not tracked.num_unlearned and self._next_matches(tracked).is_sure

    def _is_sure(self, matches: Sequence[_SourceMatch]) -> bool:
        return any(self._agreement.confidence(source, match) >= SURE_CONFIDENCE for source, match in matches)

    def _matches_after(self, tracked: _TrackedRequest, path_ids: Sequence[int]) -> Sequence[_SourceMatch]:
        """Return the sources' matches of a request's history and a path."""
        if path_ids:
            return self._find_matches(self._trees_of(tracked), tracked.output, tracked.history, path_ids)
        return self._next_matches(tracked).matches

    def _next_matches(self, tracked: _TrackedRequest) -> _NextTokenMatches:
        """Return the sources' matches of a request's history, cached until it grows."""
        position = len(tracked.history)
        if tracked.next_matches.position != position:
            matches = _snapshot(self._find_matches(self._trees_of(tracked), tracked.output, tracked.history, ()))
            tracked.next_matches = _NextTokenMatches(position, matches, self._is_sure(matches))
        return tracked.next_matches

    def _find_matches(
        self, trees: _Trees, output: ContextTree, history: Sequence[int], path_ids: Sequence[int]
    ) -> list[_SourceMatch]:
        """Return the sources' current matches; the trees go on updating their counts."""
        end = [*history[-MAX_CONTEXT:], *path_ids]
        return trees.matches(end, len(end), self._min_tokens, output.match(end, min_length=self._min_tokens))

    def _distribution(self, matches: Sequence[_SourceMatch], context: SamplingContext) -> CachedDistribution | None:
        if not matches:
            return None
        distribution = _mixture([(*one, self._agreement.confidence(*one)) for one in matches])
        num_generated = len(context.history) - context.num_prompt_tokens + len(context.path_ids)
        is_reliable = distribution.confidence >= SURE_CONFIDENCE
        is_sure = is_reliable and not may_suppress(context.sampling, distribution.probs, num_generated)
        return replace(distribution, is_sure=is_sure)


def _snapshot(matches: Sequence[_SourceMatch]) -> list[_SourceMatch]:
    """Return matches whose own counts stay as they are: the output learns the next token before these are observed with it."""
    return [_SourceMatch(source, match.copy() if source is TextSource.OWN else match) for source, match in matches]


def _tree_of(token_ids: Sequence[int]) -> ContextTree:
    tree = ContextTree()
    tree.begin()
    for token_id in token_ids:
        tree.append(token_id)
    return tree


def _mixture(matches: Sequence[tuple[TextSource, Match, float]]) -> CachedDistribution:
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
