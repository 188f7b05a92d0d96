"""Cached text of each request: its own tokens, its prediction, and its tenant's recent outputs. No other text is used.

Texts are matched as far as they are indexed. Distributions depend on committed tokens, on the path, and on the steps and
queries so far. They never depend on a draw from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.core.step_plan import Row, SamplingContext
from engine.core.types import Request
from engine.draft.text.edited import may_suppress
from engine.draft.text.matching import SURE_CONFIDENCE, CachedDistribution, NativeTexts, RequestTexts, matcher_of
from engine.draft.text.recent_texts import RecentLimits, RecentTexts
from engine.draft.text.suffix_counts import MAX_CONTEXT
from engine.draft.text.text_index import Indexer, TextIndex, text_with_context

MAX_INDEXED_PER_STEP = 512  # tokens of all texts: a few milliseconds in Python, and as fast as prompts are prefilled
_LEARNED_TOGETHER = 8  # tokens of a request that is not queried
_NO_RECENT_TEXTS = RecentLimits()


@dataclass(slots=True)
class _TrackedRequest:
    """A live request: its history, which only grows, and its texts, which contain the first `num_learned` tokens of the history.

    The `indexes` of its prompt and its prediction are filled in turns and may be shared. While a request `is_queried`,
    its tokens are learned in each step, else several together. `is_sure`: whether a source was confident of the token after
    `num_sure` tokens.
    """

    request: Request
    history: Sequence[int]
    texts: RequestTexts
    indexes: Sequence[TextIndex | None]
    num_learned: int
    num_sure: int = -1
    is_sure: bool = False
    is_queried: bool = True

    @property
    def is_free(self) -> bool:
        """Whether the request leaves the choice of a tree to the policy."""
        return self.request.speculation.expansion is None

    @property
    def num_unlearned(self) -> int:
        """Committed tokens that are not learned yet."""
        return len(self.history) - self.num_learned


class TextCache:
    """Cached text of all requests. `begin` and `end` bound a request's life; `advance` is called before a policy chooses.

    A match in own or recent text has at least `min_tokens` tokens. `recent` limits the stored outputs; by default none are
    stored. If `has_own_texts` is False, only predictions are drafted from. Distributions change in `advance` alone.
    """

    def __init__(self, min_tokens: int = 2, recent: RecentLimits = _NO_RECENT_TEXTS, has_own_texts: bool = True) -> None:
        self.has_own_texts = has_own_texts
        self._matcher = matcher_of(min_tokens)
        self._indexer = Indexer(self._matcher.new_tree)
        self._recent = RecentTexts(recent if has_own_texts else _NO_RECENT_TEXTS, self._indexer)
        self._tracked: dict[str, _TrackedRequest] = {}

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Track a request; `history` is its committed tokens and grows with them."""
        if request.speculation.is_enabled and (self.has_own_texts or request.prediction_ids):
            self._tracked[request.request_id] = self._tracked_request(request, history)
            self._recent.touch(request.tenant)

    def _tracked_request(self, request: Request, history: Sequence[int]) -> _TrackedRequest:
        tenant, prompt_ids = request.tenant, request.prompt_ids
        prompt = prediction = output = None
        if request.prediction_ids:
            # The context lets the prediction match right after the prompt. Later its own tokens match, so that an output that
            # deviated can return to it.
            prediction = self._indexer.index_of(tenant, text_with_context(prompt_ids, request.prediction_ids))
        if self.has_own_texts:
            prompt = self._indexer.index_of(tenant, text_with_context((), prompt_ids))
            output = self._matcher.new_tree()
            output.begin(prompt_ids[-MAX_CONTEXT:])
        trees = (None if index is None else index.tree for index in (prediction, prompt))
        own = self._matcher.texts_of(next(trees), next(trees), output)
        return _TrackedRequest(request, history, own, (prediction, prompt), len(prompt_ids))

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
        self._indexer.advance(MAX_INDEXED_PER_STEP)
        may_start_chain, num_left = False, MAX_INDEXED_PER_STEP
        for request_id in running if self._tracked else ():
            one = self._tracked.get(request_id)
            if one is None or not (one.is_queried or one.num_unlearned >= _LEARNED_TOGETHER):
                continue
            if (is_queried := one.is_queried) and not one.num_unlearned:  # a new request
                may_start_chain, one.is_queried = may_start_chain or one.is_free, False
                continue
            first, one.num_learned = one.num_learned, min(len(one.history), one.num_learned + num_left)
            num_left -= one.num_learned - first
            one.is_sure, one.num_sure = self._texts_of(one).learn(one.history, first, one.num_learned), one.num_learned
            # The next token is learned too, since a match that is used must be observed.
            one.is_queried = one.num_unlearned > 0 or not is_queried
            may_start_chain = may_start_chain or (one.is_sure and one.is_free and not one.num_unlearned)
        return may_start_chain

    def _texts_of(self, tracked: _TrackedRequest) -> RequestTexts:
        tracked.texts.recent = self._recent.trees_of(tracked.request.tenant)
        return tracked.texts

    def distribution_after(self, row: Row, path_ids: Sequence[int]) -> CachedDistribution | None:
        """Return the distribution after a row's committed tokens and a drafted path, or None without a match.

        The last tokens of a request that was not queried lately may not be learned yet. Such tokens are matched as a context, but
        not counted as continuations. A row of a request that is not tracked (in tests and tools) has its own tokens alone, which
        are then indexed for each call.
        """
        own = self._queried_texts(row)
        return None if own is None else self._distribution(own, row.sampling_context(tuple(path_ids)))

    def native_texts(self, row: Row) -> NativeTexts | None:
        """Return the texts of a row's request for the library, which grows its tree; None without any."""
        own = self._queried_texts(row)
        if own is None:
            return None
        assert isinstance(own, NativeTexts)
        tracked = self._tracked.get(row.request_id)
        num_new = 0 if tracked is None else tracked.num_unlearned
        own.set_tokens(row.history[-MAX_CONTEXT - num_new :], num_new)
        return own

    def note_learned(self, request_id: str, num_tokens: int, is_sure: bool) -> None:
        """Record that the library has learned this many further tokens, and whether a source is sure of the token after them."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and num_tokens:
            tracked.num_learned += num_tokens
            tracked.is_sure, tracked.num_sure = is_sure, tracked.num_learned

    def _queried_texts(self, row: Row) -> RequestTexts | None:
        tracked = self._tracked.get(row.request_id)
        if tracked is not None:
            tracked.is_queried = True
            return self._texts_of(tracked)
        if not self.has_own_texts:
            return None
        output = self._matcher.new_tree()
        output.begin()
        output.extend(row.history)
        return self._matcher.texts_of(output=output)

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
        probability, own = 1.0, self._texts_of(tracked)
        while len(path_ids) < max_tokens:
            context = SamplingContext(tracked.request.sampling, tracked.history, len(tracked.request.prompt_ids), path_ids)
            distribution = self._distribution(own, context)
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
        if tracked is None or tracked.num_unlearned:
            return False
        if tracked.num_sure != (end := tracked.num_learned):
            tracked.is_sure, tracked.num_sure = self._texts_of(tracked).learn(tracked.history, end, end), end
        return tracked.is_sure

    def _distribution(self, own: RequestTexts, context: SamplingContext) -> CachedDistribution | None:
        distribution = own.distribution([*context.history[-MAX_CONTEXT:], *context.path_ids])
        if distribution is None:
            return None
        num_generated = len(context.history) - context.num_prompt_tokens + len(context.path_ids)
        is_reliable = distribution.confidence >= SURE_CONFIDENCE
        is_sure = is_reliable and not may_suppress(context.sampling, distribution.probs, num_generated)
        return replace(distribution, is_sure=is_sure)
