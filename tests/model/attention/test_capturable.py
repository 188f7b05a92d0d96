"""A pass over a table can be captured: it neither looks at numbers on its device nor brings any there.

Every operation that torch runs in it is looked at. Attention is left out: its kernel is one launch, or two.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.packing import pack
from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.segments import chain_segment
from engine.core.policy import FixedExpansion
from engine.core.tree import parse_expansion
from engine.core.types import SamplingParams
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.device_growth import LevelGrowth
from engine.draft.trees.grow import DeviceGrower, LevelGrower
from engine.model.causal_lm import CausalModel, adopt
from engine.testing import tiny_engine, tiny_module
from tests.model.attention.test_static_steps import LIMITS
from tests.model.draft.test_checkpoint_drafters import checkpoint_engine
from tests.model.driving import greedy, run, sampled
from tests.model.heads import drafter_of, head_engine, learnt_head
from tests.model.passes import CPU
from tests.model.rows import decoding_row

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim", "bincount")
BRINGS = ("lift_fresh", "lift_fresh_copy")  # torch.tensor(..)
LOOKS_BACK = ("index", "index_put_", "index_put")  # with a mask for an index


class Watched(TorchDispatchMode):
    """Notes operations for which a host waits, and tensors that are made of numbers of the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.num_operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        has_mask = name in LOOKS_BACK and any(one is not None and one.dtype == torch.bool for one in args[1])
        if name in WAITS or name in BRINGS or has_mask:
            self.seen.append(name)
        self.num_operations += 1
        return function(*args, **(kwargs or {}))


class Recording:
    """Records as a graph does, but for the capture: the first run is free, the second is watched."""

    name = "watched"

    def __init__(self) -> None:
        self.watched = Watched()

    def record(self, run):
        run()
        with self.watched:
            run()
        return run


def nothing(query_THGK, keys_SHK, values_SHV, *_):
    return query_THGK.new_zeros(*query_THGK.shape[:3], values_SHV.shape[-1])


def steps_with(recorder) -> GraphResources:
    return GraphResources(TableBuffer(4096, CPU), PaddingShapes(4), recorder)


def target_of(family: str) -> CausalModel:
    model = adopt(tiny_module(family), CPU)
    model.attend = nothing
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_targets_pass_can_be_captured(family):
    recording = Recording()
    tiny_engine(target_of(family), None, config=LIMITS).target.record(steps_with(recording)).prepare()
    assert recording.watched.num_operations > 100
    assert recording.watched.seen == []


def test_head_pass_and_its_features_are_capturable():
    recording = Recording()
    engine = head_engine(learnt_head(), target_of("llama"), config=LIMITS)
    steps = steps_with(recording)
    engine.target.record(steps).prepare()
    of_target = recording.watched.num_operations
    drafter_of(engine).record(steps, nothing, LIMITS.max_model_len).prepare()
    assert recording.watched.num_operations > of_target + 20
    assert recording.watched.seen == []


@pytest.mark.parametrize("tree", ["3.2.2", "noise_aware.8.4.4"])
def test_rounds_of_growth_are_capturable(tree):
    """All that chooses nodes between the passes of levels, for rows of every kind."""
    recording = Recording()
    engine = head_engine(learnt_head(), target_of("llama"), config=LIMITS)
    steps = GraphResources(TableBuffer(1 << 14, CPU), PaddingShapes(32), recording)
    drafter_of(engine).record(steps, nothing, LIMITS.max_model_len).prepare()
    of_passes = recording.watched.num_operations
    grower = DeviceGrower.of(drafter_of(engine), engine.info.vocab_size, CPU)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9, top_k=9))
    rows = [
        decoding_row((5, 6, 7), parse_expansion(tree), sampling, "coupled", request_id=str(index), first_slot=20 * index)
        for index, sampling in enumerate(kinds)
    ]
    grown = grower.grow(rows, Calibrations(), None)
    assert grown.passes.num_passes >= 3
    assert recording.watched.num_operations > of_passes + 100
    assert recording.watched.seen == []


def test_rounds_over_levels_are_capturable(tmp_path):
    """From the ranking of levels to the numbers of nodes, in one graph."""
    recording = Recording()
    engine = checkpoint_engine(tmp_path, "medusa", FixedExpansion(parse_expansion("noise_aware.8.4.4")))
    drafter: Any = engine.drafter
    drafter.recorder = recording
    by_device = LevelGrower(drafter, engine.info.vocab_size, CPU, LevelGrowth(drafter))
    engine._growers = (engine._growers[0], by_device)
    run(engine, [greedy("one", [5, 9, 33]), sampled("two", [7, 8], seed=1, max_tokens=9)])
    assert recording.watched.num_operations > 500
    assert recording.watched.seen == []


def test_a_gathering_pass_could_not():
    """It brings its own tables."""
    watched = Watched()
    model = adopt(tiny_module(), CPU)
    engine = tiny_engine(model, None, config=LIMITS)
    batch = pack([chain_segment([5, 6, 7], 0, range(3))], CPU)
    with watched:
        engine.target._passes.run(batch, [2])
    assert watched.seen


@pytest.mark.parametrize(
    "look",
    [
        lambda logits: float(logits.sum()),
        lambda logits: bool((logits > 0).any()),
        lambda logits: logits[logits > 0],
        lambda logits: logits.nonzero(),
        lambda logits: logits + torch.tensor([1.0]),
    ],
)
def test_a_look_is_noticed(look):
    watched = Watched()
    with watched:
        look(torch.ones(3))
    assert watched.seen
