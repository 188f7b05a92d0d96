"""Drafters of checkpoints at work: every proposal is the network's own for its text, and no text or distribution changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.paged.buffer import TableBuffer
from engine.attention.paged.graph_recorder import Unrecorded
from engine.attention.paged.graphs import GraphResources
from engine.attention.paged.padding_shapes import PaddingShapes
from engine.attention.paged.reference import attend
from engine.attention.segments import chain_segment
from engine.core.config import SchedulerConfig
from engine.core.policy import ExpansionPolicy, FixedExpansion
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import FinishReason
from engine.draft.checkpoints.chained import Eagle3Drafter
from engine.draft.checkpoints.eagle3 import Eagle3Network
from engine.draft.checkpoints.load import CheckpointDrafter, load_drafter
from engine.draft.checkpoints.one_pass import DFlashDrafter
from engine.draft.checkpoints.read import read_checkpoint
from engine.draft.checkpoints.target_features import FeatureDrafter
from engine.draft.drafter import FrontierNode, Proposal, TrimmedVocabulary
from engine.draft.models.drafter_segments import places_of_roots
from engine.draft.models.feature_pool import FeaturePool
from engine.draft.trees import sampling as children
from engine.draft.trees.grower import Growth
from engine.engine import Engine
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import NATIVE
from engine.scheduler.scheduler import Scheduler
from engine.testing import tiny_engine
from engine.utils.host_transfer import integers
from tests.model.checkpoints import (
    FACTS,
    dflash_files,
    eagle3_files,
    expected_logits,
    learnt,
    learnt_engine,
    medusa_files,
    written,
)
from tests.model.draft.beside_cached_text import require_plain_texts_beside_cached_text
from tests.model.driving import greedy, run, sampled
from tests.model.kv_cache.test_kv_cache import RandomExpansion
from tests.model.mixed import PROMPTS, mixed_requests
from tests.model.native_models import native
from tests.model.passes import CPU
from tests.model.tiny import model, own_greedy_text, own_module
from tests.needs import needs_library

EXACT, WRONG = 1e-3, 1e-1  # of logits of size 1 to 10
CROWDED = SchedulerConfig(max_running=8, max_step_tokens=24, num_slots=90, max_model_len=64)
ROOMY = SchedulerConfig(num_slots=2048, max_model_len=256)
REQUESTS = [*mixed_requests(max_tokens=16), greedy("plain", PROMPTS[1], max_tokens=6, is_enabled=False), greedy("short", (7,))]
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CHECKPOINTS = {
    "eagle3": eagle3_files(),
    "eagle3 of two layers": eagle3_files(num_layers=2, is_reduced=False, norm_output=True, norm_before_residual=True),
    "eagle3 of a window": eagle3_files(transformer_layer_config={"layer_types": ["sliding_attention"], "sliding_window": 5}),
    "eagle3 of two states": eagle3_files(ids=(3, 2), fc_norm=True, transformer_layer_config={"model_type": "qwen3"}),
    "dflash": dflash_files(),
    "dflash of a window": dflash_files(is_reduced=True, transformer_layer_config=WINDOWED, sample_from_anchor=True),
    "medusa": medusa_files(num_layers=2),
}


@pytest.fixture
def poisoned_pools(poisoned_pools, monkeypatch):
    """Unwritten features are NaN too."""
    made = FeaturePool.__init__

    def poisoned(pool, *args):
        made(pool, *args)
        pool._pool_SW.fill_(float("nan"))

    monkeypatch.setattr(FeaturePool, "__init__", poisoned)


def drafter_of(
    folder: Path, name: str, target: CausalModel, config: SchedulerConfig, linears: str = "plain"
) -> CheckpointDrafter:
    checkpoint = read_checkpoint(written(folder / name.replace(" ", "-"), CHECKPOINTS[name]), FACTS)
    assert not checkpoint.warnings
    return load_drafter(checkpoint, target, config.num_slots, linears, "float32")


def checkpoint_engine(
    folder: Path,
    name: str,
    policy: ExpansionPolicy | None = None,
    config: SchedulerConfig = ROOMY,
    target: CausalModel | None = None,
    linears: str = "plain",
) -> Engine:
    """Return an engine that drafts with a checkpoint."""
    target = target or model("llama")
    drafter = drafter_of(folder, name, target, config, linears)
    engine = tiny_engine(target, drafter, policy, config=config)
    engine.target.report_to(drafter)
    return engine


class CheckedProposals:
    """Watches a drafter: how far its proposals are from the network's own logits, and how deep they went."""

    def __init__(self, drafter: CheckpointDrafter, name: str, family: str) -> None:
        self.error, self.depths = 0.0, [0] * 9
        self._files, self._module = CHECKPOINTS[name], own_module(family)
        for method in ("feed", "extend"):
            setattr(drafter, method, self._watched(getattr(drafter, method)))

    def _watched(self, propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def watched(*args):
            proposal = propose(*args)
            rows = dict(zip(proposal.indices, proposal.logits_PV, strict=True))
            for index, node in enumerate(args[-1]):
                self._compare(node, rows.get(index))
            return proposal

        return watched

    def _compare(self, node: FrontierNode, logits_V: Tensor | None) -> None:
        context = node.sampling_context
        expected = expected_logits(self._files, self._module, context.history, context.path_ids)
        assert (expected is None) == (logits_V is None)
        if expected is None or logits_V is None:
            return
        assert torch.equal(logits_V.isfinite() | logits_V.isnan(), expected.isfinite())
        error = float((logits_V - expected)[expected.isfinite()].abs().max())
        assert error < WRONG, f"{error} off at {context.path_ids} after {len(context.history)} tokens"
        self.error = max(self.error, error)
        self.depths[len(context.path_ids)] += 1


def proposals_of_a_run(folder: Path, name: str, family: str = "llama", linears: str = "plain") -> CheckedProposals:
    """Run rows of every kind together through chunks, random trees and preemption; compare all that is proposed."""
    target = native(family) if linears == NATIVE else model(family)
    engine = checkpoint_engine(folder, name, RandomExpansion(3), CROWDED, target, linears)
    proposals = CheckedProposals(engine.drafter, name, family)  # type: ignore[arg-type]
    session = run(engine, REQUESTS)
    assert all(outcome.finish is FinishReason.LENGTH for outcome in session.outcomes.values())
    assert sum(stats.num_preemptions for stats in session.stats)
    return proposals


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("linears", ["plain", pytest.param(NATIVE, marks=needs_library)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_proposal_is_the_networks_own(name, linears, tmp_path):
    """Context tokens read the target's true features, drafted ones the head's own states, and no key is of another text."""
    proposals = proposals_of_a_run(tmp_path, name, linears=linears)
    assert proposals.error < EXACT
    assert min(proposals.depths[:3]) >= 10


@pytest.mark.parametrize("name", ["eagle3", "dflash", "medusa"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_proposals_for_other_families_equal_the_network(name, family, tmp_path):
    """Gemma scales its embeddings: a drafter reads them unscaled."""
    assert proposals_of_a_run(tmp_path, name, family).error < EXACT


def feeds_the_first_token(drafter, rows, roots):
    """The first token has a pair with a feature of zeros, and positions begin there."""
    zero = drafter._pool.zero_row
    drafter._pool.write(integers([zero], CPU), torch.zeros(1, 32))
    segments = [chain_segment(row.draft_ids, row.draft_len, row.slots) for row in rows]
    previous = [slot for row in rows for slot in [zero, *row.slots][row.draft_len :][: len(row.draft_ids)]]
    places = places_of_roots(rows, [root.tree.row.request_id for root in roots])
    queried = [chain_segment(root.tree.token_ids[:1], root.position, root.tree.row.slots) for root in roots]
    return drafter._proposal(segments, previous, range(len(roots)), places, queried)


def own_states_are_lost(network, *args):
    logits, states = FORWARD(network, *args)
    return logits, torch.zeros_like(states)


def features_of_the_next_token(pool, slots):
    return READ(pool, [*slots[1:], *slots[:1]])


def drafted_keys_are_kept(scheduler, row, result):
    return row.draft_len + len(row.draft_ids) if row.expansion.is_plain else row.root_position + result.drafted_len


def only_the_first_feature_is_stored(drafter, write_slots_T):
    with torch.inference_mode():
        drafter._pool.write(write_slots_T[:1], drafter._fusing.features([part[:1] for part in drafter._tap.parts()]))


def the_other_side_of_the_last_norm(drafter, cache):
    drafter._is_last_normed = not drafter._is_last_normed
    return FOLLOW(drafter, cache)


def the_next_level(drafter, roots, num_levels):
    return LEVELS(drafter, roots, num_levels).roll(1, 1)


def another_root(drafter, roots, num_levels):
    return LEVELS(drafter, roots, num_levels).roll(1, 0)


FORWARD, READ, FOLLOW = Eagle3Network.forward, FeaturePool.read_checked, FeatureDrafter.follow
LEVELS = DFlashDrafter._levels_after


@pytest.mark.parametrize(
    ("names", "where", "name", "mutant"),
    [
        (["eagle3"], Eagle3Drafter, "feed", feeds_the_first_token),
        (["eagle3"], Eagle3Network, "forward", own_states_are_lost),
        (["eagle3"], Scheduler, "_draft_len_after", drafted_keys_are_kept),
        (["eagle3", "dflash", "medusa"], FeaturePool, "read_checked", features_of_the_next_token),
        (["eagle3", "dflash", "medusa"], FeatureDrafter, "on_pass", only_the_first_feature_is_stored),
        (["eagle3", "dflash", "medusa"], FeatureDrafter, "follow", the_other_side_of_the_last_norm),
        (["dflash"], DFlashDrafter, "_levels_after", the_next_level),
        (["dflash"], DFlashDrafter, "_levels_after", another_root),
    ],
)
def test_network_proposals_detect_mutants(names, where, name, mutant, tmp_path, monkeypatch):
    """No text would change, as any draft is lossless: only the proposals show it."""
    monkeypatch.setattr(where, name, mutant)
    for checkpoint in names:
        with pytest.raises(AssertionError):
            proposals_of_a_run(tmp_path, checkpoint)


MIXED = [
    *(greedy(str(row), PROMPTS[row]) for row in range(3)),
    *(sampled(f"seed {row}", PROMPTS[row], seed=row) for row in range(3)),
]
TREES = ("2.2.2", "static.8", "heap.8", "threshold.8", "noise_aware.8", "beam.8")


@pytest.mark.parametrize("config", [ROOMY, CROWDED])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_drafting_changes_no_token(kind, config, tmp_path):
    """Greedy texts are transformers' own, and seeded ones those of plain decoding, under every tree."""
    without = run(tiny_engine(model("llama")), MIXED).texts()
    assert [without[str(row)] for row in range(3)] == [own_greedy_text("llama", PROMPTS[row], 12) for row in range(3)]
    num_accepted = 0
    for tree in TREES:
        engine = learnt_engine(tmp_path / tree, kind, FixedExpansion(parse_expansion(tree)), config)
        session = run(engine, MIXED)
        assert session.texts() == without
        num_accepted += sum(stats.num_accepted_tokens for stats in session.stats)
    assert num_accepted > 20


@pytest.mark.usefixtures("poisoned_pools")
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_checkpoint_with_cached_text_proposes_as_alone(kind, tmp_path):
    """Where the cache is sure, the network does not run. No pass reads a state that was never computed."""
    drafter = drafter_of(tmp_path, kind, model("llama"), CROWDED)
    proposals = CheckedProposals(drafter, kind, "llama")
    require_plain_texts_beside_cached_text(drafter, CROWDED)
    assert proposals.error < EXACT


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_library)])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_narrower_precision_changes_no_token(kind, precision, tmp_path):
    checkpoint = read_checkpoint(written(tmp_path, learnt(kind)), FACTS)
    linears = NATIVE if precision == "int8" else "plain"
    drafter = load_drafter(checkpoint, model("llama"), ROOMY.num_slots, linears, precision)
    engine = tiny_engine(model("llama"), drafter, FixedExpansion(Expansion(2, 2, 2)), config=ROOMY)
    engine.target.report_to(drafter)
    session = run(engine, MIXED)
    assert session.texts() == run(tiny_engine(model("llama")), MIXED).texts()
    assert sum(stats.num_accepted_tokens for stats in session.stats)


def test_int8_without_the_library_is_refused(tmp_path):
    checkpoint = read_checkpoint(written(tmp_path, eagle3_files()), FACTS)
    with pytest.raises(ValueError, match="draft_dtype int8 needs the compiled library"):
        load_drafter(checkpoint, model("llama"), 8, "plain", "int8")


def recorded_error(folder: Path, kind: str) -> float:
    """Return how far the recorded distributions of drafted nodes are from the network's, over a text."""
    engine = checkpoint_engine(folder, kind)
    engine.add(sampled("a", PROMPTS[1], seed=3, verifier="traversal"))
    grown: list[Growth] = []
    grow = engine._grow
    engine._grow = lambda plan: grown.append(grow(plan)) or grown[-1]  # type: ignore[arg-type,func-returns-value,method-assign]
    history, errors = [*PROMPTS[1]], []
    while engine.has_work:
        for event in engine.step().events:
            forest, tree = grown[-1].forest, grown[-1].forest.trees[0]
            for node, probs_row in enumerate(forest.probs_rows[0]):
                if probs_row is not None:
                    path = [tree.token_ids[one] for one in tree.path(node)[1:]]
                    expected = expected_logits(CHECKPOINTS[kind], own_module("llama"), history, path)
                    assert expected is not None
                    errors.append(float((forest.draft_probs_RV[probs_row] - expected.softmax(-1)).abs().max()))
            history += event.token_ids
    assert len(errors) > 20 or max(errors) > EXACT
    return max(errors)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_recorded_distributions_are_those_of_the_network(kind, tmp_path):
    """Children of a node are drawn from its own distribution, over the target's ids."""
    assert recorded_error(tmp_path, kind) < 1e-5


def in_the_drafters_own_ids(vocab, rows_PM, filler):
    """Probabilities are not moved to the target's ids."""
    return functional.pad(rows_PM, (0, vocab.size - rows_PM.shape[1]), value=filler)


def of_the_node_before(nodes, logits_PM, probs, vocab):
    """Children are drawn from their node's distribution, and another node's is recorded."""
    found = RECORDED(nodes, logits_PM, probs, vocab)
    probs[-1] = probs[-1].roll(1, 0)
    return found


RECORDED = children._recorded_probs


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(TrimmedVocabulary, "widened", in_the_drafters_own_ids), (children, "_recorded_probs", of_the_node_before)],
)
def test_recorded_distributions_detect_mutants(where, name, mutant, tmp_path, monkeypatch):
    monkeypatch.setattr(where, name, mutant)
    assert recorded_error(tmp_path, "eagle3") > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name.startswith("eagle3")])
def test_recorded_passes_draft_the_same(name, family, tmp_path):
    """Over tables and padded, as a GPU replays them: equal texts, and as many accepted tokens."""
    runs = []
    for is_recorded in (False, True):
        engine = checkpoint_engine(tmp_path / str(is_recorded), name, RandomExpansion(3), CROWDED, model(family))
        if is_recorded:
            assert isinstance(engine.drafter, Eagle3Drafter)
            steps = GraphResources(TableBuffer(1 << 14, CPU), PaddingShapes(CROWDED.max_step_tokens), Unrecorded())
            engine.drafter.record(steps, attend, CROWDED.max_model_len).prepare()
        session = run(engine, REQUESTS)
        runs.append((session.texts(), sum(one.num_accepted_tokens for one in session.stats)))
    assert runs[0] == runs[1]
