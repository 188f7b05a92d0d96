"""The command line: every setting has a flag, mistakes are told in one line with status 2."""

from pathlib import Path

import pytest

import server.cli
from server.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that `serve` is called with; nothing is served, and the engine fails if the model is `broken`."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> str | None:
        calls.append(settings)
        return "no such model" if settings.model == "broken" else None

    monkeypatch.setattr("server.process.serve", serve)
    monkeypatch.setattr(server.cli, "configure_logging", lambda level, form: None)
    return calls


def test_flags_reach_the_settings(served: list[Settings], tmp_path: Path):
    (tmp_path / "s.yaml").write_text("port: 1\nmax_running: 3\n")
    assert server.cli.main(["serve", "--config", str(tmp_path / "s.yaml"), "--port", "9", "--cors-origins", "a,b"]) == 0
    (settings,) = served
    assert (settings.port, settings.max_running, settings.cors_origins) == (9, 3, ("a", "b"))


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        server.cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [(["--port", "x"], 2, "port"), (["--config", "/nowhere.yaml"], 2, "nowhere"), (["--model", "broken"], 1, "no such model")],
)
def test_mistakes_are_one_line(
    arguments: list[str], status: int, words: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
):
    assert server.cli.main(["serve", *arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("latebranch serve: ")
    assert words in error
    assert error.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]):
    assert server.cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("latebranch ")
