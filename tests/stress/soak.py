"""Mixed requests for a long time, and what grows meanwhile: `python -m tests.stress.soak --requests 2000`.

A real server over a tiny model, with the canary among its slots. Lengths, samplings, stops, grammars, users, streams that are
left and requests that are refused are a function of the request's number, and of each kind there are more than any cache holds.
After every fortieth of them the server is left to rest for a moment, and what it holds is noted.
"""

import argparse
import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from tests.conformance.folder import served_folder
from tests.e2e.server import RunningServer, running_server
from tests.stress.growth import FEW_KERNELS, MOST_COUNT, MOST_KIB, MOST_SERIES, Sample, growths, leaks, sample

_MOST_SAMPLES, _LEAST_BETWEEN = 40, 10  # requests
_AT_ONCE = 8
_LIMIT_S = 600.0  # of a request on a busy machine
# What is kept on purpose is full before the warm-up is over.
_FLAGS = ("--drafter", "ngram", "--policy", "fixed", "--kv-canary", "true", "--num-slots", "4096", "--max-model-len", "512")
_KEPT = (
    "--recent-tokens",
    "64",
    "--total-recent-tokens",
    "1024",
    "--spare-worker",
    "false",
)  # a spare's imports look like a leak


@dataclass(frozen=True, slots=True)
class Soak:
    """The results: how the requests ended, and the server's resources in between."""

    statuses: Counter[str]
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        rows = [
            f"{name:22} {self.samples[-1].get(name, 0.0):10.0f} {grown:+10.1f}" for name, grown in growths(self.samples).items()
        ]
        return "\n".join([ends, f"{'':22} {'at the end':>10} {'growth':>10}", *rows])


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request; each number's is another."""
    draw = random.Random(number)
    text = " ".join(draw.choice(("sea", "stone", "late", "branch", "7", "ö")) for _ in range(draw.randint(1, 40)))
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": draw.randint(1, 48),
        "temperature": draw.choice((0.0, 0.7, 1.3)),
        "user": f"user {number}",
        "stream": number % 2 == 0,
    }
    if number % 3 == 0:
        body["seed"] = number
    match number % 10:
        case 0:
            body |= {"stop": [f"s{number}"], "n": 2, "temperature": 1.0}
        case 1:
            body |= {"frequency_penalty": 0.5, "logit_bias": {str(draw.randint(3, 60)): -5.0}}
        case 2:
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}}
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        case 3:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}], "logprobs": True}
        case 4:
            body |= {"model": f"model {number}"}
        case 5:
            body |= {"temperature": -1.0, f"field {number}": number}
        case 6:
            return f"/v1/nothing/{number}", body
    return "/v1/completions", body | {"prompt": text}


def _is_left(number: int) -> bool:
    """Return whether the client leaves the stream that it requested."""
    return number % 2 == 0 and number % 10 == 8


async def _request(client: httpx.AsyncClient, number: int) -> str:
    """Return how a request ended."""
    path, body = body_of(number)
    async with client.stream("POST", path, json=body) as response:
        async for _ in response.aiter_lines():
            if _is_left(number):
                return "left"
    return str(response.status_code)


async def _worked(server: RunningServer, num_requests: int) -> Soak:
    statuses: Counter[str] = Counter()
    samples = []

    async def work(client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            statuses[await _request(client, number)] += 1

    size = max(_LEAST_BETWEEN, num_requests // _MOST_SAMPLES)
    for first in range(0, num_requests, size):
        numbers = iter(range(first, min(first + size, num_requests)))
        async with httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S) as client:
            await asyncio.gather(*(work(client, numbers) for _ in range(_AT_ONCE)))
        await _rested(server)
        samples.append(sample(server))
    return Soak(statuses, tuple(samples))


async def _rested(server: RunningServer) -> None:
    """Return when nothing runs any more."""
    while server.metric("vllm:num_requests_running") or server.metric("vllm:num_requests_waiting"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def soaked(folder: Path, num_requests: int) -> Soak:
    """Run so many requests through a server of its own; `folder` is for its files."""
    model = str(served_folder(folder / "model"))
    flags = ("--model", model, "--model-name", "tiny", *_FLAGS, *_KEPT)
    with patch.dict(os.environ, FEW_KERNELS), running_server(folder / "log", *flags) as server:
        soak = asyncio.run(_worked(server, num_requests))
        assert server.metric("latebranch_engine_restarts_total") == 0, (folder / "log").read_text()[-4000:]
    return soak


def main() -> None:
    """Run it and print what grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    with tempfile.TemporaryDirectory() as folder:
        soak = soaked(Path(folder), parser.parse_args().requests)
    found = leaks(soak.samples)
    limits = f"growth may be {MOST_KIB:.0f} KiB, {MOST_COUNT:g} of what is counted, {MOST_SERIES:g} series"
    print("\n".join([str(soak), limits, *found, f"{len(found)} leaks"]))  # noqa: T201
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
