"""The command line: measures what is missing, then writes the tables, and the figure if matplotlib is installed."""

import argparse
import sys
from itertools import product
from pathlib import Path

from benchmarks.paper.collect import Amount, collect, read
from benchmarks.paper.design import PAIRS
from benchmarks.paper.report import write_report
from server.cli.bench_prompts import BENCH_PROMPTS, read_prompts

_SAMPLINGS = [f"{temperature},{top_p}" for temperature, top_p in product((0.2, 0.6, 1.0), (0.9, 1.0))]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description="every verifier with its best trees, exactly")
    parser.add_argument("--out", type=Path, default=Path("paper"), help="folder; an interrupted run is continued")
    parser.add_argument("--pairs", nargs="+", default=[*PAIRS], choices=[*PAIRS])
    parser.add_argument("--samplings", nargs="+", type=_sampling, default=[*map(_sampling, _SAMPLINGS)], metavar="T,TOP_P")
    parser.add_argument("--kinds", nargs="+", default=["code", "maths", "prose", "translation"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--num-texts", type=int, default=2, help="of each prompt and sampling")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--stride", type=int, default=10, help="tokens between two roots of a text")
    parser.add_argument("--most-roots", type=int, default=9, help="of a text")
    parser.add_argument("--measured", action="store_true", help="measure nothing: tables of what there is")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    amount = Amount(tuple(args.samplings), args.num_texts, args.max_tokens, args.stride, args.most_roots)
    prompts, roots = read_prompts(BENCH_PROMPTS, args.kinds, args.num_prompts), {}
    for name in args.pairs:
        file = args.out / f"{name}.jsonl"
        if not args.measured:
            if missing := PAIRS[name].missing:
                sys.stderr.write(f"{name} is left out: {', '.join(missing)} is not cached\n")
                continue
            collect(PAIRS[name], prompts, amount, file)
        lines = [line for line in read(file) if "tokens" in line]
        roots[name] = [line for line in lines if (line["temperature"], line["top_p"]) in amount.samplings]
    write_report(roots, args.out)


def _sampling(text: str) -> tuple[float, float]:
    temperature, top_p = map(float, text.split(","))
    return temperature, top_p


if __name__ == "__main__":
    main()
