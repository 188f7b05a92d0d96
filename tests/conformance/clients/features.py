"""What the programs of this folder share. Each runs the features of a client against a server and prints a JSON object.

python CLIENT.py URL MODEL: URL is the server's root, MODEL a name that it serves. A feature is "yes" or the error that ended it.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, TypeVar

FEATURES: Final = (
    *("chat", "stream", "tools forced", "tools auto", "structured", "responses", "messages"),
    "agent run",
)
URL, MODEL = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")
BASE = f"{URL}/v1"
KEY: Final = "none"
SYSTEM: Final = "You are a helpful assistant."
GREETING: Final = "Say hello."
QUESTION: Final = "What is the weather in Oslo? Use the tool."
WEATHER: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON: Final = "Write a person as JSON: name Ann, age 30."

Check = TypeVar("Check", bound=Callable[[], Any])
_checks: dict[str, Callable[[], Any]] = {}


def feature(name: str) -> Callable[[Check], Check]:
    """Register a function, or a coroutine function, that raises where the feature does not work."""
    assert name in FEATURES

    def register(check: Check) -> Check:
        _checks[name] = check
        return check

    return register


def main(*packages: str) -> None:
    """Run every registered feature; print the packages with their versions, and what became of each feature."""
    with asyncio.Runner() as runner:  # one loop: a client keeps connections of the loop that made them
        found = {name: _result(check, runner) for name, check in _checks.items() if not sys.argv[3:] or name in sys.argv[3:]}
    answer = {"client": ", ".join(name if " " in name else f"{name} {version(name)}" for name in packages), "features": found}
    sys.stdout.write(json.dumps(answer) + "\n")


def _result(check: Callable[[], Any], runner: asyncio.Runner) -> str:
    try:
        if inspect.iscoroutinefunction(check):
            runner.run(check())
        else:
            check()
    except Exception as error:  # noqa: BLE001 (a client raises what it likes)
        line = [frame.line for frame in traceback.extract_tb(error.__traceback__) if "/clients/" in frame.filename][-1]
        return f"{type(error).__name__}: {error} at {line}"
    return "yes"
