"""What a server adds to its engine's steps: seconds of a stream that no step took, a step, by requests at a time.

    python -m benchmarks.delivery --config configs/default.yaml --concurrency 1 16

Starts the server, has a client process stream answers of equal length, and sets the time from the first request sent to the last
token received beside what the server's own metrics report for steps. What is left is reading requests, moving tokens between
processes, detokenising and SSE, by processes that share the machine's processors with the engine.
"""

import argparse
import re
import statistics
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.jobs import Job
from benchmarks.peers.processes import PORT, Launch, ServerProcess, start_client

_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Steps:
    """Engine steps so far, and their seconds."""

    count: float
    seconds: float


def steps_of(url: str) -> Steps:
    """Return a server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    count = re.findall(r"^latebranch_steps_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    seconds = re.findall(r"^latebranch_step_phase_seconds_sum\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return Steps(sum(map(float, count)), sum(map(float, seconds)))


def added_ms(server: ServerProcess, concurrency: int, num_tokens: int, round_number: int) -> float:
    """Return milliseconds a step beside those of the steps, of so many requests that come together."""
    first = 1000 * round_number
    prompts = tuple(tuple(range(first + 40 * one, first + 40 * one + _PROMPT_TOKENS)) for one in range(concurrency))
    fields = {"model": "latebranch", "return_token_ids": True}
    before = steps_of(server.url)
    answers = server.answer(Job(prompts, num_tokens, 0.0, (None,) * concurrency, concurrency, fields=fields))
    after = steps_of(server.url)
    return 1000.0 * (answers.seconds - (after.seconds - before.seconds)) / (after.count - before.count)


def main() -> None:
    """Print a line for each number of requests: the median over rounds, the least and the most."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delivery", description="what a server adds to its engine's steps")
    parser.add_argument("--config", required=True, help="YAML file of settings")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    program = str(Path(sys.executable).parent / "latebranch")
    own = ["--config", args.config, "--host", "127.0.0.1", "--port", PORT, "--model-name", "latebranch"]
    with tempfile.TemporaryDirectory() as folder:
        client = start_client(Path(folder) / "client.log")
        server = ServerProcess(Launch((program, "serve", *own), "http", 0), client, Path(folder) / "server.log")
        try:
            for concurrency in args.concurrency:
                added_ms(server, concurrency, args.max_tokens, 0)  # warms up
                added = [added_ms(server, concurrency, args.max_tokens, 1 + one) for one in range(args.rounds)]
                spread = f"{min(added):.2f} to {max(added):.2f}"
                print(f"{concurrency} at a time: {statistics.median(added):.2f} ms a step beside it ({spread})", flush=True)
        finally:
            server.stop()
            client.stop()


if __name__ == "__main__":
    main()
