"""`latebranch selector`: measures, trains and evaluates the network that chooses trees. Each command has its own module."""

import argparse

from server.cli.selector_collect import add_collect_command
from server.cli.selector_evaluate import add_evaluate_command
from server.cli.selector_train import add_train_command


def add_selector_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `selector` with its commands."""
    selector = subparsers.add_parser("selector", help="train or evaluate a network that predicts each tree's tokens")
    commands = selector.add_subparsers(required=True, metavar="COMMAND")
    add_collect_command(commands)
    add_train_command(commands)
    add_evaluate_command(commands)
