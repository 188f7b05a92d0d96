"""No body is the server's fault: a few hundred of those that `python -m tests.e2e.fuzz` sends ten thousand of."""

from collections.abc import Iterator

import httpx
import pytest

import server.errors
from tests.conformance.served import app_of, real_engine, served
from tests.e2e.fuzz import fuzz, text_of, unrest_of
from tests.fake_engine import FakeEngine, says

NUM_BODIES = 250


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(app_of(real_engine())) as address:
        yield address


def test_no_body_is_the_servers_fault(url: str) -> None:
    before = text_of(url)
    findings = fuzz(url, NUM_BODIES, number=0)
    assert findings.problems == []
    assert findings.num_sent == NUM_BODIES
    assert {200, 400, 404} <= set(findings.statuses)
    assert findings.statuses[200] > NUM_BODIES / 20, "most were refused before anything was tried"
    assert text_of(url) == before
    assert unrest_of(lambda path: httpx.get(url + path)) == []


def test_a_failing_engine_is_noticed() -> None:
    with served(app_of(FakeEngine(script=says([5] * 9), fail_after=1))) as address:
        problems = fuzz(address, 60, number=0).problems
    assert any(problem.startswith("500") for problem in problems)
    assert any(problem.startswith("an error of the server in a stream") for problem in problems)


def test_an_error_as_long_as_what_it_is_about_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.errors, "clipped", lambda text, limit: text.encode("utf-8", "replace").decode())
    with served(app_of(FakeEngine(script=says([5] * 9)))) as address:
        problems = fuzz(address, 150, number=0).problems
    assert any(problem.startswith("an error of ") for problem in problems)


def test_a_request_that_never_ends_is_noticed() -> None:
    app = app_of(FakeEngine(script=says([5] * 9)))
    with served(app) as address:
        assert unrest_of(lambda path: httpx.get(address + path)) == []
        app.state.runtime.metrics.http.num_open += 1
        assert unrest_of(lambda path: httpx.get(address + path)) == ["1 requests are open"]
