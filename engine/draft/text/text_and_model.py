"""Cached text and a model in one tree: a node's law is the cache's where that is sure, the model's where the cache knows nothing,
a mixture of both between the two.

Where the cache is sure the model is not run: a trunk of cached text costs no draft pass. A node below such a trunk that needs the
model has the trunk fed with it, in one pass. A drafter that reads its parent's state cannot catch up so: there a path that began
on the cache stays on it. Shape key: P proposals, M tokens known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.core.step_plan import Feeding, Row
from engine.core.tree import ROOT
from engine.draft.drafter import Drafter, FrontierNode, ModelPasses, Proposal, TrimmedVocabulary
from engine.draft.text.mixture import mixtures, vocabulary_of, with_tokens_of
from engine.draft.text.text_cache import CachedLaw, TextCache
from engine.draft.text.text_drafter import FollowsTexts, probs_at
from engine.draft.trees.native_growth import HasNativeGrower, NativeTreeGrower

_MOST_DEFERRED = 128  # committed tokens of all rows that the model may be behind in a step


@dataclass(frozen=True)
class _Asked:
    """A node to be put to the model: its place in the frontier, or None for an ancestor that is fed for a node's sake."""

    node: FrontierNode
    index: int | None


class CombinedDrafter(FollowsTexts):
    """Asks the cache first and the model where that leaves something open. Is fed as the model is."""

    def __init__(self, model: Drafter, texts: TextCache, vocab_size: int, device: torch.device) -> None:
        super().__init__(texts)
        self.name = f"{model.name}+ngram" if texts.has_own_texts else model.name
        self.feeding = model.feeding
        self._model = model
        self._vocab_size = vocab_size
        self._device = device

    def native_grower(self) -> NativeTreeGrower | None:
        """Return what grows ranked trees of the model's and of cached text."""
        own = self._model.native_grower() if isinstance(self._model, HasNativeGrower) else None
        return None if own is None else replace(own, texts=self.texts)

    @property
    def _can_catch_up(self) -> bool:
        """Whether the model can be fed a node's ancestors beside it."""
        return self.feeding is not Feeding.TARGET_FEATURES

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the model, but for what can wait; propose at the roots."""
        probs = [probs_at(self.texts, root) for root in roots]
        asked = [
            _Asked(root, index)
            for index, (root, distribution) in enumerate(zip(roots, probs, strict=True))
            if not _is_sure(distribution)
        ]
        waiting = self._waiting(roots, probs)
        fed = [row for row in rows if row.request_id not in waiting]
        answers = self._model.feed(fed, [one.node for one in asked]) if fed else None
        is_unasked = {index for index, distribution in enumerate(probs) if _is_sure(distribution)}
        unfed = {i for i in is_unasked if not self._can_catch_up or roots[i].tree.row.request_id in waiting}
        return self._proposal(probs, _rows_of(asked, answers), answers, unfed)

    def _waiting(self, roots: Sequence[FrontierNode], probs: Sequence[CachedLaw | None]) -> set[str]:
        """Return the rows whose tree may do without the model, so that their tokens can be fed later, many at a time."""
        waiting: set[str] = set()
        num_deferred = 0
        for root, distribution in zip(roots, probs, strict=True):
            row = root.tree.row
            if self._can_catch_up and _is_sure(distribution) and num_deferred + len(row.draft_ids) <= _MOST_DEFERRED:
                num_deferred += len(row.draft_ids)
                waiting.add(row.request_id)
        return waiting

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at nodes; feed the model those that the cache is not sure of, each after the ancestors it has not seen."""
        probs = [probs_at(self.texts, asked) for asked in frontier]
        asked = list(self._asked(frontier, probs))
        late = self._feed_late_roots(asked)
        answers = self._model.extend([one.node for one in asked]) if asked else None
        for place in answers.indices if answers is not None else ():
            if asked[place].index is None:
                asked[place].node.tree.fed.add(asked[place].node.node)
        places = _rows_of(asked, answers)
        proposal = self._proposal(probs, places, answers, set(range(len(frontier))) - places.keys())
        return replace(proposal, passes=late + proposal.passes)

    def _asked(self, frontier: Sequence[FrontierNode], probs: Sequence[CachedLaw | None]) -> Iterator[_Asked]:
        """Yield what the model is to be fed, each node after its ancestors."""
        chosen: set[tuple[int, int]] = set()
        for index, (asked, distribution) in enumerate(zip(frontier, probs, strict=True)):
            tree = asked.tree
            unseen = [node for node in tree.path(asked.node)[1:-1] if node not in tree.fed and (id(tree), node) not in chosen]
            if _is_sure(distribution) or ((unseen or ROOT not in tree.fed) and not self._can_catch_up):
                continue
            chosen.update((id(tree), node) for node in unseen)
            yield from (_Asked(FrontierNode(tree, node, 1), None) for node in unseen)
            yield _Asked(asked, index)

    def _feed_late_roots(self, asked: Sequence[_Asked]) -> ModelPasses:
        """Feed the committed tokens of trees that went without the model so far; return what that took."""
        trees = {id(one.node.tree): one.node.tree for one in asked if ROOT not in one.node.tree.fed}
        if not trees:
            return ModelPasses()
        roots = [FrontierNode(tree, ROOT, 1) for tree in trees.values()]
        fed = self._model.feed([tree.row for tree in trees.values()], roots)
        for tree in trees.values():
            tree.fed.add(ROOT)
        return fed.passes

    def _proposal(
        self, probs: Sequence[CachedLaw | None], rows: Mapping[int, int], answers: Proposal | None, unfed: set[int]
    ) -> Proposal:
        """Return the model's laws, the cache's where there is none of the model, and mixtures where there are both.

        `rows[index]` is the row of `answers` that the model said of node `index` of the frontier.
        """
        known = {index: distribution for index, distribution in enumerate(probs) if distribution is not None}
        if answers is not None and not known and tuple(rows) == answers.indices:
            return answers
        indices = sorted({*known, *rows})
        if answers is None:
            vocab: TrimmedVocabulary | None = vocabulary_of([*known.values()], self._vocab_size, self._device)
        else:
            vocab = with_tokens_of([*known.values()], answers.vocab)
        said = None if answers is None else answers.logits_PM
        told, answered = [probs[index] for index in indices], [rows.get(index) for index in indices]
        logits_PM, origins = mixtures(said, answered, told, vocab, self._vocab_size, self._device)
        of_index = {index: own for index, own in zip(indices, origins, strict=True) if own}
        return Proposal(tuple(indices), logits_PM, frozenset(unfed), of_index, _passes_of(answers), vocab)


def _is_sure(distribution: CachedLaw | None) -> bool:
    return distribution is not None and distribution.is_sure


def _passes_of(answers: Proposal | None) -> ModelPasses:
    return ModelPasses() if answers is None else answers.passes


def _rows_of(asked: Sequence[_Asked], answers: Proposal | None) -> dict[int, int]:
    """Return the row of the model's answer for each node of the frontier that it answered."""
    if answers is None:
        return {}
    return {index: row for row, place in enumerate(answers.indices) if (index := asked[place].index) is not None}
