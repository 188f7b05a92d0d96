"""Growth of trees over levels that a drafter predicts at once: all levels ranked together, or round by round."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.core.step_plan import Feeding, Row
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, LevelProposal, ModelPasses, Proposal
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import LevelGrower, RoundGrower
from engine.draft.trees.grower import TreeGrower

_TREE = Expansion(0, 8, 8, "noise_aware", 16)
_ROOT = 40  # position


class RandomLevels:
    """Random logits of each level, the same for all rows."""

    name = "levels"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._logits_LV = 3.0 * torch.randn(_TREE.depth, vocab_size, generator=generator, device=device)

    def feed_levels(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> LevelProposal:
        """Propose all levels; there is nothing to feed."""
        del rows
        logits_BLV = self._logits_LV.expand(len(roots), *self._logits_LV.shape)
        return LevelProposal(tuple(range(len(roots))), logits_BLV, ModelPasses(), None)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Propose at the roots; there is nothing to feed."""
        del rows
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose each node's level."""
        known = [(index, one.tree.depths[one.node]) for index, one in enumerate(frontier)]
        known = [(index, depth) for index, depth in known if depth < len(self._logits_LV)]
        logits_PV = torch.stack([self._logits_LV[depth] for _, depth in known]) if known else self._logits_LV[:0]
        return Proposal(tuple(index for index, _ in known), logits_PV)


def level_growers(device: torch.device, num_rows: int, is_tiny: bool) -> dict[str, Callable[[], object]]:
    """Return the growth of one step's trees in both ways."""
    vocab_size = 100 if is_tiny else 151_936
    drafter, rows = RandomLevels(vocab_size, device), [_row(index) for index in range(num_rows)]
    growers: dict[str, TreeGrower] = {
        "rounds": RoundGrower(drafter, vocab_size, device),
        "levels": LevelGrower(drafter, vocab_size, device),
    }
    return {name: partial(grower.grow, rows, Calibrations(), None) for name, grower in growers.items()}


def _row(index: int) -> Row:
    return Row(
        request_id=str(index),
        context_len=_ROOT,
        certain_ids=(1,),
        num_new_prompt_tokens=0,
        is_decoding=True,
        draft_len=_ROOT,
        draft_ids=(),
        expansion=_TREE,
        slots=tuple(range(_ROOT + 1 + _TREE.max_nodes)),
        sampling=SamplingParams(temperature=0.7),
        verifier="coupled",
        seed=index,
        history=(),
        num_prompt_tokens=0,
    )
