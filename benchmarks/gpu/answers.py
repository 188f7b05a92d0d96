"""Drafts of known answers, of which a share is right, and the adaptive policy over them."""

from collections.abc import Sequence

import torch

from engine.choice_cache import CachedChoice
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.step_plan import Feeding, Row
from engine.core.tree import Expansion
from engine.draft.drafter import FrontierNode, Proposal, TrimmedVocabulary
from engine.engine import Engine
from engine.profiling.step_timer import StepTimer
from selector.acceptance import CountedAcceptance
from selector.guard import GuardedPolicy
from selector.menu import menu_for_all
from selector.policy import AdaptiveExpansion
from selector.profile import measure

_EXPANSION, _LARGEST = Expansion(4, 1, 0), Expansion(12, 1, 0)
_WRONG = 7  # what is added to a token in place of 1


class AnswerDrafter:
    """Proposes the next number after a token, which is what models.counting_model answers; at a share of positions another."""

    name = "answers"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, vocab_size: int, device: torch.device, right_share: float) -> None:
        self._vocab_size, self._device, self._right_share = vocab_size, device, right_share

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Propose at the roots; there is nothing to feed."""
        del rows
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose one token after each node."""
        ids = [self._next(one) for one in frontier]
        known = [*dict.fromkeys(ids)]
        logits_PM = torch.full((len(ids), len(known)), float("-inf"))
        logits_PM[range(len(ids)), [known.index(token_id) for token_id in ids]] = 0.0
        vocab = TrimmedVocabulary.of(known, self._vocab_size, self._device)
        return Proposal((*range(len(ids)),), logits_PM.to(self._device), vocab=vocab)

    def _next(self, node: FrontierNode) -> int:
        key = stream_key(node.tree.row.seed, node.position, Stream.DRAFT)
        step = 1 if uniform(key, 0) < self._right_share else _WRONG
        return (node.tree.token_ids[node.node] + step) % self._vocab_size


def adaptive_over(engine: Engine, drafter: AnswerDrafter, limits: SchedulerConfig, budget_s: float) -> ExpansionPolicy:
    """Return the adaptive policy with the costs of an engine's passes, measured now, which counts acceptance."""
    rig = StepTimer(engine.info, limits, engine.target, drafter)
    menu = menu_for_all(_EXPANSION, "coupled", _LARGEST)
    policy = AdaptiveExpansion(menu, CountedAcceptance(menu), measure(rig, budget_s=budget_s).costs())
    return CachedChoice(GuardedPolicy(policy, _EXPANSION))
