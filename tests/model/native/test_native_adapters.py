"""LoRA adapters in the library: near torch's own products, and each row's bits are those of its sequence alone."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.kv_cache.kv_cache import KVCache
from engine.model.adapters import adapt
from engine.model.causal_lm import CausalModel, adopt, weights_dtype
from engine.model.linear_backends import NATIVE
from engine.native import library
from engine.native.adapters import NativeAdapters, UnknownLayer
from engine.testing import tiny_module
from engine.weights.lora import Adapter, LowRank
from tests.model.lora import layers_of
from tests.model.native_models import KNOWN, PRECISIONS, with_weights
from tests.model.passes import CPU
from tests.needs import needs_library

pytestmark = needs_library
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("v_proj", "up_proj")
TEXT = [(7 * place + 3) % 61 for place in range(200)]
BATCH = ((40, "one"), (7, None), (1, "two"), (110, "two"), (1, None), (30, "some"), (9, "one"))  # tokens, adapters
ODD = {"hidden_size": 37, "intermediate_size": 83, "num_attention_heads": 6, "head_dim": 10}


def adapter_of(name: str, family: str, rank: int, targets: Sequence[str], sizes: dict[str, int]) -> Adapter:
    generator = torch.Generator().manual_seed(rank)

    def term(linear: torch.nn.Linear) -> LowRank:
        shapes = (rank, linear.in_features), (linear.out_features, rank)
        return LowRank(*(torch.randn(*shape, generator=generator) * rank**-0.5 for shape in shapes))

    return Adapter(name, {name: term(linear) for name, linear in layers_of(tiny_module(family, **sizes), targets).items()})


def adapters_of(family: str, sizes: dict[str, int]) -> list[Adapter]:
    """Return adapters of several ranks, one of which leaves most layers as they are."""
    kinds = {"one": (5, ALL), "two": (16, ALL), "some": (1, SOME)}
    return [adapter_of(name, family, rank, targets, sizes) for name, (rank, targets) in kinds.items()]


def base(family: str, precision: str, sizes: dict[str, int]) -> CausalModel:
    return adopt(with_weights(tiny_module(family, **sizes), weights_dtype(precision)), CPU, NATIVE, precision)


def adapted(family: str, precision: str = "float32", **sizes: int) -> CausalModel:
    model = base(family, precision, sizes)
    model.add_adapters(adapters_of(family, sizes))
    return model


def by_torch(family: str, precision: str, **sizes: int) -> CausalModel:
    """Return the model whose passes torch runs, over the same packed layers."""
    model = base(family, precision, sizes)
    model.native, model.adapters = None, adapt(model.module, adapters_of(family, sizes), CPU)
    return model


def logits(model: CausalModel, rows: Sequence[tuple[int, str | None]], num_last: int | None = None) -> list[Tensor]:
    """Return the logits of texts in one pass, of their last tokens or of all."""
    starts = [*accumulate((count for count, _ in rows), initial=0)]
    segments = [
        structs.replace(chain_segment(TEXT[:count], 0, range(start, start + count)), adapter=name)
        for start, (count, name) in zip(starts, rows, strict=False)
    ]
    chosen = [[*range(begin, end)][-(num_last or end) :] for begin, end in pairwise(starts)]
    found_NV = model.forward(pack(segments, CPU), KVCache(starts[-1], CPU), torch.tensor([*chain.from_iterable(chosen)]))
    return list(found_NV.split([len(rows) for rows in chosen]))


def alone(model: CausalModel, count: int, adapter: str | None) -> Tensor:
    """Return the logits of a text that is fed token by token."""
    cache, first = KVCache(count, CPU), torch.tensor([0])
    segments = [structs.replace(chain_segment([TEXT[place]], place, range(count)), adapter=adapter) for place in range(count)]
    return torch.cat([model.forward(pack([segment], CPU), cache, first) for segment in segments])


def has_own_bits(model: CausalModel, plain: CausalModel) -> bool:
    """Return whether each row has the bits of its text alone, and rows of the base those of a model without adapters."""
    for num_last in (None, 1):  # with 1, few rows go through the end of the last layer
        for (count, name), found in zip(BATCH, logits(model, BATCH, num_last), strict=True):
            expected = alone(model if name else plain, count, name)
            if not torch.equal(found, expected[-len(found) :]):
                return False
    return True


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("family", "sizes"), [*((family, {}) for family in KNOWN), ("qwen3", ODD)])
def test_rows_have_bits_of_texts_alone(family, sizes, precision):
    """Rows of several adapters and of the base share the passes, some of them wider than a panel."""
    assert has_own_bits(adapted(family, precision, **sizes), base(family, precision, sizes))


@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-4), ("bfloat16", 1e-4), ("int8", 1e-2), ("compact", 0.1)])
@pytest.mark.parametrize(("family", "sizes"), [*((family, {}) for family in KNOWN), ("qwen3", ODD)])
def test_logits_are_near_those_of_torch(family, sizes, precision, limit):
    """Torch adds the same terms to the outputs of the same packed layers."""
    found, expected = (logits(model(family, precision, **sizes), BATCH) for model in (adapted, by_torch))
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < limit


def neighbours(rows: np.ndarray) -> np.ndarray:
    return np.roll(rows, 1)


def base_rows_too(rows: np.ndarray) -> np.ndarray:
    return np.where(rows == 0, rows.max(), rows)


@pytest.mark.parametrize("mutation", [neighbours, np.zeros_like, base_rows_too])
def test_bits_differ_with_neighbours_adapter(mutation, monkeypatch):
    """The mutants of the choice of rows must fail the test of bits."""
    own = NativeAdapters.rows_of

    def rows_of(adapters, batch):
        found = own(adapters, batch)
        return found if found is None or batch.num_tokens == 1 else (mutation(found[0]), found[1])

    monkeypatch.setattr(NativeAdapters, "rows_of", rows_of)
    assert not has_own_bits(adapted("llama"), base("llama", "float32", {}))


@pytest.mark.parametrize("part", library.LINEARS)
def test_each_part_changes_the_logits(part):
    """A term that the pass does not read would leave the base's bits."""
    name = f"{part[0] if part in ('query', 'key', 'value', 'output') else part}_proj"
    model = base("llama", "float32", {})
    model.add_adapters([adapter_of("one", "llama", 3, (name,), {})])
    with_part, without = (logits(model, [(20, adapter)])[0] for adapter in ("one", None))
    assert float((with_part[1:] - without[1:]).abs().max()) > 1e-2


def test_broken_row_spares_other_adapters_rows():
    """A NaN of one row's term reaches no other row."""
    adapters = adapters_of("llama", {})
    adapters[0].layers["model.layers.0.mlp.up_proj"].b_OR.fill_(torch.nan)
    model = base("llama", "float32", {})
    model.add_adapters(adapters)
    for (_, name), found, expected in zip(BATCH, logits(model, BATCH), logits(adapted("llama"), BATCH), strict=True):
        assert found.isnan().all() if name == "one" else torch.equal(found, expected)


def test_unknown_layer_is_refused():
    low = LowRank(torch.zeros(1, 32), torch.zeros(32, 1))
    for name in ("model.layers.3.self_attn.q_proj", "model.layers.0.mlp.w_proj", "lm_head"):
        with pytest.raises(UnknownLayer, match=f"does not run {name}"):
            NativeAdapters([Adapter("one", {name: low})], num_layers=3)
