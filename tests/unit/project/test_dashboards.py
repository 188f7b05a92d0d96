"""The dashboard and the alerts by themselves: they name what the server exports, and their own tools accept them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.dashboards import (
    METRIC,
    PROMETHEUS,
    ROOT,
    alerts,
    dashboard,
    documented_queries,
    exported_metrics,
    panel_queries,
    panels,
)


def _named(query: str) -> set[str]:
    return {metric.partition("{")[0] for metric in METRIC.findall(query)}


def test_queries_name_metrics_that_the_server_exports():
    exported = exported_metrics()
    queries = [*panel_queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]
    queries += [("docs/metrics.md", query) for query in documented_queries()]
    for where, query in queries:
        assert _named(query) <= exported, where
    missing = [where for where, query in queries if not _named(query)]
    assert missing == ["ServerDown"], "its metric is Prometheus's own"


def test_documents_name_every_metric():
    text = (ROOT / "docs" / "metrics.md").read_text()
    families = {
        name.removesuffix(end) for name in exported_metrics() for end in ("_bucket", "_sum", "_count") if name.endswith(end)
    }
    plain = {name for name in exported_metrics() if not name.endswith(("_bucket", "_sum", "_count"))}
    for name in plain | families:
        assert f"`{name}`" in text or name.startswith(("process_", "python_")), name


def test_every_panel_queries_selected_model_and_source():
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"DS_PROMETHEUS", "model_name"}
    for panel in panels():
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            selectors = [metric for metric in METRIC.findall(target["expr"]) if not metric.startswith("http_")]
            assert all('model_name="$model_name"' in selector for selector in selectors), panel["title"]


def _lost(ours: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield where what Grafana's schema has read differs from what we wrote; what it adds are defaults."""
    match ours, read:
        case dict(), dict():
            for key, value in ours.items():
                yield from _lost(value, read.get(key), f"{path}.{key}")
        case list(), list() if len(ours) == len(read):
            for place, (one, other) in enumerate(zip(ours, read, strict=True)):
                yield from _lost(one, other, f"{path}[{place}]")
        case _ if ours != read:
            yield path


def _lost_by_grafana(written: dict[str, Any]) -> list[str]:
    register_default_plugins()
    return sorted(_lost(written, json.loads(JSONEncoder().encode(Dashboard.from_json(written)))))


def test_grafanas_own_schema_knows_every_field():
    """Panels, their options and queries included; a misspelt option would be left out in silence by Grafana."""
    shown_in_settings = ".templating.list[1].definition"  # Grafana writes it, its schema has not got it
    assert _lost_by_grafana(dashboard()) == [shown_in_settings]
    mutant = dashboard()
    mutant["panels"][1]["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
    assert [path for path in _lost_by_grafana(mutant) if path.endswith("lineWidht")]


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(places)


def test_grafana_receives_data_source_and_folder():
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    service, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose[service]["ports"] == [f"127.0.0.1:{port}:{port}"]
    scrape = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    provider = yaml.safe_load((provisioning / "dashboards" / "latebranch.yml").read_text())["providers"][0]
    mounts = dict(mount.split(":")[:2] for mount in compose["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_alerts_have_severity_and_summary():
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "summary" in rule["annotations"]
    tested = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    raised = {sample["labels"] for test in tested for check in test["promql_expr_test"] for sample in check["exp_samples"]}
    for rule in alerts():
        assert any(f'alertname="{rule["alert"]}"' in labels for labels in raised), "no test raises it"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
@pytest.mark.parametrize(
    "command", ["check config --syntax-only prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_promtool_accepts(command: str):
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_accepts_its_file():
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            names = re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text())
            environment = os.environ | dict.fromkeys(names, "some-key")
            done = subprocess.run([*command, "config", "--quiet"], cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return
    pytest.skip("neither docker compose nor docker-compose is installed")
