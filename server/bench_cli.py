"""`latebranch bench`: builds the configured engine in this process, compares, prints a table and one JSON line last."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import AutoTokenizer

from engine.build import build_engine
from engine.engine import Engine
from engine.tree import Expansion
from engine.weights import resolve
from server.bench import Encode, Load, Result, cases_of, compare, load_prompts, table
from server.settings import load_settings, parse_expansion

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
    logging.basicConfig(level=logging.WARNING)
    settings = load_settings(parsed.config, {})
    tokenizer = AutoTokenizer.from_pretrained(resolve(settings.model).folder)

    def encode(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    engine = build_engine(settings.to_engine_config())
    results = run_bench(engine, encode, parsed)
    sys.stdout.write(table(results) + "\n" + as_json(engine, results) + "\n")
    return 0


def run_bench(engine: Engine, encode: Encode, parsed: argparse.Namespace) -> list[Result]:
    """Run the whole benchmark; each kind and temperature is printed as it is done."""
    results: list[Result] = []
    cases = cases_of(parsed.verifiers, parsed.expansions)
    for kind, prompts in load_prompts(parsed.prompts, parsed.kinds, parsed.num_prompts, encode).items():
        for temperature in parsed.temperatures:
            load = Load(prompts, temperature, parsed.max_tokens, parsed.concurrency)
            part = compare(engine, cases, load, kind, parsed.rounds)
            results += part
            sys.stderr.write(table(part) + "\n")
    return results


def as_json(engine: Engine, results: Sequence[Result]) -> str:
    """Return one line with the engine's facts and every result."""
    return json.dumps({"engine": asdict(engine.info), "results": [asdict(result) for result in results]})
