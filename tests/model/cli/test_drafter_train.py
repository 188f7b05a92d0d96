"""`latebranch drafter train` and `evaluate` as a user runs them, on a tiny model; what comes out drafts."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from engine.build import build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams
from engine.distill.trainer import Trainer
from engine.draft.models.head import DraftHead
from engine.testing import tiny_module
from engine.weights.fingerprint import RECIPE_KEY, fingerprint
from server.cli.main import main
from tests.model.driving import run
from tests.model.folders import model_folder
from tests.model.tiny import own_greedy_text

GRAMMAR = {
    "weights": {"a": 1},
    "templates": {"a": ["w{number} {x}", "{x} w{small} w{small}"]},
    "fillers": {"x": ["w5", "w9", "w23"]},
}
SMALL = ["--dtype", "float32", "--threads", "1", "--max-tokens", "14"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """Return the folder of a target and that of what a training left."""
    target, work = model_folder(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("work")
    (work / "grammar.yaml").write_text(yaml.safe_dump(GRAMMAR))
    sizes = [
        "--num-prompts",
        "120",
        "--batch",
        "8",
        "--width",
        "192",
        "--intermediate",
        "64",
        "--vocab",
        "40",
        "--epochs",
        "1",
        "--weights",
        "a=2",
    ]
    sizes += ["--weights", "a=2"]
    where = ["--prompt-grammar", str(work / "grammar.yaml"), "--work", str(work), "--out", str(work / "head.safetensors")]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *sizes, *where]) == 0
    return target, work


def test_head_is_written_with_recipe_and_curve(made):
    target, work = made
    head, recipe = DraftHead.load(work / "head.safetensors")
    assert head.shape.feature_layers == (1, 2, 3)
    assert len(head.vocab_M) == 40
    assert 90 <= int(str(recipe["num_texts"])) < 120  # some were kept to measure on; the shortest teach no chain
    assert recipe[RECIPE_KEY] == fingerprint(target).as_text()
    command = str(recipe["command"])
    assert all(part in command for part in ("--width 192", "--dtype float32", "--refusal-weight 0.0", "--weights a=2"))
    held_out = recipe["held_out"]
    assert isinstance(held_out, list)
    assert [report["depth"] for report in held_out] == [1, 2, 3, 4, 5, 6]
    curve = [json.loads(line) for line in (work / "head.jsonl").read_text().splitlines()]
    assert all({"update", "loss", "overlap", "norm"} == set(point) for point in curve)


def test_impossible_training_is_refused_with_reason(made, capsys):
    target, work = made
    other = ["--prompt-grammar", str(work / "grammar.yaml"), "--work", str(work), "--out", str(work / "other.safetensors")]
    assert main(["drafter", "train", "--target", str(target), *SMALL, "--num-prompts", "120", "--seed", "7", *other]) == 1
    assert "were made with another" in capsys.readouterr().err
    assert main(["drafter", "train", "--target", str(target), *SMALL, "--num-prompts", "120", "--width", "100", *other]) == 1
    assert "multiple of 192" in capsys.readouterr().err
    where = ["--work", str(work / "nothing"), "--out", str(work / "other.safetensors")]
    for setting, words in (
        (["--rate", "-0.01"], "--rate must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--refusal-weight", "1.5"], "from 0 to 1"),
        (["--prompt-grammar", str(work / "head.safetensors")], "is no grammar"),
        (["--tokens-per-pass", "3000", "--tokens-per-update", "8000"], "up to 3000, or a multiple of it"),
        (["--prompt-grammar", str(work / "grammar.yaml"), str(work / "grammar.yaml")], "names one file twice"),
        (["--weights", "prose=1,poem=2"], "kinds of prompts that there are not: poem"),
        (["--out", str(work / "no" / "head.safetensors")], "cannot be written"),
        (["--begin-with", str(work / "other.safetensors")], "would replace"),
        (["--kept-share", "0.5"], "of a head to --begin-with"),
        (["--begin-with", str(work / "head.safetensors"), "--kept-share", "1"], "from 0 to below 1"),
    ):
        assert main(["drafter", "train", "--target", str(target), *where, *setting]) == 1
        assert words in capsys.readouterr().err
    assert not (work / "nothing").exists()  # before a text is written


def test_prompts_are_drawn_from_several_grammars(made, tmp_path):
    target, work = made
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**GRAMMAR, "templates": {"a": ["w7 w{number}"]}}))
    grammars = ["--prompt-grammar", str(work / "grammar.yaml"), str(tmp_path / "other.yaml")]
    sizes = ["--num-prompts", "120", "--width", "192", "--vocab", "40", "--epochs", "1", "--tokens-per-pass", "500"]
    files = ["--work", str(tmp_path), "--out", str(tmp_path / "head.safetensors")]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *sizes, *grammars, *files]) == 0
    recipe = DraftHead.load(tmp_path / "head.safetensors")[1]
    assert "--prompt-grammar grammar.yaml other.yaml --num-prompts" in str(recipe["command"])
    assert "--tokens-per-pass 500" in str(recipe["command"])
    assert isinstance(recipe["plan"], dict)
    assert (recipe["plan"]["tokens_per_pass"], recipe["plan"]["tokens_per_update"]) == (500, 500)
    assert isinstance(recipe["texts"], dict)
    assert len(set(recipe["texts"]["prompt grammar"].split())) == 2


def test_training_goes_on_with_a_head(made, tmp_path, capsys, monkeypatch):
    target, work = made
    first, first_recipe = DraftHead.load(work / "head.safetensors")
    (tmp_path / "texts").symlink_to(work / "texts")
    out = tmp_path / "more.safetensors"
    files = ["--prompt-grammar", str(work / "grammar.yaml"), "--work", str(tmp_path), "--out", str(out)]
    more = ["--num-prompts", "120", "--weights", "a=2", "--epochs", "1", "--rate", "0.002"]
    begun: list[Tensor] = []
    run_training = Trainer.run

    def noted(trainer, texts):
        begun.append(trainer.head.widen.weight.detach().clone())
        run_training(trainer, texts)

    monkeypatch.setattr(Trainer, "run", noted)
    begin = ["--begin-with", str(work / "head.safetensors")]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *more, *begin, *files]) == 0
    head, recipe = DraftHead.load(out)
    assert head.shape == first.shape
    assert head.vocab_M.equal(first.vocab_M)
    assert recipe["began_with"] == first_recipe
    assert "--begin-with head.safetensors" in str(recipe["command"])
    assert "--width" not in str(recipe["command"])
    assert [weight.equal(first.widen.weight) for weight in begun] == [True]
    assert not head.widen.weight.equal(first.widen.weight)
    half = [*files[:-1], str(tmp_path / "half.safetensors"), "--kept-share", "0.25"]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *more, *begin, *half]) == 0
    between, recipe = DraftHead.load(tmp_path / "half.safetensors")
    assert "--kept-share 0.25" in str(recipe["command"])
    half_way, learnt, known = (torch.cat([part.float().flatten() for part in one.parameters()]) for one in (between, head, first))
    way = float(torch.dist(half_way, known) / torch.dist(learnt, known))
    assert way == pytest.approx(0.75, abs=0.12), "files are in bfloat16, and one update goes not far beyond its rounding"
    wider = [*files[:-1], str(tmp_path / "wider.safetensors"), "--vocab", "50"]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *more, *begin, *wider]) == 0
    head, recipe = DraftHead.load(tmp_path / "wider.safetensors")
    assert len(head.vocab_M) == 50
    assert set(first.vocab_M.tolist()) < set(head.vocab_M.tolist())
    assert "--vocab 50" in str(recipe["command"])
    other = model_folder(tmp_path / "other", tiny_module("llama", seed=5))
    assert main(["drafter", "train", "--target", str(other), *SMALL, *more, *begin, *files]) == 1
    assert "made for other weights" in capsys.readouterr().err
    refused = {"leave out --width": ["--width", "192"], "keeps its 40 tokens": ["--vocab", "39"]}
    for why, setting in {**refused, "a multiple of it": ["--tokens-per-update", "3000"]}.items():
        assert main(["drafter", "train", "--target", str(target), *SMALL, *more, *begin, *files, *setting]) == 1
        assert why in capsys.readouterr().err
    (tmp_path / "no-head").write_text("nothing")
    begin = ["--begin-with", str(tmp_path / "no-head")]
    assert main(["drafter", "train", "--target", str(target), *SMALL, *more, *begin, *files]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_trained_head_drafts_without_changing_tokens(made):
    target, work = made
    config = EngineConfig(
        str(target),
        drafter="head",
        head=str(work / "head.safetensors"),
        expansion=Expansion(3, 2, 1),
        scheduler=SchedulerConfig(num_slots=512, max_model_len=256),
    )
    engine = build_engine(config)
    texts = run(engine, [Request("a", (5, 9, 23), SamplingParams(0.0, max_tokens=20, ignore_eos=True))])
    assert texts.outcomes["a"].ids == own_greedy_text("llama", (5, 9, 23), 20)


def test_evaluation_reports_each_kind_and_depth(made, capsys):
    target, work = made
    (work / "prompts.yaml").write_text(yaml.safe_dump({"one": ["w5 w6", "w7"], "two": ["w9 w11 w12"]}))
    which = ["--target", str(target), "--head", str(work / "head.safetensors"), "--prompts", str(work / "prompts.yaml")]
    capsys.readouterr()
    assert main(["drafter", "evaluate", *which, *SMALL, "--steps", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["one", "two"]
    assert all(0.0 <= depth["overlap"] <= 1.0 for line in lines for depth in line["depths"])
    assert [depth["depth"] for depth in lines[0]["depths"]] == [1, 2, 3]
    assert main(["drafter", "evaluate", *which, *SMALL, "--steps", "3", "--kinds", "two"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines[1:]


def test_impossible_evaluation_is_refused_with_reason(made, tmp_path, capsys):
    target, work = made
    other = model_folder(tmp_path / "other", tiny_module("llama", seed=5))
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump({"one": ["w5 w6"]}))
    (tmp_path / "no-head").write_text("nothing")
    unnamed = tmp_path / "unnamed.safetensors"
    DraftHead.load(work / "head.safetensors")[0].save(unnamed, {})
    good = {"target": target, "head": work / "head.safetensors", "prompts": tmp_path / "prompts.yaml"}
    for part in ({"target": other}, {"head": unnamed}):  # whose drafts are exact all the same
        which = [word for name, path in {**good, **part}.items() for word in (f"--{name}", str(path))]
        assert main(["drafter", "evaluate", *which, *SMALL]) == 0
        assert "made for" in capsys.readouterr().err
    for part, words in (
        ({"head": tmp_path / "no-head"}, "cannot be read"),
        ({"prompts": tmp_path / "none.yaml"}, "cannot be read"),
    ):
        which = [word for name, path in {**good, **part}.items() for word in (f"--{name}", str(path))]
        assert main(["drafter", "evaluate", *which, *SMALL]) == 1
        assert words in capsys.readouterr().err
