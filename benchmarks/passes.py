"""Seconds of one pass by how it is computed: our library's decoders beside torch's packed layers, in every precision.

    python -m benchmarks.passes --model smollm2-135m --widths 1 4 8 16 32 64 --context 256 --rounds 9

A pass feeds so many tokens after a context and returns all their logits. Contenders take turns within a round; a round in which
others used the processors (--max-foreign) does not count. Prints how many times as fast as the first contender each is, the
median over rounds with its quartiles, and what a wider pass costs over one token; the last line is JSON.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.foreign import MAX_FOREIGN_CPUS, ForeignCpu
from benchmarks.markdown import table
from benchmarks.precision import timed_pass
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel, load_model
from engine.utils.progress_bar import progress_bar
from engine.weights import resolve

_CPU = torch.device("cpu")
_CHUNK_TOKENS = 256
_CONTENDERS = ("packed.float32", "packed.bfloat16", "native.float32", "native.bfloat16", "native.int8", "native.compact")


@dataclass(frozen=True, slots=True)
class Figure:
    """A contender's passes of one width: times as fast as the first contender, and its own cost over one token's."""

    contender: str
    num_tokens: int
    ratio: float
    low: float
    high: float
    cost: float
    num_rounds: int


def main() -> None:
    """Print a table a width, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--contenders", nargs="+", default=list(_CONTENDERS), help="LINEARS.PRECISION; the first is compared with"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-foreign", type=float, default=MAX_FOREIGN_CPUS, help="processors that others may use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = resolve(args.model).folder
    models = {
        name: load_model(folder, precision, _CPU, linears) for name in args.contenders for linears, precision in [name.split(".")]
    }
    caches = {name: KVCache(args.context + max(args.widths), _CPU) for name in models}
    for name, model in models.items():
        _fill(model, caches[name], args.context)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    num_dropped = 0
    for _ in progress_bar(range(args.rounds), what=args.model, total=args.rounds, unit="round"):
        foreign = ForeignCpu()
        taken = {
            (name, width): _seconds(model, caches[name], args.context, width)
            for width in args.widths
            for name, model in models.items()
        }
        if (foreign.cpus() or 0.0) > args.max_foreign:
            num_dropped += 1
            continue
        for place, one in taken.items():
            seconds[place].append(one)
    figures = list(_figures(seconds, args.contenders, args.widths))
    rows = (
        [one.contender, str(one.num_tokens), f"{one.ratio:.2f}", f"{one.low:.2f}-{one.high:.2f}", f"{one.cost:.2f}"]
        for one in figures
    )
    print(table(["how", "tokens", f"over {args.contenders[0]}", "quartiles", "over its own one token"], rows))
    print(
        f"{args.rounds - num_dropped} rounds counted, {num_dropped} dropped; {args.threads} threads, {args.context} tokens before"
    )
    print(json.dumps([asdict(one) for one in figures]))


def _figures(seconds: dict[tuple[str, int], list[float]], contenders: Sequence[str], widths: Sequence[int]) -> "list[Figure]":
    found = []
    for width in widths:
        for name in contenders:
            times = seconds[name, width]
            if len(times) < 2:
                raise SystemExit("too few quiet rounds: give more rounds, or a larger --max-foreign")
            ratios = [first / one for first, one in zip(seconds[contenders[0], width], times, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cost = statistics.median(one / alone for one, alone in zip(times, seconds[name, widths[0]], strict=True))
            found.append(Figure(name, width, middle, low, high, cost, len(times)))
    return found


def _fill(model: CausalModel, cache: KVCache, num_tokens: int) -> None:
    """Feed so many tokens, a chunk at a time."""
    for first in range(0, num_tokens, _CHUNK_TOKENS):
        timed_pass(model, cache, first, min(_CHUNK_TOKENS, num_tokens - first))


def _seconds(model: CausalModel, cache: KVCache, done: int, num_tokens: int) -> float:
    """Return the seconds of a pass, the better of two."""
    return min(timed_pass(model, cache, done, num_tokens) for _ in range(2))


if __name__ == "__main__":
    main()
