"""Prometheus scrapes a working server and answers each query of the dashboard, the alerts and the documents."""

import contextlib
import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conformance.folder import served_folder
from tests.dashboards import METRIC, PROMETHEUS, alerts, documented_queries, panel_queries
from tests.e2e.server import RunningServer, running_server

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (a Debian package) is not installed")

_LIMIT_S = 60.0
_WINDOW = "20s"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A tiny model that drafts for itself, every answer audited."""
    folder = tmp_path_factory.mktemp("tiny")
    model = str(served_folder(folder / "model"))
    flags = ("--model", model, "--model-name", "tiny", "--drafter", "model", "--draft-model", model, "--audit-share", "1")
    with running_server(folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus with the configuration that ships, but for the target and the pace."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    del config["scrape_configs"][0]["authorization"]  # the server of this test has no keys
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=subprocess.STDOUT)
    try:
        with _traffic(server):
            _until_scraped(f"http://{address}", folder / "log")
            yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _traffic(server: RunningServer) -> Iterator[None]:
    """Send short requests until the end, alternately greedy and sampled.

    This drafter costs more than it gains, so the policy uses it only for requests that name a tree.
    """
    is_over = threading.Event()

    def send_requests() -> None:
        number = 0
        while not is_over.wait(0.2):
            number += 1
            body = {"model": "tiny", "prompt": f"hello {number} hello", "max_tokens": 12, "temperature": number % 2}
            body |= {"speculative": {"trunk": 1, "branches": 2, "depth": 1}} if number % 3 else {}
            httpx.post(server.url + "/v1/completions", json=body, timeout=60).raise_for_status()

    thread = threading.Thread(target=send_requests)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _query(prometheus: str, path: str, **parameters: str) -> Any:
    answer = httpx.get(f"{prometheus}/api/v1/{path}", params=parameters, timeout=30).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def _values(prometheus: str, query: str) -> list[float]:
    return [float(sample["value"][1]) for sample in _query(prometheus, "query", query=query)["result"]]


def _until_scraped(prometheus: str, log: Path) -> None:
    """Return when rates have something to look at: audited draws are the last to come."""
    last = 'sum(rate(latebranch_audit_tokens_total{check="sampled"}[20s])) > 0 and sum(rate(latebranch_steps_total[20s])) > 0'
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{prometheus}/-/ready").status_code == 200 and _values(prometheus, last):
                return
        time.sleep(0.5)
    raise AssertionError(f"nothing came:\n{log.read_text()[-2000:]}")


def test_every_query_returns_numbers(prometheus: str):
    queries = [*panel_queries(), *(("docs/metrics.md", query) for query in documented_queries())]
    for where, query in queries:
        filled = query.replace("$model_name", "tiny").replace("$__rate_interval", _WINDOW)
        assert any(map(math.isfinite, _values(prometheus, filled))), f"{where}: {filled}"


def test_alerts_use_existing_series_and_stay_silent(prometheus: str):
    for rule in alerts():
        series = METRIC.findall(rule["expr"]) or ["up"]
        assert all(_values(prometheus, metric) for metric in series if "fallback" not in metric), rule["alert"]
    loaded = [rule for group in _query(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in loaded} == {rule["alert"] for rule in alerts()}
    assert all(rule["health"] == "ok" for rule in loaded), [rule["lastError"] for rule in loaded if "lastError" in rule]
    assert not [alert for alert in _query(prometheus, "alerts")["alerts"] if alert["state"] == "firing"]
