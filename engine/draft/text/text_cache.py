"""The texts a request may draft from: its own, its prediction, and what was said lately to its tenant. Nothing else, ever.

Each is in a ContextTree, as far as it is indexed; the law after a text is the mixture of what followed its longest known end in
each, weighted by how well such matches agreed with what came. Weights and laws depend on committed tokens, on the path, on how
many steps there were and in which of them somebody asked, never on a draw from them. Knows token ids and requests' lives, neither
token trees nor tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row, SamplingContext
from engine.core.types import Request
from engine.draft.text.agreement import Agreement, TextSource
from engine.draft.text.edited import may_hinder
from engine.draft.text.recent_texts import RecentLimits, RecentTexts
from engine.draft.text.suffix_counts import MAX_CONTEXT, ContextTree, Match, joined
from engine.draft.text.text_index import Indexer, TextIndex, text_after

SURE = 0.8  # chance of a cached law from which on no model is asked
MOST_INDEXED = 512  # tokens of all texts that are indexed in a step: milliseconds, and no slower than prompts are fed
_FOLLOWED_TOGETHER = 8  # tokens of a text that nobody drafts from: following it costs less so than token by token
_NOTHING = RecentLimits()


@dataclass(frozen=True, slots=True)
class CachedLaw:
    """What cached text says comes next: probabilities that sum to 1, how far they are trusted, which tokens are predicted ones.

    `chance` is that of a draw from the law to be the token that the bare model says. A law `is_sure` if that is high and the
    request does nothing to its logits that may hinder one of the tokens: a model need not be asked.
    """

    odds: dict[int, float]
    chance: float
    predicted: frozenset[int]
    is_sure: bool = False

    def source_of(self, token_id: int) -> DraftSource:
        """Return where a token of the law comes from: the prediction if that foretells it too."""
        return DraftSource.PREDICTION if token_id in self.predicted else DraftSource.CACHE

    @property
    def origins(self) -> dict[int, Origin]:
        """Where each token comes from, if nobody else says anything."""
        return {token_id: Origin(self.source_of(token_id), True) for token_id in self.odds}

    def origins_beside(self, is_rather_cached: Iterable[bool]) -> dict[int, Origin]:
        """Return where tokens come from beside a model, of which each has more from the cache or not, in the law's order."""
        return {
            token_id: Origin(self.source_of(token_id), is_rather)
            for token_id, is_rather in zip(self.odds, is_rather_cached, strict=True)
            if is_rather or token_id in self.predicted
        }


class _Told(NamedTuple):
    """What one source says."""

    source: TextSource
    match: Match


class _Trees(NamedTuple):
    """What one request may draft from besides its output, by source."""

    prediction: ContextTree | None = None
    prompt: ContextTree | None = None
    recent: tuple[ContextTree, ...] = ()

    def told(self, text: Sequence[int], end: int, min_tokens: int, own: Match | None) -> list[_Told]:
        """Return what each source knows of what follows the first `end` tokens of a text; its output knows `own`.

        One token of a prediction says something, elsewhere it says little.
        """
        prediction, prompt, recent = self
        told: list[_Told] = []
        if prediction is not None and (match := prediction.match(text, end)) is not None:
            told.append(_Told(TextSource.PREDICTION, match))
        if prompt is not None and (match := prompt.match(text, end, min_tokens)) is not None:
            own = match if own is None else joined(match, own)
        if own is not None:
            told.append(_Told(TextSource.OWN, own))
        for tree in recent:
            if (match := tree.match(text, end, min_tokens)) is not None:
                told.append(_Told(TextSource.RECENT, match))
        return told


class _Said(NamedTuple):
    """What all sources said of the token at the position that was asked about last, and whether one was sure then."""

    position: int = -1
    told: Sequence[_Told] = ()
    is_sure: bool = False


@dataclass(slots=True)
class _Followed:
    """A living request: its text, which only grows, and what is indexed of it and of its prediction.

    `output` is nobody else's and follows the text; `prompt` and `prediction` come in their turns. Who `is_asked` about is
    followed token by token, others some tokens at a time.
    """

    request: Request
    history: Sequence[int]
    prediction: TextIndex | None
    prompt: TextIndex | None
    output: ContextTree
    num_known: int
    said: _Said = _Said()
    is_asked: bool = True

    @property
    def is_free(self) -> bool:
        """Whether its request asks for no tree of its own."""
        return self.request.speculation.expansion is None

    @property
    def num_unknown(self) -> int:
        """Tokens of its text that have not been followed."""
        return len(self.history) - self.num_known

    def trees(self, recent: tuple[ContextTree, ...]) -> _Trees:
        """Return what the request may draft from now."""
        prediction = None if self.prediction is None else self.prediction.tree
        prompt = None if self.prompt is None else self.prompt.tree
        return _Trees(prediction, prompt, recent)


class TextCache:
    """Owns what is cached of all requests. `begin` and `end` tell of their lives, `advance` of each step.

    A match in own or recent text has `min_tokens` tokens at least. `recent` bounds what is remembered of finished outputs:
    nothing, as it stands. With `has_own_texts` False only predictions are drafted from. Laws change in `advance` alone.
    """

    def __init__(self, min_tokens: int = 2, recent: RecentLimits = _NOTHING, has_own_texts: bool = True) -> None:
        self._min_tokens = min_tokens
        self.has_own_texts = has_own_texts
        self._agreement = Agreement()
        self._indexer = Indexer()
        self._recent = RecentTexts(recent if has_own_texts else _NOTHING, self._indexer)
        self._followed: dict[str, _Followed] = {}
        self._is_asked, self._num_waited = False, 0  # whether anybody was since texts were last followed, and steps since

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Follow a request from now on; `history` is its text, which grows as it is committed."""
        if request.speculation.is_enabled and (self.has_own_texts or request.prediction_ids):
            self._followed[request.request_id] = self._followed_of(request, history)
            self._is_asked = True
            self._recent.use(request.tenant)

    def _followed_of(self, request: Request, history: Sequence[int]) -> _Followed:
        tenant, prompt_ids = request.tenant, request.prompt_ids
        prompt = prediction = None
        if request.prediction_ids:
            # It is expected where the prompt ends, and found again by what was just said after it was left.
            prediction = self._indexer.index_of(tenant, text_after(prompt_ids, request.prediction_ids))
        if self.has_own_texts:
            prompt = self._indexer.index_of(tenant, text_after((), prompt_ids))
        output = ContextTree()
        output.begin(prompt_ids)
        return _Followed(request, history, prediction, prompt, output, len(prompt_ids))

    def end(self, request_id: str) -> None:
        """Forget a request; its output stays with its tenant."""
        one = self._followed.pop(request_id, None)
        if one is not None:
            prompt_len = len(one.request.prompt_ids)
            self._recent.add(one.request.tenant, one.request.prompt_ids, one.history[prompt_len:])

    def advance(self, running: Iterable[str]) -> bool:
        """Learn what was committed of these requests since, and index a bounded number of tokens of what waits.

        Of those that have grown and that somebody asked about, what is said of the next token is looked up: it will be asked.
        Return whether a run may begin at the end of some text that has grown and whose request leaves its trees to us: of one
        that nobody asked about that is not told before somebody looks.
        """
        self._num_waited += 1
        may_begin_run, asked = False, []
        if self._is_asked or self._num_waited >= _FOLLOWED_TOGETHER:
            self._is_asked, self._num_waited = False, 0
            followed = [one for one in map(self._followed.get, running) if one is not None]
            asked = [one for one in followed if one.is_asked and one.num_unknown]
            for one in followed:
                # Half of them will do where somebody else was asked about meanwhile: none waits twice as long.
                if one.is_asked or 2 * one.num_unknown >= _FOLLOWED_TOGETHER:
                    may_begin_run = may_begin_run or (one.is_free and not (one.is_asked and one.num_unknown))
                    self._follow(one)
        self._indexer.advance(MOST_INDEXED)
        for one in asked:
            may_begin_run = (self._said(one).is_sure and one.is_free) or may_begin_run
        return may_begin_run

    def _follow(self, one: _Followed) -> None:
        """Learn the tokens that were committed since, and how well each was foretold before it was known."""
        trees, history = self._trees_of(one), one.history
        told = one.said.told if one.said.position == one.num_known else None
        for position in range(one.num_known, len(history)):
            token_id = history[position]
            own = None if one.prompt is None else one.output.learn(token_id, self._min_tokens)
            if told is None:
                told = trees.told(history, position, self._min_tokens, own)
            for source, match in told:
                self._agreement.observe(source, match, token_id)
            told = None
        one.num_known, one.said, one.is_asked = len(history), _Said(), False

    def _trees_of(self, one: _Followed) -> _Trees:
        return one.trees(self._recent.trees_of(one.request.tenant))

    def probs_after(self, row: Row, path_ids: Sequence[int]) -> CachedLaw | None:
        """Return the law after a row's text and these drafted tokens; None where nothing is known of it.

        Of a text that nobody asked about for a while its last tokens are not followed yet: they are known as what stands before
        the next one, and not as what came after others.

        A row whose request was not begun here (in tests and tools) has its own text alone, read afresh each time.
        """
        one, context = self._followed.get(row.request_id), row.sampling_context(tuple(path_ids))
        if one is not None:
            one.is_asked = self._is_asked = True
            return self._probs(self._told(one, context.path_ids), context)
        if not self.has_own_texts:
            return None
        return self._probs(self._told_by(_Trees(), _tree_of(row.history), row.history, context.path_ids), context)

    def run(self, request_id: str, most_tokens: int, least_chance: float) -> int:
        """Return how many tokens after a request's text are foretold so surely that they should be drafted as one chain.

        Each of them surely after those before it, and all of them together with `least_chance` at least. Of a text that is not
        followed token by token this is told when some tokens have come together.
        """
        one = self._followed.get(request_id)
        if one is None or not self.begins_run(request_id):
            return 0
        path_ids: tuple[int, ...] = ()
        chance = 1.0
        while len(path_ids) < most_tokens:
            context = SamplingContext(one.request.sampling, one.history, len(one.request.prompt_ids), path_ids)
            told = self._told(one, path_ids)
            if path_ids and not self._is_sure(told):
                break
            distribution = self._probs(told, context)
            if distribution is None or not distribution.is_sure or (chance := chance * distribution.chance) < least_chance:
                break
            path_ids += (max(distribution.odds, key=lambda token_id: distribution.odds[token_id]),)
        if path_ids:
            one.is_asked = self._is_asked = True
        return len(path_ids)

    def begins_run(self, request_id: str) -> bool:
        """Return whether a source is sure of the token after a request's text; where none is there is no run."""
        one = self._followed.get(request_id)
        return one is not None and not one.num_unknown and self._said(one).is_sure

    def _is_sure(self, told: Sequence[_Told]) -> bool:
        return any(self._agreement.chance(source, match) >= SURE for source, match in told)

    def _told(self, one: _Followed, path_ids: Sequence[int]) -> Sequence[_Told]:
        """Return what the sources say of the token after a request's text and a path."""
        if path_ids:
            return self._told_by(self._trees_of(one), one.output, one.history, path_ids)
        return self._said(one).told

    def _said(self, one: _Followed) -> _Said:
        """Return what is said of the token after a request's text."""
        position = len(one.history)
        if one.said.position != position:
            told = _kept(self._told_by(self._trees_of(one), one.output, one.history, ()))
            one.said = _Said(position, told, self._is_sure(told))
        return one.said

    def _told_by(self, trees: _Trees, output: ContextTree, history: Sequence[int], path_ids: Sequence[int]) -> list[_Told]:
        """Return what is said now: the trees go on counting in it."""
        end = [*history[-MAX_CONTEXT:], *path_ids]
        return trees.told(end, len(end), self._min_tokens, output.match(end, least=self._min_tokens))

    def _probs(self, told: Sequence[_Told], context: SamplingContext) -> CachedLaw | None:
        if not told:
            return None
        distribution = _mixture([(*one, self._agreement.chance(*one)) for one in told])
        num_generated = len(context.history) - context.num_prompt_tokens + len(context.path_ids)
        is_sure = distribution.chance >= SURE and not may_hinder(context.sampling, distribution.odds, num_generated)
        return replace(distribution, is_sure=is_sure)


def _kept(told: Sequence[_Told]) -> list[_Told]:
    """Return what is said as it is now: the output learns the token that comes before that is compared with what was said."""
    return [_Told(source, match.copy() if source is TextSource.OWN else match) for source, match in told]


def _tree_of(token_ids: Sequence[int]) -> ContextTree:
    tree = ContextTree()
    tree.begin()
    for token_id in token_ids:
        tree.append(token_id)
    return tree


def _mixture(told: Sequence[tuple[TextSource, Match, float]]) -> CachedLaw:
    """Mix what the sources say, each weighted by the odds of its chance. What a prediction foretells at all is predicted."""
    weights = [chance / (1.0 - chance) for _, _, chance in told]
    whole = sum(weights)
    odds: dict[int, float] = {}
    predicted: set[int] = set()
    for (source, match, _), weight in zip(told, weights, strict=True):
        share = weight / whole / sum(match.counts.values())
        for token_id, count in match.counts.items():
            odds[token_id] = odds.get(token_id, 0.0) + share * count
        if source is TextSource.PREDICTION:
            predicted.update(match.counts)
    chance = sum(chance * weight for (_, _, chance), weight in zip(told, weights, strict=True)) / whole
    return CachedLaw(odds, chance, frozenset(predicted))
