"""`latebranch selector collect`, `train` and `evaluate` as a user runs them, on a tiny model; what comes out chooses trees."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from engine.build import BadConfiguration, build_engine
from engine.core.policy import Reason
from engine.draft.models.head import DraftHead
from engine.engine import Engine
from engine.weights.fingerprint import tensors_digest
from selector.build import adaptive_policy
from selector.cost import NUM_REST
from selector.network.examples import ExampleFolder
from selector.network.net import SelectorNet
from selector.profile import Profile
from server.cli.main import main
from server.settings import load_settings
from tests.model.driving import greedy, run, sampled
from tests.model.folders import model_folder
from tests.model.heads import learnt_head
from tests.model.tiny import own_greedy_text

PROMPTS = {"one": ["w5 w9 w23", "w7 w8", "w31 w9 w4"], "two": ["w9 w11 w12", "w40 w5", "w6 w6 w6"]}
COLLECT = ["--max-tokens", "20", "--stride", "6", "--trees", "2", "--temperatures", "0", "1.2"]
PROFILE = Profile((1.0, *(0.001,) * (NUM_REST - 1)), (0.001,) * 4)


@pytest.fixture(scope="module", autouse=True)
def no_profiling(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATEBRANCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("selector.profile.measure", lambda bench: PROFILE)
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Return a folder with a configuration, examples and two trained networks."""
    folder: Path = tmp_path_factory.mktemp("work")
    model_folder(folder / "target")
    learnt_head().save(folder / "head.safetensors", {})
    settings = {
        "model": str(folder / "target"),
        "drafter": "head",
        "verifier": "traversal",
        "head": str(folder / "head.safetensors"),
        "largest_expansion": "delayed_distinct.1.2.2",
        "num_slots": 2048,
        "max_model_len": 128,
        "num_threads": 1,
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "prompts.yaml").write_text(yaml.safe_dump(PROMPTS))
    where = ["--config", str(folder / "settings.yaml"), "--prompts", str(folder / "prompts.yaml"), "--out", str(folder / "roots")]
    assert main(["selector", "collect", *where, *COLLECT, "--verifiers", "coupled"]) == 0
    for objective in ("tokens", "policy"):
        train = ["--examples", str(folder / "roots"), "--out", str(folder / f"{objective}.safetensors"), "--objective", objective]
        assert main(["selector", "train", *train, "--epochs", "3"]) == 0
    return folder


def engine_of(work: Path, **overrides) -> Engine:
    settings = load_settings(work / "settings.yaml", overrides)
    return build_engine(settings.to_engine_config(), adaptive_policy)


def test_examples_are_of_every_rule_and_prompt(work):
    examples, notes = ExampleFolder(work / "roots").read()
    assert set(examples.rules) == {"greedy", "traversal", "coupled"}
    assert len(set(examples.prompts)) == 6
    assert "--verifiers coupled" in str(notes["command"])
    assert (examples.tokens_RM[:, 0] == 1.0).all()
    assert (examples.tokens_RM >= 1.0 - 1e-6).all()
    assert (examples.tokens_RM <= [depth + 1 + 1e-6 for depth in examples.menu.depths]).all()
    assert examples.tokens_RM.max() > 2.0
    assert (examples.nodes_RM <= examples.menu.num_nodes).all()
    drawn = [row for row, rule in enumerate(examples.rules) if rule == "traversal"]
    has_distribution = examples.scalars_RS[:, 3]
    assert (has_distribution[drawn] == 1.0).all()
    assert has_distribution.sum() == len(drawn)  # a deterministic rule keeps no draft distribution


def test_second_run_collects_missing_prompts(work, monkeypatch):
    """Complete prompts are not measured again. A prompt without its shard is, with equal results except for counts."""
    shard = work / "roots" / "roots-two-1.safetensors"
    others = {path: path.stat().st_mtime_ns for path in (work / "roots").iterdir() if path != shard}
    shard.unlink()
    where = ["--config", str(work / "settings.yaml"), "--prompts", str(work / "prompts.yaml"), "--out", str(work / "roots")]
    assert main(["selector", "collect", *where, *COLLECT, "--verifiers", "coupled"]) == 0
    assert shard.is_file()
    assert others == {path: path.stat().st_mtime_ns for path in others}
    monkeypatch.setattr("server.cli.selector_collect.Collector.of_prompts", None)
    assert main(["selector", "collect", *where, *COLLECT]) == 0  # nothing is missing


def test_prompt_kinds_are_selectable_unknown_refused(work, tmp_path, capsys):
    where = ["--config", str(work / "settings.yaml"), "--out", str(tmp_path), *COLLECT]
    of_file = ["--prompts", str(work / "prompts.yaml")]
    assert main(["selector", "collect", *where, *of_file, "--kinds", "two", "--num-prompts", "1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["roots-two-0.safetensors"]
    assert main(["selector", "collect", *where, *of_file, "--kinds", "two", "--num-prompts", "2"]) == 0
    assert "--kinds two --num-prompts 2" in str(ExampleFolder(tmp_path).read()[1]["command"])
    for source in (of_file, []):  # of a grammar too
        assert main(["selector", "collect", *where, *source, "--kinds", "three"]) == 2
        assert "three" in capsys.readouterr().err


def test_examples_of_another_rule_are_not_extended(work, tmp_path, monkeypatch, capsys):
    where = ["--config", str(work / "settings.yaml"), "--prompts", str(work / "prompts.yaml"), "--out", str(tmp_path), *COLLECT]
    assert main(["selector", "collect", *where, "--num-prompts", "1"]) == 0
    monkeypatch.setenv("LATEBRANCH_VERIFIER", "nss")
    assert main(["selector", "collect", *where, "--num-prompts", "2"]) == 1
    assert "made differently" in capsys.readouterr().err
    monkeypatch.delenv("LATEBRANCH_VERIFIER")
    assert main(["selector", "collect", *where, "--num-prompts", "2"]) == 0


def test_examples_of_different_recipes_are_not_joined(work, tmp_path, monkeypatch, capsys):
    where = ["--config", str(work / "settings.yaml"), "--prompts", str(work / "prompts.yaml"), *COLLECT, "--num-prompts", "1"]
    assert main(["selector", "collect", *where, "--out", str(tmp_path / "one")]) == 0
    monkeypatch.setenv("LATEBRANCH_VERIFIER", "nss")
    assert main(["selector", "collect", *where, "--out", str(tmp_path / "other")]) == 0
    (tmp_path / "other/roots-one-0.safetensors").rename(tmp_path / "one/roots-two-9.safetensors")
    assert main(["selector", "train", "--examples", str(tmp_path / "one"), "--out", str(tmp_path / "net.safetensors")]) == 1
    assert "made differently" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"drafter": "none", "head": None}, "nothing to choose without a drafter"),
        ({"expansion": "heap.8", "largest_expansion": "heap.16"}, "only delayed trees"),
    ],
)
def test_impossible_collection_is_refused_with_reason(setting, words, work, tmp_path, capsys):
    settings = yaml.safe_load((work / "settings.yaml").read_text()) | setting
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    where = ["--config", str(tmp_path / "settings.yaml"), "--prompts", str(work / "prompts.yaml"), "--out", str(tmp_path)]
    assert main(["selector", "collect", *where, *COLLECT]) == 1
    assert words in capsys.readouterr().err


def test_evaluation_prints_a_table_of_every_way(work, capsys):
    files = [str(work / f"{objective}.safetensors") for objective in ("tokens", "policy")]
    assert main(["selector", "evaluate", "--examples", str(work / "roots"), "--selectors", *files]) == 0
    shown = capsys.readouterr().out
    for way in ("static", "moving average", "table by entropy", "linear", "counting", "oracle", "tokens", "policy"):
        assert f"\n| {way} |" in shown
    assert "T=1.2" in shown
    assert "calibration of tokens" in shown


def test_evaluation_refuses_selectors_of_different_splits(work, capsys):
    train = ["--examples", str(work / "roots"), "--out", str(work / "other.safetensors"), "--seed", "5"]
    assert main(["selector", "train", *train, "--epochs", "1"]) == 0
    files = [str(work / "tokens.safetensors"), str(work / "other.safetensors")]
    assert main(["selector", "evaluate", "--examples", str(work / "roots"), "--selectors", *files]) == 1
    assert "one seed" in capsys.readouterr().err


def test_trained_network_selects_without_changing_tokens(work):
    plain = engine_of(work, policy="plain")
    engine = engine_of(work, selector=str(work / "tokens.safetensors"))
    requests = [
        greedy("greedy", (5, 9, 23), max_tokens=30),
        *(sampled(f"seeded-{seed}", (7, 8), seed=seed, max_tokens=24) for seed in range(3)),
    ]
    ran, wanted = run(engine, requests), run(plain, requests)
    assert ran.texts() == wanted.texts()
    assert ran.texts()["greedy"] == own_greedy_text("llama", (5, 9, 23), 30)
    assert engine.roots.is_watching
    reasons = {stats.policy_reason for stats in ran.stats}
    assert Reason.SPECULATION_PAYS in reasons
    assert Reason.FALLBACK not in reasons


def test_unfit_file_is_refused(work):
    for unfit, words in (("policy", "trained to choose"), ("roots/roots-one-0", "no selector"), ("nowhere", "cannot be used")):
        with pytest.raises(BadConfiguration, match=words):
            engine_of(work, selector=str(work / f"{unfit}.safetensors"))
    with pytest.raises(BadConfiguration, match="was not trained for"):
        engine_of(work, selector=str(work / "tokens.safetensors"), largest_expansion="delayed_distinct.2.2.2")


def test_network_for_another_head_is_unused(work, tmp_path, caplog):
    """It reads what a head makes of the target's states: another's numbers would mean something else to it."""
    head, recipe = DraftHead.load(work / "head.safetensors")
    head.save(tmp_path / "renamed.safetensors", {**recipe, "more": 1})
    engine_of(work, selector=str(work / "tokens.safetensors"), head=str(tmp_path / "renamed.safetensors"))
    head.fuse.weight.data += 0.1
    head.save(tmp_path / "other.safetensors", recipe)
    with pytest.raises(BadConfiguration, match="trained with another head"):
        engine_of(work, selector=str(work / "tokens.safetensors"), head=str(tmp_path / "other.safetensors"))
    net, made = SelectorNet.load(work / "tokens.safetensors")
    net.save(tmp_path / "old.safetensors", {name: value for name, value in made.items() if name != "head"})
    engine_of(work, selector=str(tmp_path / "old.safetensors"), head=str(tmp_path / "other.safetensors"))  # names no head


def test_examples_of_another_head_are_not_extended(work, tmp_path, capsys):
    head, recipe = DraftHead.load(work / "head.safetensors")
    head.fuse.weight.data += 0.1
    head.save(tmp_path / "other.safetensors", recipe)
    settings = {**yaml.safe_load((work / "settings.yaml").read_text()), "head": str(tmp_path / "other.safetensors")}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "roots").mkdir()
    for one in ("one-0", "two-1"):
        shutil.copy(work / f"roots/roots-{one}.safetensors", tmp_path / "roots")
    where = ["--prompts", str(work / "prompts.yaml"), "--out", str(tmp_path / "roots"), "--verifiers", "coupled"]
    assert main(["selector", "collect", "--config", str(tmp_path / "settings.yaml"), *where, *COLLECT]) == 1
    assert "made differently" in capsys.readouterr().err
    assert main(["selector", "collect", "--config", str(work / "settings.yaml"), *where, *COLLECT]) == 0


def test_recipe_states_how_it_was_made(work):
    net, recipe = SelectorNet.load(work / "tokens.safetensors")
    assert recipe["head"] == tensors_digest(work / "head.safetensors")
    assert net.shape.rules == ("coupled", "greedy", "traversal")
    assert "selector collect" in str(recipe["collected_by"])
    assert set(recipe["prompts"]) == {"train", "stop", "test"}  # type: ignore[call-overload]
    curve = [json.loads(line) for line in (work / "tokens.jsonl").read_text().splitlines()]
    assert [point["epoch"] for point in curve] == [1.0, 2.0, 3.0]
