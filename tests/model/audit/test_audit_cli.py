"""`latebranch audit`: its arguments become a plan, its report is text and one JSON line, its status the verdict."""

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import server.cli.main
from engine.audit.collect import AuditRequestFailed, collect
from engine.audit.examine import examine
from engine.audit.outcomes import Tally
from engine.audit.plan import AuditPlan, Setting
from engine.audit.reference import Reference
from engine.audit.report import AuditVerdict
from engine.audit.report_text import as_text
from engine.build import BadConfiguration
from engine.core.tree import Expansion
from engine.core.types import SamplingParams
from engine.scheduler.slot_allocator import IntegrityError
from engine.testing import tiny_engine, tiny_module
from engine.verify import two_phase
from server.cli.audit_run import EXIT_STATUS, as_json, plan_of
from server.settings import load_settings
from tests.model.tiny import own_module, pair

CHAIN = Expansion(3, 1, 0)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])


@pytest.fixture(scope="module")
def report():
    setting = Setting(SamplingParams(top_p=0.9), "traversal", CHAIN)
    plan = AuditPlan(((5, 9, 33, 4),), (setting,), first_seed=7, num_samples=60, max_tokens=3, num_choice_tokens=8)
    return examine(collect(tiny_engine(*pair("llama")), plan), Reference(own_module("llama")))


def text_of(report):
    return as_text(report, tiny_engine(*pair("llama")).info, 1.5)


def test_the_report_names_every_check(report):
    text = text_of(report)
    for words in (
        "all tokens",
        "first token, together",
        "impossible tokens",
        "temperature 0",
        "coupled 3.1.0",
        "LOSSLESS as far",
    ):
        assert words in text
    assert "VIOLATION" not in text
    assert max(map(len, text.splitlines())) < 130


def test_a_violation_cannot_be_overlooked(report):
    broken = replace(report, greedy=(replace(report.greedy[0], tally=Tally(7, 0, 1, 4.0)),))
    assert not broken.is_lossless
    assert text_of(broken).count("VIOLATION") == 2
    assert text_of(broken).splitlines()[-1].startswith("NOT LOSSLESS")
    impossible = replace(report, sampled=(replace(report.sampled[0], support=Tally(9, 0, 1)),))
    assert not impossible.is_lossless


def test_audit_without_power_is_inconclusive(report):
    """The bug: without any accepted draft, or with few samples, it passed."""
    assert report.verdict is AuditVerdict.LOSSLESS
    (draws,) = report.sampled
    without_drafts = replace(report, sampled=(replace(draws, num_accepted=0),))
    without_test = replace(report, sampled=(replace(draws, tests=draws.tests[:1]),))
    greedy_alone = replace(report, greedy=(replace(report.greedy[0], num_accepted=0),))
    for vacuous in (without_drafts, without_test, greedy_alone):
        assert vacuous.verdict is AuditVerdict.INCONCLUSIVE
        assert EXIT_STATUS[vacuous.verdict] == 3
        assert text_of(vacuous).splitlines()[-1].startswith("INCONCLUSIVE: ")
        assert vacuous.inconclusive[0] in text_of(vacuous).splitlines()[-1]
    by_policy = replace(report, sampled=(replace(draws, num_accepted=0, is_by_policy=True),))
    assert by_policy.verdict is AuditVerdict.LOSSLESS, "a policy may choose to draft nothing"
    wrong = replace(without_drafts, greedy=(replace(report.greedy[0], tally=Tally(7, 0, 1, 4.0)),))
    assert wrong.verdict is AuditVerdict.VIOLATION


def test_first_tokens_are_tested_with_few_samples():
    setting = Setting(SamplingParams(1.5, top_k=4), "traversal", CHAIN)
    plan = AuditPlan(((5, 9, 33, 4),), (setting,), first_seed=7, num_samples=40, max_tokens=3, num_choice_tokens=8)
    (draws,) = examine(collect(tiny_engine(*pair("llama")), plan), Reference(own_module("llama"))).sampled
    first = [one for one in draws.tests if one.name.startswith("first token")]
    assert [one.test.num_counted for one in first] == [40, 40]


def test_the_level_is_shared_by_all_tests(report):
    assert report.level == pytest.approx(1e-3 / report.num_tests)
    assert report.num_tests == sum(draws.num_tests for draws in report.sampled) > 2


def test_bfloat16_verdict_mentions_rounding(report):
    assert "rounding" in text_of(replace(report, reference_dtype="bfloat16"))


def test_json_line_contains_all_fields(report):
    line = as_json(report, tiny_engine(*pair("llama")).info)
    read = json.loads(line)
    assert "\n" not in line
    assert read["is_lossless"] is True
    assert read["report"]["first_seed"] == 7
    assert read["report"]["sampled"][0]["tests"][0]["test"]["num_counted"] == 180


def test_an_infinite_gap_is_still_json(report):
    line = as_json(
        replace(report, greedy=(replace(report.greedy[0], tally=Tally(7, 0, 1, math.inf)),)), tiny_engine(*pair("llama")).info
    )
    assert "Infinity" not in line
    read = json.loads(line)
    assert (read["verdict"], read["report"]["greedy"][0]["tally"]["widest_gap"]) == ("violation", None)


@pytest.fixture
def audits(monkeypatch):
    """Return the arguments that the audit is run with; nothing is run, and a violation is found."""
    calls: list[argparse.Namespace] = []

    def audit(settings, texts, parsed):
        calls.append(parsed)
        return 1

    monkeypatch.setattr("server.cli.audit_run.audit", audit)
    return calls


def test_arguments_become_a_plan(audits):
    arguments = "--temperatures 1 0.5 --top-p 0.9 --verifiers traversal rrsw --expansions 0.2.2 --samples 9 --first-seed 4"
    assert server.cli.main.main(["audit", *arguments.split()]) == 1
    plan = plan_of(audits[0], ((1, 2),))
    assert [setting.name for setting in plan.settings] == [
        "temperature 1 top_p 0.9, traversal 0.2.2",
        "temperature 1 top_p 0.9, rrsw 0.2.2",
        "temperature 0.5 top_p 0.9, traversal 0.2.2",
        "temperature 0.5 top_p 0.9, rrsw 0.2.2",
    ]
    assert (plan.num_samples, plan.first_seed, plan.alpha) == (9, 4, 1e-3)


def test_configured_engine_is_audited(audits, tmp_path):
    (tmp_path / "s.yaml").write_text("verifier: block\nexpansion: 5.1.0\n")
    server.cli.main.main(["audit", "--config", str(tmp_path / "s.yaml")])
    assert {setting.verifier for setting in plan_of(audits[0], ((1,),)).settings} == {"block"}
    assert {str(setting.expansion) for setting in plan_of(audits[0], ((1,),)).settings} == {"5.1.0", "None"}


MISTAKES = [
    (["--config", "/nowhere.yaml"], "no such configuration file"),
    (["--kinds", "nope"], "no prompts of kind nope"),
    (["--verifiers", "nope"], "is named nope; the names are"),
    (["--verifiers", "specinfer", "--expansions", "heap.8"], "specinfer is not lossless on heap trees"),
    (["--prompts", "/nowhere.yaml"], "cannot be read"),
    (["--presence-penalty", "3"], "presence_penalty must be in"),
    (["--repetition-penalty", "nan"], "repetition_penalty must be in"),
    (["--min-p", "-0.1"], "min_p must be in"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_mistakes_are_one_line_before_model_load(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("server.cli.audit_run.tool_engine", None)
    assert server.cli.main.main(["audit", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("latebranch audit: ")
    assert words in error
    assert error.count("\n") == 1


URL = ["--url", "http://127.0.0.1:9"]
OF_ENGINE = [
    *(f"--{name} 1" for name in ("temperatures", "top-p", "top-k", "min-p", "repetition-penalty")),
    "--verifiers coupled",
]
OF_ENGINE += [
    *(f"--{name} 1" for name in ("samples", "max-tokens", "seeds", "num-prompts")),
    "--expansions 4.1.0",
    "--config x.yaml",
]
OF_ENGINE += ["--presence-penalty 0", "--frequency-penalty 0"]
BY_URL = [
    "--weights x",
    "--weights-dtype int8",
    "--chat",
    "--api-key k",
    "--skip n",
    *(f"--{name} 200" for name in ("requests", "wait")),
]
BY_URL += [f"--{name} 1" for name in ("concurrency", "timeout", "tie-gap")]


@pytest.mark.parametrize("option", OF_ENGINE)
def test_engine_options_are_refused_with_url(option, capsys):
    """The bug: `--url` ignored the options of the other audit."""
    assert server.cli.main.main(["audit", *URL, *option.split()]) == 2
    assert f"{option.split()[0]} cannot be combined with --url" in capsys.readouterr().err


@pytest.mark.parametrize("option", BY_URL)
def test_url_options_need_url(option, audits, capsys):
    """The bug: without `--url` its options were ignored, so another model than the named one was audited."""
    assert server.cli.main.main(["audit", *option.split()]) == 2
    assert f"{option.split()[0]} needs --url" in capsys.readouterr().err
    assert not audits


def test_every_option_is_of_a_known_audit(capsys):
    with pytest.raises(SystemExit):
        server.cli.main.main(["audit", "--help"])
    of_both = {"--help", "--model", "--prompts", "--kinds", "--greedy-tokens", "--alpha", "--first-seed", "--json", "--url"}
    of_one = {option.split()[0] for option in (*OF_ENGINE, *BY_URL)}
    assert set(re.findall(r"(?<=\s)--[a-z-]+", capsys.readouterr().out)) == of_both | of_one


def test_named_model_is_audited(monkeypatch, tmp_path):
    """The bug: `--model` without `--url` audited the configured model."""
    models: list[str] = []
    monkeypatch.setattr("server.cli.audit_run.audit", lambda settings, texts, parsed: models.append(settings.model))
    (tmp_path / "s.yaml").write_text("model: one\n")
    for model in ([], ["--model", "two"]):
        server.cli.main.main(["audit", "--config", str(tmp_path / "s.yaml"), *model])
    assert models == ["one", "two"]


def test_no_speculation_is_nothing_to_audit(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text("drafter: none\n")
    assert server.cli.main.main(["audit", "--config", str(tmp_path / "s.yaml")]) == 2
    assert "without a drafter" in capsys.readouterr().err


def test_engine_refusal_is_one_line(monkeypatch, capsys):
    def refuse(*_):
        raise BadConfiguration("not this")

    monkeypatch.setattr("server.cli.audit_run._audit", refuse)
    assert server.cli.main.main(["audit"]) == 2
    assert capsys.readouterr().err == "latebranch audit: not this\n"


@pytest.mark.parametrize(
    "arguments", [["--samples", "0"], ["--temperatures", "0"], ["--top-p", "1.1"], ["--alpha", "1"], ["--first-seed", "-1"]]
)
def test_unusable_numbers_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        server.cli.main.main(["audit", *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {arguments[0]}: must " in error
    assert arguments[1] in error


def test_adaptive_policy_is_audited_beside_configured_tree(audits, tmp_path):
    (tmp_path / "s.yaml").write_text("policy: adaptive\nexpansion: 5.1.0\n")
    server.cli.main.main(["audit", "--config", str(tmp_path / "s.yaml"), "--top-k", "0", "--min-p", "0"])
    assert [setting.expansion for setting in plan_of(audits[0], ((1,),)).settings] == [Expansion(5, 1, 0), None] * 2


@pytest.mark.parametrize("failure", [AuditRequestFailed("no memory"), IntegrityError("a slot is lost")])
def test_engine_failure_is_no_usage_error(failure, monkeypatch, capsys):
    def fail(*_):
        raise failure

    monkeypatch.setattr("server.cli.audit_run._audit", fail)
    assert server.cli.main.main(["audit"]) == 1
    assert capsys.readouterr().err == f"latebranch audit: the engine failed: {failure}\n"


@pytest.mark.parametrize("edit", [{"logit_bias": ((3, 1.0),)}, {"allowed_token_ids": (3,)}, {"min_tokens": 1}])
def test_unsupported_parameters_cannot_be_planned(edit):
    with pytest.raises(ValueError, match="cannot be audited"):
        AuditPlan(((1,),), (Setting(SamplingParams(**edit), "traversal"),), first_seed=7)


PROMPTS = """
prose: ["w5 w9 w33 w4", "w7 w8"]
"""
SMALL = "--temperatures 1.5 --top-k 4 --samples 150 --max-tokens 4 --greedy-tokens 8 --num-prompts 2 --first-seed 7"


@pytest.fixture(scope="module")
def pair_on_disk(tmp_path_factory):
    """Return a configuration file of a saved target with a tokenizer, a saved drafter, a trace and a background audit."""
    folder = tmp_path_factory.mktemp("pair")
    draft = tiny_module()
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for name, module in (("target", tiny_module()), ("draft", draft)):
        module.save_pretrained(folder / name)
        words().save_pretrained(folder / name)
    (folder / "prompts.yaml").write_text(PROMPTS)
    lines = [f"model: {folder / 'target'}", "drafter: model", f"draft_model: {folder / 'draft'}"]
    lines += ["expansion: 1.3.1", "verifier: traversal"]
    lines += [f"trace_file: {folder / 'trace'}", "audit_share: 1.0", "device: cpu", "max_model_len: 64", "num_slots: 2048"]
    (folder / "s.yaml").write_text("\n".join(lines))
    return folder


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tiny models' 61 tokens: w0, w1, ..."""
    tokenizer = Tokenizer(WordLevel({f"w{token_id}": token_id for token_id in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def run_whole(folder: Path) -> int:
    arguments = ["--config", str(folder / "s.yaml"), "--prompts", str(folder / "prompts.yaml"), *SMALL.split()]
    return server.cli.main.main(["audit", *arguments])


def test_sound_pair_passes_from_command_line(pair_on_disk, capsys):
    assert run_whole(pair_on_disk) == 0
    *text, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["is_lossless"] is True
    assert any(one.startswith("LOSSLESS as far") for one in text)


def test_json_is_appended_to_a_file(pair_on_disk, capsys, monkeypatch, tmp_path, report):
    monkeypatch.setattr("server.cli.audit_run.examine", lambda *_: report)
    monkeypatch.setattr("server.cli.audit_run._collected", lambda *_: (tiny_engine(*pair("llama")).info, None))
    for _ in range(2):
        server.cli.main.main(["audit", "--config", str(pair_on_disk / "s.yaml"), "--json", str(tmp_path / "lines")])
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line)["is_lossless"] for line in lines] == [True, True]
    assert "is_lossless" not in capsys.readouterr().out


def test_broken_verifier_fails_from_command_line(pair_on_disk, capsys, monkeypatch):
    monkeypatch.setattr(
        two_phase.PlannedForest, "extra_weights", lambda self, level, prefix_P: torch.ones_like(_WEIGHTS(self, level, prefix_P))
    )
    assert run_whole(pair_on_disk) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["is_lossless"] is False


_WEIGHTS = two_phase.PlannedForest.extra_weights


def test_tool_writes_no_server_trace(pair_on_disk):
    settings = load_settings(pair_on_disk / "s.yaml", {})
    assert (settings.to_engine_config().trace_file, settings.to_engine_config().audit_share) == (str(pair_on_disk / "trace"), 1.0)
    assert (settings.to_tool_config().trace_file, settings.to_tool_config().audit_share) == (None, 0.0)
    assert not (pair_on_disk / "trace").exists(), "the audits above wrote one"
