"""Measures the value of each mechanism of the adaptive policy on the simulated machine of tests/selector/machine.py.

python -m benchmarks.policy_ablation [--only NAME ...]

Time is computed and randomness is seeded, so every run prints the same. Each row switches one mechanism off. The columns are
ratios of tokens a second. Delayed trees, over the best fixed choice: mean and worst of 36 settings, after changes of the text
(mean of four), unlike sequences. Noise-aware trees, over the best least chance (mean of nine). A useless drafter, over plain
decoding. A profile that is wrong by a factor of 100, over the best fixed choice. A drafter 300 times as slow as in its profile,
over plain decoding.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.markdown import table
from engine.core.tree import GrowthCosts
from selector import acceptance, policy, probes, search
from selector.cost import CostModel
from tests.selector import scores


def _mechanisms() -> dict[str, Callable[[], Any]]:
    """Return the patch that switches each mechanism off, by name."""
    grow = search.Search.growth_costs

    def without_node_costs(self: search.Search, chosen: search.Step, num_sharing: int) -> GrowthCosts:
        return replace(grow(self, chosen, num_sharing), nodes=())

    def without_growth_costs(*_: object) -> GrowthCosts:
        return GrowthCosts()

    def ignores(*_: object) -> None:
        return

    def nothing_due(*_: object) -> tuple[list[int], int]:
        return [], policy.REUSED_STEPS

    def same_for_all(self: search.Search, start: search.Step) -> search.Step:
        steps = [self.with_tree(start, range(len(start.places)), entry) for entry in self._menu.drafting]
        return max([start, *steps], key=lambda step: step.rate)

    def keeps_all(_: search.Search, start: search.Step) -> search.Step:
        return start

    return {
        "as it is": lambda: patch.object(policy, "REUSED_STEPS", policy.REUSED_STEPS),
        "no reuse of a choice": lambda: patch.object(policy, "REUSED_STEPS", 1),
        "reuse for twice as long": lambda: patch.object(policy, "REUSED_STEPS", 2 * policy.REUSED_STEPS),
        "no margin before drafting": lambda: patch.object(policy, "_MARGIN", 1.0),
        "no probes": lambda: patch.object(probes.Probes, "due", nothing_due),
        "no correction of costs": lambda: patch.object(CostModel, "observe", ignores),
        "no cost of each node": lambda: patch.object(search.Search, "growth_costs", without_node_costs),
        "no ending of trees": lambda: patch.object(search.Search, "growth_costs", without_growth_costs),
        "all sequences or none": lambda: patch.multiple(search.Search, _best_alike=same_for_all, _best_of_fewer=keeps_all),
        "a kind's acceptance alone": lambda: patch.object(acceptance, "OWN_DECAY", 0.0),
    }


@contextmanager
def _without(name: str) -> Iterator[None]:
    with _mechanisms()[name]():
        yield


def main() -> None:
    """Print a row for each mechanism."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_ablation", description="the value of each mechanism")
    parser.add_argument("--only", nargs="+", choices=[*_mechanisms()], default=[*_mechanisms()], metavar="NAME")
    args = parser.parse_args()
    heads = ["without", "delayed", "worst", "changes", "unlike", "noise-aware", "useless", "wrong profile", "dear drafter"]
    rows = []
    for name in args.only:
        with _without(name):
            delayed = scores.near_best_fixed()
            figures = [
                mean(delayed.values()),
                min(delayed.values()),
                mean(scores.after_changes().values()),
                scores.unlike_sequences(),
                mean(scores.noise_aware().values()),
                scores.useless_drafter(),
                min(scores.wrong_profile().values()),
                scores.dear_drafter(),
            ]
        rows.append([name, *(f"{one:.3f}" for one in figures)])
    print(table(heads, rows))


if __name__ == "__main__":
    main()
