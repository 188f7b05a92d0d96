"""`latebranch bench`: its arguments, checked before a model is loaded. server.cli.bench_run does the rest."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.core.tree import Expansion
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from engine.weights import WeightsError
from server.cli.bench_prompts import BenchError, add_prompt_flags, read_prompts
from server.cli.parser import number_within, positive_int, tree_shape
from server.settings import SettingsError, load_settings

_EXPANSIONS = [Expansion(4, 1, 0), Expansion(8, 1, 0), Expansion(2, 2, 3), Expansion(0, 3, 4)]
_VERIFIERS = ["traversal", "specinfer", "nss"]


def add_bench_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench`: the verifiers and trees to compare, and the prompts."""
    command = subparsers.add_parser("bench", help="compare plain decoding with verifiers and expansions")
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings: models, drafter, threads")
    add_prompt_flags(command, num_prompts=4)
    command.add_argument("--temperatures", nargs="+", type=number_within(0.0, math.inf, "[)"), default=[0.0, 1.0])
    command.add_argument(
        "--expansions", nargs="+", type=tree_shape, metavar="TREE", help="default: " + " ".join(map(str, _EXPANSIONS))
    )
    command.add_argument("--verifiers", nargs="+", metavar="NAME", help="default: " + " ".join(_VERIFIERS))
    command.add_argument("--max-tokens", type=positive_int, default=96, help="tokens generated for each prompt")
    command.add_argument("--concurrency", type=positive_int, default=1, help="requests in the engine at a time")
    command.add_argument("--rounds", type=positive_int, default=3, help="times everything is run, interleaved")
    command.add_argument(
        "--oracle", action="store_true", help="compare the configured drafter with drafts from recorded answers: the ceiling"
    )
    command.set_defaults(handler=_bench)


def _bench(parsed: argparse.Namespace) -> int:
    """Run the benchmark. A mistake in the arguments is one line and status 2; weights that are not available, status 1."""
    try:
        settings = load_settings(parsed.config, {})
        texts = read_prompts(parsed.prompts, parsed.kinds, parsed.num_prompts)
        if parsed.oracle and (parsed.expansions or parsed.verifiers):
            raise BenchError("--oracle runs the configured drafter: leave out --expansions and --verifiers")
        parsed.expansions, parsed.verifiers = parsed.expansions or _EXPANSIONS, parsed.verifiers or _VERIFIERS
        _check_pairs(parsed.verifiers, parsed.expansions)
        from server.cli.bench_run import bench  # here, because it brings torch

        return bench(settings, texts, parsed)
    except (SettingsError, BenchError, WeightsError) as error:
        sys.stderr.write(f"latebranch bench: {error}\n")
        return 1 if isinstance(error, WeightsError) else 2


def _check_pairs(names: Sequence[str], expansions: Sequence[Expansion]) -> None:
    """Refuse unknown names, and verifiers or trees without an exact partner."""
    if unknown := [name for name in names if name not in VERIFIER_NAMES]:
        raise BenchError(f"no verifier is named {', '.join(unknown)}; the names are {', '.join(VERIFIER_NAMES)}")
    for expansion in expansions:
        if not any(is_exact(expansion.kind, name) for name in names):
            raise BenchError(f"none of the verifiers {', '.join(names)} is lossless on {expansion.tree} trees")
    for name in names:
        if not any(is_exact(expansion.kind, name) for expansion in expansions):
            raise BenchError(f"verifier {name} is lossless on none of the trees {', '.join(map(str, expansions))}")
