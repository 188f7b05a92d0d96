"""The drafters: text that repeats itself, and the target's own first layers."""

import pytest
import torch
from safetensors.torch import save_file

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Feeding
from engine.core.tree import ROOT, Expansion
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.models.early_exit import Lens, early_exit_drafter
from engine.draft.text.text_drafter import TextDrafter
from engine.draft.trees.grow import grow, growers_of
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import adopt
from engine.model.linear_backends import NATIVE
from engine.testing import tiny_engine, tiny_module
from tests.model.driving import give_drafter, greedy, run, sampled
from tests.model.kv_cache.test_kv_cache import EXACT, RandomExpansion, cache_error
from tests.model.passes import CPU
from tests.model.rows import decoding_row
from tests.model.tiny import model, own_greedy_text, own_module
from tests.needs import needs_library


def test_cached_distributions_are_proposed_where_available():
    """The distribution is the share of continuations of the longest match. A context without a match stays a leaf."""
    trees = [GrowingTree(decoding_row(text, request_id=str(text))) for text in ((1, 2, 0, 3, 1, 2, 1, 3, 1, 2), (1, 2, 3))]
    proposal = TextDrafter(4, CPU).feed([], [FrontierNode(tree, ROOT, 1) for tree in trees])
    assert proposal.indices == (0,)
    assert proposal.logits_PV.softmax(-1).tolist() == [pytest.approx([0.0, 1.0, 0.0, 0.0])]
    assert proposal.origins == {0: {1: Origin(DraftSource.CACHE, True)}}


def test_ngram_trees_extend_matched_paths_only():
    """Unmatched rows keep their root alone; a matched one follows the text it has seen."""
    rows = [
        decoding_row((0, 1, 2), Expansion(4, 1, 0), request_id="none"),
        decoding_row((1, 2, 3, 0, 0, 1, 2), Expansion(4, 1, 0), request_id="some"),
    ]
    plain, chain = grow(growers_of(TextDrafter(4, CPU), 4, CPU), rows).forest.trees
    assert plain.num_nodes == 1
    assert chain.token_ids == (2, 3, 0, 0, 1)


def random_lens(num_layers: int = 2, width: int = 32, seed: int = 0) -> Lens:
    """Return a lens near the identity, so that its drafts are meaningful."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.eye(width) + 0.05 * torch.randn(width, width, generator=generator)
    return Lens(
        num_layers, weight.bfloat16().float(), torch.randn(width, generator=generator).mul(0.1).bfloat16().float(), {"seed": "0"}
    )


def early_exit_logits(text: list[int], lens: Lens) -> torch.Tensor:
    """Return the expected proposal after the sequence: transformers' own state, the lens, the norm, the head."""
    module = own_module("llama")
    with torch.inference_mode():
        states = module(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        state = states[lens.num_layers][0, -1] @ lens.weight_DD + lens.bias_D
        return module.lm_head(module.model.norm(state))  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_early_exit_proposes_lens_of_first_layers(num_layers):
    lens, cache = random_lens(num_layers), KVCache(64, CPU)
    drafter = early_exit_drafter(model("llama"), cache, lens)
    row = decoding_row((5, 9, 33, 4), Expansion(1, 2, 2))
    grown = grow(growers_of(drafter, 61, CPU), [row])
    tree = grown.forest.trees[0]
    for node, probs_row in enumerate(grown.forest.probs_rows[0]):
        if probs_row is not None:
            text = [*row.certain_ids, *(tree.token_ids[v] for v in tree.path(node)[1:])]
            probs_V = grown.forest.draft_probs_RV[probs_row]
            assert torch.allclose(probs_V, early_exit_logits(text, lens).softmax(-1), atol=1e-4)
    assert cache.num_layers == num_layers


def test_early_exit_writes_the_target_keys():
    cache = KVCache(8, CPU)
    drafter = early_exit_drafter(model("llama"), cache, random_lens())
    grow(growers_of(drafter, 61, CPU), [decoding_row((5, 9, 33, 4), Expansion(1, 1, 0))])
    fresh = KVCache(4, CPU)
    model("llama").forward(pack([chain_segment((5, 9, 33, 4), 0, range(4))], CPU), fresh, torch.tensor([0]))
    where = torch.arange(4)[None]
    for layer in range(2):
        assert torch.allclose(cache.gather(layer, where)[0], fresh.gather(layer, where)[0], atol=1e-5)


def engine_with_early_exit(policy=None):
    """Return an engine whose drafter shares the target's cache."""
    engine = tiny_engine(model("llama"), TextDrafter(61, CPU), policy)
    give_drafter(engine, early_exit_drafter(engine._target.model, engine._target.cache, random_lens()))
    return engine


def test_early_exit_keeps_tokens_and_shared_cache():
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


@needs_library
@pytest.mark.parametrize("prompt", [[7], [5, 12, 19, 26, 33]])
def test_early_exit_shares_cache_of_rounding_target(prompt):
    """Either may write first: for a prompt of one token it is the drafter."""
    target = adopt(tiny_module("llama"), CPU, NATIVE, "int8")
    engine = tiny_engine(target, TextDrafter(61, CPU), RandomExpansion(1))
    give_drafter(engine, early_exit_drafter(target, engine._target.cache, random_lens()))
    requests = [greedy("a", prompt), sampled("b", prompt, seed=3)]
    found, plain = run(engine, requests), run(tiny_engine(target), requests)
    assert {name: one.ids for name, one in found.outcomes.items()} == {name: one.ids for name, one in plain.outcomes.items()}
    assert sum(stats.num_draft_tokens for stats in found.stats)
    assert engine._target.cache.gather(0, torch.tensor([[0]]))[0].dtype == torch.float16


def test_cache_of_another_format_is_not_read():
    cache = KVCache(2, CPU)
    cache.write(0, torch.tensor([0]), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"float32, not torch\.float16"):
        cache.pools(1, 2, 4, torch.float16)


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
def test_unfit_lens_is_refused(lens):
    with pytest.raises(ValueError, match="does not fit"):
        early_exit_drafter(model("llama"), KVCache(1, CPU), lens)


def test_drafter_reports_whether_it_needs_feeding():
    assert early_exit_drafter(model("llama"), KVCache(1, CPU), random_lens()).feeding is Feeding.TARGET_CACHE
    assert TextDrafter(4, CPU).feeding is Feeding.TARGET_CACHE
