"""A draft head at work: each proposal equals the reference net's, its stored states are right, and no sequence changes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.step_plan import Feeding, StepPlan
from engine.core.tree import Expansion, TokenTree, parse_expansion
from engine.core.types import FinishReason
from engine.draft.drafter import FrontierNode, GrowingTree, ModelPasses, Proposal
from engine.draft.models.feature_pool import FeaturePool
from engine.draft.models.head import DraftHead
from engine.draft.models.head_drafter import HeadDrafter
from engine.draft.models.native_head import NativeHead
from engine.draft.models.torch_head import TorchHead
from engine.draft.trees.grow import grow, growers_of
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import adopt
from engine.model.hidden_states import StateTap, place_after
from engine.model.linear_backends import NATIVE, PackedLinear
from engine.scheduler.scheduler import Scheduler
from engine.testing import tiny_engine, tiny_model, tiny_module
from engine.utils.host_transfer import integers
from tests.model.draft.beside_cached_text import require_plain_texts_beside_cached_text
from tests.model.driving import greedy, run, sampled
from tests.model.heads import drafter_of, head_engine, head_logits, learnt_head, random_head, true_features
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.mixed import PROMPTS, mixed_requests
from tests.model.native_models import native
from tests.model.passes import CPU
from tests.model.rows import decoding_row
from tests.model.tiny import model, own_greedy_text, own_module
from tests.needs import needs_library

EXACT, WRONG = 1e-3, 1e-1  # of logits of size 1 to 10
ROUNDED = 3e-2  # the same where what the target leaves is kept in half precision
ROUNDED_FEATURE = 5e-3  # of features of size 1, there
PRECISIONS = [("plain", EXACT), pytest.param(NATIVE, ROUNDED, marks=needs_library)]
CROWDED = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)
REQUESTS = [
    *mixed_requests(max_tokens=16),
    greedy("plain", PROMPTS[1], max_tokens=6, is_enabled=False),
]


@pytest.fixture
def poisoned_pools(poisoned_pools, monkeypatch):
    """Unwritten features are NaN too."""
    made = FeaturePool.__init__

    def poisoned(pool, *args):
        made(pool, *args)
        pool._pool_SW[: pool.zero_row] = float("nan")

    monkeypatch.setattr(FeaturePool, "__init__", poisoned)


class Proposals:
    """Watches a drafter: how far its proposals are from the net's own logits, and how deep they went."""

    def __init__(self, drafter: HeadDrafter, head: DraftHead, family: str = "llama") -> None:
        self.error, self.depths = 0.0, [0] * 8
        self._head, self._module = head, own_module(family)
        for name in ("feed", "extend"):
            monitored = self._watched(getattr(drafter, name))
            setattr(drafter, name, monitored)

    def _watched(self, propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def watched(*args):
            proposal = propose(*args)
            for node, logits_V in zip(args[-1], proposal.logits_PV, strict=True):
                self._compare(node, logits_V)
            return proposal

        return watched

    def _compare(self, node: FrontierNode, logits_V: Tensor) -> None:
        context = node.sampling_context
        expected = head_logits(self._head, self._module, context.history, context.path_ids)
        assert torch.equal(logits_V.isfinite() | logits_V.isnan(), expected.isfinite())
        error = float((logits_V - expected)[expected.isfinite()].abs().max())
        assert error < WRONG, f"{error} off at {context.path_ids} after {len(context.history)} tokens"
        self.error = max(self.error, error)
        self.depths[len(context.path_ids)] += 1


def proposals_of_a_run(num_layers: int = 1, family: str = "llama", linears: str = "plain") -> Proposals:
    """Run rows of every kind together through chunks, random trees and preemption; compare all that is proposed."""
    head = random_head(num_layers)
    target = native(family) if linears == NATIVE else model(family)
    engine = head_engine(head, target, RandomExpansion(3), CROWDED, linears)
    proposals = Proposals(drafter_of(engine), head, family)
    session = run(engine, REQUESTS)
    assert all(outcome.finish is FinishReason.LENGTH for outcome in session.outcomes.values())
    assert sum(stats.num_preemptions for stats in session.stats)
    return proposals


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize(("linears", "most"), PRECISIONS)
@pytest.mark.parametrize(("num_layers", "family"), [(1, "llama"), (2, "qwen2"), (1, "gemma3")])
def test_every_proposal_is_the_nets_own(num_layers, family, linears, most):
    """Committed tokens read the target's true features, drafted ones the head's own states; in training it is the same."""
    proposals = proposals_of_a_run(num_layers, family, linears)
    assert proposals.error < most
    assert min(proposals.depths[:4]) >= 10


def reads_its_own_feature(drafter, row):
    return row.slots[row.draft_len : row.draft_len + len(row.draft_ids)]


def reads_the_slot_before(drafter, row):
    """Position 0 reads the contents of the last slot."""
    return [row.slots[position - 1] for position in range(row.draft_len, row.draft_len + len(row.draft_ids))]


def drafted_keys_are_kept(scheduler, row, result):
    return row.draft_len + len(row.draft_ids) if row.expansion.is_plain else row.root_position + result.drafted_len


def nodes_are_not_observed(drafter, write_slots_T):
    """Only a row's first token has its feature kept; of short steps that is the root."""
    with torch.inference_mode():
        drafter._head.keep_features(drafter._pool, write_slots_T[:1], [part[:1] for part in drafter._tap.parts()])


def roots_are_proposed_for_at_once(scheduler, sequence, wish):
    return wish.num_draft_tokens


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [
        (HeadDrafter, "_slots_before", reads_its_own_feature),
        (HeadDrafter, "_slots_before", reads_the_slot_before),
        (HeadDrafter, "on_pass", nodes_are_not_observed),
        (Scheduler, "_draft_len_after", drafted_keys_are_kept),
        (Scheduler, "_num_draftable", roots_are_proposed_for_at_once),
    ],
)
def test_net_proposals_detect_mutants(where, name, mutant, monkeypatch):
    """The text would be right still, as any draft is lossless: only the proposals show it."""
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(AssertionError, match="off at"):
        proposals_of_a_run()


def feature_error(engine: Engine) -> float:
    """Return how far the kept features of all cached tokens are from the target's."""
    drafter = drafter_of(engine)
    errors = [0.0]
    for sequence in engine._scheduler._by_id.values():
        if sequence.slots:
            ids_BT = torch.tensor([sequence.token_ids[: sequence.target_len]])
            kept = drafter.features_at(sequence.slots)
            errors.append(float((kept - true_features(learnt_head(), own_module("llama"), ids_BT)[0]).abs().max()))
        assert sequence.draft_len <= sequence.target_len
    return max(errors)


def largest_feature_error(linears: str) -> float:
    """Return how far kept features are from the target's at most, after any step of a crowded run."""
    target = adopt(tiny_module("llama"), CPU, linears) if linears == NATIVE else None
    engine = head_engine(learnt_head(), target, RandomExpansion(5), CROWDED, linears)
    errors: list[float] = []
    run(engine, REQUESTS, lambda engine: errors.append(feature_error(engine)))
    return max(errors)


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize(("linears", "most"), [("plain", EXACT), pytest.param(NATIVE, ROUNDED_FEATURE, marks=needs_library)])
def test_kept_slot_keeps_its_feature(linears, most):
    assert largest_feature_error(linears) < most


def of_the_layer_before(count, depth):
    return max(0, place_after(count, depth) - 1)


def of_what_the_last_norm_is_given(count, depth):
    return place_after(count, depth, is_last_normed=False)


@needs_library
@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("mutant", [of_the_layer_before, of_what_the_last_norm_is_given])
def test_features_of_other_states_are_reported(mutant, monkeypatch):
    monkeypatch.setattr("engine.draft.models.head_drafter.place_after", mutant)
    assert largest_feature_error(NATIVE) > 10 * ROUNDED_FEATURE


@needs_library
def test_pass_keeps_the_features_of_a_tap():
    """To the bit, in every precision. A pass over another cache leaves the features of the followed cache alone."""
    for precision in ("float32", "int8", "compact"):
        target = adopt(tiny_module("llama"), CPU, NATIVE, precision)
        made, tapped = (HeadDrafter("head", learnt_head(), target, 64, NATIVE, precision) for _ in range(2))
        followed, other = (KVCache(64, CPU, dtype=target.cache_dtype) for _ in range(2))
        tap = StateTap(target, learnt_head().shape.feature_layers)
        assert made.follow(followed)
        first, second = (pack([chain_segment(ids, 0, [*range(40, 40 + len(ids))])], CPU) for ids in PROMPTS[:2])
        target.forward(first, followed, integers([0], CPU))
        tapped._head.keep_features(tapped._pool, first.write_slots_T, tap.parts())
        target.forward(second, other, integers([0], CPU))
        slots = first.write_slots_T.tolist()
        assert torch.equal(made.features_at(slots), tapped.features_at(slots))
        assert bool(made.features_at(slots).abs().sum(1).all())
        tap.close()


MIXED = [
    *(greedy(str(row), PROMPTS[row]) for row in range(3)),
    *(sampled(f"seed {row}", PROMPTS[row], seed=row) for row in range(3)),
]
TREES = ("2.2.2", "delayed_distinct.1.2.1", "static.8", "heap.8", "calibrated.8", "threshold.8", "noise_aware.8", "beam.8")


@cache
def texts_without_drafts() -> dict[str, list[int]]:
    texts = run(tiny_engine(model("llama")), MIXED).texts()
    assert [texts[str(row)] for row in range(3)] == [own_greedy_text("llama", PROMPTS[row], 12) for row in range(3)]
    return texts


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("config", [None, CROWDED])
def test_drafting_changes_no_token(tree, config):
    session = run(head_engine(learnt_head(), policy=FixedExpansion(parse_expansion(tree)), config=config), MIXED)
    assert session.texts() == texts_without_drafts()
    assert sum(stats.num_accepted_tokens for stats in session.stats)


@pytest.mark.usefixtures("poisoned_pools")
def test_head_with_cached_text_proposes_as_alone():
    """Where the cache is sure, the head writes its keys without proposing. No pass reads a state that was never computed."""
    head = HeadDrafter("head", learnt_head(), model("llama"), CROWDED.num_slots)
    proposals = Proposals(head, learnt_head())
    require_plain_texts_beside_cached_text(head, CROWDED)
    assert proposals.error < EXACT


@pytest.mark.parametrize("other", ["packed", pytest.param(NATIVE, marks=needs_library)])
def test_head_over_packed_tied_weights_proposes_equally(other):
    """The output rows come from a layer that is packed already; the head's own layers are packed too."""
    config = LlamaConfig(**{**tiny_module().config.to_dict(), "tie_word_embeddings": True})
    probs = []
    for linears in ("plain", other):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            target = adopt(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), CPU, linears)
        engine = head_engine(random_head(), target, linears=linears)
        drafter = drafter_of(engine)
        if linears == NATIVE:
            assert isinstance(drafter._head, NativeHead)
        else:
            assert isinstance(drafter._head, TorchHead)
            assert isinstance(drafter._head.output, PackedLinear) == (linears == "packed")
        row = decoding_row((5,), Expansion(3, 1, 0))
        probs.append(grow(growers_of(drafter, 61, CPU), [row]).forest.draft_probs_RV)
    assert torch.allclose(probs[0], probs[1], atol=1e-5)


def test_a_head_works_in_the_targets_precision():
    target = tiny_model()
    target.module.to(torch.bfloat16)
    engine = head_engine(random_head(), target)
    session = run(engine, [greedy("a", PROMPTS[1]), sampled("b", PROMPTS[2], seed=1)])
    assert sum(stats.num_drafts for stats in session.stats)
    assert drafter_of(engine)._pool._pool_SW.dtype == torch.bfloat16


def test_narrow_head_changes_no_token():
    target = model("llama")
    head = HeadDrafter("head", learnt_head(), target, 2048, precision="bfloat16")
    engine = tiny_engine(target, head, FixedExpansion(Expansion(2, 2, 2)))
    engine.target.report_to(head)
    session = run(engine, MIXED)
    assert {session.texts()[name] == text for name, text in texts_without_drafts().items()} == {True}
    assert sum(stats.num_accepted_tokens for stats in session.stats)
    assert head._pool._pool_SW.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (random_head(target_width=16), "width 16, this one has 32"),
        (random_head(vocab_size=64), "not ascending ids of the target's 61"),
    ],
)
def test_unfit_head_is_refused(head, why):
    with pytest.raises(ValueError, match=why):
        HeadDrafter("head", head, model("llama"), 8)


def test_head_of_deeper_target_is_refused():
    with pytest.raises(ValueError, match="after layers"):
        HeadDrafter("head", random_head(), tiny_model(num_layers=2), 8)


def test_single_prompt_is_fed_without_proposal():
    """A plain row's tokens are fed by the features before them; there is nothing to propose and nothing to attend for."""
    engine = head_engine(random_head(2))
    drafter = drafter_of(engine)
    row = decoding_row((5, 9, 33, 4), Expansion(0, 1, 0))
    engine.target.forward(StepPlan(0, (row,)), [TokenTree.single(4)])
    assert drafter.feed([row], []).logits_PV.shape == (0, 61)
    assert drafter._cache.num_layers == 2


@pytest.mark.parametrize("linears", ["plain", pytest.param(NATIVE, marks=needs_library)])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_fed_token_costs_its_share_of_products(num_layers, linears):
    """A fed token skips the products after the last layer's keys and values. Its cost is its share of all products."""
    head = random_head(num_layers)
    engine = head_engine(head, native("llama") if linears == NATIVE else model("llama"), linears=linears)
    drafter = drafter_of(engine)
    behind = sum(part.weight.numel() for part in (head.decoder[-1].output, head.decoder[-1].gate_up, head.decoder[-1].down))
    behind += len(head.vocab_M) * head.shape.width
    fed = sum(part.weight.numel() for layer in head.decoder for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
    whole = fed + head.fuse.weight.numel() + head.token.weight.numel() + len(head.vocab_M) * head.shape.width
    assert drafter.fed_only_share == pytest.approx(1.0 - behind / whole)
    row = decoding_row((5, 9, 33, 4), Expansion(0, 1, 0))
    engine.target.forward(StepPlan(0, (row,)), [TokenTree.single(4)])
    assert drafter.feed([row], []).passes == ModelPasses(1, len(row.draft_ids) * drafter.fed_only_share)
    root = FrontierNode(GrowingTree(row), 0, 1)
    assert drafter.feed([row], [root]).passes == ModelPasses(1, 1 + (len(row.draft_ids) - 1) * drafter.fed_only_share)


def test_a_head_is_built_from_its_file(tmp_path):
    random_head().save(tmp_path / "head", {})
    engine = build_engine(configured(tmp_path, "head"))  # which warms it up
    assert engine.info.drafter == "head"
    assert engine.drafter is not None
    assert engine.drafter.feeding is Feeding.TARGET_FEATURES


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing", "cannot be read"), ("lens", "is not a draft head"), ("wide", "was made for a target of width 16")],
)
def test_file_without_a_matching_head_is_refused(name, why, tmp_path):
    random_head(target_width=16).save(tmp_path / "wide", {})
    save_file({"weight": torch.eye(2)}, tmp_path / "lens")
    with pytest.raises(BadConfiguration, match=why):
        build_engine(configured(tmp_path, name))


def configured(folder: Path, head: str) -> EngineConfig:
    tiny_module().save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")  # only its existence is checked
    return EngineConfig(str(folder / "model"), drafter="head", head=str(folder / head), scheduler=CROWDED)
