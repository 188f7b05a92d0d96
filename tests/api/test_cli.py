"""The command line: every setting has a flag, mistakes are told in one line with status 2."""

import os
import subprocess
from pathlib import Path

import pytest

import server.cli.main
from engine.build import BadConfiguration
from engine.core.validation import RequestRefused
from engine.weights import UnsupportedModel
from server.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that `serve` is called with; nothing is served, and the engine fails if the model is `broken`."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> str | None:
        calls.append(settings)
        return "no such model" if settings.model == "broken" else None

    monkeypatch.setattr("server.process.serve", serve)
    monkeypatch.setattr(server.cli.main, "configure_logging", lambda level, form: None)
    return calls


def test_flags_reach_the_settings(served: list[Settings], tmp_path: Path):
    (tmp_path / "s.yaml").write_text("port: 1\nmax_running: 3\n")
    assert server.cli.main.main(["serve", "--config", str(tmp_path / "s.yaml"), "--port", "9", "--cors-origins", "a,b"]) == 0
    (settings,) = served
    assert (settings.port, settings.max_running, settings.cors_origins) == (9, 3, ("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "is_strict"),
    [([], False), (["--strict"], True), (["--strict", "--port", "9"], True), (["--strict", "no"], False)],
)
def test_a_switch_alone_is_true(arguments: list[str], is_strict: bool, served: list[Settings]):
    assert server.cli.main.main(["serve", *arguments]) == 0
    assert served[0].strict is is_strict


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        server.cli.main.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [(["--port", "x"], 2, "port"), (["--config", "/nowhere.yaml"], 2, "nowhere"), (["--model", "broken"], 1, "no such model")],
)
def test_mistakes_are_one_line(
    arguments: list[str], status: int, words: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
):
    assert server.cli.main.main(["serve", *arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("latebranch serve: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "serve"),
        (["MODEL=gemma3-270m"], "serve --model gemma3-270m"),
        (["MODEL=gemma3-270m", "ARGS=--port 9000"], "serve --model gemma3-270m --port 9000"),
        (["MODEL=a b", "ARGS=--config c.yaml"], "serve --config c.yaml"),
    ],
)
def test_make_serves_the_model_it_is_asked_for(arguments: list[str], expected: str):
    """The bug: `make serve MODEL=gemma3-270m` fetched that model and then served the default one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MODEL", "ARGS")}
    command = ["make", "--dry-run", "--old-file", ".venv/.installed", "serve", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.splitlines()[-1].split()[1:]) == expected


BENCH_MISTAKES = [
    (["--config", "/nowhere.yaml"], "no such configuration file"),
    (["--kinds", "nope"], "no prompts of kind nope; it has code"),
    (["--verifiers", "traversal", "nope"], "is named nope; the names are"),
    (["--verifiers", "hu"], "none of the verifiers hu is lossless on delayed trees"),
    (["--prompts", "/nowhere.yaml"], "cannot be read"),
    (["--prompts", "pyproject.toml"], "cannot be read"),
]


@pytest.mark.parametrize(("arguments", "words"), BENCH_MISTAKES)
def test_mistakes_of_bench_are_one_line_and_told_before_a_model_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The bug: each of these was a traceback, some only after the model had been loaded."""
    monkeypatch.setattr("server.cli.bench_run.tool_engine", None)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert server.cli.main.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("latebranch bench: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("refusal", [BadConfiguration, UnsupportedModel, RequestRefused])
def test_what_the_engine_refuses_is_one_line(
    refusal: type[ValueError], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise refusal("not this")

    monkeypatch.setattr("server.cli.bench_run._bench", refuse)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert server.cli.main.main(["bench"]) == 2
    assert capsys.readouterr().err == "latebranch bench: not this\n"


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--concurrency", "-1"], ["--temperatures", "nan"], ["--expansions", "4.0.1"]]
)
def test_numbers_that_bench_cannot_use_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        server.cli.main.main(["bench", *arguments])
    assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]):
    assert server.cli.main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("latebranch ")
