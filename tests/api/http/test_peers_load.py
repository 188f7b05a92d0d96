"""The HTTP client of the comparison with other engines, against our own server: its requests, counts and times."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.jobs import Answers, Job, JobFailed, require_length
from benchmarks.peers.load import run_job
from benchmarks.peers.processes import start_client
from engine.core.types import Request
from tests.api.harness import MODEL, over_loopback
from tests.fake_engine import FakeEngine, counting

PROMPTS = ((5, 6, 7), (8, 9), (10, 11, 12), (13,))


def job(url: str, **how: Any) -> Job:
    usual: dict[str, Any] = {"prompts": PROMPTS, "num_tokens": 9, "temperature": 1.0, "seeds": (1, 2, 3, 4)}
    return Job(**usual | {"url": url, "fields": {"model": MODEL, "return_token_ids": True}} | how)


def output_of(request: Request) -> tuple[int, ...]:
    return tuple(counting(request))


async def test_answers_match_their_prompts_and_seeds():
    engine = FakeEngine(chunks=(1, 3, 2))
    async with over_loopback(engine) as url:
        found = await asyncio.to_thread(run_job, job(url, concurrency=3))
    by_prompt = {request.prompt_ids: request for request in engine.requests}
    assert [answer.token_ids for answer in found.answers] == [output_of(by_prompt[prompt]) for prompt in PROMPTS]
    assert [by_prompt[prompt].sampling.seed for prompt in PROMPTS] == [1, 2, 3, 4]
    assert all(request.sampling.ignore_eos and request.sampling.top_p == 1 for request in engine.requests)
    assert all(answer.num_tokens == 9 and 0 < answer.first_s <= answer.last_s <= found.seconds for answer in found.answers)
    assert found.tokens_per_s == pytest.approx(36 / found.seconds)


async def test_concurrency_stays_within_the_requested_limit():
    most = 0

    def script(request: Request) -> list[int]:
        nonlocal most
        most = max(most, len(engine.living))
        return counting(request)

    engine = FakeEngine(script=script)
    async with over_loopback(engine) as url:
        await asyncio.to_thread(run_job, job(url, prompts=PROMPTS * 4, seeds=(None,) * 16, temperature=0.0, concurrency=2))
    assert most == 2
    assert all(request.sampling.temperature == 0 for request in engine.requests)


async def test_refused_or_broken_answer_fails_job():
    async with over_loopback(FakeEngine(fail_after=2)) as url:
        with pytest.raises(JobFailed):
            await asyncio.to_thread(run_job, job(url))
        with pytest.raises(JobFailed, match="status 400"):
            await asyncio.to_thread(run_job, job(url, num_tokens=100_000))


async def test_answers_of_another_length_are_not_measured():
    """An answer that its end token cut short does not have the requested length, whatever the options of the peer."""
    async with over_loopback(FakeEngine(script=lambda _: [5, 6, 7])) as url:
        requested = job(url)
        found = await asyncio.to_thread(run_job, requested)
    with pytest.raises(JobFailed, match=r"asked for 9 tokens each, got \[3\]"):
        require_length(requested, found.answers)


async def test_client_process_survives_a_failed_job(tmp_path: Path):
    client = await asyncio.to_thread(start_client, tmp_path / "log")
    try:
        async with over_loopback(FakeEngine()) as url:
            with pytest.raises(JobFailed, match="ConnectionRefusedError"):
                await asyncio.to_thread(client.answer, job("http://127.0.0.1:9"))
            found = await asyncio.to_thread(client.answer, job(url))
            assert client.group.cpu_s() > 0
            assert client.group.peak_bytes() > 2**20
    finally:
        client.stop()
    assert [answer.num_tokens for answer in found.answers] == [9] * 4
    assert client.group.peak_bytes() == 0  # it is gone


def test_jobs_and_answers_survive_round_trip():
    requested = job("http://127.0.0.1:1")
    assert Job.from_json(requested.to_json()) == requested
    text = '{"seconds": 2.0, "answers": [{"first_s": 0.5, "last_s": 1.7, "num_tokens": 4, "token_ids": [1, 2, 3, 4]}]}'
    answers = Answers.from_json(text)
    assert Answers.from_json(answers.to_json()) == answers
    assert answers.answers[0].token_s == pytest.approx(0.4)
    assert replace(answers.answers[0], num_tokens=1).token_s == pytest.approx(1.2)
    assert answers.tokens_per_s == 2.0
