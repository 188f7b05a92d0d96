"""Work in a process of its own, whose imports and loaded files take no memory of this process afterwards.

The module is run as a program. Its stdout is the result, or the kind of the error and the reason in one line.
"""

import subprocess
import sys
from collections.abc import Callable

from engine.utils.one_line import one_line
from engine.weights.errors import UnsupportedModel, WeightsError


def run_apart(module: str, *arguments: str) -> str:
    """Return the stdout of a module that is run as a program. Raises the WeightsError or UnsupportedModel that it reports."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    kind, _, reason = done.stdout.strip().rpartition("\n")[2].partition(" ")
    error = UnsupportedModel if kind == UnsupportedModel.__name__ else WeightsError
    raise error(reason or f"{' '.join([module, *arguments])}: exit status {done.returncode}")


def reported(work: Callable[[], str]) -> int:
    """Write the result of `work`, or its error, for `run_apart`; return the exit status."""
    try:
        sys.stdout.write(work())
    except (WeightsError, UnsupportedModel) as error:
        sys.stdout.write(f"\n{type(error).__name__} {one_line(error)}\n")
        return 1
    return 0
