"""`latebranch drafter`: trains drafters and checks them. Each command has its own module."""

import argparse

from server.cli.drafter_check import add_check_command
from server.cli.drafter_fit_lens import add_fit_lens_command
from server.cli.drafter_train import add_evaluate_command, add_train_command


def add_drafter_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `drafter` with its commands."""
    drafter = subparsers.add_parser("drafter", help="make or check a drafter for a target")
    commands = drafter.add_subparsers(required=True, metavar="COMMAND")
    add_check_command(commands)
    add_fit_lens_command(commands)
    add_train_command(commands)
    add_evaluate_command(commands)
