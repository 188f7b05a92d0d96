"""The `latebranch` command: serve, weights, bench, audit, drafter, selector, trace, version.

Each handler returns the exit status.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from server.audit_cli import add_audit_command
from server.bench_cli import add_bench_command
from server.drafter_cli import add_drafter_command
from server.logs import configure_logging
from server.selector_cli import add_selector_command
from server.settings import Settings, SettingsError, load_settings
from server.trace_cli import add_trace_command
from server.weights_cli import add_weights_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parsed = _parser().parse_args(arguments)
    status: int = parsed.handler(parsed)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="latebranch", description="Lossless tree-speculative LLM inference.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve_command(subparsers)
    add_weights_command(subparsers)
    add_bench_command(subparsers)
    add_audit_command(subparsers)
    add_drafter_command(subparsers)
    add_selector_command(subparsers)
    add_trace_command(subparsers)
    subparsers.add_parser("version", help="print the version").set_defaults(handler=_version)
    return parser


def _add_serve_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`, with a flag for every setting."""
    command = subparsers.add_parser("serve", help="serve a model over HTTP", argument_default=argparse.SUPPRESS)
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    for name, field in Settings.model_fields.items():
        command.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=_help(field.description, field.default))
    command.set_defaults(handler=_serve)


def _help(description: str | None, default: object) -> str:
    text = f"{description} Default: {default}" if default not in (None, ()) else str(description)
    return text.replace("%", "%%")


def _serve(parsed: argparse.Namespace) -> int:
    from server.process import serve  # here, so that the other commands need not wait for its imports

    flags = {name: value for name, value in vars(parsed).items() if name in Settings.model_fields}
    try:
        settings = load_settings(getattr(parsed, "config", None), flags)
    except SettingsError as error:
        sys.stderr.write(f"latebranch serve: {error}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    reason = serve(settings)
    if reason is not None:
        sys.stderr.write(f"latebranch serve: {reason}\n")
    return 0 if reason is None else 1


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"latebranch {version('latebranch')}\n")
    return 0
