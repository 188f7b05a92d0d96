"""Tokens a second that a client receives over HTTP, of ways to send the same requests, by turns.

    python -m benchmarks.served lora --model smollm2-135m --dtype float32 --concurrency 4
    python -m benchmarks.served trace --model smollm2-135m --dtype float32 --concurrency 1

`lora`: requests of the base without adapters, of the base beside three loaded adapters, and under these adapters in turn; plain
decoding. `trace`: requests by the server's policy, and the same with `speculative.trace`, as from the playground.
Prints times as fast as the first way, the median over rounds with the lowest and the highest; the last line is JSON.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import mixed_prompts
from benchmarks.markdown import table
from benchmarks.peers.jobs import Job
from benchmarks.peers.processes import PORT, Launch, ServerProcess, start_client
from benchmarks.served.ways import BASE, ways
from engine.utils.progress_bar import progress_bar

_SERVE = "import sys; from server.cli.main import main; sys.exit(main())"
_KINDS = ("code", "prose", "translation", "maths")


def main() -> None:
    """Start the servers, measure by turns and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lora", "trace"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    prompts = tuple(mixed_prompts(args.model, _KINDS, args.prompts))
    speeds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        found = ways(args.what, args.model, args.rank, folder)
        client = start_client(folder / "client.log")
        stack.callback(client.stop)
        servers: dict[tuple[str, ...], ServerProcess] = {}
        for flags in {tuple(way.flags) for way in found.values()}:
            own = ("--model", args.model, "--model-name", BASE, "--dtype", args.dtype, "--host", "127.0.0.1", "--port", PORT)
            launch = Launch((sys.executable, "-c", _SERVE, "serve", *own, *flags), "http", 0)
            servers[flags] = ServerProcess(launch, client, folder / f"server-{len(servers)}.log")
            stack.callback(servers[flags].stop)
        for number in progress_bar(range(args.rounds + 1), what=args.what, total=args.rounds + 1, unit="round"):
            for name in random.Random(number).sample(list(found), len(found)):
                way, seeds = found[name], tuple(range(number, number + len(prompts)))
                models = tuple(way.models[index % len(way.models)] for index in range(len(prompts)))
                job = Job(prompts, args.max_tokens, 0.7, seeds, args.concurrency, fields=dict(way.fields), models=models)
                speed = servers[tuple(way.flags)].answer(job).tokens_per_s
                if number:  # the first round warms up
                    speeds[name].append(speed)
    first = speeds[next(iter(found))]
    figures = [{"how": name, **_ratio(speeds[name], first)} for name in found]
    print(table(list(figures[0]), ([str(value) for value in figure.values()] for figure in figures)))
    print(json.dumps({"arguments": vars(args), "figures": figures}))


def _ratio(speeds: Sequence[float], first: Sequence[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(speeds, first, strict=True)]
    found = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return {name: round(value, 3) for name, value in {**found, "tokens_per_s": statistics.median(speeds)}.items()}


if __name__ == "__main__":
    main()
