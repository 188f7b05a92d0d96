"""The benchmark of verifiers runs and reports each of them. Times are not judged."""

import json
import runpy
from pathlib import Path

import pytest

from engine.core.verifier_table import VERIFIER_NAMES

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "verify_cost.py"


def test_benchmark_prints_table_and_json_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--vocab-size", "50", "--expansion", "1.3.2", "--repeats", "2"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["num_nodes"] == 8
    assert [cost["verifier"] for cost in report["costs"]] == list(VERIFIER_NAMES)
    assert [line.split()[0] for line in table[1:]] == list(VERIFIER_NAMES)
    assert all(cost["quartile1_ms"] <= cost["median_ms"] <= cost["quartile3_ms"] for cost in report["costs"])
