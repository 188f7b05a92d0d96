"""The `latebranch` command: serve, doctor, weights, bench, audit, drafter, selector, trace, version.

Each handler returns the exit status.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from engine.weights import UnsupportedModel, WeightsError
from server.cli.audit import add_audit_command
from server.cli.bench import add_bench_command
from server.cli.doctor_cli import add_doctor_command
from server.cli.drafter import add_drafter_command
from server.cli.selector import add_selector_command
from server.cli.settings_flags import add_settings_flags, settings_of
from server.cli.trace import add_trace_command
from server.cli.weights import add_weights_command
from server.http.logs import configure_logging
from server.settings import SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.handler(parsed)
    except (UnsupportedModel, WeightsError) as error:
        sys.stderr.write(f"latebranch {arguments[0]}: {error}\n")
        return 2 if isinstance(error, UnsupportedModel) else 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="latebranch", description="Lossless tree-speculative LLM inference.")
    parser.add_argument("--version", action="version", version=_version_text())
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve_command(subparsers)
    add_doctor_command(subparsers)
    add_weights_command(subparsers)
    add_bench_command(subparsers)
    add_audit_command(subparsers)
    add_drafter_command(subparsers)
    add_selector_command(subparsers)
    add_trace_command(subparsers)
    subparsers.add_parser("version", help="print the version").set_defaults(handler=_version)
    return parser


def _add_serve_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`, with a flag for every setting. The model may be named without one."""
    command = subparsers.add_parser("serve", help="serve a model over HTTP")
    command.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model; before all flags")
    add_settings_flags(command)
    command.set_defaults(handler=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    from server.process import serve  # here, because its imports are slow

    if parsed.positional_model is not None:
        if getattr(parsed, "model", parsed.positional_model) != parsed.positional_model:
            sys.stderr.write("latebranch serve: the model is named twice, as an argument and by --model\n")
            return 2
        parsed.model = parsed.positional_model
    try:
        settings = settings_of(parsed)
    except SettingsError as error:
        sys.stderr.write(f"latebranch serve: {error}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    reason = serve(settings)  # raises UnsupportedModel
    if reason is not None:
        sys.stderr.write(f"latebranch serve: {reason}\n")
    return 0 if reason is None else 1


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{_version_text()}\n")
    return 0


def _version_text() -> str:
    return f"latebranch {version('latebranch')}"
