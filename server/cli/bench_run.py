"""Runs `latebranch bench`: builds the configured engine in this process, compares, prints a table and one JSON line last."""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from engine.build import BadConfiguration, Models
from engine.core.config import EngineConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import PLAIN
from engine.core.validation import RequestRefused
from engine.draft.recorded_text import RecordedText
from engine.engine import Engine
from engine.utils.progress_bar import long_work
from engine.weights import UnsupportedModel, resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import tool_engine
from server.cli.bench_compare import (
    BenchLoad,
    Ceiling,
    OutputsDiffer,
    RequestFailed,
    Result,
    cases_of,
    compare,
    compare_with_oracle,
    table,
)
from server.cli.bench_prompts import BenchError
from server.settings import Settings
from server.text.chat_ids import chat_ids

Prompts = tuple[tuple[int, ...], ...]  # token ids
Texts = Mapping[str, Sequence[str]]  # user messages by kind


def bench(settings: Settings, texts: Texts, parsed: argparse.Namespace) -> int:
    """Run the benchmark on messages by kind; return the exit status: 1 if a request failed or a greedy text changed.

    Raises BenchError if the engine refuses the settings.
    """
    try:
        return _bench(settings, texts, parsed)
    except (OutputsDiffer, RequestFailed) as error:
        sys.stderr.write(f"latebranch bench: {error}\n")
        return 1
    except (BadConfiguration, UnsupportedModel, RequestRefused) as error:
        raise BenchError(str(error)) from error


def _bench(settings: Settings, texts: Texts, parsed: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    tokenizer = load_tokenizer(resolve(settings.model).folder)
    prompts = {kind: tuple(chat_ids(tokenizer, text) for text in of_kind) for kind, of_kind in texts.items()}
    config = settings.to_tool_config()
    models: Models = {}
    with long_work("loading the models"):
        engine = tool_engine(config, models)
    oracle = oracle_engine(config, models) if parsed.oracle else None
    results, ceilings = run_bench(engine, oracle, prompts, parsed)
    lines = [table(results), *map(str, ceilings), as_json(engine, results, ceilings)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def oracle_engine(config: EngineConfig, models: Models) -> Engine:
    """Return an engine that drafts each request's prediction, over the loaded `models` and a cache of its own."""
    bare = replace(
        config, drafter="none", draft_model=None, lens=None, head=None, checkpoint=None, cached_text=False, selector=None
    )
    engine = tool_engine(bare, models)
    drafter = RecordedText(engine.info.vocab_size, engine.target.model.device)
    return Engine(engine.info, config.scheduler, engine.target, drafter, FixedExpansion(PLAIN))


def run_bench(
    engine: Engine, oracle: Engine | None, prompts: Mapping[str, Prompts], parsed: argparse.Namespace
) -> tuple[list[Result], list[Ceiling]]:
    """Run the whole benchmark. The table of each kind and temperature is printed when it is finished."""
    results: list[Result] = []
    ceilings: list[Ceiling] = []
    for kind, of_kind in prompts.items():
        for temperature in parsed.temperatures:
            load = BenchLoad(of_kind, temperature, parsed.max_tokens, parsed.concurrency)
            if oracle is None:
                part = compare(engine, cases_of(parsed.verifiers, parsed.expansions, temperature), load, kind, parsed.rounds)
            else:
                part, ceiling = compare_with_oracle(engine, oracle, load, kind, parsed.rounds)
                ceilings.append(ceiling)
            results += part
            sys.stderr.write(table(part) + "\n")
    return results, ceilings


def as_json(engine: Engine, results: Sequence[Result], ceilings: Sequence[Ceiling]) -> str:
    """Return one line with the engine's facts and every result."""
    facts = {"engine": asdict(engine.info), "results": [asdict(result) for result in results]}
    return json.dumps({**facts, "ceilings": [asdict(ceiling) for ceiling in ceilings]})
