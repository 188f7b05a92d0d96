"""`latebranch weights`: its words on stdout, one line on stderr for what fails, and the exit status."""

import argparse

import pytest

from engine.weights import WeightsCache, load_presets
from engine.weights.references import RECIPE
from server.cli.weights import add_weights_command


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "cache"))
    return WeightsCache(tmp_path / "cache")


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="latebranch")
    add_weights_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["weights", *words])
    return int(arguments.handler(arguments))


def _put(cache, name):
    preset = load_presets()[name]
    folder, gguf = cache.model(f"{preset.key}-r{RECIPE}"), cache.gguf(preset.key)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 2_000_000)
    gguf.parent.mkdir()
    gguf.write_bytes(b"x" * 1_000_000)
    return folder, gguf


def test_list_shows_disk_usage(cache, capsys):
    _put(cache, "gemma3-270m")
    assert _run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", *load_presets()]
    assert lines[0].split() == ["NAME", "FAMILY", "SIZE", "LICENCE", "WEIGHTS", "DOWNLOAD", "ON", "DISK"]
    assert lines[1].endswith("bfloat16  98 MB     -")
    assert lines[4].endswith("bfloat16  253 MB    3 MB")


def test_where_prints_the_folder_or_the_file(cache, capsys):
    folder, gguf = _put(cache, "smollm2-135m")
    assert _run("where", "smollm2-135m") == 0
    assert _run("where", "--gguf", "smollm2-135m") == 0
    assert capsys.readouterr().out.splitlines() == [str(folder), str(gguf)]


def test_fetch_of_present_model_prints_path(cache, capsys):
    folder, _ = _put(cache, "smollm2-135m")
    assert _run("fetch", "smollm2-135m") == 0
    assert capsys.readouterr().out == f"smollm2-135m: {folder}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("where", "smollm2-135m"), "run `latebranch weights fetch smollm2-135m`"),
        (("where", "nothing"), "no model is named 'nothing'"),
        (("fetch",), "--all"),
        (("fetch", "nothing"), "is no model"),
    ],
)
def test_failure_is_one_line_and_status_1(cache, capsys, words, reason):
    assert _run(*words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_deleted_gguf_is_missed_only_by_name(cache, capsys):
    folder, gguf = _put(cache, "smollm2-135m")
    gguf.unlink()
    assert _run("where", "smollm2-135m") == 0
    assert _run("where", "--gguf", "smollm2-135m") == 1
    assert capsys.readouterr().out == f"{folder}\n"
