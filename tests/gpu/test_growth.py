"""Trees whose nodes are chosen on the device they are for: rounds captured, replayed, and as good as the host's."""

import pytest
import torch

from engine.attention.paged.completion import complete_by_torch
from engine.core.policy import FixedExpansion
from engine.core.tree import parse_expansion
from engine.draft.trees.grow import DeviceGrower
from engine.engine import Engine
from tests.gpu.device import NEEDS_KERNELS
from tests.gpu.test_paged import LIMITS, engine_of, replayed
from tests.model.attention.test_completion import Step, by_kernel
from tests.model.driving import Session, greedy, run, sampled

pytestmark = NEEDS_KERNELS
REQUESTS = [
    greedy("greedy", [5, 9, 33], max_tokens=24),
    sampled("seeded", [7, 8, 9, 11], seed=1, max_tokens=24, verifier="coupled"),
    sampled("truncated", [17, 8], seed=2, max_tokens=24, verifier="coupled", top_k=7, top_p=0.9),
]


def engine_with(drafter: str, tree: str, cuda_graphs: str) -> Engine:
    engine = replayed(engine_of("llama", drafter), cuda_graphs)
    policy = FixedExpansion(parse_expansion(tree))
    return Engine(engine.info, LIMITS, engine.target, engine.drafter, policy)


def run_with(drafter: str, tree: str, cuda_graphs: str, on_device: bool) -> Session:
    engine = engine_with(drafter, tree, cuda_graphs)
    assert any(isinstance(one, DeviceGrower) for one in engine._growers)
    if not on_device:
        engine._growers = tuple(one for one in engine._growers if not isinstance(one, DeviceGrower))
    return run(engine, REQUESTS)


@pytest.mark.parametrize("tree", ["3.1.0", "1.2.2", "beam.6.3.3", "noise_aware.6.3.3", "static.6.3.3"])
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_devices_grow_the_trees_of_rounds(drafter, tree):
    """Equal texts, and nearly as many accepted tokens: near ties may be ranked otherwise."""
    rounds = run_with(drafter, tree, "off", on_device=False)
    num_accepted = sum(one.num_accepted_tokens for one in rounds.stats)
    for cuda_graphs in ("off", "on"):
        found = run_with(drafter, tree, cuda_graphs, on_device=True)
        assert found.texts() == rounds.texts()
        assert abs(sum(one.num_accepted_tokens for one in found.stats) - num_accepted) <= 0.1 * num_accepted + 2


@pytest.mark.parametrize("tree", ["3.1.0", "noise_aware.6.3.3"])
@pytest.mark.parametrize("drafter", ["model", "head"])
def test_trees_read_with_choices_leave_texts_alone(drafter, tree):
    """Over the kernel that writes them to the target's table; absent nodes change nothing."""
    texts = []
    for reads_first in (True, False):
        engine, num_unread = engine_with(drafter, tree, "on"), 0
        forward = engine.target.forward_unread

        def counted(*given, forward=forward, reads_first=reads_first):
            nonlocal num_unread
            passed = None if reads_first else forward(*given)
            num_unread += passed is not None
            return passed

        engine.target.forward_unread = counted  # type: ignore[method-assign]
        texts.append(run(engine, REQUESTS).texts())
        assert (num_unread > 3) != reads_first
    assert texts[0] == texts[1]


@pytest.mark.parametrize("sizes", [(6, 3), (40, 2), (9, 70)])
def test_the_kernel_completes_as_the_reference(sizes):
    for seed in range(40):
        step = Step(seed, *sizes)
        assert torch.equal(step.completed(by_kernel), step.completed(complete_by_torch))
