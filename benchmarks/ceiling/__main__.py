"""The command line: prints the table. Shape key: R roots, M entries, C prompts, B resamples."""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ceiling.ways import predictions
from benchmarks.markdown import table
from benchmarks.paper.collect import measured_engine
from selector.network.examples import ExampleFolder, Examples
from selector.network.replay import Array, best_places, rows_by, seconds_of
from server.settings import load_settings

_NUM_RESAMPLES = 1000


def rows_of(examples: Examples, seconds_RM: Array) -> list[dict[str, str]]:
    """Return a row for each rule and temperature: counting over plain decoding, then each way over counting, in percent."""
    rows = []
    for rule, of_rule in rows_by(examples.rules).items():
        part, part_s = examples.at(of_rule), seconds_RM[of_rule]
        found = {way: best_places(tokens_RM, part_s) for way, tokens_RM in predictions(part, part_s).items()}
        for temperature in np.unique(part.temperature_R).tolist():
            of_temperature = np.flatnonzero(part.temperature_R == np.float32(temperature))
            rates = {
                way: _rates(part, part_s, places_R, of_temperature)
                for way, places_R in ({"plain": np.zeros(len(part), dtype=np.int64)} | found).items()
            }
            cells = {"over plain": f"{rates['counting'][0] / rates['plain'][0]:.3f}"}
            for way in found:
                if way != "counting":
                    low, high = np.percentile(rates[way][1:] / rates["counting"][1:], [2.5, 97.5])
                    cells[way] = f"{rates[way][0] / rates['counting'][0]:.3f} ({low:.3f}–{high:.3f})"
            rows.append({"rule": rule, "temperature": f"{temperature:g}", "roots": str(len(of_temperature)), **cells})
    return rows


def _rates(examples: Examples, seconds_RM: Array, places_R: NDArray[np.int64], rows: NDArray[np.int64]) -> Array:
    """Return tokens a second over these roots, for all prompts and for each resample, [1 + B]."""
    names = sorted(set(examples.prompts))
    prompt_R = np.array([names.index(examples.prompts[row]) for row in rows.tolist()])
    counts = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1.0 / len(names)), _NUM_RESAMPLES)
    weights = np.concatenate([np.ones((1, len(names))), counts])
    sums = [np.bincount(prompt_R, one[rows, places_R[rows]], len(names)) for one in (examples.tokens_RM, seconds_RM)]
    return np.asarray((weights @ sums[0]) / (weights @ sums[1]))


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling", description="what features of a root add to counting")
    parser.add_argument("examples", type=Path, nargs="+", help="folders that `latebranch selector collect` made")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings: costs of steps here")
    args = parser.parse_args()
    costs = measured_engine(load_settings(args.config, {"policy": "adaptive"}).to_tool_config())[1]
    rows: list[dict[str, str]] = []
    for folder in args.examples:
        examples, _ = ExampleFolder(folder).read()
        rows += rows_of(examples, seconds_of(examples, costs))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
