"""Runs `latebranch bench`: builds the configured engine in this process, compares, prints a table and one JSON line last."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

from transformers import AutoTokenizer

from engine.build import build_engine
from engine.engine import Engine
from engine.weights import resolve
from server.bench import Encode, Load, Result, cases_of, compare, load_prompts, table
from server.settings import load_settings


def bench(parsed: argparse.Namespace) -> int:
    """Run the benchmark; return the exit status."""
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
    for kind, prompts in load_prompts(parsed.prompts, parsed.kinds, parsed.num_prompts, encode).items():
        for temperature in parsed.temperatures:
            load = Load(prompts, temperature, parsed.max_tokens, parsed.concurrency)
            cases = cases_of(parsed.verifiers, parsed.expansions, temperature)
            part = compare(engine, cases, load, kind, parsed.rounds)
            results += part
            sys.stderr.write(table(part) + "\n")
    return results


def as_json(engine: Engine, results: Sequence[Result]) -> str:
    """Return one line with the engine's facts and every result."""
    return json.dumps({"engine": asdict(engine.info), "results": [asdict(result) for result in results]})
