"""What is written to the log of a request's own words."""

import logging
from typing import Any

import pytest

from server.http.request_log import MAX_VALUE_CHARS
from tests.api.harness import chat, completion, in_process
from tests.fake_engine import FakeEngine

EVIL = "secret\nINFO forged \x1b[31m\u2028"


async def _lines(caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    caplog.set_level(logging.INFO, "server.requests")
    async with in_process(FakeEngine(max_model_len=2000), **settings) as client:
        await client.post("/v1/completions", json=completion(prompt=EVIL, temperature=0.5, stop=[EVIL], user=EVIL, seed=7))
        await client.post("/v1/chat/completions", json=chat(messages=[{"role": "user", "content": "x" * 1000}], n=2))
    return [record.getMessage() for record in caplog.records if record.name == "server.requests"]


async def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture):
    assert await _lines(caplog) == []


async def test_parameters_are_logged_without_words(caplog: pytest.LogCaptureFixture):
    first, second = await _lines(caplog, log_requests="parameters")
    assert first.startswith('/v1/completions model="fake" ')
    assert "temperature=0.5" in first
    assert "seed=7" in first
    assert "n=2" in second
    assert not any(word in first + second for word in ("secret", "forged", "xxx"))


async def test_logged_texts_are_escaped_and_truncated(caplog: pytest.LogCaptureFixture):
    first, second = await _lines(caplog, log_requests="texts")
    assert first.count("secret\\nINFO forged \\u001b[31m\\u2028") == 3
    assert not any(control in first for control in "\n\x1b\u2028")
    assert MAX_VALUE_CHARS - 50 < second.count("x") <= MAX_VALUE_CHARS
