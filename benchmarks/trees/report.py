"""From measurements to the table. Knows JSON lines only; runs anywhere."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DELAYED = ("delayed", "delayed_distinct")


@dataclass(frozen=True)
class Cell:
    """One tree and verifier at one budget and temperature, over all points."""

    budget: int
    temperature: float
    tree: str
    expansion: str
    verifier: str
    tokens: dict[str, list[float]]  # by kind
    judge_ms: float
    step_ms: float
    plain_ms: float

    @property
    def all_tokens(self) -> list[float]:
        """Every point's tokens."""
        return [value for of_kind in self.tokens.values() for value in of_kind]

    @property
    def efficiency(self) -> float:
        """Block efficiency: tokens a step, every kind weighing the same."""
        return statistics.mean(statistics.mean(of_kind) for of_kind in self.tokens.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of a step that costs what such a tree's growth, pass and verification cost."""
        return self.efficiency / (self.step_ms + self.judge_ms) * 1000.0

    @property
    def speed_up(self) -> float:
        """The same over plain decoding's, timed in the same run."""
        return self.tokens_per_s * self.plain_ms / 1000.0

    @property
    def judge_share(self) -> float:
        """Part of the step that verification takes."""
        return self.judge_ms / (self.step_ms + self.judge_ms)


def report(path: Path) -> str:
    """Return a Markdown table for each budget and temperature, best first; of delayed trees the best shape.

    Speeds of trees that were never timed are nan.
    """
    cells = _cells([json.loads(line) for line in path.read_text().splitlines()])
    parts = []
    for temperature, budget in sorted({(cell.temperature, cell.budget) for cell in cells}):
        here = [cell for cell in cells if (cell.temperature, cell.budget) == (temperature, budget)]
        parts.append(f"### Temperature {temperature:g}, {budget} nodes\n\n" + _table(_best_shapes(here)))
    return "\n\n".join(parts)


def _cells(lines: Sequence[dict[str, Any]]) -> list[Cell]:
    steps = _medians((_cost_key(line), line["draft_s"] + line["verify_s"]) for line in _of("time", lines))
    tokens: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    judged: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for line in _of("tokens", lines):
        key = (line["budget"], line["temperature"], line["expansion"], line["verifier"])
        tokens[key][line["kind"]].append(line["tokens"])
        judged[key].append(line["judge_s"])
    return [
        Cell(
            *(budget, temperature, _tree(expansion), expansion, verifier, dict(by_kind)),
            judge_ms=1000.0 * statistics.median(judged[budget, temperature, expansion, verifier]),
            step_ms=1000.0 * steps.get(_step_key(temperature, expansion, verifier), math.nan),
            plain_ms=1000.0 * steps.get(_step_key(temperature, "plain", ""), math.nan),
        )
        for (budget, temperature, expansion, verifier), by_kind in tokens.items()
    ]


def _cost_key(line: dict[str, Any]) -> tuple[bool, bool, str]:
    return _step_key(line["temperature"], line["expansion"], line.get("verifier", ""))


def _step_key(temperature: float, expansion: str, verifier: str) -> tuple[bool, bool, str]:
    """Return what a step's cost depends on: greedy rows need no distributions, coupled ones make noise."""
    return temperature == 0, verifier == "coupled", expansion


def _of(kind: str, lines: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return (line for line in lines if line["type"] == kind)


def _medians(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    values: dict[Any, list[float]] = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return {key: statistics.median(of_key) for key, of_key in values.items()}


def _tree(expansion: str) -> str:
    name = expansion.split(".")[0]
    if name.isdecimal():
        return "chain" if expansion.split(".")[1] == "1" else "delayed"
    return name


def _best_shapes(cells: Sequence[Cell]) -> list[Cell]:
    best: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        key = (cell.tree, cell.verifier)
        if key not in best or cell.efficiency > best[key].efficiency:
            best[key] = cell
    return sorted(best.values(), key=lambda cell: -cell.efficiency)


def _table(cells: Sequence[Cell]) -> str:
    kinds = sorted({kind for cell in cells for kind in cell.tokens})
    lines = [
        f"| tree | verifier | {' | '.join(kinds)} | all | verification ms | of the step | tokens/s | over plain |",
        "|---|---|" + "---|" * (len(kinds) + 5),
    ]
    for cell in cells:
        by_kind = " | ".join(_mean(cell.tokens.get(kind, [])) for kind in kinds)
        error = _standard_error(cell)
        lines.append(
            f"| {_label(cell)} | {cell.verifier} | {by_kind} | **{cell.efficiency:.2f}** ± {error:.2f} | {cell.judge_ms:.1f} "
            f"| {cell.judge_share:.1%} | {cell.tokens_per_s:.1f} | {cell.speed_up:.2f} |"
        )
    return "\n".join(lines)


def _label(cell: Cell) -> str:
    return f"{cell.tree} {cell.expansion.removeprefix('delayed_distinct.')}" if cell.tree in (*_DELAYED, "chain") else cell.tree


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}" if values else "–"


def _standard_error(cell: Cell) -> float:
    """Return the standard error of the mean over kinds, points taken as independent."""
    parts = [statistics.variance(values) / len(values) for values in cell.tokens.values() if len(values) > 1]
    return float(sum(parts) ** 0.5 / len(cell.tokens))
