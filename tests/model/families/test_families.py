"""Families of models: greedy texts under trees are transformers' own, refusals have their message, docs/models.md has both."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.distill.generation.generate import generate
from engine.distill.generation.jobs import GenerationJob
from engine.distill.rows import require_plain_output
from engine.draft.models.early_exit import Lens
from engine.model.causal_lm import CausalModel, adopt
from engine.model.hidden_states import has_layer_states
from engine.model.linear_backends import fastest_linears
from engine.native.decoder import UnknownDecoder, refuse_by_structure
from engine.testing import tiny_engine
from engine.weights import UnsupportedModel
from engine.weights.layer_sizes import state_bytes
from selector.build import adaptive_policy
from server.cli.main import main
from tests.model.driving import greedy, run
from tests.model.families.page import DOCUMENT, models_page
from tests.model.families.table import DIFFERENT, LIBRARY, REFUSED, SERVED, TORCH, VOCAB_SIZE, Family, Refused
from tests.model.folders import model_folder
from tests.model.heads import random_head
from tests.model.rows import TableDrafter
from tests.tokenizers_for_tests import byte_level

CPU = torch.device("cpu")
NUM_TOKENS = 16
PROMPTS = [[random.Random(seed).randrange(3, 120) for _ in range(length)] for seed, length in ((1, 13), (2, 4))]


def own_text(module: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return what `generate` adds to the prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    return module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def runs_by(module: PreTrainedModel) -> str:
    """Return what runs a model."""
    try:
        refuse_by_structure(module)
    except UnknownDecoder:
        return TORCH
    return LIBRARY


def drafter_of(texts: list[list[int]]) -> TableDrafter:
    """Return a drafter of the texts' pairs of tokens, and of others: some of its drafts are accepted, some are not."""
    logits_VV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    for text in texts:
        for one, other in pairwise(text):
            logits_VV[one, other] += 4.0
    return TableDrafter(logits_VV)


def fitting(model: CausalModel, expected: list[int]) -> Iterator[str]:
    """Yield the drafters that fit a model. `expected` follows the first prompt."""
    yield from ("text", "model")
    if not has_layer_states(model):
        return
    try:
        require_plain_output(model)
        (text,) = generate(model, {0: GenerationJob(PROMPTS[0], 0.0, 0, 4)}, 1, [model.depth])
        assert text.ids == [*PROMPTS[0], *expected[:4]][: len(text.ids)]  # it ends at an end token
        yield "head"
    except UnsupportedModel:
        pass
    yield "checkpoint"
    width = model.embeddings_VD.shape[1]
    if not model.has_states and Lens(1, torch.eye(width), torch.zeros(width), {}).final_norm(model):
        yield "early-exit"


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.model_type)
def test_greedy_texts_are_generates(family: Family) -> None:
    """Two rows of unlike length under trees that are accepted in part."""
    module = family.module()
    expected = [own_text(module, prompt) for prompt in PROMPTS]
    assert max(len({*text}) for text in expected) > 1, "texts of one token show nothing"
    assert runs_by(module) == family.runs_by
    linears = fastest_linears(CPU) if family.runs_by == LIBRARY else "plain"
    model = adopt(module, CPU, linears)
    drafter = drafter_of([[*prompt, *text] for prompt, text in zip(PROMPTS, expected, strict=True)])
    config = SchedulerConfig(num_slots=512, max_model_len=64)
    engine = tiny_engine(model, drafter, FixedExpansion(Expansion(1, 2, 2)), config=config)
    session = run(engine, [greedy(str(index), prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)])
    assert engine.target.cache.states.bytes_per_slot == state_bytes(module.config.get_text_config(), 4)
    assert [session.texts()[str(index)] for index in range(len(PROMPTS))] == expected
    accepted, drafted = (sum(getattr(s, name) for s in session.stats) for name in ("num_accepted_tokens", "num_draft_tokens"))
    assert 0 < accepted < drafted
    assert tuple(fitting(model, expected[0])) == family.drafters


@pytest.mark.parametrize(
    ("family", "model_type"),
    [(one, each) for one in REFUSED for each in one.model_types],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_configurations_are_refused(family: Refused, model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bug: a model with a recurrent state was refused by a missing name of its configuration, or by an AttributeError.

    No weights are read: the file has none of the model's.
    """
    CONFIG_MAPPING[model_type](**family.fields).save_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    byte_level().save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    reported = capsys.readouterr().out
    assert f"model type '{model_type}' is not supported: {family.reason}" in reported


@pytest.mark.parametrize("family", DIFFERENT, ids=lambda family: family.model_types[0])
def test_passes_that_differ_are_refused(family: Refused) -> None:
    module = Family(family.model_types[0], family.model_types[0], family.fields).module()
    with pytest.raises(UnsupportedModel) as refusal:
        adopt(module, CPU)
    assert family.reason in str(refusal.value)


def test_the_page_is_made_from_the_table() -> None:
    """`python -m tests.model.families.page` makes it again."""
    assert DOCUMENT.read_text() == models_page()


@pytest.mark.parametrize("drafter", ["head", "early-exit"])
def test_unreadable_states_refuse_a_drafter(drafter: str, tmp_path: Path) -> None:
    """The bug: a drafter that reads states of layers ended in an AttributeError for a model whose layers have other names."""
    family = next(family for family in SERVED if family.model_type == "gpt2")
    folder = model_folder(tmp_path / "model", family.module())
    random_head().save(tmp_path / "head", {})
    Lens(1, torch.eye(32), torch.zeros(32), {}).save(tmp_path / "lens")
    limits = SchedulerConfig(num_slots=64, max_model_len=32)
    with pytest.raises(BadConfiguration, match=r"the states between the layers of .* cannot be read"):
        build_engine(
            EngineConfig(str(folder), drafter=drafter, head=str(tmp_path / "head"), lens=str(tmp_path / "lens"), scheduler=limits)
        )


def test_unreadable_states_refuse_training() -> None:
    """A neighbour: a head that is trained for such a model."""
    family = next(family for family in SERVED if family.model_type == "gpt2")
    with pytest.raises(UnsupportedModel, match="the states between its layers cannot be read"):
        require_plain_output(adopt(family.module(), CPU))


@pytest.mark.parametrize("drafter", ["early-exit", "model"])
def test_recurrent_layers_refuse_a_drafter(drafter: str, tmp_path: Path) -> None:
    """Early exit would share the target's states, and those of a draft model are not kept."""
    family = next(family for family in SERVED if family.model_type == "qwen3_next")
    folder = model_folder(tmp_path / "model", family.module())
    Lens(1, torch.eye(32), torch.zeros(32), {}).save(tmp_path / "lens")
    limits = SchedulerConfig(num_slots=64, max_model_len=32)
    config = EngineConfig(
        str(folder),
        drafter=drafter,
        lens=str(tmp_path / "lens"),
        draft_model=str(folder),
        draft_dtype="float32",
        scheduler=limits,
    )
    with pytest.raises(BadConfiguration, match="recurrent layers"):
        build_engine(replace(config, lens=None) if drafter == "model" else replace(config, draft_model=None))


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "mamba2"])
def test_recurrent_models_are_built_from_a_folder(model_type: str, tmp_path: Path) -> None:
    """With cached text, the adaptive policy and its measurements, and a canary."""
    family = [family for family in SERVED if family.model_type == model_type][-1 if model_type != "lfm2" else 0]
    module = family.module()
    expected = [own_text(module, prompt) for prompt in PROMPTS]
    folder = model_folder(tmp_path / "model", module, eos=None)
    limits = SchedulerConfig(num_slots=256, max_model_len=64, max_step_tokens=64)
    config = EngineConfig(str(folder), drafter="ngram", policy="adaptive", expansion=Expansion(4, 1, 0), scheduler=limits)
    engine = build_engine(replace(config, kv_canary=True), adaptive_policy)
    assert len(engine.target.cache.states) == 0
    session = run(engine, [greedy(str(index), prompt, NUM_TOKENS) for index, prompt in enumerate(PROMPTS)])
    assert [session.texts()[str(index)] for index in range(len(PROMPTS))] == expected
