"""`latebranch doctor` reports for given settings what a start would find."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.policy import PlainDecoding
from engine.core.tree import parse_expansion
from engine.core.types import Request, SamplingParams
from engine.model import check
from engine.model.causal_lm import load_model
from engine.native import library
from engine.native.linear import QUANTISED
from engine.testing import tiny_engine, tiny_model
from engine.weights import WeightsCache, load_presets
from engine.weights.layer_sizes import key_bytes
from engine.weights.weight_headers import num_parameters
from selector.menu import menu_of
from selector.network.net import NetShape, Objective, SelectorNet
from server.cli.main import main
from tests.conformance.folder import served_folder
from tests.model.stored_models import stores_tiny_models
from tests.needs import needs_library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(served_folder(tmp_path_factory.mktemp("tiny")))


def _report(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["doctor", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def _levels(report: dict[str, Any], part: str) -> list[str]:
    return [finding["level"] for finding in report["findings"] if finding["part"] == part]


def test_a_model_that_can_be_served(folder, capsys, monkeypatch):
    monkeypatch.setenv("LATEBRANCH_MAX_RUNNING", "3")
    monkeypatch.setenv("LATEBRANCH_PORT", "0")
    status, report = _report(capsys, "--model", folder, "--api-keys", "secret-of-sixteen", "--num-slots", "4096")
    assert (status, report["can_serve"]) == (0, True)
    assert {finding["part"] for finding in report["findings"]} == {"device", "precision", "model", "cache", "drafter", "selector"}
    assert report["settings"]["max_running"] == {"value": 3, "from": "environment"}
    assert report["settings"]["model"] == {"value": folder, "from": "command line"}
    assert report["settings"]["host"] == {"value": "127.0.0.1", "from": "default"}
    assert "secret" not in json.dumps(report["settings"]["api_keys"])
    assert main(["doctor", "--model", folder]) == 0
    assert capsys.readouterr().out.endswith("it can serve\n")


def test_port_in_use_prevents_no_examination(folder, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        status, report = _report(capsys, "--model", folder, "--port", str(port := other.getsockname()[1]))
    assert (status, _levels(report, "address")) == (0, ["warning"])
    assert f"port {port} of 127.0.0.1 is in use" in json.dumps(report["findings"])


def test_a_missing_model_is_reported_once(capsys):
    status, report = _report(capsys, "/no/model")
    assert status == 1
    assert [one["part"] for one in report["findings"] if "/no/model" in one["text"]] == ["model"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--drafter", "head", "--head", "{folder}/config.json"), "drafter"),
        (("--selector", "{folder}/config.json"), "selector"),
        (("--device", "cuda"), "device"),
        (("--device", "cpu", "--cuda-graphs", "on"), "passes"),
        (("--device", "cpu", "--tensor-parallel", "2", "--deterministic"), "model"),
        (("--model", "{folder}/nothing"), "model"),
    ],
)
def test_settings_that_prevent_serving_are_refused(folder, capsys, flags, part, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, report = _report(capsys, "--model", folder, *(flag.format(folder=folder) for flag in flags))
    assert (status, report["can_serve"]) == (1, False)
    assert "refused" in _levels(report, part)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_integers_need_their_instructions(folder, capsys, monkeypatch, dtype):
    for has_them in (True, False):
        monkeypatch.setattr(library, "supported", lambda has_them=has_them: ["AVX2"] if has_them else [])
        monkeypatch.setattr(library, "instruction_set", lambda has_them=has_them: "AVX2" if has_them else None)
        status, report = _report(capsys, "--model", folder, "--dtype", dtype, "--device", "cpu")
        assert (status == 0) is has_them
        (finding,) = (finding for finding in report["findings"] if finding["part"] == "precision")
        assert finding["level"] == ("ok" if has_them else "refused")
        assert (f"{dtype} needs a processor with AVX2" in finding["text"]) is not has_them


@pytest.mark.parametrize("dtype", QUANTISED)
def test_integers_need_our_library(folder, capsys, monkeypatch, dtype):
    monkeypatch.setattr(library, "supported", lambda: ["AVX2"])
    monkeypatch.setattr(library, "instruction_set", lambda: None)
    status, report = _report(capsys, "--model", folder, "--dtype", dtype, "--device", "cpu")
    assert status == 1
    assert "our library, which was not compiled" in json.dumps(report["findings"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *QUANTISED])
def test_precision_level_depends_on_the_library(folder, capsys, monkeypatch, dtype):
    monkeypatch.setattr(library, "is_available", lambda: True)
    _, report = _report(capsys, "--model", folder, "--dtype", dtype, "--device", "cpu")
    assert _levels(report, "precision") == ["ok"]
    assert "rows have the same bits in any batch" in json.dumps(report["findings"])
    monkeypatch.setattr(library, "is_available", lambda: False)
    _, report = _report(capsys, "--model", folder, "--dtype", dtype, "--device", "cpu")
    assert _levels(report, "precision") == [{"float32": "ok", "bfloat16": "warning"}.get(dtype, "refused")]


def test_weights_use_the_reported_bytes(folder, capsys):
    """As many bytes as the loaded model's parameters, with tied ones once."""
    model = load_model(Path(folder), "float32", torch.device("cpu"), "plain")
    assert num_parameters(Path(folder)) == model.module.num_parameters()
    status, report = _report(capsys, "--model", folder, "--num-slots", str(10**12))
    assert (status, _levels(report, "cache")[0]) == (1, "refused")


def _selector_file(path: Path, width: int, *, expansion: str = "4.1.0", objective: Objective = "tokens") -> str:
    menu = menu_of(parse_expansion(expansion), "traversal")
    entries = tuple(str(entry) for entry in menu.entries)
    SelectorNet(NetShape(width, width, ("greedy",), entries, objective)).save(path, {"model": "tiny"})
    return str(path)


def test_selector_is_compared_with_the_models(folder, capsys, tmp_path):
    """Each difference by name; what fits is refused by nothing."""
    width = json.loads((Path(folder) / "config.json").read_text())["hidden_size"]
    fitting = _selector_file(tmp_path / "fitting.safetensors", width)
    status, report = _report(capsys, "--model", folder, "--drafter", "ngram", "--selector", fitting)
    assert (status, _levels(report, "selector")) == (0, ["ok"])
    other = _selector_file(tmp_path / "other.safetensors", width + 1, objective="policy")
    status, report = _report(capsys, "--model", folder, "--drafter", "ngram", "--selector", other)
    assert (status, _levels(report, "selector")) == (1, ["refused", "refused"])
    texts = [finding["text"] for finding in report["findings"] if finding["part"] == "selector"]
    assert "trained to choose" in texts[0]
    assert f"widths {width + 1} and {width + 1}, not ({width}, {width})" in texts[1]
    trees = ("--expansion", "2.2.2")  # i.i.d. branches, of another family
    status, report = _report(capsys, "--model", folder, "--drafter", "ngram", "--selector", fitting, *trees)
    assert status == 1
    assert "was not trained for" in str(report["findings"])


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that are checked and stored, in an empty cache."""
    return stores_tiny_models(tmp_path, monkeypatch)


@needs_library
def test_check_repeats_a_stored_verdict(folder, capsys, checked):
    """The verdict of a start is kept, so a second start does not check; `--check` must."""
    for num_checks in (1, 2):
        status, report = _report(capsys, "--model", folder, "--dtype", "compact", "--check")
        assert (status, report["can_serve"], _levels(report, "check")) == (0, True, ["ok"])
        assert checked == ["compact"] * num_checks


@needs_library
def test_check_examines_target_and_draft_model(folder, capsys, checked):
    status, report = _report(capsys, "--model", folder, "--drafter", "model", "--draft-model", folder, "--check")
    assert (status, _levels(report, "check")) == (0, ["ok", "ok"])


def test_without_check_no_model_is_loaded(folder, capsys, checked):
    status, report = _report(capsys, "--model", folder)
    assert (status, _levels(report, "check"), checked) == (0, [], [])


@pytest.mark.parametrize("is_stored", [False, True])
def test_check_refuses_a_model_that_differs(folder, capsys, checked, monkeypatch, is_stored):
    """Also one that passed at an earlier start, because the library or the processor may have broken since."""
    if is_stored:
        assert _report(capsys, "--model", folder, "--check")[0] == 0
    right = check._driven_logits
    monkeypatch.setattr(check, "_driven_logits", lambda model, ids: 1.5 * right(model, ids))
    status, report = _report(capsys, "--model", folder, "--check")
    assert (status, report["can_serve"], _levels(report, "check")) == (2, False, ["refused"])
    assert "a tree-masked pass differs" in next(one["text"] for one in report["findings"] if one["part"] == "check")


def test_check_of_an_unwritable_cache(folder, capsys, checked, monkeypatch):
    """The bug: a file that cannot be deleted was a traceback."""

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "packed")

    monkeypatch.setattr("server.cli.doctor_checks.forget_stored", fail)
    status, report = _report(capsys, "--model", folder, "--check")
    assert (status, _levels(report, "check")) == (1, ["refused"])


def test_missing_preset_is_not_downloaded(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path))
    status, report = _report(capsys, "--model", next(iter(load_presets())))
    assert status == 0
    assert _levels(report, "weights") == ["warning"]
    assert not list(WeightsCache(tmp_path).root.iterdir())


def test_wrong_settings_give_the_serve_message(capsys):
    assert main(["doctor", "--max-running", "0"]) == 2
    assert "max_running" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_uses_the_reported_bytes(family):
    """Its pools, made by a real pass, have the bytes of the configuration's sizes."""
    model = tiny_model(family)
    engine = tiny_engine(model, None, PlainDecoding())
    engine.add(Request("one", (1, 2, 3), SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    cache = engine.target.cache
    num_slots = cache.num_slots + 1  # and the dummy slot
    assert cache.num_bytes == num_slots * key_bytes(model.module.config, 4)
