"""The table of drafters: which contender runs what, in which order and over which weights. Its figures are the measurements."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import foreign
from benchmarks.drafters import __main__ as command
from benchmarks.drafters.contenders import PLAINLY, Contender, MissingPart, Stable, config_of, contenders_of
from benchmarks.drafters.measure import Design, EncodedPrompt, Measurement, blocks_of
from benchmarks.drafters.report import UnlikeRuns, interval, report
from benchmarks.foreign import ForeignCpu
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion
from engine.core.types import Request
from engine.draft.models.early_exit import Lens
from engine.verify.dispatch import Judge
from server.cli.bench_compare import OutputsDiffer
from server.cli.bench_prompts import BenchError, Prompt, load_prompts, read_prompts
from tests.model.folders import model_folder, with_rows

CHAIN, HEAP, BEAM = Expansion(3, 1, 0), Expansion(0, 3, 4, "heap", 6), Expansion(0, 3, 4, "beam", 6)
PROMPTS = {
    "code": [EncodedPrompt((5, 6, 7, 5, 6, 7, 5, 6)), EncodedPrompt((9, 8, 9, 8), (9, 8, 9))],
    "edit": [EncodedPrompt((11, 40, 3))],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def stable(folder) -> Stable:
    draft = model_folder(folder.parent / "draft", with_rows(61))
    lens = folder.parent / "lens"
    Lens(1, torch.eye(32), torch.zeros(32), {}).save(lens)
    base = EngineConfig(str(folder), policy="fixed", expansion=CHAIN, scheduler=SchedulerConfig(num_slots=512, max_model_len=256))
    return Stable(base, {"draft_model": str(draft), "lens": str(lens), "head": None})


DRAFTERS = ("none", "ngram", "early-exit", "model", "model+ngram")


def design(drafters=DRAFTERS, trees=(CHAIN,), batch=1, rounds=1, temperatures=(0.0, 1.0)):
    return Design(tuple(contenders_of(drafters, trees)), temperatures, 6, batch, rounds, "traversal")


def measured(design_: Design, stable: Stable, out: Path) -> list[dict[str, Any]]:
    Measurement(design_, stable, out).run(PROMPTS)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def two_rounds(stable, tmp_path_factory) -> list[dict[str, Any]]:
    return measured(design(rounds=2), stable, tmp_path_factory.mktemp("rounds") / "out")


def place(line_: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line_[name] for name in ("round", "kind", "prompt", "temperature"))


def test_contenders_get_all_prompts_each_round(two_rounds):
    header, *lines = two_rounds
    assert len({place(one) for one in lines}) == 2 * 3 * 2
    assert len({(*place(one), one["drafter"], one["tree"]) for one in lines}) == len(lines) == 2 * 3 * 2 * len(DRAFTERS)
    assert [name for name in header["drafters"] if header["drafters"][name].endswith("+ngram")] == ["model+ngram"]
    assert {(one["drafter"], one["tree"]) for one in lines} == {("none", "0.1.0"), *((name, "3.1.0") for name in DRAFTERS[1:])}


def test_a_line_adds_up_its_steps(two_rounds):
    for one in two_rounds[1:]:
        every, after = one["all"], one["after_prompt"]
        assert 1 <= every["num_generated_tokens"] <= 6
        assert after["num_steps"] == every["num_steps"] - 1  # each prompt is fed in one step
        assert every["step_s"] >= every["draft_s"] + every["verify_s"]
        if one["drafter"] == "none":
            assert (every["num_draft_tokens"], every["num_decoding_rows"]) == (0, every["num_generated_tokens"])
    accepted = [one["all"]["num_accepted_tokens"] for one in two_rounds if one.get("drafter") == "model"]
    assert sum(accepted) > len(accepted)  # the draft model is the target


def test_blocks_and_contenders_are_shuffled_each_round(two_rounds):
    rounds = [[one for one in two_rounds[1:] if one["round"] == number] for number in range(2)]
    assert len({tuple(place(one)[1:] for one in lines) for lines in rounds}) == 2
    assert len({one["drafter"] for one in two_rounds[1 :: len(DRAFTERS)]}) > 1  # the first of a block


def test_a_batch_runs_its_prompts_together(stable, tmp_path):
    lines = measured(design(("ngram",), batch=2, temperatures=(0.0,)), stable, tmp_path / "out")[1:]
    code = [line for line in lines if line["kind"] == "code" and line["drafter"] == "none" and line["temperature"] == 0]
    assert [(line["prompt"], line["all"]["num_generated_tokens"]) for line in code] == [(0, code[0]["all"]["num_decoding_rows"])]
    assert code[0]["all"]["num_steps"] < code[0]["all"]["num_decoding_rows"]


def test_engines_share_the_one_target(stable):
    engines = [stable.engine(name) for name in ("none", "ngram", "early-exit", "model")]
    assert len({id(engine.target.model.module) for engine in engines}) == 1
    assert len({id(engine.target.cache) for engine in engines}) == 4
    assert stable.engine("ngram") is engines[1]


def test_a_drafter_gets_its_own_parts_alone(stable):
    assert config_of("model", stable.base, stable.parts).lens is None
    assert config_of("early-exit", stable.base, stable.parts).draft_model is None
    with pytest.raises(MissingPart, match="drafter head needs --head"):
        config_of("head", stable.base, stable.parts)
    with pytest.raises(MissingPart, match=r"drafter head\+ngram needs --head"):
        config_of("head+ngram", stable.base, stable.parts)
    assert config_of("model", stable.base, stable.parts).cached_text is False
    combined = config_of("model+ngram", stable.base, stable.parts)
    assert (combined.drafter, combined.draft_model, combined.cached_text) == ("model", stable.parts["draft_model"], True)


@pytest.mark.parametrize(("tree", "verifier"), [(CHAIN, "traversal"), (HEAP, "traversal"), (BEAM, "nss"), (None, "traversal")])
def test_tree_uses_a_rule_exact_on_it(tree, verifier):
    assert Contender("model", tree).speculation("traversal").verifier == verifier
    assert not PLAINLY.speculation("traversal").is_enabled


def test_seeds_and_predictions_are_equal_across_contenders():
    plan = design(temperatures=(1.0,))
    for block in blocks_of(plan, PROMPTS, 1):
        requests_of_contenders = [
            [(r.request_id, r.sampling, r.prediction_ids) for r in block.requests(one, plan)] for one in plan.contenders
        ]
        assert all(one == requests_of_contenders[0] for one in requests_of_contenders)
        assert {request[1].seed for request in requests_of_contenders[0]} == {1000 + block.first}
    requests: list[Request] = [r for block in blocks_of(plan, PROMPTS, 1) for r in block.requests(PLAINLY, plan)]
    assert sorted(len(request.prediction_ids) for request in requests) == [0, 0, 3]


def test_different_greedy_completion_stops_the_run(stable, tmp_path, monkeypatch):
    """The mutant: the extra token is 1 more than it should be, but only where something was drafted."""
    judge: Any = Judge.judge

    def shifted(self, rows, forest, *given):
        verdicts = judge(self, rows, forest, *given)
        return [
            type(verdict)(verdict.path, (verdict.extra_id + 1) % 61) if tree.num_nodes > 1 else verdict
            for tree, verdict in zip(forest.trees, verdicts, strict=True)
        ]

    monkeypatch.setattr(Judge, "judge", shifted)
    with pytest.raises(OutputsDiffer, match=r"model 3\.1\.0 differs from plain decoding at temperature 0"):
        measured(design(("model",)), stable, tmp_path / "out")


# The report


def line(drafter: str, kind: str, prompt: int, tokens_per_s: float, foreign_cpus: float | None = 0.0, **how) -> dict[str, Any]:
    """Return a line of 20 tokens in `10 / efficiency` rows a second after a prompt step of 1 token."""
    efficiency, draft_s = how.get("efficiency", 1.0), how.get("draft_s", 0.0)
    sums = {
        "num_steps": 30 / efficiency,
        "num_drafting_steps": 0 if drafter == "none" else 20 / efficiency,
        "num_generated_tokens": 20,
        "num_decoding_rows": 20 / efficiency,
        "drafting_s": draft_s,
        "verify_s": 20 / tokens_per_s,
        "step_s": 20 / tokens_per_s,
    }
    after = {**sums, "step_s": sums["step_s"] / 2, "verify_s": sums["verify_s"] / 2}
    where = {"type": "run", "run": "r", "round": 0, "kind": kind, "prompt": prompt, "temperature": 0.7}
    contender = {"drafter": drafter, "tree": "3.1.0", "foreign_cpus": foreign_cpus}
    return {**where, **contender, "all": sums, "after_prompt": after}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_the_table_counts_right(tmp_path):
    lines = [
        *(line("none", "code", prompt, 10.0) for prompt in (0, 1)),
        *(line("none", "edit", prompt, 20.0) for prompt in (0, 1)),
        *(line("ngram", "code", prompt, 20.0, efficiency=2.0, draft_s=0.5) for prompt in (0, 1)),
        *(line("ngram", "edit", prompt, 160.0, efficiency=4.0, draft_s=0.5) for prompt in (0, 1)),
    ]
    text = report(written(tmp_path / "out", lines), 0.2)
    # Ratios 2 and 8, in the geometric mean 4. Drafting of a step that drafted: .5 s / 10 over .033 s, and .5 s / 5 over .017 s.
    by_kind = "2.00, 2.00 (2.00–2.00) | 4.00, 8.00 (8.00–8.00)"
    cells = f"| ngram | 3.1.0 | 3.750 | {by_kind} | 3.00 | 4.00 (4.00–4.00) | 4.00 (4.00–4.00) | 4 |"
    assert "### Temperature 0.7" in text
    assert cells in text
    assert "0 of 4 blocks left out" in text


def test_disturbed_and_unpaired_blocks_are_dropped(tmp_path):
    lines = [
        line("none", "code", 0, 10.0),
        line("ngram", "code", 0, 20.0),
        line("none", "code", 1, 10.0, foreign_cpus=0.9),
        line("ngram", "code", 1, 90.0),
        line("ngram", "code", 2, 90.0),
        *(line(drafter, "code", 3, rate, foreign_cpus=None) for drafter, rate in (("none", 10.0), ("ngram", 20.0))),
    ]
    path = written(tmp_path / "out", lines)
    assert "1.00, 2.00 (2.00–2.00)" in report(path, 0.2)
    assert "1 of 3 blocks left out: others used more than 0.2 processors." in report(path, 0.2)
    assert "0 of 3 blocks left out" in report(path, 1.0)
    assert "1.00, 2.00 (2.00–2.00)" not in report(path, 1.0)


def test_interval_covers_spread_within_kinds_only():
    narrow = interval({"a": [2.0] * 8, "b": [8.0] * 8})
    assert (narrow.mean, narrow.low, narrow.high) == pytest.approx((4.0, 4.0, 4.0))
    wide = interval({"a": [1.0, 4.0] * 8})
    assert wide.mean == pytest.approx(2.0)
    assert 1.0 < wide.low < 1.7 < 2.4 < wide.high < 4.0


def test_other_load_excludes_this_process(monkeypatch, tmp_path):
    """Two processors, one kept busy by this process and half of one by others; what guests use is in user time already."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(foreign, "_STAT", stat)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    now = {"wall": 0.0, "own": 0.0}
    monkeypatch.setattr("time.perf_counter", lambda: now["wall"])
    monkeypatch.setattr("time.process_time", lambda: now["own"])
    #                       user nice sys  idle wait irq soft steal guest nice
    stat.write_text("cpu  1000 10 100 5000 700 1 2 3 50 0\ncpu0 1 2 3\n")
    watch = ForeignCpu()
    now.update(wall=10.0, own=10.0)
    stat.write_text("cpu  2200 20 310 5500 900 6 12 68 90 0\ncpu0 1 2 3\n")
    # Busy: 1200 + 10 + 210 + 5 + 10 + 65 ticks = 15 s, less 10 s of this process, in 10 s.
    assert watch.cpus() == pytest.approx(0.5)
    stat.unlink()
    assert ForeignCpu().cpus() is None


# The command


def test_the_command_measures_and_reports(folder, tmp_path, monkeypatch, capsys):
    config, prompts, out = tmp_path / "config.yaml", tmp_path / "prompts.yaml", tmp_path / "out.jsonl"
    config.write_text(f"model: {folder}\nnum_slots: 512\nmax_model_len: 256\nexpansion: 2.1.0\n")
    prompts.write_text("edit:\n  - text: w5 w6 w5 w6\n    prediction: w5 w6\ncode:\n  - w7 w8 w9\n")
    flags = ["--config", config, "--prompts", prompts, "--out", out, "--temperatures", "0", "--rounds", "1", "--max-tokens", "6"]
    monkeypatch.setattr("sys.argv", ["drafters", "run", "--drafters", "ngram", *map(str, flags), "--predictions"])
    command.main()
    monkeypatch.setattr("sys.argv", ["drafters", "report", str(out), "--max-foreign", "99"])
    command.main()
    text = capsys.readouterr().out
    assert "| drafter | tree | drafting | code | edit |" in text
    assert "| ngram | 2.1.0 |" in text
    assert "name " + str(folder) in text
    assert "prompts prompts.yaml; predictions sent; heads none" in text


def test_more_rounds_continue_and_unlike_runs_fail(folder, tmp_path, monkeypatch):
    config, prompts, out = tmp_path / "config.yaml", tmp_path / "prompts.yaml", tmp_path / "out.jsonl"
    config.write_text(f"model: {folder}\nnum_slots: 512\nmax_model_len: 256\nexpansion: 2.1.0\n")
    prompts.write_text("code:\n  - w7 w8 w9\n")
    flags = ["--config", config, "--prompts", prompts, "--out", out, "--temperatures", "1", "--rounds", "2", "--max-tokens", "6"]
    monkeypatch.setattr("sys.argv", ["drafters", "run", "--drafters", "ngram", *map(str, flags)])
    command.main()
    command.main()
    lines = [json.loads(one) for one in out.read_text().splitlines()]
    assert [one["round"] for one in lines if one["type"] == "run"] == [0, 0, 1, 1, 2, 2, 3, 3]
    with out.open("a") as file:
        file.write('{"type": "run", "rou\n')  # cut off in writing
    report(out, 99.0)
    monkeypatch.setattr("sys.argv", [*sys.argv, "--predictions"])
    command.main()
    with pytest.raises(UnlikeRuns, match=r"predictions none.*predictions sent"):
        report(out, 99.0)


@pytest.mark.parametrize(
    ("flags", "words"), [(["--drafters", "model"], "needs --draft-model"), (["--drafters", "nope"], "unknown drafter 'nope'")]
)
def test_a_mistake_is_one_line(folder, tmp_path, monkeypatch, flags, words):
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {folder}\nnum_slots: 512\nmax_model_len: 256\n")
    monkeypatch.setattr("sys.argv", ["drafters", "run", "--config", str(config), "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit, match=words):
        command.main()


# The prompts


def test_prompt_may_predict_its_answer(tmp_path):
    file = tmp_path / "prompts.yaml"
    file.write_text("edit:\n  - text: change this\n    prediction: this\n  - plain\n")
    assert load_prompts(file, [], 9) == {"edit": (Prompt("change this", "this"), Prompt("plain"))}
    assert read_prompts(file, [], 9) == {"edit": ("change this", "plain")}
    for wrong in ("edit:\n  - prediction: this\n", "edit:\n  - text: a\n    other: b\n", "edit:\n  - text: 3\n"):
        file.write_text(wrong)
        with pytest.raises(BenchError, match="is not a file of prompts"):
            load_prompts(file, [], 9)


def test_repository_prompts_have_six_per_kind():
    kinds = load_prompts(Path(__file__).parents[3] / "configs" / "bench_prompts.yaml", [], 99)
    assert list(kinds) == ["code", "prose", "translation", "maths", "edit", "summary"]
    assert {len(of_kind) for of_kind in kinds.values()} == {6}
    predicted = [prompt for of_kind in kinds.values() for prompt in of_kind if prompt.prediction is not None]
    assert len(predicted) == 6
    assert all((prompt.prediction or "") in prompt.text for prompt in predicted)
