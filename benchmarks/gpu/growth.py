"""Growth of trees with one wait or with a wait for each level: over levels that a drafter predicts at once, and by a head.

And a step of such trees, which the host reads before the target's pass or with its choices.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from msgspec import structs

from engine.attention.paged.graphs import GraphResources
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, LevelProposal, ModelPasses, Proposal
from engine.draft.models.head import DraftHead, HeadShape
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import DeviceGrower, LevelGrower, RoundGrower
from engine.draft.trees.grower import TreeGrower, UnreadGrowth
from engine.model.causal_lm import CausalModel
from engine.model.passes import RecordedPasses
from engine.model.target import Target
from engine.sampling import device_choice
from engine.utils.host_transfer import arrays_of
from engine.verify.dispatch import node_draws

_TREE = Expansion(0, 8, 8, "noise_aware", 16)
_ROOT = 40  # position
_SLOTS = _ROOT + 1 + _TREE.max_nodes
_SIZES = {"num_heads": 16, "num_kv_heads": 4, "head_size": 64, "intermediate": 4096}  # of a head
_WIDTH, _KNOWN = 1024, 32_768  # of a head, and its tokens


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


def _row(index: int, first_slot: int = 0) -> Row:
    return Row(
        request_id=str(index),
        context_len=_ROOT,
        certain_ids=(1,),
        num_new_prompt_tokens=0,
        is_decoding=True,
        draft_len=_ROOT,
        draft_ids=(),
        expansion=_TREE,
        slots=tuple(range(first_slot, first_slot + _SLOTS)),
        sampling=SamplingParams(temperature=0.7),
        verifier="coupled",
        seed=index,
        history=(),
        num_prompt_tokens=0,
    )


def head_growers(model: CausalModel, resources: GraphResources, num_rows: int, is_tiny: bool) -> dict[str, Callable[[], object]]:
    """Return the growth of one step's trees by a random head, whose nodes are chosen by the host or on its device."""
    drafter, trees = _head(model, resources, num_rows, is_tiny)
    growers: dict[str, TreeGrower] = {
        "rounds": RoundGrower(drafter, model.vocab_size, model.device),
        "device": DeviceGrower.of(drafter, model.vocab_size, model.device),
    }
    for grower in growers.values():
        assert grower.can_grow(trees)
        assert grower.grow(trees, Calibrations(), None).num_rounds > 1
    return {name: partial(grower.grow, trees, Calibrations(), None) for name, grower in growers.items()}


def steps_of_trees(
    model: CausalModel, resources: GraphResources, num_rows: int, is_tiny: bool
) -> dict[str, Callable[[], object]]:
    """Return a step of trees by a random head, which are read before the target's pass or with its choices."""
    drafter, trees = _head(model, resources, num_rows, is_tiny)
    target, plan = Target(model, num_rows * _SLOTS), StepPlan(0, tuple(trees))
    vars(target)["_passes"] = RecordedPasses(model, target.cache, resources, chooses=True)
    grower = DeviceGrower.of(drafter, model.vocab_size, model.device)

    def trees_first() -> object:
        grown = grower.grow(trees, Calibrations(), None).forest.trees
        logits_NV = target.forward(plan, grown, draws=node_draws(trees, grown))
        return target.likeliest(logits_NV, len(logits_NV))

    def at_once() -> object:
        grown = grower.start(trees, Calibrations(), None)
        assert isinstance(grown, UnreadGrowth)
        passed = target.forward_unread(plan, grown.trees, (), node_draws(trees, grown.trees), grown.nodes)
        assert passed is not None
        *results, choices_N3 = arrays_of([*grown.results, passed.choices_N3])
        return grown.read(results), device_choice.read(choices_N3), passed.logits(range(len(choices_N3)))

    return {"trees first": trees_first, "at once": at_once}


def _head(model: CausalModel, resources: GraphResources, num_rows: int, is_tiny: bool) -> tuple[HeadDrafter, list[Row]]:
    """Return a random head that has been fed the texts of some rows, and the rows."""
    attend, vocab_size = model.attend, model.vocab_size
    assert attend is not None
    width = model.embeddings_VD.shape[1]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "intermediate": 96} if is_tiny else _SIZES
    layers = tuple(sorted({1, max(1, model.depth // 2), model.depth}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = DraftHead(HeadShape(width, layers, min(width, _WIDTH), **sizes), torch.arange(min(vocab_size, _KNOWN)))
        torch.nn.init.normal_(head.widen.weight, std=3.0 * head.shape.width**-0.5)  # distributions with a few likely tokens
    trees = [structs.replace(_row(index, index * _SLOTS), draft_ids=(1,)) for index in range(num_rows)]
    drafter = HeadDrafter("head", head.requires_grad_(False).eval(), model, num_rows * _SLOTS, precision=model.precision)
    drafter.record(resources, attend, _SLOTS)
    with torch.inference_mode():
        vars(drafter)["_pool"].rows_SW.normal_()  # features, which the target's passes would have stored
    drafter.feed([structs.replace(row, draft_len=0, draft_ids=(1,) * (_ROOT + 1)) for row in trees], [])
    return drafter, trees
