"""The kernel and CUDA graphs on the device they are for: compiled, captured, replayed."""

from collections.abc import Callable

import pytest
import torch

from engine.attention.paged.attention import kernel
from engine.attention.paged.graph_recorder import CudaGraphs
from engine.attention.paged.reference import attend as reference
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.draft.models.head_drafter import HeadDrafter
from engine.engine import Engine
from engine.graph_setup import record, static_steps
from engine.model.causal_lm import adopt
from engine.testing import FAMILIES, tiny_engine, tiny_module
from tests.gpu.device import CUDA, NEEDS_KERNELS
from tests.model.driving import run
from tests.model.heads import learnt_head
from tests.model.mixed import mixed_requests
from tests.model.paged import Heads, by, inputs, paged, random_segments

pytestmark = NEEDS_KERNELS
LIMITS = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 7, 128, 128),
        Heads(3, 3, 64, 64),
        Heads(2, 1, 80, 80),
        Heads(1, 4, 256, 256, window=100),
        Heads(2, 2, 128, 128, softcap=3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("contexts", [(0,), (300,), (0, 5, 70, 33), (120,) * 4], ids=str)
def test_the_kernel_is_the_reference(heads, dtype, contexts):
    segments = random_segments(len(contexts), contexts)
    num_tokens = sum(segment.num_tokens for segment in segments)
    for padded in (num_tokens, num_tokens + 9):
        given = inputs(padded, heads, dtype)
        found, expected = (by(attend, given, paged(segments, padded), heads) for attend in (kernel(), reference))
        assert (found - expected).norm() / expected.norm() < ERROR[dtype]
        assert not found[num_tokens:].any()


def engine_of(family: str, drafter: str) -> Engine:
    target, policy = adopt(tiny_module(family), CUDA), FixedExpansion(Expansion(2, 2, 2))
    if drafter == "model":
        return tiny_engine(target, adopt(tiny_module(family), CUDA), policy, config=LIMITS)
    head = HeadDrafter("head", learnt_head(family), target, LIMITS.num_slots)
    engine = tiny_engine(target, head, policy, config=LIMITS)
    engine.target.report_to(head)
    return engine


def replayed(engine: Engine, cuda_graphs: str) -> Engine:
    steps = static_steps(EngineConfig("tiny", scheduler=LIMITS, cuda_graphs=cuda_graphs), engine.target.model)
    assert steps is not None
    assert isinstance(steps.recorder, CudaGraphs) == (cuda_graphs == "on")
    for passes in record(steps, LIMITS, engine.target, engine.drafter):
        passes.prepare()
    return engine


@pytest.mark.parametrize("drafter", ["model", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_equal_with_cuda_graphs(family, drafter):
    make: dict[str, Callable[[], Engine]] = {
        "as they come": lambda: engine_of(family, drafter),
        "padded": lambda: replayed(engine_of(family, drafter), "off"),
        "graphs": lambda: replayed(engine_of(family, drafter), "on"),
    }
    texts = {name: run(engine(), mixed_requests(max_tokens=16)).texts() for name, engine in make.items()}
    assert texts["graphs"] == texts["padded"] == texts["as they come"]


def test_replay_reads_current_buffer_contents():
    given, found = torch.zeros(4, device=CUDA), torch.zeros(4, device=CUDA)
    replay = CudaGraphs(is_required=True).record(lambda: found.copy_(given * 2))
    given.copy_(torch.arange(4))
    assert replay().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_function_that_synchronizes_is_not_captured():
    """And the next function runs itself."""
    numbers, graphs, stream = torch.ones(4, device=CUDA), CudaGraphs(), torch.cuda.current_stream()
    assert graphs.record(lambda: float(numbers.sum()))() == 4.0
    assert torch.cuda.current_stream() == stream
    assert torch.equal(graphs.record(lambda: numbers + 1)(), numbers + 1)
