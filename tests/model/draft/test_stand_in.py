"""A shipped head that does not belong to the model after all: cached text drafts in its place. What measures leaves no trace."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import eye

from engine.build import BadConfiguration, build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion
from engine.draft.text.matching import NativeMatcher
from engine.draft.text_and_model import CombinedDrafter
from engine.testing import tiny_module
from selector.build import adaptive_policy
from selector.cost import DRAFT_COEFFICIENTS, NUM_REST
from selector.profile import Bench, Profile, measure
from tests.model.driving import greedy, run
from tests.model.heads import random_head

LIMITS = SchedulerConfig(num_slots=900, max_model_len=256, max_step_tokens=64)


def configured(folder: Path, head: str, stand_in: str | None = "ngram") -> EngineConfig:
    tiny_module().save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")  # only its existence is checked
    random_head().save(folder / "head", {})
    random_head(target_width=16).save(folder / "wide", {})
    save_file({"weight": eye(2)}, folder / "lens")
    return EngineConfig(
        str(folder / "model"),
        drafter="head",
        head=str(folder / head),
        cached_text=True,
        stand_in=stand_in,
        expansion=Expansion(4, 1, 0),
        policy="adaptive",
        scheduler=LIMITS,
    )


@pytest.mark.parametrize("head", ["wide", "missing", "lens"])
def test_stand_in_drafts_after_broken_head(head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    engine = build_engine(replace(configured(tmp_path, head), policy="fixed"))
    assert engine.info.drafter == "ngram"
    assert "ngram drafts instead" in caplog.text
    assert len(run(engine, [greedy("r", (5, 6, 5, 6, 5), max_tokens=12)]).texts()["r"]) == 12


def test_config_without_stand_in_is_refused(tmp_path: Path):
    with pytest.raises(BadConfiguration, match="was made for a target of width 16"):
        build_engine(configured(tmp_path, "wide", stand_in=None))


def test_measurement_excludes_cached_text_and_teaches_nothing(tmp_path: Path, monkeypatch):
    measured: list[Bench] = []

    def measuring(bench: Bench) -> Profile:
        measured.append(bench)
        measure(bench, budget_s=0.1)
        return Profile((0.1,) * NUM_REST, (0.1,) * len(DRAFT_COEFFICIENTS))

    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("selector.profile.measure", measuring)
    config = configured(tmp_path, "head")
    engine = build_engine(config, adaptive_policy)
    assert engine.info.drafter == "head+ngram"
    steps = measured[0].run_steps(1, 16, [Expansion(4, 1, 0)] * 3)
    assert [step.work.num_passes for step in steps] == [4, 4, 4], "the prompts repeat a token, so that cached text would be sure"
    assert isinstance(engine.drafter, CombinedDrafter)
    assert isinstance(engine.drafter.texts._matcher, NativeMatcher)
    assert not any(engine.drafter.texts._matcher.rates)
    build_engine(config, adaptive_policy)
    counts = [len(measured)]
    random_head(2).save(tmp_path / "head", {})
    build_engine(config, adaptive_policy)
    counts.append(len(measured))
    assert counts == [1, 2], "the same head on the same machine is known, another in the same file is not"
