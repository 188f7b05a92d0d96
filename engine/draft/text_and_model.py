"""A drafter that combines cached text with a model in one tree.

A node's distribution is the cache's if the cache is confident, the model's if the cache has no match, and else a mixture of both.
If the cache is confident, the model is not run: a trunk of cached text needs no draft pass. If a node below such a trunk needs
the model, the trunk is fed with it in one pass. A drafter that reads its parent's state cannot be fed in this way. Its paths that
begin with cached text continue with cached text alone. Shape key: P proposals, M known tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.core.step_plan import Feeding, Row
from engine.core.tree import ROOT
from engine.core.types import Request
from engine.draft.drafter import Drafter, FrontierNode, ModelPasses, Proposal, RequestFollower, TrimmedVocabulary
from engine.draft.text.matching import CachedDistribution
from engine.draft.text.mixture import extended_vocabulary, mixtures, vocabulary_of
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import DrafterWithTextCache, distributions_at
from engine.draft.trees.native_growth import HasNativeGrower, NativeTreeGrower

_MAX_DEFERRED = 128  # committed tokens of all rows whose feeding may be deferred in a step


@dataclass(frozen=True)
class _Query:
    """A node to be fed to the model: its index in the frontier, None for an ancestor of a frontier node."""

    node: FrontierNode
    index: int | None


class CombinedDrafter(DrafterWithTextCache):
    """Queries the cache first, and the model if the cache is not confident. Is fed as the model is."""

    def __init__(self, model: Drafter, texts: TextCache, vocab_size: int, device: torch.device) -> None:
        super().__init__(texts)
        self.name = f"{model.name}+ngram" if texts.has_own_texts else model.name
        self.feeding = model.feeding
        self.model = model
        self._follower = model if isinstance(model, RequestFollower) else None  # found once: checking a protocol is slow
        self._vocab_size = vocab_size
        self._device = device

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Track a request."""
        super().begin(request, history)
        if self._follower is not None:
            self._follower.begin(request, history)

    def advance(self, running: Iterable[str]) -> bool:
        """Learn the committed tokens of these requests; return whether a long chain may start after one of them."""
        running = [*running]
        model_has_news = self._follower is not None and self._follower.advance(running)
        return super().advance(running) or model_has_news

    def end(self, request_id: str) -> None:
        """Stop tracking a request."""
        super().end(request_id)
        if self._follower is not None:
            self._follower.end(request_id)

    def native_grower(self) -> NativeTreeGrower | None:
        """Return the model's grower of ranked trees, with cached text added."""
        grower = self.model.native_grower() if isinstance(self.model, HasNativeGrower) else None
        return None if grower is None else replace(grower, texts=self.texts)

    @property
    def _can_catch_up(self) -> bool:
        """Whether the model can be fed a node's ancestors in the same pass."""
        return self.feeding is not Feeding.TARGET_FEATURES

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the model the rows that cannot be deferred; propose at the roots."""
        cached = distributions_at(self.texts, roots)
        queries = [_Query(root, index) for index, (root, one) in enumerate(zip(roots, cached, strict=True)) if not _is_sure(one)]
        deferred = self._deferred_rows(roots, cached)
        fed = [row for row in rows if row.request_id not in deferred]
        of_model = self.model.feed(fed, [query.node for query in queries]) if fed else None
        sure = {index for index, one in enumerate(cached) if _is_sure(one)}
        unfed = {index for index in sure if not self._can_catch_up or roots[index].tree.row.request_id in deferred}
        return self._proposal(cached, _model_rows(queries, of_model), of_model, unfed)

    def _deferred_rows(self, roots: Sequence[FrontierNode], cached: Sequence[CachedDistribution | None]) -> set[str]:
        """Return the request ids of rows whose trees may not need the model, so that their tokens can be fed later together."""
        deferred: set[str] = set()
        num_tokens = 0
        for root, distribution in zip(roots, cached, strict=True):
            row = root.tree.row
            if self._can_catch_up and _is_sure(distribution) and num_tokens + len(row.draft_ids) <= _MAX_DEFERRED:
                num_tokens += len(row.draft_ids)
                deferred.add(row.request_id)
        return deferred

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at nodes. Nodes for which the cache is not confident are fed to the model, each after its unfed ancestors."""
        cached = distributions_at(self.texts, frontier)
        queries = list(self._queries(frontier, cached))
        late_passes = self._feed_late_roots(queries)
        of_model = self.model.extend([query.node for query in queries]) if queries else None
        for place in of_model.indices if of_model is not None else ():
            if queries[place].index is None:
                queries[place].node.tree.fed.add(queries[place].node.node)
        rows = _model_rows(queries, of_model)
        proposal = self._proposal(cached, rows, of_model, set(range(len(frontier))) - rows.keys())
        return replace(proposal, passes=late_passes + proposal.passes)

    def _queries(self, frontier: Sequence[FrontierNode], cached: Sequence[CachedDistribution | None]) -> Iterator[_Query]:
        """Yield the nodes to feed the model, each after its ancestors."""
        chosen: set[tuple[int, int]] = set()
        for index, (frontier_node, distribution) in enumerate(zip(frontier, cached, strict=True)):
            tree, path = frontier_node.tree, frontier_node.tree.path(frontier_node.node)
            unfed = [node for node in path[1:-1] if node not in tree.fed and (id(tree), node) not in chosen]
            if _is_sure(distribution) or ((unfed or ROOT not in tree.fed) and not self._can_catch_up):
                continue
            chosen.update((id(tree), node) for node in unfed)
            yield from (_Query(FrontierNode(tree, node, 1), None) for node in unfed)
            yield _Query(frontier_node, index)

    def _feed_late_roots(self, queries: Sequence[_Query]) -> ModelPasses:
        """Feed the deferred committed tokens of the queried trees; return the passes."""
        trees = {id(query.node.tree): query.node.tree for query in queries if ROOT not in query.node.tree.fed}
        if not trees:
            return ModelPasses()
        roots = [FrontierNode(tree, ROOT, 1) for tree in trees.values()]
        fed = self.model.feed([tree.row for tree in trees.values()], roots)
        for tree in trees.values():
            tree.fed.add(ROOT)
        return fed.passes

    def _proposal(
        self,
        cached: Sequence[CachedDistribution | None],
        rows: Mapping[int, int],
        of_model: Proposal | None,
        unfed: set[int],
    ) -> Proposal:
        """Return the model's distributions, the cache's, or mixtures where both propose.

        `rows[index]` is the row of the model's proposal for node `index` of the frontier.
        """
        known = {index: distribution for index, distribution in enumerate(cached) if distribution is not None}
        if of_model is not None and not known and tuple(rows) == of_model.indices:
            return of_model
        indices = sorted({*known, *rows})
        if of_model is None:
            vocab: TrimmedVocabulary | None = vocabulary_of([*known.values()], self._vocab_size, self._device)
        else:
            vocab = extended_vocabulary([*known.values()], of_model.vocab)
        logits_PM, origins = mixtures(
            None if of_model is None else of_model.logits_PM,
            [rows.get(index) for index in indices],
            [cached[index] for index in indices],
            vocab,
            self._vocab_size,
            self._device,
        )
        origins_of = {index: of_node for index, of_node in zip(indices, origins, strict=True) if of_node}
        return Proposal(tuple(indices), logits_PM, frozenset(unfed), origins_of, _passes_of(of_model), vocab)


def _is_sure(distribution: CachedDistribution | None) -> bool:
    return distribution is not None and distribution.is_sure


def _passes_of(of_model: Proposal | None) -> ModelPasses:
    return ModelPasses() if of_model is None else of_model.passes


def _model_rows(queries: Sequence[_Query], of_model: Proposal | None) -> dict[int, int]:
    """Return the model's row for each frontier index that it proposes for."""
    if of_model is None:
        return {}
    return {index: row for row, place in enumerate(of_model.indices) if (index := queries[place].index) is not None}
