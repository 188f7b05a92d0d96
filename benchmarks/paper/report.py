"""From roots to tables. A shape is chosen on two thirds of the prompts and measured on the rest, each third in turn.

Intervals are percentiles of a bootstrap over prompts, paired: both sides of a difference have the same roots. Shape key: R roots,
M shapes, C prompts, B resamples. A resample chooses its shapes anew, but selectors are not trained anew.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.design import DELAYED, FAMILIES, HEAPS, MOST_NODES, ROOT_BRANCHED, SHAPES
from benchmarks.paper.figure import draw_depths
from benchmarks.paper.selectors import WAYS, prompt_of, with_choices
from benchmarks.roots import folds, most_over_all

Array = NDArray[np.float64]

_GROUPS: dict[str, Sequence[int]] = {
    "root-branched": range(len(ROOT_BRANCHED)),
    "delayed": range(len(ROOT_BRANCHED), len(ROOT_BRANCHED) + len(DELAYED)),
    "heap": range(len(SHAPES), len(SHAPES) + len(HEAPS)),
    **{way: range(len(SHAPES)) for way in WAYS},
    "oracle": range(len(SHAPES)),
    "branched": [place for place, one in enumerate(ROOT_BRANCHED) if one.branches > 1 and one.num_draft_tokens == MOST_NODES],
}
_RULES = tuple((name, family.name) for family in FAMILIES for name in family.verifiers)
_REFERENCE = ("traversal", "i.i.d.")
_CHOSEN = ("delayed", "heap", *WAYS, "oracle")
_NUM_RESAMPLES = 2000
_DEPTHS_HEAD = ("pair", "temperature", "top_p", "depth", "chance", "accepted there", "overlap of all drafts")


@dataclass(frozen=True)
class Chosen:
    """Tokens over costs with the chosen shapes, for all roots and for each resample, and the shape if it is one."""

    ratio: float
    ratio_B: Array
    shape: str = ""

    def ahead(self, other: "Chosen") -> tuple[float, float, float]:
        """Return the ratio of this choice over another, less 1, and its 95 % interval."""
        low, high = np.percentile(self.ratio_B / other.ratio_B, [2.5, 97.5]) - 1.0
        return self.ratio / other.ratio - 1.0, float(low), float(high)


class Cell:
    """The roots of one setting of sampling, or of several: a shape is then chosen for each."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.num_roots = len(lines)
        self._lines = lines
        self._settings = np.array([(line["temperature"], line["top_p"]) for line in lines])
        prompts = [prompt_of(line) for line in lines]
        self._names = sorted(set(prompts))
        self._prompt_R = np.array([self._names.index(one) for one in prompts])
        num_prompts = len(self._names)
        counts = np.random.default_rng(0).multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), _NUM_RESAMPLES)
        self._weights_BC = np.concatenate([np.ones((1, num_prompts)), counts])  # the first are all roots
        self._known: dict[tuple[tuple[str, str], str, bool], Chosen | None] = {}

    def best(self, rule: tuple[str, str], group: str, is_speed: bool) -> Chosen | None:
        """Return the result of a group's best shape, None if the rule is not exact on the group's trees.

        Costs are steps, or their seconds over those of plain decoding.
        """
        key = (rule, group, is_speed)
        if key not in self._known:
            self._known[key] = self._best(rule, group, is_speed)
        return self._known[key]

    def _best(self, rule: tuple[str, str], group: str, is_speed: bool) -> Chosen | None:
        columns = [*_GROUPS[group]]
        tokens_RM = np.array([line["tokens"]["/".join(rule)] for line in self._lines], dtype=np.float64)[:, columns]
        if np.isnan(tokens_RM).any():
            return None
        seconds_RM = np.array([line["seconds"][rule[1]] for line in self._lines])[:, columns]
        cost_RM = seconds_RM if is_speed else np.ones_like(tokens_RM)
        sums_2B = np.zeros((2, len(self._weights_BC)))
        shapes = set()
        for setting in np.unique(self._settings, axis=0):
            rows = np.flatnonzero((self._settings == setting).all(1))
            tokens, cost = tokens_RM[rows], cost_RM[rows]
            if group in WAYS or group in _UNFITTED:
                if group in WAYS:
                    places = [self._lines[row]["chosen"][group]["/".join(rule)][is_speed] for row in rows.tolist()]
                    of_roots = tokens[np.arange(len(rows)), places], cost[np.arange(len(rows)), places]
                else:
                    of_roots = _UNFITTED[group](tokens, cost)
                sums_2B += [self._weights_BC @ self._by_prompt(rows, one[:, None])[:, 0] for one in of_roots]
            else:
                tokens_CM, cost_CM = (self._by_prompt(rows, one) for one in (tokens, cost))
                sums_2B += self._cross_fitted(tokens_CM, cost_CM)
                shapes.add(str([*SHAPES, *HEAPS][columns[int((tokens_CM.sum(0) / cost_CM.sum(0)).argmax())]]))
        ratio_B = sums_2B[0] / sums_2B[1]
        return Chosen(float(ratio_B[0]), ratio_B[1:], shapes.pop() if len(shapes) == 1 else "")

    def _by_prompt(self, rows: NDArray[np.int64], values_RM: Array) -> Array:
        sums_CM = np.zeros((len(self._names), values_RM.shape[1]))
        np.add.at(sums_CM, self._prompt_R[rows], values_RM)
        return sums_CM

    def _cross_fitted(self, tokens_CM: Array, cost_CM: Array) -> Array:
        """Return tokens and costs of each resample with the shapes that are best for its other prompts."""
        sums_2B = np.zeros((2, len(self._weights_BC)))
        rows_B = np.arange(len(self._weights_BC))
        for train, tested in folds(self._names):
            known = train if len(train) else tested
            tokens_BM, cost_BM = (self._weights_BC[:, known] @ one[known] for one in (tokens_CM, cost_CM))
            places_B = (tokens_BM / np.maximum(cost_BM, 1e-9)).argmax(1)
            sums_2B += [(self._weights_BC[:, tested] @ one[tested])[rows_B, places_B] for one in (tokens_CM, cost_CM)]
        return sums_2B


def _in_hindsight(tokens_RM: Array, cost_RM: Array) -> tuple[Array, Array]:
    """Return each root's tokens and costs with the tree that is best there: more than any choice before drafting has."""
    rows, places = np.arange(len(tokens_RM)), most_over_all(tokens_RM, cost_RM)
    return tokens_RM[rows, places], cost_RM[rows, places]


def _mean(tokens_RM: Array, cost_RM: Array) -> tuple[Array, Array]:
    """Return each root's mean over shapes: the same trees for every rule."""
    return tokens_RM.mean(1), cost_RM.mean(1)


_UNFITTED = {"oracle": _in_hindsight, "branched": _mean}


_SHORT = ("delayed over root-branched", "linear over traversal's root-branched", "oracle over traversal's root-branched")


def rows_of(cell: Cell, is_short: bool = False) -> Iterator[dict[str, str]]:
    """Yield a row for each rule: tokens a step and speed over plain decoding of each group's best shape, and what is ahead."""
    for rule in _RULES:
        row = {"rule": rule[0], "drawn": rule[1], "roots": str(cell.num_roots)}
        for is_speed, measure in ((False, "tokens"), (True, "speed")):
            found = {group: cell.best(rule, group, is_speed) for group in _GROUPS}
            row |= {f"{measure}: {group}": _figure(best) for group, best in found.items()}
            differences = {
                "branched over traversal's": (found["branched"], cell.best(_REFERENCE, "branched", is_speed)),
                **{f"{group} over root-branched": (found[group], found["root-branched"]) for group in _CHOSEN},
                **{
                    f"{group} over traversal's root-branched": (found[group], cell.best(_REFERENCE, "root-branched", is_speed))
                    for group in ("root-branched", *_CHOSEN)
                },
                **{f"{way} over counting": (found[way], found["counting"]) for way in ("linear", "network")},
            }
            row |= {f"{measure}: {name}": _ahead(*both) for name, both in differences.items() if name in _SHORT or not is_short}
        yield row


def page_rows(cells: Sequence[Cell]) -> Iterator[dict[str, str]]:
    """Yield a short row for each rule: tokens a step, then speed over plain decoding, with a value for each pair in a figure.

    Selectors have their speed alone.
    """
    for rule in _RULES:
        row = {"rule": rule[0] if rule[1] != "distinct" else " ".join(rule)}
        for group in ("root-branched", "delayed", "heap"):
            row[group] = " ".join(_of_pairs(cells, rule, group, is_speed) for is_speed in (False, True)).strip()
        row[", ".join(WAYS)] = " ".join(_of_pairs(cells, rule, way, is_speed=True) for way in WAYS)
        row["oracle"] = " ".join(_of_pairs(cells, rule, "oracle", is_speed) for is_speed in (False, True))
        yield row


def _of_pairs(cells: Sequence[Cell], rule: tuple[str, str], group: str, is_speed: bool) -> str:
    found = (cell.best(rule, group, is_speed) for cell in cells)
    return "/".join(f"{one.ratio:.2f}" for one in found if one is not None)


def _figure(best: Chosen | None) -> str:
    return "" if best is None else f"{best.ratio:.2f} {best.shape}".strip()


def _ahead(one: Chosen | None, other: Chosen | None) -> str:
    return "" if one is None or other is None else percent(one.ahead(other))


def percent(ahead: tuple[float, float, float]) -> str:
    """Return a difference and its interval in percent."""
    middle, low, high = (100.0 * one for one in ahead)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


def depths_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """Yield for each depth the chance to reach it, acceptance there, and the overlap of the models' distributions on all drafts.

    Acceptance is the overlap on the paths that reach the depth. A chain that ended early has no deeper levels.
    """
    for depth in range(max(len(line["overlaps"]) for line in lines)):
        known = [(line["chances"][depth], line["overlaps"][depth]) for line in lines if depth < len(line["overlaps"])]
        chance, overlap = np.array(known).T
        yield float(chance.sum() / len(lines)), float(chance @ overlap / max(chance.sum(), 1e-9)), float(overlap.mean())


def write_report(roots: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> None:
    """Write tables into a folder: cells.csv by sampling and kind, summary.csv and page.csv of all samplings, and the depths."""
    cells, summary, depths, wholes = [], [], [], []
    for pair, lines in roots.items():
        if not lines:
            continue
        lines = with_choices(lines)
        whole = Cell(lines)
        wholes.append(whole)
        summary += [{"pair": pair, **row} for row in rows_of(whole)]
        for temperature, top_p in sorted({(line["temperature"], line["top_p"]) for line in lines}):
            of_setting = [line for line in lines if (line["temperature"], line["top_p"]) == (temperature, top_p)]
            setting = {"pair": pair, "temperature": f"{temperature:g}", "top_p": f"{top_p:g}"}
            for kind in ("all", *sorted({line["kind"] for line in of_setting})):
                of_kind = [line for line in of_setting if kind in ("all", line["kind"])]
                cells += [{**setting, "kind": kind, **row} for row in rows_of(Cell(of_kind), is_short=True)]
            depths += [
                dict(zip(_DEPTHS_HEAD, (*setting.values(), str(depth), *(f"{one:.3f}" for one in values)), strict=True))
                for depth, values in enumerate(depths_of(of_setting), 1)
            ]
    tables = {"cells.csv": cells, "summary.csv": summary, "page.csv": [*page_rows(wholes)], "depths.csv": depths}
    for name, rows in tables.items():
        _write(out / name, rows)
    draw_depths(depths, out / "depths.svg")


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    with path.open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
