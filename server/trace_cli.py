"""`latebranch trace show`: what an engine did at each step, from the file that it wrote. The handler returns the exit status."""

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.trace import TraceError, read_trace
from engine.weights import WeightsError, resolve
from server.trace_view import Spell, lines_of, shown_steps, spelt_as_ids


def add_trace_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `trace` with its one command."""
    trace = subparsers.add_parser("trace", help="read what an engine did, step by step")
    show = trace.add_subparsers(required=True, metavar="COMMAND").add_parser("show", help="print each step's trees")
    show.add_argument("file", type=Path, metavar="FILE", help="the file that the setting trace_file names")
    show.add_argument("--request", metavar="ID", help="only the rows of this request, and the steps it has rows in")
    show.add_argument("--last", type=_positive, metavar="N", help="only the last N of these steps")
    show.add_argument("--model", metavar="NAME", help="show text instead of token ids, by the tokenizer of these weights")
    show.set_defaults(handler=_show)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a number of at least 1, not {text!r}")
    return int(text)


def _show(parsed: argparse.Namespace) -> int:
    try:
        for line in _lines(parsed):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output (head, a pager) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TraceError, WeightsError, OSError) as error:
        sys.stderr.write(f"latebranch trace: {error}\n")
        return 1
    return 0


def _lines(parsed: argparse.Namespace) -> Iterator[str]:
    spell = spelt_as_ids if parsed.model is None else _spelt_as_text(parsed.model)
    steps = shown_steps(read_trace(parsed.file), parsed.request)
    return lines_of(steps if parsed.last is None else deque(steps, maxlen=parsed.last), spell)


def _spelt_as_text(reference: str) -> Spell:
    """Return what quotes the text of token ids: escaped, so that a line stays a line whatever a model has written."""
    from transformers import AutoTokenizer  # here, because it takes seconds

    tokenizer = AutoTokenizer.from_pretrained(resolve(reference).folder)

    def spelt(token_ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    return spelt
