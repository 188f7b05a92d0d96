"""The prompts of `latebranch bench` and `audit`: a YAML file of user messages by kind. Knows text only."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.utils.one_line import one_line
from server.cli.parser import positive_int
from server.settings import SHIPPED, or_shipped

BENCH_PROMPTS = SHIPPED / "bench_prompts.yaml"


class BenchError(Exception):
    """A mistake in the arguments of the benchmark; the message is one line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message, and text that its answer is likely to repeat, if the file has a prediction."""

    text: str
    prediction: str | None = None


def add_prompt_flags(command: argparse.ArgumentParser, num_prompts: int) -> None:
    """Add the flags that choose prompts, `num_prompts` of each kind by default."""
    command.add_argument("--prompts", type=Path, default=BENCH_PROMPTS, help="YAML file: lists of user messages by kind")
    command.add_argument("--kinds", nargs="*", default=[], help="kinds of prompts to use; all of the file by default")
    command.add_argument("--num-prompts", type=positive_int, default=num_prompts, help="prompts of each kind")


def load_prompts(path: Path, kinds: Sequence[str], limit: int) -> dict[str, tuple[Prompt, ...]]:
    """Return up to `limit` prompts of each of the kinds, of all kinds if `kinds` is empty. Raises BenchError."""
    prompts = _prompts(path)
    unknown = [kind for kind in kinds if kind not in prompts]
    if unknown:
        raise BenchError(f"{path} has no prompts of kind {', '.join(unknown)}; it has {', '.join(prompts)}")
    return {kind: prompts[kind][:limit] for kind in kinds or prompts}


def read_prompts(path: Path, kinds: Sequence[str], limit: int) -> dict[str, tuple[str, ...]]:
    """Return the messages alone. Raises BenchError."""
    return {kind: tuple(prompt.text for prompt in of_kind) for kind, of_kind in load_prompts(path, kinds, limit).items()}


def _prompts(path: Path) -> dict[str, tuple[Prompt, ...]]:
    try:
        value = yaml.safe_load(or_shipped(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"{path} cannot be read: {one_line(error)}") from error
    is_kinds = isinstance(value, dict) and all(isinstance(entries, list) and entries for entries in value.values())
    if not value or not is_kinds or not all(_is_prompt(entry) for entries in value.values() for entry in entries):
        raise BenchError(f"{path} is not a file of prompts: it must map each kind to a list of texts, or of text and prediction")
    return {str(kind): tuple(_prompt(entry) for entry in entries) for kind, entries in value.items()}


def _is_prompt(entry: Any) -> bool:
    if isinstance(entry, dict):
        return (
            "text" in entry and entry.keys() <= {"text", "prediction"} and all(isinstance(part, str) for part in entry.values())
        )
    return isinstance(entry, str)


def _prompt(entry: Any) -> Prompt:
    return Prompt(**entry) if isinstance(entry, dict) else Prompt(entry)
