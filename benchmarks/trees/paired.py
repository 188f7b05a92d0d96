"""Two contenders on the very same points: the mean difference of their tokens a step, with its standard error."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_Points = dict[tuple[int, str], float]  # tokens by budget and point


def differences(path: Path, first: str, second: str, temperature: float | None = None) -> str:
    """Return a line a budget for contenders written `tree/verifier`, a delayed tree by its shape; None: temperatures above 0."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [one for one in lines if one["type"] == "tokens" and _is_at(one["temperature"], temperature)]
    one, other = _tokens(lines, first), _tokens(lines, second)
    budgets = sorted({budget for budget, _ in one.keys() & other.keys()})
    if not budgets:
        raise SystemExit(f"no point has both {first} and {second}")
    return "\n".join(_line(budget, first, second, _gaps(budget, one, other)) for budget in budgets)


def _tokens(lines: Iterable[dict[str, Any]], contender: str) -> _Points:
    tree, _, verifier = contender.partition("/")
    return {
        (line["budget"], line["point"]): line["tokens"]
        for line in lines
        if line["verifier"] == verifier and _is(tree, line["expansion"])
    }


def _is_at(temperature: float, wanted: float | None) -> bool:
    return temperature > 0 if wanted is None else temperature == wanted


def _is(tree: str, expansion: str) -> bool:
    return expansion == tree or (expansion.startswith(f"{tree}.") and not tree[0].isdigit())


def _gaps(budget: int, one: _Points, other: _Points) -> list[float]:
    return [one[key] - other[key] for key in one.keys() & other.keys() if key[0] == budget]


def _line(budget: int, first: str, second: str, gaps: Sequence[float]) -> str:
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    return (
        f"{budget:>3} nodes: {first} - {second} = {statistics.mean(gaps):+.2f} ± {error:.2f} tokens a step ({len(gaps)} points)"
    )
