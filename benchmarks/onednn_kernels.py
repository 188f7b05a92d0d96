"""What bounds on oneDNN's kernels cost an engine, and what they save it.

oneDNN compiles a kernel for each shape of a product and keeps so many of them in each of two caches, by environment variables
that are read when torch is loaded. Each bound has a process of its own, with the served default but for our library, in which
there is no oneDNN. It is counted how many kernels are compiled in a step, a number that no other work on the machine changes.

    python -m benchmarks.onednn_kernels

prints, for each bound, kernels compiled a step at each load, milliseconds for each, and what the process held at the end. Prompts
have other lengths in each round, so that shapes keep coming; the first rounds do not count.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

from benchmarks.markdown import table
from engine.core.types import Request, SamplingParams
from server.settings import load_settings

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_LOADS = (1, 4, 16)  # requests at a time
_NUM_TOKENS, _LONGEST_PROMPT, _FEWEST_REQUESTS = 16, 100, 4
_MARK = "measured"
_AS_THEY_COME = 1024


def main() -> None:
    """Measure each bound and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/default.yaml"), help="YAML file of settings")
    parser.add_argument("--bounds", nargs="+", type=int, default=[16, 64, 256, _AS_THEY_COME], help="kernels in each cache")
    parser.add_argument("--rounds", type=int, default=4, help="the first half of them warms up")
    parser.add_argument("--work", action="store_true", help="be one of the processes")
    args = parser.parse_args()
    if args.work:
        _work(args.config, args.rounds)
        return
    rows = []
    for bound in args.bounds:
        own = [sys.executable, "-m", "benchmarks.onednn_kernels", "--work", "--config", args.config, "--rounds", str(args.rounds)]
        settings = {**dict.fromkeys(_VARIABLES, str(bound)), "ONEDNN_VERBOSE": "profile_create"}
        run = subprocess.run(own, env={**os.environ, **settings}, stdout=subprocess.PIPE, check=True, text=True)
        rows.append([str(bound), *_cells(run.stdout.splitlines())])
    print(table(["kernels kept", *(f"compiled a step, {load} at a time" for load in _LOADS), "ms each", "MiB"], rows))


def _cells(lines: Iterable[str]) -> list[str]:
    """Return kernels compiled a step, by load, the median of their milliseconds, and what the process held at the end."""
    num_kernels, num_steps = Counter[int](), Counter[int]()
    since_mark, all_ms, resident_mib = list[float](), list[float](), ""
    for line in lines:
        if "create:cache_miss" in line:
            since_mark.append(float(line.rsplit(",", 1)[1]))
        elif line.startswith(_MARK):
            _, counts, load, steps, resident_mib = line.split()
            if counts == str(True):
                num_kernels[int(load)] += len(since_mark)
                num_steps[int(load)] += int(steps)
                all_ms += since_mark
            since_mark.clear()
    a_step = [f"{num_kernels[load] / num_steps[load]:.1f}" for load in _LOADS]
    return [*a_step, f"{statistics.median(all_ms):.2f}", resident_mib]


def _work(config: Path, num_rounds: int) -> None:
    """Run every load in every round; report after each how many steps it took."""
    from server.adaptive_engine import tool_engine  # here, because it brings torch
    from server.cli.bench_compare import run_case

    with patch("engine.native.library.is_available", return_value=False):
        engine = tool_engine(load_settings(config, {}).to_tool_config())
    for number in range(num_rounds):
        for load in _LOADS:
            run = run_case(engine, _requests(f"{number} {load}", max(_FEWEST_REQUESTS, load)), load)
            print(_MARK, 2 * number >= num_rounds, load, len(run.steps), f"{_resident_mib():.0f}", flush=True)


def _requests(name: str, count: int) -> Iterator[Request]:
    """Yield requests, greedy and seeded in turn, with prompts of any tokens and many lengths."""
    draw = random.Random(name)
    for index in range(count):
        prompt = tuple(draw.randrange(1000, 20_000) for _ in range(draw.randint(1, _LONGEST_PROMPT)))
        seed = index if index % 2 else None
        sampling = SamplingParams(0.7 if index % 2 else 0.0, seed=seed, max_tokens=_NUM_TOKENS, ignore_eos=True)
        yield Request(f"{name} {index}", prompt, sampling, cache_salt=None)


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


if __name__ == "__main__":
    main()
