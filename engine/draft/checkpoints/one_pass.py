"""The drafters that predict all levels of a tree from its root: DFlash with a block, Medusa with a head for each level.

Predictions do not depend on the drafted tokens. So the children of all nodes of a level are drawn from one distribution, the
marginal of their place. Shape key: B roots, L levels, P proposals, M drafter's vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.paged.graph_recorder import Recorder
from engine.core.step_plan import Row
from engine.draft.checkpoints.dflash import Anchor, DFlashNetwork
from engine.draft.checkpoints.medusa import MedusaNetwork
from engine.draft.checkpoints.target_features import FeatureDrafter
from engine.draft.drafter import FrontierNode, LevelProposal, ModelPasses, Proposal, TrimmedVocabulary
from engine.kv_cache.canary import Canary
from engine.model.causal_lm import CausalModel
from engine.utils.host_transfer import integers


class _LevelDrafter(FeatureDrafter, ABC):
    """Keeps the logits of each tree's levels from its root until the next step."""

    recorder: Recorder | None = None  # of rounds of growth, if the target's passes are recorded
    num_levels: int
    fed_only_share: float
    _vocab: TrimmedVocabulary | None = None
    _num_known: int

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the target's features of committed tokens; predict every level after the roots."""
        return self._proposal(roots, self.feed_levels(rows, roots).passes)

    def feed_levels(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> LevelProposal:
        """Feed the target's features of committed tokens; predict every level after the roots."""
        indices = [index for index, root in enumerate(roots) if self._can_propose(root)]
        known = [roots[index] for index in indices]
        depths = [root.tree.row.expansion.max_depth for root in known]
        levels_BLM = torch.empty(0, 0, self._num_known, device=self._target.device)
        with torch.inference_mode():
            num_fed = self._feed_features(rows)
            if known:
                levels_BLM = self._levels_after(known, min(max(depths), self.num_levels))
        self._levels = {root.tree.row.request_id: of_root for root, of_root in zip(known, levels_BLM, strict=True)}
        passes = ModelPasses.one(num_fed + len(known), len(known), self.fed_only_share) if num_fed or known else ModelPasses()
        return LevelProposal(tuple(indices), levels_BLM, passes, self._vocab)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose at nodes above the last level, without a pass."""
        return self._proposal(frontier, ModelPasses())

    def _proposal(self, nodes: Sequence[FrontierNode], passes: ModelPasses) -> Proposal:
        found = {}
        for index, one in enumerate(nodes):
            levels, depth = self._levels.get(one.tree.row.request_id), one.tree.depths[one.node]
            if levels is not None and depth < len(levels):
                found[index] = levels[depth]
        none = torch.empty(0, self._num_known, device=self._target.device)
        logits_PM = torch.stack([*found.values()]) if found else none
        return Proposal(tuple(found), logits_PM, passes=passes, vocab=self._vocab)

    @abstractmethod
    def _can_propose(self, root: FrontierNode) -> bool:
        """Return whether the levels after a root can be predicted."""

    @abstractmethod
    def _feed_features(self, rows: Sequence[Row]) -> int:
        """Feed all tokens that can be fed before the roots; return their number."""

    @abstractmethod
    def _levels_after(self, roots: Sequence[FrontierNode], num_levels: int) -> Float[Tensor, "B L M"]:
        """Return the logits of the levels after roots."""


class DFlashDrafter(_LevelDrafter):
    """Drafts blocks for a target, on its device."""

    def __init__(self, network: DFlashNetwork, target: CausalModel, num_slots: int, canary: Canary | None = None) -> None:
        shape = network.shape
        super().__init__("dflash", network, network.width, target, shape.after, num_slots, canary)
        self._network = network
        self._levels: dict[str, Tensor] = {}
        self.num_levels, self._num_known = network.num_levels, shape.vocab.num_known
        ids = shape.vocab.ids
        self._vocab = None if ids is None else TrimmedVocabulary(integers(ids, target.device), shape.vocab.size)
        self.fed_only_share = network.context_share

    def _can_propose(self, root: FrontierNode) -> bool:
        del root
        return True

    def _feed_features(self, rows: Sequence[Row]) -> int:
        """Write the keys of all tokens but each row's last, whose feature may not be known: it is fed one step later."""
        slots: list[int] = []
        positions: list[int] = []
        for row in rows:
            first, end = max(row.draft_len - 1, 0), row.draft_len + len(row.draft_ids) - 1
            slots.extend(row.slots[first:end])
            positions.extend(range(first, end))
        if slots:
            self._network.cache_context(self._pool.read_checked(slots), slots, positions)
        return len(slots)

    def _levels_after(self, roots: Sequence[FrontierNode], num_levels: int) -> Float[Tensor, "B L M"]:
        anchors = [Anchor(root.tree.token_ids[0], root.position, root.tree.row.slots) for root in roots]
        return self._network.level_logits(anchors, num_levels)


class MedusaDrafter(_LevelDrafter):
    """Drafts with heads over the target's last state before the root. A root without a token before it has no proposal."""

    fed_only_share = 0.0  # tokens are not fed

    def __init__(self, network: MedusaNetwork, target: CausalModel, num_slots: int, canary: Canary | None = None) -> None:
        super().__init__("medusa", network, network.width, target, (target.depth,), num_slots, canary, is_last_normed=True)
        self._network = network
        self._levels: dict[str, Tensor] = {}
        self.num_levels, self._num_known = network.num_levels, target.vocab_size

    def _can_propose(self, root: FrontierNode) -> bool:
        return root.position > 0

    def _feed_features(self, rows: Sequence[Row]) -> int:
        del rows
        return 0

    def _levels_after(self, roots: Sequence[FrontierNode], num_levels: int) -> Float[Tensor, "B L M"]:
        slots = [root.tree.row.slots[root.position - 1] for root in roots]
        return self._network.level_logits(self._pool.read_checked(slots), num_levels)
