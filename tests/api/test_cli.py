"""The command line: every setting has a flag, mistakes are reported in one line with status 2."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

import server.cli.main
from engine.build import BadConfiguration
from engine.core.validation import RequestRefused
from engine.weights import UnsupportedModel
from server.cli.settings_flags import GROUPS
from server.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that `serve` is called with; nothing is served, and the engine fails if the model is `a/broken`."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> str | None:
        calls.append(settings)
        return "no such model" if settings.model == "a/broken" else None

    monkeypatch.setattr("server.process.serve", serve)
    monkeypatch.setattr("server.http.logs.configure_logging", lambda level, form: None)
    monkeypatch.setattr("server.preflight.require_free", lambda host, port: None)
    monkeypatch.setattr("server.cli.main.start_template", lambda module: None)
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


def test_help_starts_with_model_and_has_examples(capsys: pytest.CaptureFixture[str]):
    """The bug: the first of a hundred flags was --config, and what a flag takes had to be looked up."""
    with pytest.raises(SystemExit):
        server.cli.main.main(["serve", "--help"])
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if line.strip().startswith("--"))
    assert first.split()[0] == "--model"
    assert "--dtype {float32,bfloat16,fp8,int8,compact}" in text
    assert "Default: smollm2-135m" in text
    examples = text.partition("examples:\n")[2].splitlines()
    assert len([line for line in examples if line.startswith("  latebranch serve ")]) == 2


@pytest.mark.parametrize(
    ("arguments", "num_started"),
    [
        (["serve"], 2),
        (["serve", "--spare-worker", "false"], 0),
        (["version"], 0),
        (["serve", "--config", "configs/default.yaml"], 1),
    ],
)
def test_the_template_starts_unless_it_is_disabled(
    arguments: list[str], num_started: int, served: list[Settings], monkeypatch: pytest.MonkeyPatch
):
    """A start begins with it where no setting can disable it, and repeats the call, which then does nothing."""
    started: list[str] = []
    monkeypatch.setattr("server.cli.main.start_template", started.append)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert server.cli.main.main(arguments) == 0
    assert started == ["server.worker_imports"] * num_started


def test_every_setting_is_in_one_group():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(Settings.model_fields)


MISSPELT = [
    (["sevre"], "did you mean serve?"),
    (["serve", "--modle", "x"], "did you mean --model?"),
    (["serve", "--max-runing=3"], "did you mean --max-running?"),
    (["serve", "--dtype", "compct"], "did you mean compact?"),
    (["doctor", "--modle", "x"], "did you mean --model?"),
    (["weights", "fetsh"], "did you mean fetch?"),
]


@pytest.mark.parametrize(("arguments", "words"), MISSPELT)
def test_misspelt_words_have_a_suggestion(
    arguments: list[str], words: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
):
    """The bug: an unknown flag printed the usage of a hundred flags, and the mistake below it."""
    try:
        status: object = server.cli.main.main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2
    assert words in error
    assert error.count("\n") == 1
    assert served == []


def test_misspelt_settings_have_a_suggestion(
    served: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "s.yaml").write_text("max_runing: 3\n")
    assert server.cli.main.main(["serve", "--config", str(tmp_path / "s.yaml")]) == 2
    assert "did you mean max_running?" in capsys.readouterr().err
    monkeypatch.setenv("LATEBRANCH_MODLE", "x")
    assert server.cli.main.main(["serve"]) == 2
    assert "did you mean LATEBRANCH_MODEL?" in capsys.readouterr().err


TRAIN = ["drafter", "train", "--target", "t", "--work", "w", "--out", "o"]
WRONG_VALUES = [
    (["bench", "--rounds", "0"], "--rounds: must be a whole number of at least 1, not 0"),
    (["bench", "--temperatures", "-1"], "--temperatures: must be in [0, inf), not -1"),
    (["audit", "--expansions", "9x"], "--expansions: an expansion is written like 4.1.0"),
    (["audit", "--min-p", "x"], "--min-p: must be a number, not 'x'"),
    ([*TRAIN, "--epochs", "1.5"], "--epochs: must be a whole number of at least 1, not 1.5"),
    ([*TRAIN, "--weights", "code"], "--weights: must be written like code=20,prose=2, not code"),
    ([*TRAIN, "--feature-layers", "1,x"], "--feature-layers: must be a whole number of at least 1, not x"),
    (["selector", "collect", "--seed", "-1"], "--seed: must be a whole number of at least 0, not -1"),
    (["selector", "train", "--epochs", "0"], "--epochs: must be a whole number of at least 1, not 0"),
    (["trace", "view", "f", "--last", "0"], "--last: must be a whole number of at least 1, not 0"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG_VALUES)
def test_wrong_values_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    """The bug: a wrong number was an `invalid _count value`, and a tree an `invalid parse_expansion value`."""
    with pytest.raises(SystemExit) as exited:
        server.cli.main.main(arguments)
    error = capsys.readouterr().err
    assert exited.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_unrelated_flag_has_no_suggestion(served: list[Settings], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        server.cli.main.main(["serve", "--qqqqqq"])
    assert "did you mean" not in capsys.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a refusal of `serve` that comes before anything is imported or loaded."""
    assert server.cli.main.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("latebranch serve: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.http.logs.configure_logging", lambda level, form: None)
    monkeypatch.setattr("server.cli.main.start_template", lambda module: None)
    monkeypatch.setattr("server.process.serve", None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
@pytest.mark.usefixtures("nothing_starts")
def test_port_in_use_is_refused_with_hint(host: str, capsys: pytest.CaptureFixture[str]):
    """The bug: the model was loaded first, then the log ended with a traceback's last line."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = refused(["--host", host, "--port", str(port)], capsys)
    assert f"port {port} of {host} is in use" in error
    assert f"--port {port + 1}" in error


@pytest.mark.usefixtures("nothing_starts")
def test_a_host_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "192.0.2.1 port 8765 cannot be listened on" in refused(["--host", "192.0.2.1", "--port", "8765"], capsys)
    assert "is no address of this machine" in refused(["--host", "no such host", "--port", "8765"], capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/model"], "'/no/model' is no model: not one of the presets"),
        (["--model", "smollm"], "did you mean smollm2-135m?"),
        (["--drafter", "model", "--draft-model", "/no/model"], "'/no/model' is no model"),
        (["--drafter", "head", "--head", "/no/head"], "head: there is no file /no/head"),
        (["--drafter", "/no/drafter"], "drafter: /no/drafter is no folder with config.json"),
        (["--drafter", "early-exit", "--lens", "/no/lens"], "lens: there is no file /no/lens"),
        (["--selector", "/no/net"], "selector: there is no file /no/net"),
        (["--trace-file", "/no/folder/trace"], "trace_file: /no/folder is no folder"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_missing_files_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    """The bug: a head that did not exist was noticed after the target was loaded, a model that did not after "loading"."""
    assert words in refused(arguments, capsys)


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        server.cli.main.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--port", "x"], 2, "port"),
        (["--config", "/nowhere.yaml"], 2, "nowhere"),
        (["a/b", "--model", "c/d"], 2, "the model is named twice"),
        (["--max-step-tokens", "1"], 2, "serve: max_step_tokens (1) must be at least max_running"),
        (["--model", "a/broken"], 1, "no such model"),
    ],
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
def test_make_serves_the_requested_model(arguments: list[str], expected: str):
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
    (["--oracle", "--verifiers", "traversal"], "--oracle runs the configured drafter"),
    (["--oracle", "--expansions", "4.1.0"], "--oracle runs the configured drafter"),
]


@pytest.mark.parametrize(("arguments", "words"), BENCH_MISTAKES)
def test_bench_mistakes_are_reported_before_loading(
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
def test_engine_refusal_is_one_line(
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


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The bug: Ctrl-C in `audit`, `bench` or `doctor` printed a traceback."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.cli.main, "_version", interrupted)
    assert server.cli.main.main(["version"]) == 130
    assert capsys.readouterr() == ("", "latebranch: interrupted\n")


def test_version(capsys: pytest.CaptureFixture[str]):
    assert server.cli.main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("latebranch ")
