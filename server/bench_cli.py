"""`latebranch bench`: its arguments. What it does is server.bench_run."""

import argparse
from pathlib import Path

from engine.tree import Expansion
from server.settings import parse_expansion

_PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.yaml"
_EXPANSIONS = [Expansion(4, 1, 0), Expansion(8, 1, 0), Expansion(2, 2, 3), Expansion(0, 3, 4)]


def add_bench_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench`: what to compare and on what."""
    command = subparsers.add_parser("bench", help="compare plain decoding with verifiers and expansions")
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings: models, drafter, threads")
    command.add_argument("--prompts", type=Path, default=_PROMPTS, help="YAML file: lists of user messages by kind")
    command.add_argument("--kinds", nargs="*", default=[], help="kinds of prompts to run; all of the file by default")
    command.add_argument("--num-prompts", type=int, default=4, help="prompts of each kind")
    command.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    command.add_argument("--expansions", nargs="+", type=parse_expansion, default=_EXPANSIONS, metavar="TRUNK.BRANCHES.DEPTH")
    command.add_argument("--verifiers", nargs="+", default=["traversal", "specinfer", "nss"])
    command.add_argument("--max-tokens", type=int, default=96, help="tokens generated for each prompt")
    command.add_argument("--concurrency", type=int, default=1, help="requests in the engine at a time")
    command.add_argument("--rounds", type=int, default=3, help="times everything is run, interleaved")
    command.set_defaults(handler=_bench)


def _bench(parsed: argparse.Namespace) -> int:
    from server.bench_run import bench  # here, because it brings torch

    return bench(parsed)
