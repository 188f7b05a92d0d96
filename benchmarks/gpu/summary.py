"""A summary of figures as Markdown."""

from typing import Any

from benchmarks.gpu.figures import Figures
from benchmarks.markdown import table


def summary(figures: Figures, machine: str) -> str:
    """Return headings and tables."""
    parts = [f"# GPU: {machine}", *_exactness(figures)]
    if timed := _timed(figures, "pass"):
        parts += ["## A pass, ms and times as long as by gathering", table(_TIMED + _ways(timed), map(_timed_row, timed))]
    if timed := _timed(figures, "attention"):
        parts += ["## A layer's attention, ms of ten", table(_TIMED[1:] + _ways(timed), (_timed_row(one)[1:] for one in timed))]
    for part in ("kernel", "texts", "pass", "attention"):
        parts += [f"{part}: left out, {one['left_out']}" for one in figures.of(part) if "left_out" in one]
    return "\n\n".join(parts) + "\n"


def _timed(figures: Figures, part: str) -> list[dict[str, Any]]:
    return [one for one in figures.of(part) if "left_out" not in one]


_TIMED = ["model", "rows", "context", "nodes"]


def _ways(figures: list[dict[str, Any]]) -> list[str]:
    return [name for name, fact in figures[0].items() if isinstance(fact, dict)]


def _timed_row(figure: dict[str, Any]) -> list[str]:
    facts = [str(figure.get(name, "")) for name in _TIMED]
    return facts + [_cell(figure[way]) for way in _ways([figure])]


def _cell(times: dict[str, Any]) -> str:
    low, high = times["ratio_quartiles"]
    return f"{times['median_ms']:.3f} ({times['ratio']:.2f}, {low:.2f} to {high:.2f})"


def _exactness(figures: Figures) -> list[str]:
    compared = [one for one in figures.of("kernel") if "error" in one]
    texts = [one for one in figures.of("texts") if "way" in one]
    parts = []
    if compared:
        worst = {one["dtype"]: max(other["error"] for other in compared if other["dtype"] == one["dtype"]) for one in compared}
        rows = ([dtype, f"{error:.1e}"] for dtype, error in worst.items())
        parts += ["## The kernel beside the reference, largest relative error", table(["format", "error"], rows)]
    if texts:
        names = ["model", "dtype", "way", "texts", "different", "greedy_tokens", "near_ties", "wrong", "accepted"]
        parts += ["## Texts beside plain decoding's", table(names, ([str(one[name]) for name in names] for one in texts))]
    return parts
