"""`latebranch doctor`: the parts of a server with these settings, and the problems that prevent a start.

The exit status is 0 if it could serve, 1 if a problem prevents it. It is 2 if the settings are wrong or the model is not
supported.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from engine.core.refusal import Refusal
from server import preflight
from server.cli.settings_flags import add_settings_flags, given_flags, settings_of
from server.settings import ENV_PREFIX, Settings, or_shipped

if TYPE_CHECKING:
    from server.cli.doctor_checks import Finding


def add_doctor_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`, with the flags of `serve`."""
    command = subparsers.add_parser("doctor", help="report what a server with these settings would run on, and what prevents it")
    command.add_argument("--json", action="store_true", help="print JSON, every setting included")
    command.add_argument("--check", action="store_true", help="load the models and repeat the model check")
    add_settings_flags(command)
    command.set_defaults(handler=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    settings = settings_of(parsed)
    from server.cli.doctor_checks import Finding, Level, check_models, examine  # here, because it brings torch

    findings = list(examine(settings.to_engine_config()))
    if parsed.check and not any(finding.level is Level.REFUSED for finding in findings):
        findings += check_models(settings.to_engine_config())
    findings += [Finding("security", Level.WARNING, text) for text in settings.warnings]
    try:
        preflight.require_free(settings.host, settings.port)
    except Refusal as why:
        findings.append(Finding("address", Level.WARNING, str(why)))
    report = _settings_report(settings, given_flags(parsed), getattr(parsed, "config", None))
    is_refused = any(finding.level is Level.REFUSED for finding in findings)
    sys.stdout.write(_as_json(findings, report, is_refused) if parsed.json else _as_text(findings, report, is_refused))
    if any(finding.is_unsupported for finding in findings):
        return 2
    return 1 if is_refused else 0


def _settings_report(settings: Settings, flags: dict[str, str], config_file: Path | None) -> dict[str, dict[str, Any]]:
    """Return each setting's value and source; keys are hidden."""
    in_file = yaml.safe_load(or_shipped(config_file).read_text()) or {} if config_file is not None else {}
    in_environment = {name.upper() for name in os.environ}
    sources = [
        ("command line", flags.__contains__),
        ("environment", lambda name: ENV_PREFIX + name.upper() in in_environment),
        (str(config_file), in_file.__contains__),
        ("default", lambda _: True),
    ]
    values = settings.model_dump(mode="json")
    return {name: {"value": values[name], "from": next(s for s, has in sources if has(name))} for name in Settings.model_fields}


def _as_json(findings: "list[Finding]", settings: dict[str, dict[str, Any]], is_refused: bool) -> str:
    report = {"can_serve": not is_refused, "findings": [asdict(finding) for finding in findings], "settings": settings}
    return json.dumps(report, indent=2) + "\n"


def _as_text(findings: "list[Finding]", settings: dict[str, dict[str, Any]], is_refused: bool) -> str:
    lines = [f"{finding.level:8} {finding.part:10} {finding.text}" for finding in findings]
    lines += [f"setting  {name} = {row['value']} ({row['from']})" for name, row in settings.items() if row["from"] != "default"]
    return "\n".join([*lines, "it cannot serve" if is_refused else "it can serve"]) + "\n"
