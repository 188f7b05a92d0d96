"""`latebranch selector`: measuring, training and judging the network that chooses trees. Each command is a module of its own."""

import argparse

from server.cli.selector_collect import add_collect_command
from server.cli.selector_evaluate import add_evaluate_command
from server.cli.selector_train import add_train_command


def add_selector_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `selector` with its commands."""
    selector = subparsers.add_parser("selector", help="make or judge a network that expects what each tree brings")
    commands = selector.add_subparsers(required=True, metavar="COMMAND")
    add_collect_command(commands)
    add_train_command(commands)
    add_evaluate_command(commands)
