"""The library's decoder: close to the model's own distribution. Each row's logits have the same bits in any batch."""

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.attention.packing import PackedBatch, pack
from engine.attention.segments import chain_segment
from engine.audit.reference import SameBitsReference
from engine.core.types import Request, SamplingParams
from engine.kv_cache.canary import SlotCanary
from engine.kv_cache.kv_cache import KVCache
from engine.model import causal_lm as loading
from engine.model.causal_lm import CausalModel, adopt, load_model, loaded_dtype, weights_dtype
from engine.model.hidden_states import StateTap
from engine.model.linear_backends import NATIVE
from engine.native import distributions as probs
from engine.native import library
from engine.native.decoder_pass import cache_dtype
from engine.native.linear import QUANTISED
from engine.sampling.argmax import RowArgMax
from engine.scheduler.slot_allocator import IntegrityError
from engine.testing import tiny_engine, tiny_module
from engine.weights.weight_headers import stored_dtype
from tests.model.attention.test_attention import (
    causal_mask,
    long_scene,
    only_itself_seen,
    positions_by_index,
    ragged_scene,
    scenes,
)
from tests.model.native_models import KNOWN, PRECISIONS, alone, is_same, native, with_weights
from tests.model.passes import CPU
from tests.model.tiny import model, own_module
from tests.needs import needs_library

pytestmark = needs_library
TEXT = [(7 * place + 3) % 61 for place in range(200)]
WIDE = {"hidden_size": 160, "intermediate_size": 320, "head_dim": 32}
NUM_EQUAL = 70
ODD_SIZES = [  # no whole number of vectors, of blocks of outputs, or of heads that are read together
    {"hidden_size": 37, "intermediate_size": 43},
    {"num_attention_heads": 6, "head_dim": 10, "vocab_size": 131},
    {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 18, "intermediate_size": 65},
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", KNOWN)
@settings(max_examples=4)
@given(rows=scenes())
def test_node_bits_equal_its_path_alone(family, precision, rows):
    """Chunks, trees and neighbours of any shape, over slots in any order; some layers look through a window."""
    assert is_same(native(family, precision), rows)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", ODD_SIZES)
def test_odd_sized_models_have_stable_bits(sizes, precision):
    """The model's own pass has been compared when it was adopted."""
    assert is_same(adopt(tiny_module("qwen3", **sizes), CPU, NATIVE, precision), ragged_scene())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("family", "window"), [("llama", {}), ("gemma3", {"sliding_window": 40})])
def test_nodes_after_long_prefixes_have_stable_bits(family, window, precision):
    """Contexts of several blocks, read together or through a window that cuts them for some tokens of a pass alone."""
    assert is_same(adopt(tiny_module(family, **window), CPU, NATIVE, precision), long_scene())


@pytest.mark.parametrize("segment", [causal_mask, only_itself_seen, positions_by_index])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_comparison_sees_another_tree(precision, segment):
    assert not is_same(native("llama", precision), ragged_scene(), segment=segment)


def test_comparison_detects_rounding_with_neighbours():
    """The mutant rounds like products of torch."""
    assert not is_same(model("llama"), ragged_scene())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("factor", [4.0, -6.0])
def test_prompts_of_large_scores_keep_bits(factor, precision):
    """Bug: sums of earlier keys were not rescaled when a later block of keys had a row's largest score."""
    module = tiny_module("qwen3")
    for layer in module.model.layers:
        layer.self_attn.q_norm.weight.data *= factor
    target = adopt(with_weights(module, weights_dtype(precision)), CPU, NATIVE, precision)
    together = target.forward(chunk(200), KVCache(200, CPU), torch.arange(200))
    assert torch.equal(together, alone(target, TEXT[:200]))


@pytest.mark.parametrize("place", [40, 41])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_broken_tokens_spare_earlier_prompt_tokens(precision, place):
    """Bug: a value that is NaN reached tokens before it, as the unseen half of a pair or of a block of keys."""
    module = tiny_module("qwen2")
    module.get_input_embeddings().weight.data[7] = math.nan
    target = adopt(module, CPU, NATIVE, precision)
    text = [1 if token == 7 else token for token in TEXT[:70]]
    text[place] = 7
    logits_TV = target.forward(pack([chain_segment(text, 0, range(70))], CPU), KVCache(70, CPU), torch.arange(70))
    assert torch.equal(logits_TV[:place], alone(target, text[:place]))
    assert logits_TV[place:].isnan().all()


@pytest.mark.parametrize("family", KNOWN)
def test_prompts_in_float32_are_near_float64(family):
    """The sums of a prompt's attention are as precise as float32 allows."""
    with torch.inference_mode():
        exact_TV = tiny_module(family).double()(input_ids=torch.tensor([TEXT[:200]])).logits[0]
    found_TV = native(family).forward(chunk(200), KVCache(200, CPU), torch.arange(200))
    assert float((found_TV - exact_TV).abs().max() / exact_TV.abs().max()) < 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_tokens", [7, 97, 200])
def test_chunk_bits_equal_single_token_bits(num_tokens, precision):
    """Below and above a panel's rows."""
    target = native("gemma3", precision)
    together = target.forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.arange(num_tokens))
    assert torch.equal(together, alone(target, TEXT[:num_tokens]))


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [("float32", 0.0, 1e-4), ("bfloat16", 1e-4, 0.1), ("int8", 1e-4, 0.2), ("compact", 1e-4, 0.3)],
)
@pytest.mark.parametrize("family", KNOWN)
def test_distributions_are_near_those_of_the_model(family, precision, least, most):
    """By total variation: equal up to rounding for rounded weights, and different from the original weights."""
    with torch.inference_mode():
        own_TV = own_module(family)(input_ids=torch.tensor([TEXT[:40]])).logits[0].softmax(-1)
    distance = float((alone(native(family, precision), TEXT[:40]).softmax(-1) - own_TV).abs().sum(-1).amax() / 2)
    assert least < distance < most


@pytest.mark.parametrize("family", KNOWN)
def test_in_bfloat16_weights_alone_are_rounded(family):
    """The distribution is that of the rounded model in float32."""
    rounded = with_weights(tiny_module(family), torch.bfloat16).float()
    with torch.inference_mode():
        own_TV = rounded(input_ids=torch.tensor([TEXT[:40]])).logits[0]
    found_TV = alone(native(family, "bfloat16"), TEXT[:40])
    assert (found_TV - own_TV).abs().max() < 2e-4
    assert torch.equal(found_TV, alone(adopt(rounded, CPU, NATIVE, "float32"), TEXT[:40])), "stored so, it is float32 to the bit"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sequences_equal_plain_decoding(precision):
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
    plain, drafted = (texts_of(native("llama", precision), drafter, requests) for drafter in (None, native("llama", "int8")))
    assert plain == drafted
    assert plain != texts_of(native("llama", "float32" if precision == "int8" else "int8"), None, requests)


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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_narrow_weights_halve_keys_and_values(precision):
    cache = KVCache(2, CPU)
    native("llama", precision).forward(chunk(2), cache, torch.arange(1))
    dtype = torch.float16 if precision in QUANTISED else torch.float32
    assert {pool.dtype for pool in cache.gather(0, torch.tensor([[0]]))} == {cache_dtype(precision)} == {dtype}


def test_key_and_value_layout_equals_torch():
    """The last slot's layout too. The dummy slot is overwritten."""
    caches = []
    for target in (model("qwen2"), native("qwen2")):
        caches.append(cache := KVCache(7, CPU))
        slots = [4, 0, 6, cache.dummy_slot, 1, 5, 2]
        target.forward(pack([chain_segment(TEXT[:7], 0, slots)], CPU), cache, torch.arange(1))
        target.forward(pack([chain_segment([9], 0, [cache.dummy_slot])], CPU), cache, torch.arange(1))
    for layer in range(caches[0].num_layers):
        own, found = (torch.stack(cache.gather(layer, torch.tensor([slots]))) for cache in caches)
        assert found.shape[3] > 1, "heads"
        assert torch.allclose(own, found, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_slots_of_other_blocks_change_no_bit(precision):
    """Neighbours: slots within a block, at its ends, and in many blocks in any order."""
    target, found, text = native("qwen2", precision), [], TEXT[:130]
    orders = [range(130), range(450, 580), random.Random(1).sample(range(3000), 130)]
    for slots in orders:
        cache = KVCache(3000, CPU)
        target.forward(pack([chain_segment(text[:100], 0, slots[:100])], CPU), cache, torch.tensor([99]))
        logits_NV = target.forward(pack([chain_segment(text[100:], 100, slots)], CPU), cache, torch.arange(30))
        found.append([logits_NV, *cache.gather(1, torch.tensor([[*slots]]))])
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


@pytest.mark.parametrize(
    ("size", "kept"), [(1e3, 1e3), (1e7, 65504.0), (-1e7, -65504.0), (math.inf, math.inf), (math.nan, math.nan)]
)
def test_float16_overflow_saturates_and_nan_stays(size, kept):
    target, cache = adopt(tiny_module("qwen2"), CPU, NATIVE, "int8"), KVCache(2, CPU)
    target.module.model.layers[0].self_attn.v_proj.weights.bias_O[3] = size
    target.forward(chunk(2), cache, torch.arange(2))
    _, values = cache.gather(0, torch.tensor([[0, 1]]))
    np.testing.assert_allclose(values.flatten(2)[0, :, 3].float(), [kept, kept], rtol=1e-2)


def test_pass_may_request_no_logits():
    """A pass that feeds only the first part of a long prompt needs none."""
    assert native("qwen2").forward(chunk(2), KVCache(2, CPU), torch.arange(0)).shape == (0, 61)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("num_tokens", "rows"), [(2, [1, 0, 1, 0, 1]), (50, [49, 3]), (50, [25, 24, 23])])
def test_pass_returns_any_rows_repeatedly(num_tokens, rows, precision):
    target = adopt(with_weights(tiny_module("qwen2", **WIDE), weights_dtype(precision)), CPU, NATIVE, precision)
    logits_TV = target.forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.arange(num_tokens))
    some_RV = target.forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.tensor(rows))
    assert torch.equal(some_RV, logits_TV[rows])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", KNOWN)
def test_unread_tokens_keep_keys_for_others(family, precision):
    """Behind the last layer's keys only tokens with requested logits continue: first none, then some of two sequences."""
    target, cache, whole = native(family, precision), KVCache(100, CPU), KVCache(100, CPU)
    first, then = [two_texts(begin, end) for begin, end in ((0, 20), (20, 45))]
    target.forward(first, cache, torch.arange(0))
    target.forward(first, whole, torch.arange(first.num_tokens))
    rows = [3, 4, 24, 25, 44, 49]  # of both texts, side by side or not
    some_RV = target.forward(then, cache, torch.tensor(rows))
    assert torch.equal(some_RV, target.forward(then, whole, torch.arange(then.num_tokens))[rows])


def two_texts(begin: int, end: int) -> PackedBatch:
    """A chunk of each of two texts."""
    texts = (TEXT[begin:end], TEXT[50 + begin : 50 + end])
    return pack([chain_segment(text, begin, range(50 * place, 50 * place + 50)) for place, text in enumerate(texts)], CPU)


def chunk(num_tokens: int) -> PackedBatch:
    return pack([chain_segment(TEXT[:num_tokens], 0, range(num_tokens))], CPU)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_sequence(bad, precision):
    module = tiny_module("qwen2")
    module.get_input_embeddings().weight.data[7] = bad
    target = adopt(module, CPU, NATIVE, precision)
    segments = [chain_segment([1, 7], 0, range(2)), chain_segment([1, 3], 0, range(2, 4))]
    logits_TV = target.forward(pack(segments, CPU), KVCache(4, CPU), torch.arange(4))
    assert logits_TV[1].isnan().all()
    assert torch.equal(logits_TV[2:], alone(target, [1, 3]))


@pytest.mark.parametrize("precision", QUANTISED)
def test_audit_reference_has_equal_bits(precision):
    texts = [[5, 9, 3, 14, 22, 6], [8, 1, 30]]
    logits = SameBitsReference(adopt(tiny_module("qwen2"), CPU, NATIVE, precision), precision).logits(texts, 2)
    for text, logits_NV in zip(texts, logits, strict=True):
        assert torch.equal(logits_NV.float(), alone(native("qwen2", precision), text)[-2:])


# the likeliest tokens


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_reported_logit_facts_equal_reading_them(num_threads, num_tokens, monkeypatch):
    """Of equal logits in different blocks it reports the first, and it reports NaN."""
    monkeypatch.setattr(library, "_num_threads", num_threads)
    target = with_equal_outputs()
    found: list[RowArgMax] = []
    for _ in range(8):
        logits_NV = target.forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.arange(num_tokens))
        found = target.likeliest(logits_NV, num_tokens) or []
        assert repr(found) == repr([RowArgMax(*one) for one in probs.likeliest(logits_NV)])
    assert all(NUM_EQUAL <= one.token_id < 2 * NUM_EQUAL for one in found if one.is_valid)
    if num_tokens == 200:
        assert {one.is_valid for one in found} == {False, True}


def test_logit_facts_apply_to_their_pass_only():
    target = with_equal_outputs()
    logits_NV = target.forward(chunk(2), KVCache(2, CPU), torch.arange(2))
    later_NV = target.forward(chunk(3), KVCache(3, CPU), torch.arange(3))
    assert len(target.likeliest(later_NV, 3) or ()) == 3
    assert target.likeliest(logits_NV, 2) is target.likeliest(later_NV[1:], 2) is None


def with_equal_outputs() -> CausalModel:
    """Return a model with some outputs three times, and a token that makes no number."""
    module = tiny_module("llama", vocab_size=4 * NUM_EQUAL, tie_word_embeddings=False, **WIDE)
    weight = module.get_output_embeddings().weight.data
    weight[:] = torch.cat([0.01 * weight[:NUM_EQUAL], *[weight[:NUM_EQUAL]] * 3])
    module.get_input_embeddings().weight.data[TEXT[100]] = math.nan
    return adopt(module, CPU, NATIVE, "float32")


# threads


@pytest.mark.parametrize("precision", PRECISIONS)
def test_threads_change_no_bit(precision, monkeypatch):
    """Passes wide enough that threads are in the same phase at once, and narrow ones that leave some without a task."""
    target = adopt(tiny_module("gemma3", **WIDE), CPU, NATIVE, precision)

    def logits_of(num_threads: int, num_tokens: int, rows: Sequence[int]) -> torch.Tensor:
        monkeypatch.setattr(library, "_num_threads", num_threads)
        return target.forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.tensor(rows))

    for num_tokens, rows in ((1, range(1)), (2, range(2)), (7, range(7)), (7, [6]), (200, range(200)), (200, [3, 4, 60, 199])):
        expected = logits_of(1, num_tokens, rows)
        assert all(torch.equal(logits_of(3, num_tokens, rows), expected) for _ in range(8)), num_tokens


def test_concurrent_passes_have_their_own_rows(monkeypatch):
    """Of one model and of two, each long enough to overlap. One pass at a time uses the helper threads."""
    monkeypatch.setattr(library, "_num_threads", 2)
    models = [adopt(tiny_module(family, **WIDE), CPU, NATIVE, "int8") for family in ("llama", "gemma3")]

    def logits_of(place: int) -> torch.Tensor:
        num_tokens = 200 - place
        return models[place % 2].forward(chunk(num_tokens), KVCache(num_tokens, CPU), torch.arange(num_tokens))

    expected = [logits_of(place) for place in range(12)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(logits_of, [*range(12)] * 3))
    assert all(torch.equal(one, right) for one, right in zip(found, expected * 3, strict=True))


# observers


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("is_last_normed", [True, False])
def test_taps_read_the_module_hook_values(family, is_last_normed):
    found, expected = (states_of(target, is_last_normed) for target in (native(family), model(family)))
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, states_of(native(family), not is_last_normed), atol=1e-4)


def states_of(target: CausalModel, is_last_normed: bool) -> torch.Tensor:
    tap = StateTap(target, (1, 2, 3), is_last_normed)
    target.forward(chunk(20), KVCache(20, CPU), torch.tensor([19]))
    states = tap.latest()
    tap.close()
    return states


def test_a_tap_that_is_closed_costs_nothing():
    target = native("llama")
    assert target.native is not None
    num_watchers = len(target.native._watchers)
    tap = StateTap(target, (2,))
    assert len(target.native._watchers) == num_watchers + 1
    tap.close()
    assert len(target.native._watchers) == num_watchers


@pytest.mark.parametrize("unwritten", [3, 1999])
def test_slot_that_was_never_written_is_named(unwritten):
    """Also in another block."""
    canary = SlotCanary()
    pools, target = KVCache(2000, CPU, canary), native("qwen3")
    canary.begin()
    target.forward(chunk(2), pools, torch.tensor([1]))
    sound, lost = (pack([chain_segment([9], 2, slots)], CPU) for slots in ([0, 1, 2], [0, unwritten, 2]))
    target.forward(sound, pools, torch.tensor([0]))
    with pytest.raises(IntegrityError, match=rf"keys of layer 0 of slots \[{unwritten}\] are read"):
        target.forward(lost, pools, torch.tensor([0]))


@pytest.mark.parametrize("freed", [1, 1999])
def test_a_freed_slot_is_named(freed):
    """Also in another block."""
    canary = SlotCanary()
    cache, target = KVCache(2000, CPU, canary), native("qwen3")
    canary.begin()
    target.forward(pack([chain_segment(TEXT[:2], 0, [0, freed])], CPU), cache, torch.tensor([1]))
    canary.on_free([freed])
    with pytest.raises(IntegrityError, match=rf"keys of layer 0 of slots \[{freed}\] are read"):
        target.forward(pack([chain_segment([9], 2, [0, freed, 2])], CPU), cache, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_model_is_equal_however_weights_are_loaded(family, dtype, tmp_path, monkeypatch):
    """The library's weights are loaded in the file's format, in half of the memory. Gemma's scale would be rounded too."""
    with_weights(tiny_module(family), dtype).save_pretrained(tmp_path)
    assert stored_dtype(tmp_path) == dtype
    assert loaded_dtype(tmp_path, "float32", NATIVE) == (torch.float32 if family == "gemma3" else dtype)
    monkeypatch.setattr(loading, "loaded_dtype", lambda *_: dtype)
    narrow = load_model(tmp_path, "float32", CPU, NATIVE)
    monkeypatch.setattr(loading, "loaded_dtype", lambda *_: torch.float32)
    wide = load_model(tmp_path, "float32", CPU, NATIVE)
    for tensors, others in (
        (narrow.module.named_parameters(), dict(wide.module.named_parameters())),
        (narrow.module.named_buffers(), dict(wide.module.named_buffers())),
    ):
        assert all(tensor.dtype == others[name].dtype and torch.equal(tensor, others.pop(name)) for name, tensor in tensors)
        assert not others
    assert torch.equal(alone(narrow, TEXT[:12]), alone(wide, TEXT[:12]))
    assert narrow.module.config.to_json_string() == wide.module.config.to_json_string()


def test_weights_of_mixed_formats_load_as_float32(tmp_path):
    module = with_weights(tiny_module(), torch.bfloat16)
    module.model.norm.float()
    module.save_pretrained(tmp_path)
    assert stored_dtype(tmp_path) == loaded_dtype(tmp_path, "compact", NATIVE) == torch.float32
