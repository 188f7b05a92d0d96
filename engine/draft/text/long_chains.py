"""Chains for text that is surely foretold: a policy's choice, but where cached text promises a longer path than any of its trees.

A long trunk of cached text costs no draft pass, so it pays where no tree of a model would; but its nodes cost the target what
anyone's do, so a chain ends where its last node is less likely to be accepted than a node costs in this batch. Whether there is
one is told by committed text alone, before anything is drawn.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.policy import BatchViews, Choice, ExpansionPolicy, Reason, SequenceView, StepFeedback, composition_of
from engine.core.tree import Expansion, GrowthCosts
from engine.draft.text.text_cache import TextCache

LENGTHS = (16, 12, 8, 6)  # a few, so that labels stay few
_LEAST_CHANCE = 0.5  # of a whole chain, however cheap its nodes are


class RunningPolicy:
    """Another policy's choices, with chains of at most `longest` nodes where the cache is sure of so many.

    What became of such chains is kept from the other policy: they say nothing of its own trees. Sequences whose request has
    chosen a tree, or none, are left alone.
    """

    def __init__(self, policy: ExpansionPolicy, texts: TextCache, longest: int = LENGTHS[0]) -> None:
        self.name = policy.name
        self._policy = policy
        self._texts = texts
        self._longest = longest
        self._composition: int | None = None
        self._running: frozenset[str] = frozenset()  # requests that were given chains in the last choice

    def choose(self, views: Sequence[SequenceView]) -> Choice:
        """Return the policy's expansions, or longer chains; nothing is expected of a step that has some."""
        choice = self._policy.choose(views)
        last, self._composition = self._composition, composition_of(views)
        is_same = self._composition is not None and self._composition == last and not self._running
        if is_same and isinstance(views, BatchViews) and not views.has_news:
            return choice
        chains = [self._chain(view, wish, choice.growth_costs) for view, wish in zip(views, choice.expansions, strict=True)]
        self._running = frozenset(view.request_id for view, chain in zip(views, chains, strict=True) if chain is not None)
        if not self._running:
            return choice
        expansions = (chain or wish for chain, wish in zip(chains, choice.expansions, strict=True))
        reason = choice.reason if choice.reason is Reason.FALLBACK else Reason.COPIED_TEXT
        return replace(choice, expansions=tuple(expansions), reason=reason, speedup=1.0, step_s=None, num_steps=1)

    def _chain(self, view: SequenceView, wish: Expansion, growth_costs: GrowthCosts) -> Expansion | None:
        """Return the longest chain that the cache is sure of, if the policy may choose here and chose what is less deep.

        A tree that ends by its nodes' chances is as deep as each node of what is known is as likely as that one must be.
        """
        if not view.is_free:
            return None
        asked = view.speculation
        room = max(0, view.num_remaining - 1)
        most = min(self._longest, room, self._longest if asked.max_nodes is None else asked.max_nodes)
        known = self._texts.run(view.request_id, most, max(_LEAST_CHANCE, growth_costs.node))
        depth = wish.max_depth
        if wish.least_chance and known >= LENGTHS[-1]:
            least = growth_costs.least_chances(wish)[:depth]
            depths = range(len(least), 0, -1)
            depth = next((one for one in depths if self._texts.run(view.request_id, one, least[one - 1]) == one), 0)
        lengths = (length for length in LENGTHS if depth < length <= known)
        return next((Expansion(length, 1, 0) for length in lengths), None)

    def observe(self, feedback: StepFeedback) -> None:
        """Let the policy learn from its own trees, and from rows that had no room for a chain and ran plain."""
        if self._running:
            own = tuple(one for one in feedback.outcomes if one.request_id not in self._running or one.expansion.is_plain)
            feedback = replace(feedback, make_outcomes=lambda: own)
        self._policy.observe(feedback)
