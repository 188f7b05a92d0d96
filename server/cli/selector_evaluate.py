"""`latebranch selector evaluate`: compares networks with baselines and the oracle, on held-out prompts."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.cli.selector_train import read_examples

if TYPE_CHECKING:
    from selector.network.evaluate import CalibrationCurve


def add_evaluate_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `evaluate`."""
    measure = commands.add_parser("evaluate", help="tables of choices on held-out prompts: networks, baselines, oracle")
    measure.add_argument("--examples", type=Path, required=True, help="folder that `collect` made")
    measure.add_argument(
        "--selectors",
        type=Path,
        nargs="+",
        required=True,
        help="files that `train` wrote, with the same seed from these examples",
    )
    measure.add_argument("--plot", type=Path, help="file of a calibration plot to write, if matplotlib is installed")
    measure.set_defaults(handler=_evaluate)


def _evaluate(parsed: argparse.Namespace) -> int:
    from selector.network.evaluate import baselines, calibration, chosen_by, scores, table
    from selector.network.net import SelectorNet
    from selector.network.replay import rows_by

    try:
        examples, _, seconds_RM = read_examples(parsed.examples)
        loaded = {path.stem: SelectorNet.load(path) for path in parsed.selectors}
        held_out = {name: tuple(_prompts(recipe)["test"]) for name, (_, recipe) in loaded.items()}
        if len(set(held_out.values())) > 1:
            raise ValueError("the selectors have different held-out prompts; train them with one seed")
        by_prompt = rows_by(examples.prompts)
        tested = next(iter(held_out.values()))
        missing = [prompt for prompt in tested if prompt not in by_prompt]
        if missing:
            raise ValueError(f"held-out prompts are not among the examples: {', '.join(missing)}")
        test_rows = sorted(row for prompt in tested for row in by_prompt[prompt].tolist())
        train_rows = sorted(set(range(len(examples))) - set(test_rows))
        test, test_s = examples.at(test_rows), seconds_RM[test_rows]
        chosen = baselines(examples.at(train_rows), seconds_RM[train_rows], test, test_s)
        chosen += [chosen_by(name, net, test, test_s) for name, (net, _) in loaded.items()]
    except (ValueError, OSError) as error:
        sys.stderr.write(f"latebranch selector evaluate: {error}\n")
        return 1
    sys.stdout.write(f"{len(test)} examples of {len(tested)} prompts\n\n{table(scores(chosen, test, test_s))}\n\n")
    curves = [calibration(one, test) for one in chosen if one.tokens_RM is not None and one.name != "oracle"]
    sys.stdout.writelines(f"calibration of {one.name}: off by {one.error:.3f} tokens in the mean of its bins\n" for one in curves)
    if parsed.plot is not None:
        _plot(curves, parsed.plot)
    return 0


def _prompts(recipe: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = recipe["prompts"]
    return found


def _plot(curves: "Sequence[CalibrationCurve]", path: Path) -> None:
    """Plot observed over expected tokens, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("matplotlib is not installed: no plot\n")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    for curve in curves:
        axes.plot(curve.expected, curve.observed, marker="o", label=f"{curve.name} ({curve.error:.2f})")
    lowest, highest = axes.get_xlim()
    axes.plot([lowest, highest], [lowest, highest], color="grey", linestyle=":")
    axes.set(xlabel="tokens expected of the chosen tree", ylabel="observed tokens")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
