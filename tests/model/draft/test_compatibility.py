"""Unfit drafters are refused by name before weights are loaded. Drafters that differ only in padding are exact."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import server.cli.main
from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.compatibility import (
    Compatibility,
    UnreadableDrafter,
    compare_fingerprint,
    compare_models,
    recorded_fingerprint,
)
from engine.draft.models import vocab_padding as padding
from engine.draft.models.draft_model import ModelDrafter
from engine.draft.models.early_exit import Lens
from engine.draft.models.vocab_padding import RepaddedModel
from engine.engine import Engine
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import adopt
from engine.testing import tiny_engine, tiny_model, tiny_module
from engine.weights.fingerprint import fingerprint
from tests.model.driving import run
from tests.model.folders import SPECIAL, WORDS, model_folder, with_rows
from tests.model.heads import random_head
from tests.model.passes import CPU
from tests.model.tiny import own_greedy_text

SMALL = SchedulerConfig(num_slots=512, max_model_len=256)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("target"))


def compared(target: Path, draft: Path, max_model_len: int = 256) -> Compatibility:
    return compare_models(target, draft, max_model_len)


def short_module():
    module = tiny_module("llama")
    module.config.max_position_embeddings = 128
    return module


def short(folder: Path) -> Path:
    return model_folder(folder / "short", short_module())


DIFFERENCES = {
    "two swapped": (
        {"words": (*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:])},
        "2 of 61 token ids decode to different strings: 5 is 'w5' in the target and 'w6' in the drafter; 6 is 'w6' in the target",
    ),
    "all other": (
        {"words": (*WORDS[:3], *(f"v{index}" for index in range(3, 61)))},
        "58 of 61 token ids decode to different strings: 3 is 'w3' in the target and 'v3' in the drafter; 4 is 'w4' in the "
        "target and 'v4' in the drafter; 5 is 'w5' in the target and 'v5' in the drafter and 55 more",
    ),
    "one missing": ({"words": WORDS[:-1]}, "1 token ids (61 and 60 in all) exist only in the target: 60 is 'w60'"),
    "one more": ({"words": (*WORDS, "extra")}, "1 token ids (61 and 62 in all) exist only in the drafter: 61 is 'extra'"),
    "less special": ({"special": SPECIAL[1:]}, "special only in the target: '<pad>' (0)"),
    "more special": ({"special": (*SPECIAL, "w7")}, "special only in the drafter: 'w7' (7)"),
    "another end": ({"eos": 9}, "no end token in common: target '</s>' (2), drafter 'w9' (9)"),
    "short texts": ({"module": short_module()}, "limited to 128 tokens, the target must serve 256: set max_model_len to 128"),
}


@pytest.mark.parametrize(("change", "words"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_each_difference_is_refused_by_name(target, tmp_path, change, words):
    (refusal,) = compared(target, model_folder(tmp_path / "draft", **change)).refusals
    assert words in refusal
    assert "\n" not in refusal


def test_unfit_drafter_is_refused_before_weight_load(target, tmp_path, monkeypatch):
    draft = model_folder(tmp_path / "draft", words=WORDS[::-1], special=(), eos=9)
    monkeypatch.setattr("engine.build.load_model", None)
    config = EngineConfig(str(target), drafter="model", draft_model=str(draft), scheduler=SMALL)
    with pytest.raises(BadConfiguration) as raised:
        build_engine(config)
    for words in (
        "different strings: 0 is '<pad>' in the target and 'w60'",
        "special only in the target",
        "no end token in common",
    ):
        assert words in str(raised.value)


def test_same_vocabulary_is_accepted_silently(target, tmp_path):
    found = compared(target, model_folder(tmp_path / "draft", tiny_module("llama", 3, num_layers=2)))
    assert (found.refusals, found.warnings) == ((), ())
    assert "61 tokens" in found.facts[0]
    assert "end tokens '</s>' (2), 512 positions" in found.facts[1]


@pytest.mark.parametrize("eos", [[2, 5], [5, 2]])
def test_end_tokens_that_overlap_are_a_warning(target, tmp_path, eos):
    """The target's own decide: a base model may draft for one that was tuned to end its turns."""
    found = compared(target, model_folder(tmp_path / "draft", eos=eos))
    assert not found.refusals
    assert "end tokens differ" in "".join(found.warnings)


def test_other_rules_of_splitting_are_a_warning(target, tmp_path):
    folder = model_folder(tmp_path / "draft")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
    found = compared(target, folder)
    assert not found.refusals
    assert "the tokenizers differ" in "".join(found.warnings)


# Padding


def repadded(num_rows: int) -> RepaddedModel:
    """Return the tiny model with another number of rows, run as one of the target's 61. Up to 61 its rows are the target's."""
    module = with_rows(num_rows)
    with torch.no_grad():
        module.lm_head.weight[61:] = 3.0  # rows beyond the target's would win often
    return RepaddedModel(adopt(module, CPU), 61)


def drafting(model) -> Engine:
    return tiny_engine(tiny_model("llama"), ModelDrafter("repadded", model, KVCache(2048, CPU), Feeding.OWN_CACHE))


# The first text begins with ids that the smaller drafter has no row for.
PROMPTS = ((60, 59, 58), (5, 6, 7))
TREES = [Expansion(2, 2, 2), Expansion(0, 3, 4, "heap", 9), Expansion(0, 3, 4, "noise_aware", 6)]


@pytest.mark.parametrize("num_rows", [48, 80])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_differently_padded_drafter_changes_no_token(num_rows, tree):
    engine = drafting(repadded(num_rows))
    speculation = Speculation(expansion=tree)
    for index, prompt in enumerate(PROMPTS):
        greedy = Request("greedy", prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), speculation)
        session = run(engine, [greedy])
        assert list(session.outcomes["greedy"].ids) == own_greedy_text("llama", prompt, 16)
        assert sum(stats.num_accepted_tokens for stats in session.stats) > 0
        seeded = SamplingParams(seed=index, max_tokens=16, ignore_eos=True)
        plain = run(engine, [Request("r", prompt, seeded, Speculation(is_enabled=False))]).outcomes["r"].ids
        assert run(engine, [Request("r", prompt, seeded, speculation)]).outcomes["r"].ids == plain


@pytest.mark.parametrize("num_rows", [48, 64])
def test_tokens_without_target_row_are_not_drafted(num_rows):
    """Tokens without a drafter's row neither: their probability is 0, and the distribution sums to 1."""
    probs = []

    class Seen(RepaddedModel):
        def forward(self, batch, cache, logit_rows_N, walks=None):
            logits_NV = super().forward(batch, cache, logit_rows_N, walks)
            probs.append(logits_NV.softmax(-1))
            return logits_NV

    model = repadded(num_rows)
    run(drafting(Seen(model._model, 61)), [Request("r", PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True))])
    every = torch.cat(probs)
    assert every.shape[1] == 61
    assert torch.allclose(every.sum(-1), torch.ones(len(every)))
    assert bool((every[:, num_rows:] == 0).all())


def test_mutant_padding_with_zeros_drafts_missing_tokens(monkeypatch):
    pad = functional.pad
    monkeypatch.setattr(functional, "pad", lambda logits, sizes, value: pad(logits, sizes))
    with pytest.raises(AssertionError):
        test_tokens_without_target_row_are_not_drafted(48)


def test_the_mutant_that_feeds_unknown_ids_fails(monkeypatch):
    monkeypatch.setattr(padding, "replace", lambda batch, **_: batch)
    with pytest.raises(IndexError):
        run(drafting(repadded(48)), [Request("r", PROMPTS[0], SamplingParams(max_tokens=4))])


def test_configured_pair_of_different_padding_is_served(target, tmp_path):
    draft = model_folder(tmp_path / "draft", with_rows(64), (*WORDS, "[PAD61]", "[PAD62]", "[PAD63]"))
    config = EngineConfig(str(target), drafter="model", draft_model=str(draft), policy="fixed", scheduler=SMALL)
    request = Request("r", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    session = run(build_engine(config), [request])
    assert list(session.outcomes["r"].ids) == own_greedy_text("llama", PROMPTS[1], 16)
    assert sum(stats.num_accepted_tokens for stats in session.stats) > 8  # the same weights


# Files made for a model


def lens_file(path: Path, made_for: Path | None, width: int = 32) -> Path:
    recipe = {} if made_for is None else {"target_fingerprint": fingerprint(made_for).as_text()}
    Lens(1, torch.eye(width), torch.zeros(width), recipe).save(path)
    return path


def test_lens_of_the_same_model_is_accepted(target, tmp_path):
    found = compare_fingerprint(target, lens_file(tmp_path / "lens", target))
    assert (found.refusals, found.warnings) == ((), ())


def test_lens_of_other_weights_warns_and_drafts(target, tmp_path, caplog):
    other = model_folder(tmp_path / "other", tiny_module("llama", 5))
    file = lens_file(tmp_path / "lens", other)
    assert not compare_fingerprint(target, file).refusals
    with caplog.at_level(logging.WARNING):
        build_engine(EngineConfig(str(target), drafter="early-exit", lens=str(file), scheduler=SMALL))
    assert [record.message for record in caplog.records if "made for other weights" in record.message]


OTHER_MODELS = {
    "words": ({"words": (*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:])}, "made for another vocabulary of 61 tokens"),
    "count": ({"words": WORDS[:-1]}, "the target has 61 tokens, lens was made for 60"),
    "special": ({"special": SPECIAL[1:]}, "other special tokens"),
    "layers": ({"module": tiny_module("llama", num_layers=2)}, "the target has 3 layers, lens was made for 2"),
}


@pytest.mark.parametrize(("change", "words"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_lens_of_other_vocabulary_is_refused(target, tmp_path, change, words):
    file = lens_file(tmp_path / "lens", model_folder(tmp_path / "other", **change))
    (refusal,) = compare_fingerprint(target, file).refusals
    assert words in refusal
    with pytest.raises(BadConfiguration, match="does not belong to"):
        build_engine(EngineConfig(str(target), drafter="early-exit", lens=str(file), scheduler=SMALL))


def test_head_is_also_compared_with_target(target, tmp_path):
    """The mutant that looks at lenses alone builds an engine here."""
    other = model_folder(tmp_path / "other", words=(*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]))
    random_head().save(tmp_path / "head", {"target_fingerprint": fingerprint(other).as_text()})
    with pytest.raises(BadConfiguration, match="head was made for another vocabulary of 61 tokens"):
        build_engine(EngineConfig(str(target), drafter="head", head=str(tmp_path / "head"), scheduler=SMALL))


def test_lens_without_fingerprint_is_checked_by_size(target, tmp_path):
    file = lens_file(tmp_path / "lens", None)
    assert recorded_fingerprint(file) is None
    found = compare_fingerprint(target, file)
    assert not found.refusals
    assert "does not record the model it was made for" in "".join(found.warnings)
    wide = lens_file(tmp_path / "wide", None, width=16)
    with pytest.raises(BadConfiguration, match="does not fit the target"):
        build_engine(EngineConfig(str(target), drafter="early-exit", lens=str(wide), scheduler=SMALL))


def test_file_without_a_lens_is_reported(target, tmp_path):
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(BadConfiguration, match="missing cannot be read"):
        build_engine(EngineConfig(str(target), drafter="early-exit", lens=str(tmp_path / "missing"), scheduler=SMALL))
    for name in ("text", "missing"):
        with pytest.raises(UnreadableDrafter, match=f"{name} cannot be read"):
            recorded_fingerprint(tmp_path / name)
    save_file({"a": torch.zeros(1)}, tmp_path / "odd", metadata={"recipe": '{"target_fingerprint": "?"}'})
    with pytest.raises(UnreadableDrafter, match="odd cannot be read"):
        recorded_fingerprint(tmp_path / "odd")


def test_tuned_model_does_not_match_the_lens(target, tmp_path):
    file = lens_file(tmp_path / "lens", target)
    tuned = model_folder(tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"] += 1e-3
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    (warning,) = compare_fingerprint(tuned, file).warnings
    assert "other weights" in warning


# The command


def checked(capsys, *flags: object) -> tuple[int, str]:
    capsys.readouterr()  # output of writing the folders
    status = server.cli.main.main(["drafter", "check", *map(str, flags)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_command_prints_comparison_and_returns_verdict(target, tmp_path, capsys):
    good = model_folder(tmp_path / "good", eos=[2, 5])
    bad = model_folder(tmp_path / "bad", words=WORDS[:-1], eos=9)
    status, text = checked(capsys, "--model", target, "--draft-model", good)
    assert (status, text.splitlines()[-1]) == (0, "they belong together")
    assert "warning: end tokens differ, the target's are used: target '</s>' (2), drafter '</s>' (2), 'w5' (5)" in text
    status, text = checked(capsys, "--model", target, "--draft-model", bad)
    assert (status, text.splitlines()[-1]) == (1, "they do not belong together")
    assert len([line for line in text.splitlines() if line.startswith("refused: ")]) == 2
    assert "must serve 512" in checked(capsys, "--model", target, "--draft-model", short(tmp_path), "--max-model-len", 4096)[1]


@pytest.mark.parametrize("flag", ["--lens", "--head"])
def test_the_command_checks_files_too(target, tmp_path, capsys, flag):
    file = lens_file(tmp_path / "lens", target)
    assert checked(capsys, "--model", target, flag, file)[0] == 0
    two_layers = model_folder(tmp_path / "other", tiny_module("llama", num_layers=2))
    status, text = checked(capsys, "--model", two_layers, flag, file)
    assert (status, "refused: the target has 2 layers, lens was made for 3" in text) == (1, True)
    status, text = checked(capsys, "--model", target, flag, tmp_path / "missing")
    assert (status, text.count("\n"), "missing cannot be read" in text) == (1, 1, True)


@pytest.mark.weights
def test_the_shipped_drafters_belong_to_their_targets():
    from engine.weights import resolve
    from server.settings import SHIPPED_DRAFTERS

    pair = compare_models(resolve("qwen2.5-coder-1.5b").folder, resolve("qwen2.5-coder-0.5b").folder, 32768)
    assert (pair.refusals, pair.warnings) == ((), ())
    for file in SHIPPED_DRAFTERS.glob("*.safetensors"):
        own = compare_fingerprint(resolve(file.stem.rpartition("-")[0]).folder, file)
        assert (own.refusals, own.warnings) == ((), ())
        assert file.stat().st_size < 20_000_000
    others = compare_models(resolve("qwen2.5-coder-1.5b").folder, resolve("smollm2-135m").folder, 8192)
    assert not others.refusals
    assert "the tokenizers differ" in "".join(others.warnings)
