"""Makes the drafter of a checkpoint."""

from engine.draft.checkpoints.chained import Eagle3Drafter
from engine.draft.checkpoints.dflash import DFlashNetwork
from engine.draft.checkpoints.eagle3 import Eagle3Network
from engine.draft.checkpoints.medusa import MedusaNetwork
from engine.draft.checkpoints.one_pass import DFlashDrafter, MedusaDrafter
from engine.draft.checkpoints.read import Checkpoint
from engine.draft.checkpoints.shapes import DFlashShape, Eagle3Shape
from engine.kv_cache.canary import Canary
from engine.model.causal_lm import CausalModel

CheckpointDrafter = Eagle3Drafter | DFlashDrafter | MedusaDrafter


def load_drafter(
    checkpoint: Checkpoint, target: CausalModel, num_slots: int, linears: str, precision: str, canary: Canary | None = None
) -> CheckpointDrafter:
    """Return the drafter of a checkpoint that was read for this target. It must observe the target's passes.

    `linears` is a name of engine.model.linear_backends. Raise ValueError if a weight is damaged or the precision is not possible.
    """
    files, shape = checkpoint.files, checkpoint.shape
    with_slots = (target, num_slots, canary)
    if isinstance(shape, Eagle3Shape):
        return Eagle3Drafter(Eagle3Network(files, shape, target, linears, precision), *with_slots)
    if isinstance(shape, DFlashShape):
        return DFlashDrafter(DFlashNetwork(files, shape, target, linears, precision, num_slots, canary), *with_slots)
    return MedusaDrafter(MedusaNetwork(files, shape, target, linears, precision), *with_slots)
