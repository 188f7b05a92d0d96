"""`latebranch selector train`: trains a network on a folder of examples. A CPU is enough."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.cli.parser import non_negative_int, positive_int

if TYPE_CHECKING:
    from selector.network.examples import Examples
    from selector.network.replay import Array


def add_train_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train`."""
    train = commands.add_parser("train", help="train the network on collected examples")
    train.add_argument("--examples", type=Path, required=True, help="folder that `collect` made")
    train.add_argument("--out", type=Path, required=True, help="safetensors file to write, with its curve (.jsonl) beside it")
    # A plan option that is not given keeps its default (selector.network.train).
    plan = train.add_argument_group("plan", argument_default=argparse.SUPPRESS)
    plan.add_argument("--objective", choices=["tokens", "policy"], help="predict tokens, or choose as the paper's selector does")
    plan.add_argument("--epochs", dest="max_epochs", metavar="EPOCHS", type=positive_int, help="at most")
    plan.add_argument("--patience", type=positive_int, help="epochs without a gain, after which it ends")
    plan.add_argument("--batch", type=positive_int, help="examples of an update")
    plan.add_argument("--rate", type=float, help="learning rate")
    plan.add_argument("--shortfall-weight", type=float, help="objective policy: of the worst examples in the loss")
    plan.add_argument("--seed", type=non_negative_int, help="of the split of the prompts, and of the network")
    train.set_defaults(handler=_train)


def _train(parsed: argparse.Namespace) -> int:
    from selector.network.train import SelectorTrainingPlan, train

    try:
        examples, notes, seconds_RM = read_examples(parsed.examples)
        given = {field.name: getattr(parsed, field.name) for field in fields(SelectorTrainingPlan) if hasattr(parsed, field.name)}
        plan = SelectorTrainingPlan(**given)
        trained = train(examples, seconds_RM, plan)
    except ValueError as error:
        sys.stderr.write(f"latebranch selector train: {error}\n")
        return 1
    recipe = {**trained.recipe, "collected_by": notes["command"], "model": notes["model"]}
    if "head" in notes:
        recipe["head"] = notes["head"]
    trained.net.save(parsed.out, recipe)
    parsed.out.with_suffix(".jsonl").write_text("".join(json.dumps(point) + "\n" for point in trained.curve))
    shown = {name: recipe[name] for name in ("num_examples", "num_epochs", "stop_loss")}
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0


def read_examples(folder: Path) -> "tuple[Examples, dict[str, Any], Array]":
    """Return the examples, their notes and the seconds of each step; raise ValueError if there are no examples."""
    from selector.cost import CostModel
    from selector.network.examples import ExampleFolder
    from selector.network.replay import seconds_of

    examples, notes = ExampleFolder(folder).read()
    coefficients: Any = notes["prices"]
    return examples, notes, seconds_of(examples, CostModel(coefficients["rest"], coefficients["draft"]))
