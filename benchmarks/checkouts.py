"""Seconds of passes in other checkouts of this repository beside this one's: the effect of a change of the library.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.checkouts ../before --model smollm2-135m --precision compact --widths 1 4 8 16 --contexts 256 1500

In each round every checkout has a process of its own, this one last: where a process's memory is stored is luck, and moves its
passes by some hundredths. The processes take turns pass by pass, so that what else happens on the machine meets them alike. A
pass feeds so many tokens after a context and returns all their logits; with `--head FILE` it is one of that draft head in int8,
which computes the last of them, and packing its tokens counts. With `--chunks` a pass is a chunk of a prompt: it
returns the last token's logits, its context is not computed, and processor time counts. Prints how many times as fast this
checkout is as each of the others: in a round the median over its turns, then the median over rounds with the lowest and the
highest; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.foreign import MAX_FOREIGN_CPUS, ForeignCpu
from benchmarks.markdown import table
from benchmarks.precision import timed_pass
from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.core.step_plan import Row
from engine.core.tree import PLAIN, ROOT
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, GrowingTree
from engine.draft.models.head import DraftHead
from engine.draft.models.head_drafter import HeadDrafter
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, load_model
from engine.weights import resolve

_CPU = torch.device("cpu")
_HERE = Path(__file__).resolve().parents[1]
_TURNS = 9  # of each width in a round, each the best of two passes
_MEASURE = "--measure"  # marks a checkout's process, unlike the one that starts it


def main() -> None:
    """Print a row for each context and width, then one line of JSON."""
    args = _arguments(sys.argv[1:])
    if args.measure:
        _measure(args)
        return
    checkouts = [*(Path(one).resolve() for one in args.checkouts), _HERE]
    places = [(context, width) for context in args.contexts for width in args.widths]
    ratios: dict[tuple[int, int], list[list[float]]] = {place: [] for place in places}  # of a round, over each other checkout
    num_dropped = 0
    for _ in range(args.rounds):
        foreign_cpus, found = _round(checkouts, places)
        if foreign_cpus > args.max_foreign:
            num_dropped += 1
            continue
        for place in places:
            ratios[place].append(found[place])
    if args.rounds == num_dropped:
        raise SystemExit("no quiet round: give more rounds, or a larger --max-foreign")
    rows, figures = [], []
    for (context, width), of_rounds in ratios.items():
        cells = []
        for checkout, over in zip(checkouts[:-1], map(sorted, zip(*of_rounds, strict=True)), strict=True):
            cells.append(f"{statistics.median(over):.2f} ({over[0]:.2f}–{over[-1]:.2f})")
            figures.append({"checkout": str(checkout), "place": f"{context} {width}", "ratios": over})
        rows.append([str(context), str(width), *cells])
    print(table(["tokens before", "tokens", *(f"as fast as {one.name}" for one in checkouts[:-1])], rows))
    counts = f"{args.rounds - num_dropped} rounds counted, {num_dropped} dropped"
    what = f"{args.head.name} for {args.model}, int8" if args.head else f"{args.model}, {args.precision}"
    print(f"{counts}; {what}, {args.threads} threads")
    print(json.dumps(figures))


def _round(checkouts: Sequence[Path], places: Sequence[tuple[int, int]]) -> tuple[float, dict[tuple[int, int], list[float]]]:
    """Return how many processors others used, and at each place how many times as fast the last checkout is as each other."""
    turns: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    foreign = ForeignCpu(_seconds_with_children)
    with _processes(checkouts) as processes:
        for _ in range(_TURNS):
            for place in places:
                *others, own = [_timed(process, place) for process in processes]
                turns[place].append([one / own for one in others])
    found = {place: [statistics.median(over) for over in zip(*of_turns, strict=True)] for place, of_turns in turns.items()}
    return foreign.cpus() or 0.0, found


def _seconds_with_children() -> float:
    """Return the processor seconds of this process and of those that it has started and ended."""
    return sum(os.times()[:4])


@contextmanager
def _processes(checkouts: Sequence[Path]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Yield a process for each checkout, whose imports are its own, ready to measure; end them."""
    here = Path(__file__).resolve()
    started: list[subprocess.Popen[str]] = []
    try:
        for checkout in checkouts:
            own = checkout / here.relative_to(_HERE)  # its imports fit the checkout
            # -P: the folder of this file must not be on the path, which begins with the checkout.
            command = [sys.executable, "-P", str(own if own.exists() else here), *sys.argv[1:], _MEASURE]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            one = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            started.append(one)
            assert one.stdout is not None
            if one.stdout.readline() != "ready\n":
                raise SystemExit(f"{checkout} cannot be measured")
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()


def _timed(process: "subprocess.Popen[str]", place: tuple[int, int]) -> float:
    """Return the seconds of a process's pass after so much context of so many tokens."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(*place, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", help="folders of other checkouts, each with its library compiled")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default="compact")
    parser.add_argument("--head", type=Path, help="a draft head of the model, whose passes are timed and not the model's")
    parser.add_argument("--chunks", action="store_true", help="time chunks of prompts, in processor time")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-foreign", type=float, default=MAX_FOREIGN_CPUS, help="processors that others may use")
    parser.add_argument(_MEASURE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _measure(args: argparse.Namespace) -> None:
    """Time passes of this process, one for each line of input: its context and its tokens."""
    torch.set_num_threads(args.threads)
    model = load_model(resolve(args.model).folder, args.precision, _CPU, "native")
    timed = _feeds(model, args) if args.head else _chunks(model, args) if args.chunks else _passes(model, args)
    print("ready", flush=True)
    for line in sys.stdin:
        context, width = map(int, line.split())
        print(min(timed(context, width) for _ in range(2)), flush=True)


def _passes(model: CausalModel, args: argparse.Namespace) -> Callable[[int, int], float]:
    """Return what times a pass of the model after so many tokens, of so many."""
    caches = {context: KVCache(context + max(args.widths), _CPU) for context in args.contexts}
    for context, cache in caches.items():
        timed_pass(model, cache, 0, context)
    return lambda context, width: timed_pass(model, caches[context], context, width)


def _chunks(model: CausalModel, args: argparse.Namespace) -> Callable[[int, int], float]:
    """Return what times a chunk of a prompt. Keys and values before it are zeros, which changes no work."""
    cache = KVCache(max(args.contexts) + max(args.widths), _CPU)

    def timed(context: int, width: int) -> float:
        ids = [(97 * place + 11) % model.vocab_size for place in range(width)]
        batch = pack([chain_segment(ids, context, range(context + width))], _CPU)
        start = time.process_time()
        model.forward(batch, cache, torch.tensor([width - 1]))
        return time.process_time() - start

    return timed


def _feeds(model: CausalModel, args: argparse.Namespace) -> Callable[[int, int], float]:
    """Return what times feeding a draft head so many committed tokens after others, of which the last is the root."""
    most = max(args.contexts) + max(args.widths)
    drafter = HeadDrafter("head", DraftHead.load(args.head)[0], model, most, "native", "int8")
    drafter.follow(cache := KVCache(most, _CPU))
    timed_pass(model, cache, 0, most)

    def timed(context: int, width: int) -> float:
        ids = tuple((97 * place + 11) % model.vocab_size for place in range(context + width))
        fed, slots = ids[context:], range(len(ids))
        row = Row("r", len(ids) - 1, ids[-1:], 0, True, context, fed, PLAIN, slots, SamplingParams(), "coupled", 0, ids, 0)
        roots = [FrontierNode(GrowingTree(row), ROOT, 1)]
        start = time.perf_counter()
        drafter.feed([row], roots)
        return time.perf_counter() - start

    for context in args.contexts:
        timed(0, context)
    return timed


if __name__ == "__main__":
    main()
