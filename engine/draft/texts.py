"""The texts a request may draft from: its own, its prediction, and what was said lately to its tenant. Nothing else, ever.

Each is a ContextTree; the law after a text is the mixture of what followed its longest known end in each, weighted by how well
such matches agreed with what came. Weights and laws depend on committed tokens and on the path alone, never on a draw from them.
Knows token ids and requests' lives, neither trees nor tensors.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.draft.agreement import Agreement, TextSource
from engine.draft.context_tree import MAX_CONTEXT, ContextTree, Match
from engine.plan import Row
from engine.types import DraftSource, Request

SURE = 0.8  # chance of a cached law from which on no model is asked
_MAX_TENANTS = 64
_LEAST_RUN = 0.5  # chance of the whole of a run


@dataclass(frozen=True, slots=True)
class CachedLaw:
    """What cached text says comes next: probabilities that sum to 1, how far they are trusted, which tokens are predicted ones.

    `chance` is that of a draw from the law to be the token that comes.
    """

    odds: dict[int, float]
    chance: float
    predicted: frozenset[int]

    def source_of(self, token_id: int) -> DraftSource:
        """Return where a token of the law comes from: the prediction if that foretells it too."""
        return DraftSource.PREDICTION if token_id in self.predicted else DraftSource.CACHE

    @property
    def origins(self) -> dict[int, DraftSource]:
        """Where each token comes from."""
        return {token_id: self.source_of(token_id) for token_id in self.odds}


class _Told(NamedTuple):
    """What one source says."""

    source: TextSource
    match: Match


class _Recent:
    """One tenant's outputs in two generations: when the younger has half the tokens, the elder is forgotten."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_young = 0
        self.generations = [ContextTree(), ContextTree()]

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Remember an output, or the last of it that there is room for."""
        if not output:
            return
        most = self._most_tokens // 2
        text, num_kept = [*prompt[-MAX_CONTEXT:], *output], min(len(output), most)
        if self._num_young + num_kept > most:
            self.generations = [ContextTree(), self.generations[0]]
            self._num_young = 0
        self._num_young += num_kept
        self.generations[0].begin(text[: len(text) - num_kept])
        for token_id in text[len(text) - num_kept :]:
            self.generations[0].append(token_id)


class _Trees(NamedTuple):
    """A request's own text, if that is drafted from, and its prediction, if it has one."""

    own: ContextTree | None
    prediction: ContextTree | None


def _tree_of(token_ids: Sequence[int] = (), context: Sequence[int] = ()) -> ContextTree:
    tree = ContextTree()
    tree.begin(context)
    for token_id in token_ids:
        tree.append(token_id)
    return tree


class _RequestTexts:
    """What one request may draft from. It follows the request's text, which only grows, when it is asked."""

    def __init__(self, history: Sequence[int], prompt_len: int, trees: _Trees, recent: _Recent | None) -> None:
        self.history = history
        self.prompt_len = prompt_len
        self.recent = recent
        self._trees = trees
        self._num_known = 0

    def follow(self, agreement: Agreement, min_tokens: int) -> None:
        """Learn the tokens that were committed since: first how well they were foretold, then the tokens."""
        for position in range(self._num_known, len(self.history)):
            token_id = self.history[position]
            if position >= self.prompt_len:
                context = self.history[max(0, position - MAX_CONTEXT) : position]
                for told in self.told(context, min_tokens):
                    agreement.observe(told.source, told.match, token_id)
            if self._trees.own is not None:
                self._trees.own.append(token_id)
        self._num_known = len(self.history)

    def told(self, context: Sequence[int], min_tokens: int) -> Iterator[_Told]:
        """Yield what each source knows of what follows. One token of a prediction says something, elsewhere it says little."""
        own, prediction = self._trees
        if prediction is not None and (match := prediction.match(context)) is not None:
            yield _Told(TextSource.PREDICTION, match)
        if own is not None and (match := own.match(context)) is not None and match.length >= min_tokens:
            yield _Told(TextSource.OWN, match)
        for tree in self.recent.generations if self.recent is not None else ():
            if (match := tree.match(context)) is not None and match.length >= min_tokens:
                yield _Told(TextSource.RECENT, match)


class TextCache:
    """Owns what is cached of all requests. `begin` and `end` tell of their lives.

    A match in own or recent text has `min_tokens` tokens at least. `recent_tokens` bounds each tenant's remembered outputs, 0
    remembers none; tenants are forgotten least lately used first. With `has_own_texts` False only predictions are drafted from.
    """

    def __init__(self, min_tokens: int = 2, recent_tokens: int = 0, has_own_texts: bool = True) -> None:
        self._min_tokens = min_tokens
        self._recent_tokens = recent_tokens
        self.has_own_texts = has_own_texts
        self._agreement = Agreement()
        self._requests: dict[str, _RequestTexts] = {}
        self._tenants: OrderedDict[str, _Recent] = OrderedDict()

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Follow a request from now on; `history` is its text, which grows as it is committed."""
        if request.speculation.is_enabled and (self.has_own_texts or request.prediction_ids):
            self._requests[request.request_id] = self._texts_of(request, history)

    def _texts_of(self, request: Request, history: Sequence[int]) -> _RequestTexts:
        own = _tree_of() if self.has_own_texts else None
        # A prediction is expected where the prompt ends, and found again by what was just said after it was left.
        prediction = _tree_of(request.prediction_ids, request.prompt_ids) if request.prediction_ids else None
        return _RequestTexts(history, len(request.prompt_ids), _Trees(own, prediction), self._recent_of(request.tenant))

    def end(self, request_id: str) -> None:
        """Forget a request; its output stays with its tenant."""
        texts = self._requests.pop(request_id, None)
        if texts is not None and texts.recent is not None:
            texts.recent.add(texts.history[: texts.prompt_len], texts.history[texts.prompt_len :])

    def _recent_of(self, tenant: str) -> _Recent | None:
        """Return what is remembered for a tenant; nothing is for nobody."""
        if not tenant or not self._recent_tokens or not self.has_own_texts:
            return None
        if tenant not in self._tenants:
            self._tenants[tenant] = _Recent(self._recent_tokens)
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return self._tenants[tenant]

    def law_after(self, row: Row, path_ids: Sequence[int]) -> CachedLaw | None:
        """Return the law after a row's text and these drafted tokens; None where nothing is known of it.

        A row whose request was not begun here (in tests and tools) has its own text alone, read afresh each time.
        """
        texts = self._requests.get(row.request_id)
        if texts is None and self.has_own_texts:
            texts = _RequestTexts(row.history, len(row.history), _Trees(_tree_of(), None), None)
        return None if texts is None else self._law(texts, path_ids)

    def run(self, request_id: str, most_tokens: int) -> int:
        """Return how many tokens after a request's text are foretold so surely that they should be drafted as one chain."""
        texts = self._requests.get(request_id)
        path_ids: list[int] = []
        chance = 1.0
        while texts is not None and len(path_ids) < most_tokens:
            law = self._law(texts, path_ids)
            if law is None or law.chance < SURE or (chance := chance * law.chance) < _LEAST_RUN:
                break
            path_ids.append(max(law.odds, key=lambda token_id: law.odds[token_id]))
        return len(path_ids)

    def _law(self, texts: _RequestTexts, path_ids: Sequence[int]) -> CachedLaw | None:
        texts.follow(self._agreement, self._min_tokens)
        context = [*texts.history[-MAX_CONTEXT:], *path_ids]
        told = [(*one, self._agreement.chance(*one)) for one in texts.told(context, self._min_tokens)]
        if not told:
            return None
        return _mixture(told)


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
