"""A model in int8: close to its own in float32, and each row's logits the same to the bit, whatever is computed beside it."""

import math
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from engine import activations, attention, exact_attention, int8
from engine import model as model_module
from engine.attention import AttentionContext, UnsupportedAttention
from engine.audit.reference import SameBitsReference
from engine.exact_attention import exact_attention as attend
from engine.int8 import Int8Linear, SharedRows, can_multiply_int8, quantise_linears
from engine.kv_cache import KVCache
from engine.model import CausalModel, adopt, load_model
from engine.model_check import UnsupportedModel
from engine.packing import pack
from engine.segments import chain_segment
from engine.testing import FAMILIES, tiny_engine, tiny_module
from engine.types import Request, SamplingParams
from tests.model.passes import CPU, SceneRow, node_logits
from tests.model.test_attention import ragged_scene, scenes
from tests.model.tiny import own_module

pytestmark = pytest.mark.skipif(not can_multiply_int8(CPU), reason="needs a processor with VNNI")


@cache
def quantised(family: str, seed: int = 0) -> CausalModel:
    return adopt(tiny_module(family, seed), CPU, "int8")


def alone(model: CausalModel, text: Sequence[int]) -> torch.Tensor:
    """The logits [T, V] after each token of the text, fed one by one."""
    cache, first = KVCache(len(text), CPU), torch.tensor([0])
    batches = [pack([chain_segment([token_id], place, range(len(text)))], CPU) for place, token_id in enumerate(text)]
    return torch.cat([model.forward(batch, cache, first) for batch in batches])


def is_same(model: CausalModel, rows: Sequence[SceneRow]) -> bool:
    """Whether every node's logits are those of its path fed alone, to the bit."""
    return all(
        torch.equal(logits_NV[list(row.tree.path(leaf))], alone(model, row.path_texts()[leaf])[len(row.text) - 1 :])
        for logits_NV, row in zip(node_logits(model, rows), rows, strict=True)
        for leaf in range(row.tree.num_nodes)
        if leaf not in row.tree.parents
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(rows=scenes())
def test_a_node_has_the_bits_of_its_path_alone(family, rows):
    """Chunks, trees and neighbours of any shape, over slots in any order."""
    assert is_same(quantised(family), rows)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_comparison_sees_attention_in_floating_point(family, monkeypatch):
    monkeypatch.setattr(exact_attention, "NAME", attention.NAME)
    monkeypatch.setattr(model_module, "require_same_bits", lambda *_: None)
    assert not is_same(adopt(tiny_module(family), CPU, "int8"), ragged_scene())


def test_the_comparison_sees_a_range_over_the_whole_batch(monkeypatch):
    per_row = SharedRows._quantise

    def per_batch(self: SharedRows, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (x * self._factors_I).abs().amax().clamp_min(1e-30) / 127
        rows, _ = per_row(self, x)
        return ((x * self._factors_I / scale).round() + 128).to(torch.uint8), scale.expand(*rows.shape[:-1], 1)

    monkeypatch.setattr(SharedRows, "_quantise", per_batch)
    with pytest.raises(UnsupportedModel, match="depend on what it is computed with"):
        adopt(tiny_module("llama"), CPU, "int8")


def of_odd_width(family: str):
    """A model whose rows are no whole number of vector registers: the last numbers of an array are computed in another way."""
    module = tiny_module(family, num_layers=2)
    for layer in module.model.layers:
        for name, shape in (("gate_proj", (37, 32)), ("up_proj", (37, 32)), ("down_proj", (32, 37))):
            linear = nn.Linear(shape[1], shape[0], bias=False)
            linear.weight.data.normal_(0.0, 0.35, generator=torch.Generator().manual_seed(3))
            setattr(layer.mlp, name, linear)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_width_have_their_own_bits(family):
    assert is_same(adopt(of_odd_width(family), CPU, "int8"), ragged_scene())


@pytest.mark.parametrize(
    ("own", "steady"), [(nn.SiLU(), activations.SteadySiLU()), (nn.GELU(approximate="tanh"), activations.SteadyGELUTanh())]
)
def test_steady_activations_are_the_same_functions(own, steady):
    x = torch.linspace(-30, 30, 4001)
    assert torch.allclose(own(x), steady(x), atol=2e-6)
    assert steady(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 200.0]
    rows = torch.randn(40, 37, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(steady(rows)[place], steady(rows[place : place + 1])[0]) for place in range(40))
    assert not all(torch.equal(own(rows)[place], own(rows[place : place + 1])[0]) for place in range(40)), "what is replaced"


@pytest.mark.parametrize("family", FAMILIES)
def test_laws_are_near_those_of_float32(family):
    text = [(7 * place + 3) % 61 for place in range(24)]
    with torch.inference_mode():
        own_V = own_module(family)(input_ids=torch.tensor([text])).logits[0, -1].softmax(-1)
    distance = float((alone(quantised(family), text)[-1].softmax(-1) - own_V).abs().sum() / 2)
    assert 0.0 < distance < 0.1


def test_texts_are_those_of_plain_decoding():
    """Greedy, and drawn with a seed, with trees of a drafter that often errs."""
    rng = random.Random(4)
    requests = [
        Request(
            f"{place}",
            tuple(rng.randrange(3, 61) for _ in range(rng.randrange(2, 20))),
            SamplingParams(temperature=[0.0, 1.0][place % 2], seed=place, max_tokens=24, ignore_eos=True, num_logprobs=2),
        )
        for place in range(8)
    ]
    target, draft = quantised("llama"), adopt(tiny_module("llama"), CPU)
    plain, drafted = (texts_of(target, drafter, requests) for drafter in (None, draft))
    assert plain == drafted


def texts_of(target, draft, requests):
    """Every request's tokens with their log-probabilities, to the last bit."""
    engine = tiny_engine(target, draft, verifier="coupled")
    for request in requests:
        engine.add(request)
    texts: dict[str, list[object]] = {request.request_id: [] for request in requests}
    num_accepted = 0
    while engine.has_work:
        for event in engine.step().events:
            texts[event.request_id] += [
                (token_id, one.logprob, one.top_ids, one.top_logprobs)
                for token_id, one in zip(event.token_ids, event.logprobs, strict=True)
            ]
            num_accepted += event.num_accepted_tokens
    assert (num_accepted > 0) == (draft is not None)
    return texts


def test_a_pass_may_ask_for_no_logits():
    """As one does that feeds only the first part of a long prompt."""
    batch = pack([chain_segment([4, 5], 0, range(2))], CPU)
    assert quantised("qwen2").forward(batch, KVCache(2, CPU), torch.arange(0)).shape == (0, 61)
    assert layer()[1](torch.zeros(1, 0, 48)).shape == (1, 0, 40)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_in_its_text(bad):
    model = adopt(tiny_module("qwen2"), CPU, "int8")
    model.module.get_input_embeddings().weight.data[7] = bad
    segments = [chain_segment([1, 7], 0, range(2)), chain_segment([1, 3], 0, range(2, 4))]
    logits_TV = model.forward(pack(segments, CPU), KVCache(4, CPU), torch.arange(4))
    assert logits_TV[1].isnan().all()
    assert torch.equal(logits_TV[2:], alone(model, [1, 3]))


def test_nothing_that_layers_read_is_kept():
    model = quantised("llama")
    alone(model, [4, 5])
    linears = [part for part in model.module.modules() if isinstance(part, Int8Linear)]
    assert linears
    assert all(part._rows._source is None and part._rows._rows is None for part in linears)


def test_parts_whose_bits_depend_on_their_place_are_refused():
    module = tiny_module("llama")
    module.model.layers[0].mlp.act_fn = nn.GELU()
    with pytest.raises(UnsupportedModel, match="GELU has no form"):
        adopt(module, CPU, "int8")
    module = tiny_module("llama")
    module.model.layers[1].mlp.expert = nn.Conv1d(4, 4, 1)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.expert, a Conv1d"):
        adopt(module, CPU, "int8")


def test_the_audit_s_reference_has_the_same_bits():
    model, texts = quantised("qwen2"), [[5, 9, 3, 14, 22, 6], [8, 1, 30]]
    logits = SameBitsReference(adopt(tiny_module("qwen2"), CPU, "int8")).logits(texts, 2)
    for text, logits_NV in zip(texts, logits, strict=True):
        assert torch.equal(logits_NV.float(), alone(model, text)[-2:])


def test_a_model_is_loaded_in_int8(tmp_path):
    tiny_module("qwen2").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "int8", CPU, "packed")
    assert torch.equal(alone(loaded, [4, 5, 6]), alone(quantised("qwen2"), [4, 5, 6]))
    assert loaded.max_positions == min(512, exact_attention.LONGEST_TEXT)


# the linear layers


def layer(num_inputs: int = 48, num_outputs: int = 40, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(num_inputs, num_outputs, bias=bias).requires_grad_(False)
    ones_I = torch.ones(num_inputs)
    return linear, Int8Linear(linear, ones_I, SharedRows(ones_I))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_up_to_rounding(bias):
    linear, rounded = layer(bias=bias)
    x = torch.randn(2, 5, 48)
    assert (rounded(x) - linear(x)).norm() < 0.02 * linear(x).norm()
    assert (rounded.dense_weight() - linear.weight).abs().max() < linear.weight.abs().max() / 200


def test_rows_of_zeros_and_of_great_numbers_are_rows():
    linear, rounded = layer()
    x = torch.stack([torch.zeros(48), torch.full((48,), 1e20), torch.full((48,), 1e-20)])
    assert torch.allclose(rounded(x)[0], linear.bias)
    assert torch.isfinite(rounded(x)).all()
    assert math.isnan(float(rounded(torch.full((1, 48), math.nan)).sum())), "what is no number must stay none"


def test_smoothing_leaves_the_function_and_tames_outliers():
    torch.manual_seed(1)
    linear = nn.Linear(64, 32, bias=False).requires_grad_(False)
    x = torch.randn(20, 64)
    x[:, 3] *= 100.0
    model = nn.Module()
    model.layer = linear
    smoothing_I = int8._smoothing(x.abs().amax(0), linear.weight.abs().amax(0))
    assert set(torch.frexp(smoothing_I)[0].tolist()) == {0.5}, "powers of two"
    errors = [
        float((Int8Linear(linear, factors_I, SharedRows(factors_I))(x) - linear(x)).norm() / linear(x).norm())
        for factors_I in (smoothing_I, torch.ones(64))
    ]
    assert errors[0] < errors[1] / 3


def test_layers_that_read_the_same_share_its_rows():
    module = tiny_module("llama")
    quantise_linears(module, 61)
    attention_part, mlp = module.model.layers[0].self_attn, module.model.layers[0].mlp
    assert attention_part.q_proj._rows is attention_part.k_proj._rows is attention_part.v_proj._rows
    assert mlp.gate_proj._rows is mlp.up_proj._rows
    assert mlp.gate_proj._rows is not attention_part.q_proj._rows
    assert not any(type(part) is nn.Linear for part in module.modules())


def test_a_broken_layer_does_not_pass(monkeypatch):
    monkeypatch.setattr(int8, "quantised_weight", lambda weight_OI: (weight_OI.to(torch.int8), torch.ones(len(weight_OI))))
    with pytest.raises(ValueError, match="in 8 bits the layer"):
        quantise_linears(tiny_module("llama"), 61)


# attention


def test_what_has_no_exact_attention_is_refused():
    context = AttentionContext(pack([chain_segment([1], 0, [0])], CPU), KVCache(1, CPU))
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedAttention, match="context"):
        attend(nn.Module(), query, query, query, None)
    with pytest.raises(UnsupportedAttention, match="sinks"):
        attend(nn.Module(), query, query, query, None, attention_context=context, s_aux=torch.zeros(1))
    wide = torch.zeros(1, 1, 1, 1024)
    with pytest.raises(UnsupportedAttention, match="1024"):
        attend(nn.Module(), wide, wide, wide, None, attention_context=context)
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(UnsupportedAttention, match="soft caps"):
        attend(module, query, query, query, None, softcap=30.0, attention_context=context)


def test_sums_are_exact_in_any_order():
    """The largest numbers that can come, in the longest row: every sum is still below 2^53."""
    weights = exact_attention.LONGEST_TEXT * exact_attention._WEIGHT * exact_attention._LARGEST_VALUE
    scores = exact_attention._LARGEST_HEAD * exact_attention._LARGEST_KEY**2
    assert max(weights, scores) <= 2.0**53
    table = exact_attention._exponentials()
    assert table[0] == 2**14
    assert table[-1] == 0
    assert np.allclose(table[:9000], 2**14 * np.exp(-np.arange(9000) / 1024), atol=0.5)
