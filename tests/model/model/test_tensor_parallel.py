"""A target whose layers two processes share out: the texts and the distribution are those of the whole model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import Speculation
from engine.memory_plan import memory_need
from engine.model import sharding
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import linear_of, weight_of
from engine.model.sharding import SummedLinear
from engine.testing import tiny_engine, tiny_module
from engine.weights import UnsupportedModel
from engine.weights.weight_headers import num_parameters
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.model.driving import greedy, run, sampled
from tests.model.engine.test_engine import seeded_text
from tests.model.engine.test_engine_distributions import BUSHY, DELAYED, WIDE, target_distribution, triples
from tests.model.folders import model_folder
from tests.model.heads import head_engine, random_head
from tests.model.passes import CPU
from tests.model.tiny import model, own_greedy_text, own_logits, pair

PROMPTS = [tuple(3 + (7 * i * i + 5 * i * number + number) % 58 for i in range(3 + number)) for number in range(24)]
TIE = 1e-4  # of logits, which are near 1: sums of several ranks round otherwise
TREE = Expansion(1, 2, 2)
NUM_GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalModel]:
    """The tiny Llama in two processes. Its 61 tokens cannot be halved."""
    folder = model_folder(tmp_path_factory.mktemp("whole"))
    config = EngineConfig(str(folder), device="cpu", num_threads=2, tensor_parallel=2, scheduler=WIDE)
    target = build_engine(config).target.model
    assert target.ranks is not None
    (pid,) = target.ranks.pids
    yield target
    target.ranks.close()
    assert not Path(f"/proc/{pid}").exists()


def first_difference(prompt: tuple[int, ...], found: list[int]) -> float | None:
    """Return by how much the whole model's logit of its token exceeds that of the first other token; None if there is none."""
    expected = own_greedy_text("llama", prompt, len(found))
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs != ours:
            logits_V = own_logits("llama", [(*prompt, *expected[:place])])[0, -1]
            return float(logits_V[theirs] - logits_V[ours])
    return None


def differences(target: CausalModel, expansion: Expansion | None = TREE) -> list[float]:
    """Return the differences of logits at which greedy texts of the prompts leave the whole model's."""
    policy = None if expansion is None else FixedExpansion(expansion)
    engine = tiny_engine(target, None if expansion is None else pair("llama", 0.1)[1], policy)
    texts = run(engine, [greedy(str(number), prompt) for number, prompt in enumerate(PROMPTS)]).texts()
    found = [first_difference(prompt, texts[str(number)]) for number, prompt in enumerate(PROMPTS)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("expansion", [None, TREE, Expansion(0, 3, 3, "heap", 5)], ids=str)
def test_greedy_texts_equal_those_of_one_process(sharded, expansion):
    ties = differences(sharded, expansion)
    assert max(ties, default=0.0) < TIE
    assert len(ties) <= 2


def unsummed(reduce: Callable[[Tensor], object], summand: Tensor) -> None:
    """The mutant of an all-reduce: rank 0 keeps its summand."""
    reduce(summand.clone())


def test_a_missing_sum_is_detected(sharded, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", partial(unsummed, dist.all_reduce))
    assert max(differences(sharded)) > 100 * TIE


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_another_offset_of_heads_is_detected(sharded, name, monkeypatch):
    """Rank 0 has the heads of rank 1 in one projection."""
    whole = weight_of(getattr(model("llama").module.model.layers[1].self_attn, name))
    attention, half = sharded.module.model.layers[1].self_attn, len(whole) // 2
    assert torch.equal(weight_of(getattr(attention, name)), whole[:half])
    monkeypatch.setitem(attention._modules, name, linear_of(whole[half:]))
    assert max(differences(sharded)) > 100 * TIE


@pytest.mark.parametrize(("verifier", "expansion"), [("traversal", BUSHY), ("specinfer", DELAYED), ("coupled", DELAYED)])
def test_trees_keep_the_targets_distribution(sharded, verifier, expansion):
    engine = tiny_engine(sharded, pair("llama", 0.1)[1], FixedExpansion(expansion), config=WIDE)
    assert z_of_counts(triples(verifier, expansion, engine), target_distribution()) < PASSES_BELOW


def test_a_missing_sum_changes_the_distribution(sharded, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", partial(unsummed, dist.all_reduce))
    engine = tiny_engine(sharded, pair("llama", 0.1)[1], FixedExpansion(DELAYED), config=WIDE)
    assert z_of_counts(triples("traversal", DELAYED, engine), target_distribution()) > FAILS_ABOVE


def test_seeded_texts_do_not_depend_on_drafts(sharded):
    requests = [sampled(str(number), prompt, seed=number) for number, prompt in enumerate(PROMPTS)]
    plain = [replace(one, speculation=Speculation(is_enabled=False)) for one in requests]
    engine = tiny_engine(sharded, pair("llama", 0.1)[1], FixedExpansion(TREE), "coupled")
    drafted = run(engine, requests)
    assert sum(stats.num_accepted_tokens for stats in drafted.stats) > 0
    assert drafted.texts() == run(engine, plain).texts()
    assert drafted.texts() == {one.request_id: seeded_text("llama", one) for one in requests}


def test_heads_draft_with_whole_embeddings_and_rows(sharded):
    """A draft head reads states, embeddings and rows of the output layer on rank 0."""
    ids = torch.tensor([0, 3, 30, 31, 60])  # of both ranks
    assert torch.equal(sharded.output_rows(ids), model("llama").output_rows(ids))
    assert torch.equal(sharded.embeddings_VD, model("llama").embeddings_VD)
    engine = head_engine(random_head(), sharded)
    session = run(engine, [greedy("r", PROMPTS[5])])
    assert session.outcomes["r"].ids == own_greedy_text("llama", PROMPTS[5], 12)
    assert sum(stats.num_drafts for stats in session.stats) > 0


def test_rank_has_half_of_keys_and_weights(sharded, tmp_path):
    """The computed memory is that of both processes, since they share the machine's."""
    limits = SchedulerConfig(num_slots=256, max_model_len=128, max_step_tokens=64, max_running=8)
    engine = tiny_engine(sharded, config=limits)
    run(engine, [greedy("r", PROMPTS[0])])
    folder = model_folder(tmp_path)
    need = memory_need(EngineConfig(str(folder), device="cpu", scheduler=limits, tensor_parallel=2), "float32", CPU)
    assert need.cache == 2 * engine.target.cache.num_bytes
    embeddings = sharded.embeddings_VD.nbytes
    assert abs(need.weights - (4 * num_parameters(folder) + embeddings)) < 8
    parts = [part for part in sharded.module.modules() if isinstance(part, SummedLinear)]
    assert {(part.linear.in_features, part.linear.out_features) for part in parts} == {(16, 32), (24, 32)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8"}, "torch runs the ranks, in float32 or bfloat16, not int8"),
        ({"dtype": "compact"}, "not compact"),
        ({"dtype": "fp8"}, "not fp8"),
        ({"deterministic": True}, "deterministic: "),
        ({"drafter": "early-exit"}, "drafter early-exit"),
        ({"tensor_parallel": 4}, "4 ranks cannot share key-value heads of 2"),
        ({"tensor_parallel": 3}, "3 ranks cannot share key-value heads of 2"),
        ({"cuda_graphs": "on"}, "cuda_graphs: on: the ranks follow each pass"),
    ],
    ids=str,
)
def test_settings_are_refused_before_loading(change, reason, tmp_path, monkeypatch):
    """The last is refused when passes are prepared, as on one GPU."""
    monkeypatch.setattr("engine.build.load_sharded", lambda *_: model("llama"))
    config = EngineConfig(str(model_folder(tmp_path)), device="cpu", tensor_parallel=2)
    with pytest.raises((BadConfiguration, UnsupportedModel), match=f"(tensor_parallel|cuda_graphs): .*{reason.split(': ')[-1]}"):
        build_engine(replace(config, **change))


def test_unshardable_settings_are_named():
    """These need files or devices, so that an engine is not built."""
    config = EngineConfig("tiny", tensor_parallel=2)
    assert sharding.why_not_sharded(config, CPU) is None
    assert sharding.why_not_sharded(replace(config, lora=(("a", "folder"),)), CPU) == "LoRA adapters are not sharded"
    assert "device must be cuda" in (sharding.why_not_sharded(config, torch.device("cuda", 1)) or "")
    assert sharding.why_not_sharded(replace(config, tensor_parallel=64), torch.device("cuda")) == f"there are {NUM_GPUS} GPUs"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "lfm2"])
def test_other_families_are_refused_by_name(family, tmp_path):
    with pytest.raises(UnsupportedModel, match=r"tensor_parallel: .* is not a known part|lacks the parts"):
        sharding.require_shardable(model_folder(tmp_path, tiny_module(family)), 2)
