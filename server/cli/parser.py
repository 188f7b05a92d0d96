"""The parser of the command line: mistakes are one line with a suggestion, and the exit status is 2."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from engine.core.tree import Expansion, parse_expansion
from engine.utils.did_you_mean import did_you_mean

_INVALID = re.compile(r"invalid (int|float) value: ")
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors do not print the usage, which has a hundred flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and the arguments of other parsers; exit if a command has an unknown argument."""
        parsed, unknown = super().parse_known_args(args, namespace)
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if unknown and not has_commands:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return parsed, unknown

    def _suggestion(self, unknown: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), None)
        return "" if flag is None else did_you_mean(flag, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        message = _INVALID.sub(lambda kind: f"must be a {'whole ' * (kind[1] == 'int')}number, not ", message)
        if match := _CHOICE.search(message):
            message += did_you_mean(match[1], re.findall(r"[\w.-]+", match[2]))
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(2)


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole(text, 1)


def non_negative_int(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    """Return a whole number of at least `least` that fits in 63 bits."""
    with suppress(ValueError):
        if least <= (number := int(text)) < 2**63:
            return number
    raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text}")


def number_within(low: float, high: float, ends: str = "()") -> Callable[[str], float]:
    """Return a parser of numbers in an interval, which includes an end that is written as a square bracket."""

    def number(text: str) -> float:
        with suppress(ValueError):
            if low < (value := float(text)) < high or (value == low and ends[0] == "[") or (value == high and ends[1] == "]"):
                return value
        raise argparse.ArgumentTypeError(f"must be in {ends[0]}{low:g}, {high:g}{ends[1]}, not {text}")

    return number


def tree_shape(text: str) -> Expansion:
    """Return the tree that a text describes."""
    try:
        return parse_expansion(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
