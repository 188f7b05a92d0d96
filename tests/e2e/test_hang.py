"""A hung step over HTTP: the probes report it, the worker is replaced, and the stream continues."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.folder import served_folder
from tests.e2e.server import RunningServer, running_server, sse
from tests.stress.growth import worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_NUM_TOKENS = 400
# SIGUSR1 blocks the main thread of each process that starts with this. Its other threads continue.
_HANGS_ON_SIGUSR1 = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))\n"
_PATIENCE_S = 600.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    (tmp_path / "sitecustomize.py").write_text(_HANGS_ON_SIGUSR1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    model = str(served_folder(tmp_path / "model"))
    flags = ("--model", model, "--model-name", "tiny", "--drafter", "ngram", "--policy", "fixed", "--max-model-len", "512")
    with running_server(tmp_path / "log", *flags, "--max-heartbeat-age-s", "2", "--hang-limit-s", "10") as running:
        yield running


def _awaited(server: RunningServer, status: int, least_restarts: int) -> dict[str, Any]:
    """Return the body of /health once it has this status after so many restarts. /live returns 200 throughout."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        health, live = server.get("/health"), server.get("/live")
        report: dict[str, Any] = health.json()
        assert live.status_code == 200
        if health.status_code == status and report["restarts"] >= least_restarts:
            return report
        time.sleep(0.05)
    raise AssertionError(f"/health never returned {status}")


def _streamed(server: RunningServer, body: dict[str, Any], on_text: Callable[[], None] = lambda: None) -> str:
    """Return the text of a stream; `on_text` is called with each piece of it."""
    texts: list[str] = []
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=_PATIENCE_S) as answer:
        assert answer.status_code == 200
        for event in sse(answer.iter_lines()):
            assert event is None or "error" not in event, json.dumps(event)
            texts += [choice["text"] for choice in event["choices"]] if event else []
            on_text()
    assert event is None, "[DONE] is the last word"
    return "".join(texts)


def test_hung_step_is_detected_and_recovered(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "hello world", "max_tokens": _NUM_TOKENS, "ignore_eos": True, "seed": 5, "stream": True}
    undisturbed = _streamed(server, body)
    first_worker, has_begun = worker_of(server), list[int]()

    def hang() -> None:
        if not has_begun:
            has_begun.append(first_worker)
            os.kill(first_worker, signal.SIGUSR1)

    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(_streamed, server, body, hang)
        silent = _awaited(server, 503, 0)
        assert (silent["status"], silent["state"], silent["restarts"]) == ("silent", "ready", 0)
        assert "the engine has sent no heartbeat for" in silent["reason"]
        assert not disturbed.done(), "it waits"
        assert _awaited(server, 200, 1)["status"] == "ready"
        assert disturbed.result() == undisturbed
    assert server.metric("latebranch_engine_restarts_total") >= 1
    assert worker_of(server) != first_worker
