"""The parser of the command line: mistakes are one line with a suggestion, and the exit status is 2."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.utils.did_you_mean import did_you_mean

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors do not print the usage, which has a hundred flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments and those of other parsers; exit if a command does not know one."""
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
        if match := _CHOICE.search(message):
            message += did_you_mean(match[1], re.findall(r"[\w.-]+", match[2]))
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(2)
