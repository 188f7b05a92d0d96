"""The drafters: text that repeats itself, and the target's own first layers."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.early_exit import Lens, early_exit_drafter
from engine.draft.growth import grow
from engine.draft.ngram import NgramDrafter, continuations
from engine.kv_cache import KVCache
from engine.packing import pack
from engine.plan import Feeding
from engine.segments import chain_segment
from engine.testing import tiny_engine
from engine.tree import ROOT, Expansion
from tests.model.driving import greedy, run, sampled
from tests.model.passes import CPU
from tests.model.rows import decoding_row
from tests.model.test_kv_cache import EXACT, RandomExpansion, cache_error
from tests.model.tiny import model, own_greedy_text, own_module

texts = st.lists(st.integers(0, 3), max_size=30)


def counted(text: list[int], size: int) -> Counter[int]:
    """Count what followed every earlier occurrence of the last `size` tokens, by looking at each place."""
    suffix = text[len(text) - size :]
    starts = range(len(text) - size)
    return Counter(text[start + size] for start in starts if text[start : start + size] == suffix)


def check_continuations(found, text: list[int], size: int) -> None:
    assert found(np.asarray(text, dtype=np.int64), size) == (counted(text, size) if size < len(text) else Counter())


@given(texts, st.integers(1, 5))
def test_continuations(text, size):
    check_continuations(continuations, text, size)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda text, size: continuations(text[:-1], size),
        lambda text, size: continuations(text, size - 1),
        lambda text, size: Counter(dict.fromkeys(continuations(text, size), 1)),
        lambda text, size: Counter(text[size - 1 :].tolist()),
    ],
)
def test_continuations_kill(mutant):
    text = [3, 2, 1, 2, 0, 1, 2, 3, 1, 2, 0, 1, 2]
    check_continuations(continuations, text, 2)
    with pytest.raises(AssertionError):
        check_continuations(mutant, text, 2)


def ngram_law(text: list[int], **sizes) -> list[float] | None:
    """Return the law proposed at the root of the text, None if nothing is proposed."""
    drafter = NgramDrafter(4, CPU, **sizes)
    proposal = drafter.feed([], [FrontierNode(GrowingTree(decoding_row(text)), ROOT, 1)])
    return proposal.logits_PV[0].softmax(-1).tolist() if proposal.indices else None


def test_the_ngram_law_is_the_share_of_continuations():
    assert ngram_law([1, 2, 0, 1, 2, 3, 1, 2, 0, 1, 2], max_tokens=2) == pytest.approx([2 / 3, 0, 0, 1 / 3])


def test_the_longest_match_decides():
    text = [3, 1, 2, 0, 1, 2, 3, 3, 1, 2]
    assert ngram_law(text, max_tokens=3) == [1.0, 0.0, 0.0, 0.0]
    assert ngram_law(text, max_tokens=2) == pytest.approx([0.5, 0.0, 0.0, 0.5])


def test_no_match_within_the_window_is_no_proposal():
    text = [1, 2, 0, 3, 3, 0, 1, 2]
    assert ngram_law(text) == [1.0, 0.0, 0.0, 0.0]
    assert ngram_law(text, window_tokens=6) is None
    assert ngram_law([1, 2, 3]) is None
    assert ngram_law([1]) is None


def test_ngram_trees_go_on_from_the_drafted_path_and_leave_others_alone():
    """Unmatched rows keep their root alone; a matched one follows the text it has seen."""
    rows = [
        decoding_row((0, 1, 2), Expansion(4, 1, 0), request_id="none"),
        decoding_row((1, 2, 3, 0, 0, 1, 2), Expansion(4, 1, 0), request_id="some"),
    ]
    plain, chain = grow(NgramDrafter(4, CPU), rows, 4, CPU).forest.trees
    assert plain.num_nodes == 1
    assert chain.token_ids == (2, 3, 0, 0, 1)


def random_lens(num_layers: int = 2, width: int = 32, seed: int = 0) -> Lens:
    """Return a lens near the identity, so that its drafts say something."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.eye(width) + 0.05 * torch.randn(width, width, generator=generator)
    return Lens(
        num_layers, weight.bfloat16().float(), torch.randn(width, generator=generator).mul(0.1).bfloat16().float(), {"seed": "0"}
    )


def early_exit_logits(text: list[int], lens: Lens) -> torch.Tensor:
    """Return what the drafter must say after the text: transformers' own state, the lens, the norm, the head."""
    module = own_module("llama")
    with torch.inference_mode():
        states = module(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        state = states[lens.num_layers][0, -1] @ lens.weight_DD + lens.bias_D
        return module.lm_head(module.model.norm(state))  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_early_exit_says_what_the_lens_makes_of_the_first_layers(num_layers):
    lens, cache = random_lens(num_layers), KVCache(64, CPU)
    drafter = early_exit_drafter(model("llama"), cache, lens)
    row = decoding_row((5, 9, 33, 4), Expansion(1, 2, 2))
    grown = grow(drafter, [row], 61, CPU)
    tree = grown.forest.trees[0]
    for node, law_row in enumerate(grown.forest.law_rows[0]):
        if law_row is not None:
            text = [*row.certain_ids, *(tree.token_ids[v] for v in tree.path(node)[1:])]
            law_V = grown.forest.draft_laws_RV[law_row]
            assert torch.allclose(law_V, early_exit_logits(text, lens).softmax(-1), atol=1e-4)
    assert cache.num_layers == num_layers


def test_early_exit_writes_the_keys_the_target_would():
    cache = KVCache(8, CPU)
    drafter = early_exit_drafter(model("llama"), cache, random_lens())
    grow(drafter, [decoding_row((5, 9, 33, 4), Expansion(1, 1, 0))], 61, CPU)
    fresh = KVCache(4, CPU)
    model("llama").forward(pack([chain_segment((5, 9, 33, 4), 0, range(4))], CPU), fresh, torch.tensor([0]))
    where = torch.arange(4)[None]
    for layer in range(2):
        assert torch.allclose(cache.gather(layer, where)[0], fresh.gather(layer, where)[0], atol=1e-5)


def engine_with_early_exit(policy=None):
    """Return an engine whose drafter shares the target's cache."""
    engine = tiny_engine(model("llama"), NgramDrafter(61, CPU), policy)
    engine._drafter = early_exit_drafter(engine._target.model, engine._target.cache, random_lens())
    return engine


def test_early_exit_changes_no_text_and_keeps_the_shared_cache_right():
    engine = engine_with_early_exit(RandomExpansion(1))
    prompts = [[5 + (7 * row + 3 * i) % 50 for i in range(3 + 5 * row)] for row in range(3)]
    errors: list[float] = []

    def look(engine):
        for sequence in engine._scheduler._by_id.values():
            assert sequence.draft_len == sequence.target_len
            ids = sequence.token_ids[: sequence.target_len]
            errors.append(cache_error(engine._target.model, engine._target.cache, ids, sequence.slots))

    requests = [greedy("0", prompts[0]), greedy("1", prompts[1]), sampled("2", prompts[2], seed=4)]
    session = run(engine, requests, look)
    assert max(errors) < EXACT
    for row in range(2):
        assert session.outcomes[str(row)].ids == own_greedy_text("llama", prompts[row], 12)
    assert session.outcomes["2"].ids == run(tiny_engine(model("llama")), requests[2:]).outcomes["2"].ids


def test_a_lens_survives_its_file(tmp_path):
    lens = random_lens()
    lens.save(tmp_path / "lens.safetensors")
    loaded = Lens.load(tmp_path / "lens.safetensors")
    assert (loaded.num_layers, loaded.recipe) == (lens.num_layers, lens.recipe)
    assert torch.equal(loaded.weight_DD, lens.weight_DD)
    assert torch.equal(loaded.bias_D, lens.bias_D)


def test_another_file_is_no_lens(tmp_path):
    save_file({"weight": torch.eye(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a lens"):
        Lens.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("lens", [random_lens(width=16), random_lens(num_layers=3)])
def test_a_lens_that_does_not_fit_is_refused(lens):
    with pytest.raises(ValueError, match="does not fit"):
        early_exit_drafter(model("llama"), KVCache(1, CPU), lens)


def test_a_drafter_says_whether_it_needs_feeding():
    assert early_exit_drafter(model("llama"), KVCache(1, CPU), random_lens()).feeding is Feeding.TARGET_CACHE
    assert NgramDrafter(4, CPU).feeding is Feeding.TARGET_CACHE
