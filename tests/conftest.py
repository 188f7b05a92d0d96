"""Set up before any test module is imported: shapes checked at run time, one torch thread, hypothesis without deadlines."""

import os

import pytest
import torch
import transformers.modeling_utils  # noqa: F401  (what is first imported under the hook below is compiled anew)
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.scheduling import GroupScheduling
from tests.typechecking import check_anew, install_shape_checks

# The modules that hold tensors. The records of the others are built inside hypothesis strategies, where the random choices by
# which beartype looks into containers are not welcome.
_TENSOR_MODULES = [
    *("sampling.noise", "sampling.logits_processors", "sampling.distributions"),
    *("attention.packing", "attention.segments", "attention.tree_attention", "kv_cache.kv_cache"),
    *("model.linear_backends", "model.causal_lm", "model.target"),
    *("native", "draft", "verify", "engine"),
]
# For the whole run: test modules import the engine after this file.
install_shape_checks([f"engine.{name}" for name in _TENSOR_MODULES])

torch.set_num_threads(1)

# No deadline: a test never asserts wall-clock time. Derandomised: a red run is red again.
settings.register_profile("latebranch", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("latebranch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-tokens", type=int, default=24, help="tokens compared with transformers.generate for each prompt")
    parser.addoption("--conformance-examples", type=int, default=12, help="requests made up for a property of tests/conformance")
    parser.addoption("--engine-examples", type=int, default=6, help="random lives of an engine (tests/model/engine_machine.py)")
    parser.addoption("--seeded-prompts", type=int, default=3, help="prompts whose seeded texts are compared on real weights")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest where several processes run, so that none is left with it at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_call() -> None:
    """Check shapes in each test."""
    check_anew()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)
