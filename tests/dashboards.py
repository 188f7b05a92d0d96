"""The Prometheus queries of deploy/ and docs/metrics.md, and the metrics that the server exports."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from engine.core.service import EngineHealth, EngineState
from engine.core.types import ModelInfo
from server.metrics import ServerMetrics

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "latebranch.json"
METRIC = re.compile(r"\b(?:vllm:|latebranch_|http_|process_)\w+(?:\{[^}]*\})?")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def exported_metrics() -> set[str]:
    """Return every name that a scrape can have."""
    metrics = ServerMetrics("m", 128, lambda: EngineHealth(EngineState.READY, 0.0, 0), num_adapters=1)
    metrics.steps.on_model(ModelInfo("m", 8, 128, 64, (), "float32", "cpu", "ngram", "traversal", "plain"), has_prefix_cache=True)
    return {family.name + end for family in metrics.registry.collect() for end in _SUFFIXES[family.type]}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return json.loads(DASHBOARD.read_text())  # type: ignore[no-any-return]


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels, rows aside."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    """Return (panel's title, query) with Grafana's variables in it."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    """Return the alerting rules."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def documented_queries() -> list[str]:
    """Return the queries of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    lines = [line for block in re.findall(r"```promql\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if not line.startswith("#")]
