"""`latebranch dynamo-worker` refuses what a worker behind Dynamo's frontend does not have. Dynamo is not needed."""

import pytest

from server.cli.main import main
from server.dynamo import command
from server.settings import Settings


def test_every_honoured_name_is_a_setting() -> None:
    assert Settings.model_fields.keys() >= command.HONOURED


@pytest.mark.parametrize(
    "flags", [["--port", "9000"], ["--api-keys", "k" * 20], ["--lora", "a=b"], ["--tool-call-parser", "none"]]
)
def test_flags_of_http_are_unknown(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dynamo-worker", *flags])
    assert f"unrecognized arguments: {flags[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("api_keys", "k" * 20), ("max_answer_tokens", "9"), ("served_model_name", "a,b")])
def test_other_settings_are_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key in the environment must not be dropped: the API would look closed and be open."""
    monkeypatch.setenv(f"LATEBRANCH_{name.upper()}", value)
    assert main(["dynamo-worker"]) == 2
    assert f"latebranch dynamo-worker: {name}: not of a worker" in capsys.readouterr().err


def test_kv_routing_needs_a_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamo-worker", "--kv-routing", "--prefix-cache", "off"]) == 2
    assert "kv_routing is given only with a prefix cache" in capsys.readouterr().err


def test_a_missing_dynamo_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "_is_installed", lambda: False)
    assert main(["dynamo-worker", "--model", "smollm2-135m"]) == 2
    assert "Dynamo is not installed" in capsys.readouterr().err
