"""`latebranch trace view` and `html`: show the steps of an engine, from its trace file.

The handlers return the exit status.
"""

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.trace.records import TraceError, read_trace
from engine.weights import WeightsError, resolve
from engine.weights.pretrained import load_tokenizer
from server.cli.parser import positive_int
from server.cli.trace_view import ShownStep, Spell, lines_of, shown_steps, spelt_as_ids

if TYPE_CHECKING:
    from server.text.codec import TokenText


def add_trace_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `trace` with its commands."""
    trace = subparsers.add_parser("trace", help="read what an engine did, step by step")
    commands = trace.add_subparsers(required=True, metavar="COMMAND")
    view = _command(commands, "view", "print each step's trees")
    view.set_defaults(handler=_view)
    html = _command(commands, "html", "draw each step's tree on a page of its own")
    html.add_argument("--out", type=Path, required=True, metavar="PAGE", help="the file to write")
    html.set_defaults(handler=_html)


def _command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, meaning: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=meaning)
    command.add_argument("file", type=Path, metavar="FILE", help="the file that the setting trace_file names")
    command.add_argument("--request", metavar="ID", help="only the rows of this request, and the steps it has rows in")
    command.add_argument("--last", type=positive_int, metavar="N", help="only the last N of these steps")
    command.add_argument("--model", metavar="NAME", help="text instead of token ids, by the tokenizer of these weights")
    return command


def _view(parsed: argparse.Namespace) -> int:
    try:
        for line in _lines(parsed):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output (head, a pager) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TraceError, WeightsError, OSError) as error:
        sys.stderr.write(f"latebranch trace: {error}\n")
        return 1
    return 0


def _html(parsed: argparse.Namespace) -> int:
    from server.cli.trace_page import named_by_id, page_of  # here, because it takes seconds

    try:
        spell = named_by_id if parsed.model is None else _token_texts(parsed.model)
        parsed.out.write_text(page_of(_steps(parsed), spell, parsed.file.name), encoding="utf-8")
    except (TraceError, WeightsError, ValueError, OSError) as error:
        sys.stderr.write(f"latebranch trace: {error}\n")
        return 1
    return 0


def _lines(parsed: argparse.Namespace) -> Iterator[str]:
    spell = spelt_as_ids if parsed.model is None else _spelt_as_text(parsed.model)
    return lines_of(_steps(parsed), spell)


def _steps(parsed: argparse.Namespace) -> Iterable[ShownStep]:
    steps = shown_steps(read_trace(parsed.file), parsed.request)
    return steps if parsed.last is None else deque(steps, maxlen=parsed.last)


def _token_texts(reference: str) -> "Callable[[int], TokenText]":
    """Return a function from a token id to its text and bytes."""
    from server.text.codec import TextCodec

    return TextCodec(load_tokenizer(resolve(reference).folder)).token_text


def _spelt_as_text(reference: str) -> Spell:
    """Return a function from token ids to their quoted text, escaped so that it has no line breaks."""
    tokenizer = load_tokenizer(resolve(reference).folder)

    def spelt(token_ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    return spelt
