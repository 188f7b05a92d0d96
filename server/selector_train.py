"""`latebranch selector train`: from a folder of examples to a network, on a processor, in minutes."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selector.examples import Examples
    from selector.replay import Array


def add_train_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train`."""
    train = commands.add_parser("train", help="train the network on collected examples")
    train.add_argument("--examples", type=Path, required=True, help="folder that `collect` made")
    train.add_argument("--out", type=Path, required=True, help="safetensors file to write, with its curve (.jsonl) beside it")
    train.add_argument(
        "--objective",
        choices=["tokens", "policy"],
        default="tokens",
        help="expect tokens, or choose as the paper's selector does",
    )
    train.add_argument("--epochs", type=int, default=200, help="at most")
    train.add_argument("--patience", type=int, default=30, help="epochs without a gain, after which it ends")
    train.add_argument("--batch", type=int, default=32)
    train.add_argument("--rate", type=float, default=3e-4)
    train.add_argument("--shortfall-weight", type=float, default=1.0, help="objective policy: of the worst examples in the loss")
    train.add_argument("--seed", type=int, default=1)
    train.set_defaults(handler=_train)


def _train(parsed: argparse.Namespace) -> int:
    from selector.train import TrainingPlan, train

    try:
        examples, notes, seconds_RM = read_examples(parsed.examples)
        plan = TrainingPlan(
            objective=parsed.objective,
            rate=parsed.rate,
            batch=parsed.batch,
            max_epochs=parsed.epochs,
            patience=parsed.patience,
            shortfall_weight=parsed.shortfall_weight,
            seed=parsed.seed,
        )
        trained = train(examples, seconds_RM, plan)
    except ValueError as error:
        sys.stderr.write(f"latebranch selector train: {error}\n")
        return 1
    recipe = {**trained.recipe, "collected_by": notes["command"], "model": notes["model"]}
    trained.net.save(parsed.out, recipe)
    parsed.out.with_suffix(".jsonl").write_text("".join(json.dumps(point) + "\n" for point in trained.curve))
    shown = {name: recipe[name] for name in ("num_examples", "num_epochs", "stop_loss")}
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0


def read_examples(folder: Path) -> "tuple[Examples, dict[str, Any], Array]":
    """Return the examples, the notes beside them and the seconds of each step; raise ValueError if there are none."""
    from selector.cost import CostModel
    from selector.examples import ExampleFolder
    from selector.replay import seconds_of

    examples, notes = ExampleFolder(folder).read()
    prices: Any = notes["prices"]
    return examples, notes, seconds_of(examples, CostModel(prices["rest"], prices["draft"]))
