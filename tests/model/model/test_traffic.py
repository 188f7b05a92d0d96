"""Bytes and operations of the target's passes: each weight once a pass, keys of every row, operations by tokens."""

import pytest

from engine.core.policy import PlainDecoding
from engine.model.causal_lm import adopt
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import greedy, run
from tests.model.passes import CPU


@pytest.mark.parametrize(("linears", "itemsize"), [("plain", 4), ("packed", 4), ("fp8", 1)])
def test_a_pass_reads_weights_once(linears, itemsize):
    """And the keys and values of every row's tokens; operations are by packed tokens."""
    module = tiny_module("llama")
    shapes = {name: one.numel() for name, one in module.named_parameters() if "proj" in name or "lm_head" in name}
    head, layers = shapes.pop("lm_head.weight"), sum(shapes.values())
    scales = sum(one.shape[0] * 4 for name, one in module.named_parameters() if "proj" in name) if linears == "fp8" else 0
    engine = tiny_engine(adopt(module, CPU, linears), None, PlainDecoding())
    session = run(engine, [greedy("one", [5, 9, 33], max_tokens=3), greedy("two", [7, 8], max_tokens=3)])
    prompts, later = session.stats[0], session.stats[1]
    slot_bytes = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size
    weights = layers * itemsize + head * 4 + scales
    assert (prompts.num_read_bytes, prompts.num_operations) == (weights + 5 * slot_bytes, 2 * (layers + head) * 5)
    assert (later.num_read_bytes, later.num_operations) == (weights + 7 * slot_bytes, 2 * (layers + head) * 2)


def test_a_native_pass_counts_its_own_weights():
    engine = tiny_engine(adopt(tiny_module("llama"), CPU, "native", "int8"), None, PlainDecoding())
    exact = tiny_engine(adopt(tiny_module("llama"), CPU, "native"), None, PlainDecoding())
    found, wide = (run(one, [greedy("one", [5, 9], max_tokens=2)]).stats[1] for one in (engine, exact))
    assert found.num_operations == wide.num_operations > 0
    assert 0 < found.num_read_bytes < wide.num_read_bytes
