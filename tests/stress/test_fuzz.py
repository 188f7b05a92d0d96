"""No body makes the server fail: a few hundred random bodies. `python -m tests.stress.fuzz` sends ten thousand."""

import json
from collections.abc import Iterator

import httpx
import pytest

from engine.core.config import SchedulerConfig
from tests.conformance.served import app_of, real_engine, served
from tests.fake_engine import FakeEngine, emits
from tests.stress.fuzz import fuzz, problem_of, text_of, unrest_of

NUM_BODIES = 250
SHORT = SchedulerConfig(num_slots=2048, max_model_len=128)  # a body without a limit gets its answer soon


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(app_of(real_engine(SHORT))) as address:
        yield address


def test_no_body_is_the_servers_fault(url: str) -> None:
    before = text_of(url)
    findings = fuzz(url, NUM_BODIES, number=0)
    assert findings.problems == []
    assert findings.num_sent == NUM_BODIES
    assert {200, 400, 404} <= set(findings.statuses)
    assert findings.statuses[200] > NUM_BODIES / 10, "most were refused before anything was tried"
    assert text_of(url) == before
    assert unrest_of(lambda path: httpx.get(url + path)) == []


def test_a_failing_engine_is_noticed() -> None:
    with served(app_of(FakeEngine(script=emits([5] * 9), fail_after=1))) as address:
        problems = fuzz(address, 120, number=0).problems
    assert any(problem.startswith("500") for problem in problems)
    assert any(problem.startswith("an error of the server in a stream") for problem in problems)


def _error(message: str, kind: str = "invalid_request_error") -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}, separators=(",", ":"))


STREAM = {"content-type": "text/event-stream"}
WRONG = {
    "503: {}": httpx.Response(503, text="{}"),
    "400 without an error: what?": httpx.Response(400, text="what?"),
    "an error of 1201 characters": httpx.Response(400, text=_error("x" * 1201)),
    "a stream without an end: data: {}\n\n": httpx.Response(200, text="data: {}\n\n", headers=STREAM),
    f"an error of the server in a stream: {_error('x', 'server_error')}": httpx.Response(
        200, text=f"data: {_error('x', 'server_error')}\n\ndata: [DONE]\n\n", headers=STREAM
    ),
}
RIGHT = [
    httpx.Response(200, text="{}", headers={"content-type": "application/json"}),
    httpx.Response(400, text=_error("x")),
    httpx.Response(200, text=f"data: {_error('x')}\n\ndata: [DONE]\n\n", headers=STREAM),
]


def test_faults_of_an_answer_are_detected() -> None:
    assert {problem_of(answer) for answer in WRONG.values()} == set(WRONG)
    assert {problem_of(answer) for answer in RIGHT} == {None}


def test_a_request_that_never_ends_is_noticed() -> None:
    app = app_of(FakeEngine(script=emits([5] * 9)))
    with served(app) as address:
        assert unrest_of(lambda path: httpx.get(address + path)) == []
        app.state.runtime.metrics.http.num_open += 1
        assert unrest_of(lambda path: httpx.get(address + path)) == ["1 requests are open"]
