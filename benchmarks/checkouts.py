"""Seconds of passes in other checkouts of this repository beside this one's: what a change of the library is worth.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.checkouts ../before --model smollm2-135m --precision compact --widths 1 4 8 16 --contexts 256 1500

Each round runs every checkout once, this one last, in a process of its own: where a process's memory lies is luck, and moves its
passes by some hundredths. A process says the median seconds of passes that feed so many tokens after a context and return all
their logits. Prints how many times as fast this checkout is as each of the others, the median over rounds with the lowest and the
highest; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.foreign import MAX_FOREIGN_CPUS, ForeignCpu
from benchmarks.markdown import table
from benchmarks.precision import timed_pass
from engine.kv_cache import KVCache
from engine.model import load_model
from engine.weights import resolve

_CPU = torch.device("cpu")
_HERE = Path(__file__).resolve().parents[1]
_PASSES = 7  # of each width in a process, at its best of two
_MEASURE = "--measure"  # how a checkout's process is told from the one that starts it


@dataclass(frozen=True)
class Measured:
    """Seconds of passes by context and width, "256 8", and how many processors others used meanwhile."""

    seconds: dict[str, float]
    foreign_cpus: float


def main() -> None:
    """Print a row for each context and width, then one line of JSON."""
    args = _arguments(sys.argv[1:])
    if args.measure:
        print(json.dumps(asdict(_measured(args))))
        return
    checkouts = [*(Path(one).resolve() for one in args.checkouts), _HERE]
    seconds: dict[Path, dict[str, list[float]]] = {checkout: {} for checkout in checkouts}
    num_dropped = 0
    for _ in range(args.rounds):
        taken = {checkout: _run_in(checkout) for checkout in checkouts}
        if any(one.foreign_cpus > args.max_foreign for one in taken.values()):
            num_dropped += 1
            continue
        for checkout, one in taken.items():
            for place, value in one.seconds.items():
                seconds[checkout].setdefault(place, []).append(value)
    if not seconds[_HERE]:
        raise SystemExit("no quiet round: give more rounds, or a larger --max-foreign")
    rows, figures = [], []
    for place, own in seconds[_HERE].items():
        cells = []
        for checkout in checkouts[:-1]:
            ratios = sorted(before / after for before, after in zip(seconds[checkout][place], own, strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})")
            figures.append({"checkout": str(checkout), "place": place, "ratios": ratios})
        rows.append([*place.split(), *cells])
    print(table(["tokens before", "tokens", *(f"as fast as {one.name}" for one in checkouts[:-1])], rows))
    counts = f"{args.rounds - num_dropped} rounds counted, {num_dropped} dropped"
    print(f"{counts}; {args.model}, {args.precision}, {args.threads} threads")
    print(json.dumps(figures))


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", help="folders of other checkouts, each with its library compiled")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default="compact")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-foreign", type=float, default=MAX_FOREIGN_CPUS, help="processors that others may use")
    parser.add_argument(_MEASURE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _run_in(checkout: Path) -> Measured:
    """Measure in a process whose imports are a checkout's."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], _MEASURE]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _measured(args: argparse.Namespace) -> Measured:
    """Measure this process's passes."""
    torch.set_num_threads(args.threads)
    model = load_model(resolve(args.model).folder, args.precision, _CPU, "native")
    caches = {context: KVCache(context + max(args.widths), _CPU) for context in args.contexts}
    for context, cache in caches.items():
        timed_pass(model, cache, 0, context)
    foreign, seconds = ForeignCpu(), dict[str, float]()
    for context, cache in caches.items():
        for width in args.widths:
            best = [min(timed_pass(model, cache, context, width) for _ in range(2)) for _ in range(_PASSES)]
            seconds[f"{context} {width}"] = statistics.median(best)
    return Measured(seconds, foreign.cpus() or 0.0)


if __name__ == "__main__":
    main()
