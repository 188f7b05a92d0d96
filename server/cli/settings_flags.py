"""A flag for every setting, for the commands that start a server or examine its settings."""

import argparse
from pathlib import Path

from server.settings import Settings, load_settings


def add_settings_flags(command: argparse.ArgumentParser) -> None:
    """Add `--config` and the flags. Flags that are not given are absent from the parsed arguments."""
    command.add_argument("--config", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="YAML file of settings")
    for name, field in Settings.model_fields.items():
        flag, text = f"--{name.replace('_', '-')}", _help(field.description, field.default)
        if field.annotation is bool:  # a flag alone is true
            command.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=text, nargs="?", const="true")
        else:
            command.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=text)


def given_flags(parsed: argparse.Namespace) -> dict[str, str]:
    """Return the settings that were given as flags."""
    return {name: value for name, value in vars(parsed).items() if name in Settings.model_fields}


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Return the settings of the flags, the environment and the file; raise SettingsError."""
    return load_settings(getattr(parsed, "config", None), given_flags(parsed))


def _help(description: str | None, default: object) -> str:
    text = f"{description} Default: {default}" if default not in (None, ()) else str(description)
    return text.replace("%", "%%")
