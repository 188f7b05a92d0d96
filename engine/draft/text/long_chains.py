"""Long chains of cached text: replace a policy's tree where the cache predicts a longer path with high confidence.

A trunk of cached text needs no draft pass, so it pays where no tree of a model would. Its nodes cost the target as much as any
others. A chain therefore ends where its last node is less likely to be accepted than a node costs in this batch. The decision
depends on committed tokens alone and is made before anything is drawn.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from engine.core.policy import BatchViews, ExpansionChoice, ExpansionPolicy, Reason, SequenceView, StepFeedback, composition_of
from engine.core.tree import Expansion, GrowthCosts
from engine.draft.text.text_cache import TextCache

CHAIN_LENGTHS = (16, 12, 8, 6)  # few, to bound the number of metric labels
_KEPT_REASONS = (Reason.FALLBACK, Reason.PROBE)  # a step that the policy charges as a probe must run as one
_MIN_PROBABILITY = 0.5  # of a whole chain to be accepted, however cheap its nodes are


class LongChainPolicy:
    """Wraps a policy: uses its choices, and chains of at most `max_length` nodes where the cache is confident.

    The wrapped policy does not observe the outcomes of these chains, because they carry no information about its own trees.
    Requests that set their own tree, or none, keep it.
    """

    def __init__(self, policy: ExpansionPolicy, texts: TextCache, max_length: int = CHAIN_LENGTHS[0]) -> None:
        self.name = policy.name
        self._policy = policy
        self._texts = texts
        self._max_length = max_length
        self._composition: Hashable = None
        self._chained: frozenset[str] = frozenset()  # requests with a chain in the last choice

    def choose(self, views: Sequence[SequenceView]) -> ExpansionChoice:
        """Return the policy's expansions with chains in place of some. A choice with chains has no expected speed."""
        choice = self._policy.choose(views)
        last, self._composition = self._composition, composition_of(views)
        is_same = self._composition is not None and self._composition == last and not self._chained
        if is_same and isinstance(views, BatchViews) and not views.has_news:
            return choice
        chains = [self._chain(view, chosen, choice.growth_costs) for view, chosen in zip(views, choice.expansions, strict=True)]
        self._chained = frozenset(view.request_id for view, chain in zip(views, chains, strict=True) if chain is not None)
        if not self._chained:
            return choice
        expansions = (chain or chosen for chain, chosen in zip(chains, choice.expansions, strict=True))
        reason = choice.reason if choice.reason in _KEPT_REASONS else Reason.COPIED_TEXT
        return replace(choice, expansions=tuple(expansions), reason=reason, speedup=1.0, step_s=None, num_steps=1)

    def _chain(self, view: SequenceView, chosen: Expansion, growth_costs: GrowthCosts) -> Expansion | None:
        """Return the longest chain in which the cache is confident, or None if the policy's tree is as deep or must be kept.

        A tree with an acceptance threshold ends by itself. It is as deep as the cached path stays above its thresholds.
        """
        if not view.is_free:
            return None
        max_nodes = view.speculation.max_nodes
        room = max(0, view.num_remaining - 1)
        max_length = min(self._max_length, room, self._max_length if max_nodes is None else max_nodes)
        known = self._texts.chain_length(view.request_id, max_length, max(_MIN_PROBABILITY, growth_costs.node))
        depth = chosen.max_depth
        if chosen.least_chance and known >= CHAIN_LENGTHS[-1]:
            thresholds = growth_costs.least_chances(chosen)[:depth]
            depths = range(len(thresholds), 0, -1)
            reached = (d for d in depths if self._texts.chain_length(view.request_id, d, thresholds[d - 1]) == d)
            depth = next(reached, 0)
        lengths = (length for length in CHAIN_LENGTHS if depth < length <= known)
        return next((Expansion(length, 1, 0) for length in lengths), None)

    def observe(self, feedback: StepFeedback) -> None:
        """Report to the policy its own trees, and rows that decoded plainly because a chain had no room."""
        if self._chained:
            own = tuple(one for one in feedback.outcomes if one.request_id not in self._chained or one.expansion.is_plain)
            feedback = replace(feedback, make_outcomes=lambda: own)
        self._policy.observe(feedback)
