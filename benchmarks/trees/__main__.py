"""The command line: `collect` measures, `report` makes the table."""

import argparse
from pathlib import Path

from benchmarks.trees.collect import Collector, Design
from benchmarks.trees.paired import differences
from benchmarks.trees.report import report
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import tool_engine
from server.cli.bench_prompts import BENCH_PROMPTS, read_prompts
from server.settings import load_settings
from server.text.chat_ids import chat_ids


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="compare trees and verifiers at equal node budgets")
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="measure, one JSON line each, appended to a file")
    collect.add_argument("--config", type=Path, required=True)
    collect.add_argument("--out", type=Path, default=Path("trees.jsonl"))
    collect.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    collect.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    collect.add_argument("--kinds", nargs="*", default=["code", "prose", "translation", "maths"])
    collect.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32], choices=[8, 16, 32])
    collect.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    collect.add_argument("--text-tokens", type=int, default=64, help="tokens the target writes after a prompt")
    collect.add_argument("--stride", type=int, default=16, help="tokens between two points")
    collect.add_argument("--time-every", type=int, default=6, help="points of a temperature between two timed ones")
    make = commands.add_parser("report", help="print the table of a file of measurements")
    make.add_argument("file", type=Path)
    pair = commands.add_parser("paired", help="difference of two contenders on the same points, for example calibrated/traversal")
    pair.add_argument("file", type=Path)
    pair.add_argument("first", metavar="TREE/VERIFIER")
    pair.add_argument("second", metavar="TREE/VERIFIER")
    pair.add_argument("--temperature", type=float, help="by default all above 0")
    args = parser.parse_args()
    if args.command == "report":
        print(report(args.file))
    elif args.command == "paired":
        print(differences(args.file, args.first, args.second, args.temperature))
    else:
        _collect(args)


def _collect(args: argparse.Namespace) -> None:
    settings = load_settings(args.config, {})
    tokenizer = load_tokenizer(resolve(settings.model).folder)
    texts = read_prompts(args.prompts, args.kinds, args.num_prompts)
    prompts = {kind: [chat_ids(tokenizer, text) for text in of_kind] for kind, of_kind in texts.items()}
    design = Design(tuple(args.budgets), tuple(args.temperatures), args.text_tokens, args.stride, args.time_every)
    engine = tool_engine(settings.to_tool_config())
    Collector(engine, design, args.out).run(prompts)


if __name__ == "__main__":
    main()
