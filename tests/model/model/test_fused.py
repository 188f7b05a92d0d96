"""The fused decoder: its launches are their reference, and its passes the module's.

Without a GPU the kernels are run by Triton's interpreter, program by program.
"""

import random
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from engine.attention.packing import pack
from engine.attention.paged.reference import attend
from engine.attention.segments import chain_segment
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion, TokenTree
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, adopt
from engine.model.fp8 import rounded
from engine.model.fused.decoder import MOST_TOKENS, FusedDecoder
from engine.model.fused.parts import FusedLayer, Pools, RopeScale, Weight
from engine.model.fused.reference import TorchOperations
from engine.model.hidden_states import StateTap
from engine.native.decoder import UnknownDecoder
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import run
from tests.model.mixed import mixed_requests
from tests.model.paged import DEVICE, needs_triton, paged, random_segments, random_tree
from tests.model.passes import CPU, SceneRow, error_of, node_logits, scene_row

if find_spec("triton"):
    from engine.attention.paged import kernels as attention_kernels
    from engine.attention.paged import launch as attention_launch
    from engine.model.fused import kernels
    from engine.model.fused.launch import Kernels, ProductBlocks
    from tests.model.interpreted import products_by_row, widened_products

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EXACT, WRONG, EPS = 1e-4, 1e-2, 1e-5
ROUNDING = 2e-2  # of bfloat16


def fused_model(family: str, operations=None, is_deterministic=False) -> CausalModel:
    """Return a tiny model whose passes over tables are fused."""
    model = adopt(tiny_module(family), CPU)
    model.attend = attend
    model.fused = FusedDecoder(model.module, operations or TorchOperations(), attend, is_deterministic)
    return model


def scenes(seed: int = 0):
    rng = random.Random(seed)
    free = rng.sample(range(200), 200)
    return [scene_row(rng, [rng.randrange(61) for _ in range(length)], random_tree(rng, 6), free) for length in (9, 14)]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_passes_are_the_modules(family):
    rows = scenes()
    assert error_of(node_logits(fused_model(family), rows), family, rows) < EXACT


@pytest.mark.parametrize("part", ["bias_O", "head_norms_2K", "window", "mlp_norm_D", "attention_norm_D"])
def test_a_missing_part_is_noticed(part):
    family = {"bias_O": "qwen2", "window": "mistral"}.get(part, "qwen3")
    model, rows = fused_model(family), scenes()
    layers = vars(model.fused)["_layers"]
    layers[:] = [replace(layer, **{part: torch.ones(32) if part.endswith("D") else None}) for layer in layers]
    assert error_of(node_logits(model, rows), family, rows) > WRONG


def test_unknown_parts_are_refused():
    """The model's own pass runs these."""
    with pytest.raises(UnknownDecoder, match="Gemma3RMSNorm"):
        FusedDecoder(tiny_module("gemma3"), TorchOperations(), attend)
    with_bias = tiny_module("llama")
    with_bias.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(UnknownDecoder, match="a bias"):
        FusedDecoder(with_bias, TorchOperations(), attend)
    with pytest.raises(UnknownDecoder, match="float16"):
        FusedDecoder(tiny_module("llama").half(), TorchOperations(), attend)


def test_stacked_weights_are_stored_once():
    module = tiny_module("llama")
    before = sum(parameter.nbytes for parameter in module.parameters())
    fused = FusedDecoder(module, TorchOperations(), attend)
    attention, layer = module.model.layers[0].self_attn, vars(fused)["_layers"][0]
    assert attention.k_proj.weight.data_ptr() == layer.qkv.rows_OI[attention.q_proj.out_features :].data_ptr()
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in module.parameters()}
    assert sum(storages.values()) == before


def test_wide_passes_are_the_modules_own():
    model = fused_model("llama")
    assert model.fused is not None
    assert model.fused.runs(MOST_TOKENS)
    assert not model.fused.runs(MOST_TOKENS + 1)
    always = fused_model("llama", is_deterministic=True).fused
    assert always is not None
    assert always.runs(MOST_TOKENS + 1)


def test_states_are_reported_to_taps():
    """A head reads states by the same name from fused passes and from the module's."""
    rows, found = scenes(), []
    for model in (fused_model("qwen3"), adopt(tiny_module("qwen3"), CPU)):
        tap = StateTap(model, [1, 3])
        node_logits(model, rows)
        found.append(tap.latest())
        tap.close()
    assert (found[0] - found[1]).abs().max() < EXACT


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_texts_are_those_of_unfused_passes(family):
    texts = []
    for target, draft in ((fused_model(family), fused_model(family)), (adopt(tiny_module(family), CPU),) * 2):
        engine = tiny_engine(target, draft, FixedExpansion(Expansion(2, 2, 2)))
        texts.append(run(engine, mixed_requests(max_tokens=16)).texts())
    assert texts[0] == texts[1]


# The kernels and their reference on the same numbers.
WIDTH, INNER, NUM_KEY, NUM_SHARED, VOCAB = 80, 72, 2, 3, 100


def layer_of(size: int, dtype: torch.dtype, has_head_norms=False, has_bias=False, is_fp8=False) -> FusedLayer:
    generator = torch.Generator().manual_seed(size)

    def made(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE)

    def weight(rows, width):
        if is_fp8:
            return Weight(*rounded(made(rows, width)))
        return Weight(made(rows, width).to(dtype))

    num_query = NUM_KEY * NUM_SHARED
    return FusedLayer(
        attention_norm_D=1.0 + made(WIDTH),
        qkv=weight((num_query + 2 * NUM_KEY) * size, WIDTH),
        bias_O=made((num_query + 2 * NUM_KEY) * size).to(dtype) if has_bias else None,
        head_norms_2K=1.0 + made(2, size) if has_head_norms else None,
        output=weight(WIDTH, num_query * size),
        mlp_norm_D=1.0 + made(WIDTH),
        gate_up=weight(2 * INNER, WIDTH),
        down=weight(WIDTH, INNER),
        window=None,
    )


def states_of(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens)).to(DEVICE, dtype)


def rotated_by(operations, layer: FusedLayer, size: int, dtype: torch.dtype, num_tokens: int) -> list[torch.Tensor]:
    """Return queries, and the pools after the write."""
    segments = random_segments(4, [70, 0, 9])
    batch = paged(segments, num_tokens)
    slots = batch.table[2 * num_tokens : 3 * num_tokens]
    slots[slots == 1 << 20] = 199  # the dummy slot of padding
    pools = Pools(*(torch.zeros(200, NUM_KEY, size, dtype=dtype, device=DEVICE) for _ in range(2)))
    rotary = RopeScale(torch.logspace(0, -3, size // 2, device=DEVICE), 1.2)
    with widened_products():
        query = operations.rotated(states_of(num_tokens, dtype), layer, rotary, EPS, pools, batch)
    return [query[: sum(one.num_tokens for one in segments)], pools.keys_SHK[:199], pools.values_SHK[:199]]


def most_error(found, expected) -> float:
    """Return the largest error of a tensor, relative to its norm."""
    pairs = ((a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


LAYERS = {
    "llama": {},
    "qwen2": {"has_bias": True},
    "qwen3": {"has_head_norms": True},
    "fp8": {"is_fp8": True},
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 40])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_rotated_product_is_its_reference(kind, size, dtype):
    layer = layer_of(size, dtype, **LAYERS[kind])
    found, expected = (rotated_by(one, layer, size, dtype, 24) for one in (Kernels(), TorchOperations()))
    assert most_error(found, expected) < (EXACT if dtype == torch.float32 else ROUNDING)


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 20, 70])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_the_other_products_are_their_references(kind, num_tokens):
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    layer, states, found = layer_of(16, dtype, is_fp8=kind == "fp8"), states_of(num_tokens, dtype), []
    for operations in (Kernels(), TorchOperations()):
        with widened_products():
            added, inner = states.clone(), operations.gated(states, layer, EPS)
            operations.add_product(added, inner, layer.down)
            found.append([inner, added, operations.logits(states, layer.mlp_norm_D, layer.gate_up, EPS)])
    assert most_error(*found) < (EXACT if dtype == torch.float32 else ROUNDING)


def changed_rows(operations) -> int:
    """Return how many rows of narrow passes have other bits than in a pass of all."""
    layer, states = layer_of(16, torch.float32), states_of(70, torch.float32)

    def bits(first, end):
        with products_by_row():
            added, inner = states[first:end].clone(), operations.gated(states[first:end], layer, EPS)
            operations.add_product(added, inner, layer.down)
            return torch.cat([added, operations.logits(added, layer.mlp_norm_D, layer.gate_up, EPS)], dim=-1)

    together = bits(0, 70)
    parts = ((0, 1), (3, 20), (64, 70))
    return sum(int((bits(first, end) != together[first:end]).any(-1).sum()) for first, end in parts)


@needs_triton
def test_rows_have_equal_bits_in_any_pass(monkeypatch):
    """The rows of a block keep the order of their sums, whatever the other rows are. Blocks of other sizes add otherwise."""
    assert changed_rows(Kernels(is_deterministic=True)) == 0
    by_width = lambda num_tokens, *_: ProductBlocks(16, 32, 16 if num_tokens < 30 else 32, 4, 1)  # noqa: E731
    monkeypatch.setattr(ProductBlocks, "of", by_width)
    assert changed_rows(Kernels()) > 0


@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_fused_kernels_run_a_model(family):
    """Over a processor's cache, whose heads are apart."""
    rows = scenes()
    assert error_of(node_logits(fused_model(family, Kernels()), rows), family, rows) < EXACT


@needs_triton
def test_a_layer_has_at_most_six_launches(monkeypatch):
    """With keys that are split in parts, whose merge is one of them. The output head's launch is one more."""
    launched = []

    class Counted:
        def __init__(self, name, function):
            self.name, self.function = name, function

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.function[grid]

    for module in (kernels, attention_kernels):
        for name in ("rotated", "gated", "product", "attend", "merge"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))
    model = fused_model("qwen3", Kernels())
    model.attend = vars(model.fused)["_attend"] = attention_launch.attend
    batch = paged(random_segments(1, [5], 1, 1), 1)
    assert model.fused is not None
    model.fused.forward(batch, KVCache(1 << 10, CPU), torch.tensor([0]))
    assert len(launched) == 6 * model.depth + 1
    assert {name: launched.count(name) for name in ("attend", "merge")} == {"attend": 3, "merge": 3}


def path_logits(model: CausalModel, text: list[int]) -> torch.Tensor:
    """Return the logits after a text that is fed token by token."""
    cache = KVCache(len(text), CPU)
    for place, token_id in enumerate(text):
        batch = pack([chain_segment([token_id], place, range(len(text)))], CPU)
        logits_NV = model.forward(batch, cache, torch.tensor([0]))
    return logits_NV[0]


def num_other_bits(model: CausalModel) -> int:
    """Return how many nodes of a tree beside another row have other bits than their paths token by token."""
    tree = TokenTree((-1, 0, 0, 2), (7, 8, 9, 10), ((1, 2), (), (3,), ()))
    rows = [SceneRow((3, 4, 7), (), tree, (*range(6),)), SceneRow((5, 6), (), TokenTree.single(6), (7, 6))]
    with products_by_row():
        together = node_logits(model, rows)[0]
        return sum(not torch.equal(path_logits(model, text), row_V) for text, row_V in zip(rows[0].path_texts(), together))


@needs_triton
def test_deterministic_passes_have_equal_bits(monkeypatch):
    """In trees beside other rows and in chunks of prompts, or token by token. A window begins at a position."""
    monkeypatch.setattr(attention_launch, "_PARTS_BY_ROW", 2)
    model = adopt(tiny_module("mistral", num_layers=1), CPU)
    model.attend = attention_launch.attend
    model.fused = FusedDecoder(model.module, Kernels(is_deterministic=True), attention_launch.attend, is_deterministic=True)
    assert model.has_same_bits
    assert num_other_bits(model) == 0
    model.fused.is_deterministic = False  # keys in the order of nodes, shared by tiles of tokens
    assert num_other_bits(model) > 0


@needs_triton
@pytest.mark.parametrize("change", ["eps", "weight row", "first slot", "first position", "stride"])
def test_a_wrong_launch_is_noticed(change, monkeypatch):
    """Each mutant gives the kernel one wrong argument."""
    size, original = 16, kernels.rotated
    layer = layer_of(size, torch.float32, has_head_norms=True)
    assert most_error(*(rotated_by(one, layer, size, torch.float32, 24) for one in (Kernels(), TorchOperations()))) < EXACT
    places = {"eps": (16, 0.5), "first slot": (13, 23), "first position": (12, 23), "stride": (15, 1)}

    class Wrong:
        def __getitem__(self, grid):
            def launched(*args, **constants):
                given = list(args)
                if change == "weight row":
                    given[2] = given[2].roll(1, 0)
                else:
                    place, value = places[change]
                    given[place] = value
                return original[grid](*given, **constants)

            return launched

    monkeypatch.setattr(kernels, "rotated", Wrong())
    assert most_error(*(rotated_by(one, layer, size, torch.float32, 24) for one in (Kernels(), TorchOperations()))) > WRONG


WRONG_ARGUMENTS = {  # of other kernels, by their places: each mutant changes one
    "gated": {
        "norm": (1, torch.ones_like),
        "weight row": (2, lambda weight: weight.roll(1, 0)),
        "scales": (3, lambda scales: scales.roll(1, 0)),
        "tokens": (5, lambda count: count - 1),
        "eps": (6, lambda _: 0.5),
    },
    "product": {
        "weight row": (2, lambda weight: weight.roll(1, 0)),
        "scales": (3, lambda scales: scales.roll(1, 0)),
        "tokens": (5, lambda count: count - 1),
        "rows": (6, lambda count: count - 1),
    },
}


@contextmanager
def unwritten_memory_is_nan():
    """Fill new tensors, so that a value which a kernel leaves out is never an earlier one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def products_error(kind: str) -> float:
    """Return the error of a product of eight-bit weights, whose scales differ, by its kernel."""
    layer, states = layer_of(16, torch.bfloat16, is_fp8=True), states_of(20, torch.bfloat16)
    inner, found = TorchOperations().gated(states, layer, EPS), []
    for operations in (Kernels(), TorchOperations()):
        with widened_products(), unwritten_memory_is_nan():
            if kind == "gated":
                found.append([operations.gated(states, layer, EPS)])
            else:
                added = states.clone()
                operations.add_product(added, inner, layer.down)
                found.append([added - states])
    return most_error([one.nan_to_num(1.0) for one in found[0]], found[1])


@needs_triton
@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind, changes in WRONG_ARGUMENTS.items() for change in changes])
def test_wrong_products_are_noticed(kind, change, monkeypatch):
    original, (place, changed) = getattr(kernels, kind), WRONG_ARGUMENTS[kind][change]
    assert products_error(kind) < ROUNDING

    class Wrong:
        def __getitem__(self, grid):
            def launched(*args, **constants):
                return original[grid](*(*args[:place], changed(args[place]), *args[place + 1 :]), **constants)

            return launched

    monkeypatch.setattr(kernels, kind, Wrong())
    assert products_error(kind) > ROUNDING
