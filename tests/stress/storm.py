"""Clients that connect, begin something and vanish, beside some that behave: `python -m tests.stress.storm --clients 500`.

They leave at random moments: before a word, in the middle of a head or a body, before the first token, somewhere in a stream
that they read or do not read, politely or with a reset. The queue is full all the while. Those that behave have a key of their
own and must get every completion whole. Their waits for first tokens are reported, with and without the storm. Afterwards nothing
may be left.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import struct
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import httpx

from tests.e2e.server import RunningServer, running_server
from tests.stress.fuzz import unrest_of
from tests.stress.growth import FEW_KERNELS, Sample, more, sample

STORMY, CALM = "sk-storm", "sk-calm"  # keys
KINDS = ("silent", "half a head", "half a body", "whole", "deaf", "stream", "stream", "stream")
_NUM_CALM = 4  # clients that behave, each with one request after the other
_CALM_TOKENS = 8
_MOST_KIB = 64 * 1024.0  # that a burst may leave with the allocators
_REST_S = 60.0  # in which a busy machine must have noticed that they are gone


@dataclass
class Weather:
    """The measurements of well-behaved clients: seconds to each first token, and faults."""

    first_token_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = sorted(self.first_token_s)
        if not waits:
            return "no first tokens"
        p50, p99 = (waits[min(len(waits) - 1, int(share * len(waits)))] for share in (0.5, 0.99))
        return f"{len(waits)} first tokens, p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, max {waits[-1] * 1e3:.0f} ms"


@dataclass
class Storm:
    """How it was: the two weathers, the clients by what they did, the answers that they saw before they left."""

    calm: Weather
    storm: Weather
    kinds: Counter[str]
    answers: Counter[str]


@dataclass(frozen=True)
class Plan:
    """A planned storm: `seed` chooses what its clients do, within `spread_s` seconds to begin and `patience_s` more to leave.

    Some request grammars if it `has_grammars`. Before it each well-behaved client sends `least_calm` requests.
    """

    num_clients: int
    seed: int = 0
    least_calm: int = 25
    spread_s: float = 30.0
    patience_s: float = 10.0
    has_grammars: bool = True


async def _vanishing(address: tuple[str, int], draw: random.Random, plan: Plan) -> tuple[str, str]:
    """Connect, begin, vanish. Return what was begun and the first line of the answer if there was one."""
    kind, lingers, patience_s = draw.choice(KINDS), draw.random() < 0.5, draw.random() * plan.patience_s
    await asyncio.sleep(draw.random() * plan.spread_s)
    reader, writer = await asyncio.open_connection(*address, limit=1 << 16)
    line = b""
    try:
        request = _request(draw, stream=kind != "whole", has_grammar=plan.has_grammars and draw.random() < 0.1)
        cut = {"silent": 0, "half a head": draw.randint(1, 60), "half a body": len(request) - draw.randint(1, 40)}
        writer.write(request[: cut.get(kind, len(request))])
        if kind == "stream":
            async with asyncio.timeout(patience_s):
                line = await reader.readline()
                for _ in range(draw.randint(0, 40)):
                    await reader.readline()
        else:
            await asyncio.sleep(patience_s)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if not lingers:  # a reset instead of a goodbye
            tcp: socket.socket = writer.get_extra_info("socket")
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    return kind, line.decode().strip()


def _request(draw: random.Random, stream: bool, has_grammar: bool) -> bytes:
    body = {
        "model": "tiny",
        "prompt": [draw.randint(3, 250) for _ in range(draw.randint(1, 100))],
        "max_tokens": draw.randint(1, 100),
        "ignore_eos": True,
        "n": draw.choice([1, 1, 1, 2, 3]),
        "seed": draw.randint(0, 9),
        "stream": stream,
        "user": f"u{draw.randint(0, 99)}",
    }
    if has_grammar:
        del body["ignore_eos"]  # which no text of a grammar could obey
        body["structured_outputs"] = {"regex": f"[a-c]{{{draw.randint(1, 60)}}}"}
    data = json.dumps(body).encode()
    kind = "Host: localhost\r\nContent-Type: application/json\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{kind}Authorization: Bearer {STORMY}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _behaving(client: httpx.AsyncClient, number: int, weather: Weather, is_over: asyncio.Event, least: int) -> None:
    """Request one seeded completion after another until it is over. Each must be the first one's, whole."""
    prompt = [3 + number, 5, 7]
    body = {"model": "tiny", "prompt": prompt, "seed": number, "max_tokens": _CALM_TOKENS, "ignore_eos": True, "stream": True}
    first: list[str] | None = None
    count = 0
    while not is_over.is_set() or count < least:
        began_s, texts, first_token_s = time.perf_counter(), [], None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                weather.problems.append(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
                return
            async for line in answer.aiter_lines():
                first_token_s = first_token_s or time.perf_counter() - began_s
                if line.startswith("data: {"):
                    texts += [choice["text"] for choice in json.loads(line[6:]).get("choices", [{"text": line}])]
        first = first or ["".join(texts)]
        if first != ["".join(texts)] or (line and line != "data: [DONE]"):
            weather.problems.append(f"{texts} instead of {first}")
        weather.first_token_s.append(first_token_s or 0.0)
        count += 1


async def weather(url: str, is_over: asyncio.Event, least: int) -> Weather:
    """Return what those that behave live until it is over, each with so many requests at least."""
    lived = Weather()
    headers = {"Authorization": f"Bearer {CALM}"}
    async with httpx.AsyncClient(base_url=url, timeout=_REST_S, headers=headers) as client:
        await asyncio.gather(*(_behaving(client, number, lived, is_over, least) for number in range(_NUM_CALM)))
    return lived


async def storm(url: str, plan: Plan) -> Storm:
    """Let a storm pass over a server."""
    over, address = asyncio.Event(), (httpx.URL(url).host, httpx.URL(url).port or 80)
    over.set()
    calm = await weather(url, over, plan.least_calm)
    over.clear()
    behaving = asyncio.create_task(weather(url, over, 1))
    vanishing = (_vanishing(address, random.Random(f"{plan.seed}/{index}"), plan) for index in range(plan.num_clients))
    seen = await asyncio.gather(*vanishing)
    over.set()
    return Storm(calm, await behaving, Counter(kind for kind, _ in seen), Counter(line for _, line in seen if line))


def warm(url: str) -> None:
    """Have a server load its lazy parts."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "structured_outputs": {"regex": "[a-c]{2}"}}
    httpx.post(
        url + "/v1/completions", json=body, headers={"Authorization": f"Bearer {CALM}"}, timeout=_REST_S
    ).raise_for_status()


def rest(server: RunningServer, before: Sample) -> list[str]:
    """Wait until a server is idle and its resources are as before. Return the differences otherwise."""
    end_s = time.monotonic() + _REST_S
    while True:
        time.sleep(0.5)  # the measuring connection has left too
        left = [*more(before, sample(server), _MOST_KIB), *unrest_of(server.get)]
        if not left or time.monotonic() > end_s:
            return left


def main() -> None:
    """Run it and print the result."""
    from tests.conformance.folder import served_folder  # here, because it brings torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(served_folder(folder / "model"))
        flags = ["--model", model, "--model-name", "tiny", "--drafter", "model", "--draft-model", model, "--cached-text", "true"]
        flags += [
            "--api-keys",
            f"{STORMY},{CALM}",
            "--max-running",
            "8",
            "--max-waiting",
            "16",
            "--max-model-len",
            "256",
            "--policy",
            "fixed",
            "--spare-worker",
            "false",  # its imports, during the storm, would look like a leak
        ]
        with patch.dict(os.environ, FEW_KERNELS), running_server(folder / "log", *flags, key=CALM) as server:
            warm(server.url)
            asyncio.run(storm(server.url, Plan(40, seed=-1, least_calm=1, spread_s=1.0, patience_s=2.0)))
            time.sleep(0.5)
            before = sample(server)
            passed = asyncio.run(storm(server.url, Plan(arguments.clients, arguments.seed)))
            left = rest(server, before)
            after = sample(server)
            given_up = server.metric("latebranch_failed_requests_total")
        tracebacks = (folder / "log").read_text().count("Traceback")
    print(f"calm:  {passed.calm}")  # noqa: T201
    print(f"storm: {passed.storm}")  # noqa: T201
    print(f"{arguments.clients} clients: {dict(passed.kinds)}; saw {dict(passed.answers)}; {given_up:g} samples given up")  # noqa: T201
    print("\n".join(f"{name:22} {before.get(name, 0.0):8.0f} {amount:8.0f}" for name, amount in after.items()))  # noqa: T201
    problems = [*passed.calm.problems, *passed.storm.problems, *left]
    for problem in problems[:20]:
        print(problem)  # noqa: T201
    print(f"{len(problems)} problems, {tracebacks} tracebacks in the log")  # noqa: T201
    raise SystemExit(bool(problems or tracebacks))


if __name__ == "__main__":
    main()
