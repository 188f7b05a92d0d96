"""Trees whose nodes are chosen on the device they are for: rounds captured, replayed, and as good as the host's."""

import pytest

from engine.core.policy import FixedExpansion
from engine.core.tree import parse_expansion
from engine.draft.trees.grow import DeviceGrower
from engine.engine import Engine
from tests.gpu.device import NEEDS_KERNELS
from tests.gpu.test_paged import LIMITS, engine_of, replayed
from tests.model.driving import Session, greedy, run, sampled

pytestmark = NEEDS_KERNELS
REQUESTS = [
    greedy("greedy", [5, 9, 33], max_tokens=24),
    sampled("seeded", [7, 8, 9, 11], seed=1, max_tokens=24, verifier="coupled"),
    sampled("truncated", [17, 8], seed=2, max_tokens=24, verifier="coupled", top_k=7, top_p=0.9),
]


def run_with(drafter: str, tree: str, cuda_graphs: str, on_device: bool) -> Session:
    engine = replayed(engine_of("llama", drafter), cuda_graphs)
    policy = FixedExpansion(parse_expansion(tree))
    engine = Engine(engine.info, LIMITS, engine.target, engine.drafter, policy)
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
