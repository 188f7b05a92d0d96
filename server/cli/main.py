"""The `latebranch` command: serve, doctor, weights, bench, audit, drafter, selector, trace, dynamo-worker, version.

Each handler returns the exit status.
"""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from engine.core.refusal import Refusal
from engine.worker.fork_template import start_template
from server.cli.parser import Parser
from server.launch import TEMPLATE

# The module of each command, with its function `add_..._command`. Only the module of the given command is imported. Worker
# processes import this module again, as the program's main module.
_MODULES = {
    "doctor": "cli.doctor_cli",
    "weights": "cli.weights",
    "bench": "cli.bench",
    "audit": "cli.audit",
    "drafter": "cli.drafter",
    "selector": "cli.selector",
    "trace": "cli.trace",
    "dynamo-worker": "dynamo.command",
}
_EXAMPLES = """examples:
  latebranch serve --model qwen2.5-coder-1.5b --dtype compact
  latebranch serve --public --api-keys-file keys.txt --port 8080
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 130 after an interrupt as shells have it."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        sys.stderr.write("latebranch: interrupted\n")
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str]) -> int:
    if _surely_needs_template(arguments):
        start_template(TEMPLATE)  # first, because its imports take longest
    from engine.weights.errors import WeightsError  # here, because it brings the whole package

    parsed = _parser(arguments[:1]).parse_args(arguments)
    try:
        status: int = parsed.handler(parsed)
    except (Refusal, WeightsError) as error:
        sys.stderr.write(f"latebranch {arguments[0]}: {error}\n")
        return 2 if isinstance(error, Refusal) else 1
    return status


def _surely_needs_template(arguments: Sequence[str]) -> bool:
    """Return whether `serve` is called and no setting, which takes a while to read, can disable the template."""
    words = " ".join(arguments)
    is_set = any(name in words for name in ("--config", "--spare", "--help", "-h ")) or "LATEBRANCH_SPARE_WORKER" in os.environ
    return arguments[:1] == ["serve"] and arguments[-1] != "-h" and not is_set


def _parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the given command, or of all commands if it is none of them."""
    parser = Parser(prog="latebranch", description="Lossless tree-speculative LLM inference.", epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=_version_text())
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    known = ["serve", *_MODULES, "version"]
    for name in [name for name in known if name in given] or known:
        if name == "serve":
            _add_serve_command(subparsers)
        elif name == "version":
            subparsers.add_parser("version", help="print the version").set_defaults(handler=_version)
        else:
            module = import_module(f"server.{_MODULES[name]}")
            getattr(module, f"add_{name.replace('-', '_')}_command")(subparsers)
    return parser


def _add_serve_command(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `serve`, with a flag for every setting. The model may be named without one."""
    from server.cli.settings_flags import add_settings_flags

    about = "Serve a model over HTTP. Every flag is a setting of docs/configuration.md."
    command = subparsers.add_parser("serve", help="serve a model over HTTP", description=about, epilog=_EXAMPLES)
    add_settings_flags(command)
    command.set_defaults(handler=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    from server.cli.settings_flags import settings_of
    from server.http.logs import configure_logging
    from server.preflight import require_startable

    settings = settings_of(parsed)
    configure_logging(settings.log_level, settings.log_format)
    require_startable(settings)
    if settings.spare_worker:
        start_template(TEMPLATE)
    gc.disable()  # collections among the objects of so many imports take longer than the imports
    from server.process import serve

    gc.freeze()
    gc.enable()
    reason = serve(settings)  # raises Refusal
    if reason is not None:
        sys.stderr.write(f"latebranch serve: {reason}\n")
    return 0 if reason is None else 1


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{_version_text()}\n")
    return 0


def _version_text() -> str:
    from importlib.metadata import version

    return f"latebranch {version('latebranch')}"
