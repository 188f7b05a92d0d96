"""The table of trees and rules: it finds the best shape without seeing its prompts, and its intervals are paired."""

import csv
import json
from base64 import b64encode
from functools import cache

import numpy as np
import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import report
from benchmarks.paper.design import DELAYED, FAMILIES, HEAPS, ROOT_BRANCHED, SHAPES
from benchmarks.paper.report import Cell, Chosen, depths_of, rows_of, write_report
from benchmarks.paper.selectors import WAYS, with_choices

RULES = [f"{name}/{family.name}" for family in FAMILIES for name in family.verifiers]
SPECINFER = ("specinfer", "i.i.d.")
BEST_ROOT, BEST_DELAYED = 3, len(ROOT_BRANCHED) + 5
LAST = len(SHAPES) - 1


def lines(gain=0.3, noise=0.2, num_prompts=24, roots=8, sampling=((0.6, 1.0), (1.0, 0.9)), swing=0.0):
    """Return roots that are all of one difficulty or another; one delayed shape brings `gain` more than any other tree."""
    rng = np.random.default_rng(5)
    found = []
    for temperature, top_p in sampling:
        for number in range(num_prompts * roots):
            prompt = number % num_prompts
            base = 2.0 + rng.normal(0.0, 0.5)
            tokens = base + rng.normal(0.0, noise, len(SHAPES) + len(HEAPS))
            tokens[BEST_ROOT] += 0.5
            tokens[BEST_DELAYED] += 0.5 + gain
            sign = rng.choice([-1.0, 1.0])
            tokens[LAST] += swing * sign  # a scalar shows whether it is the best shape
            tokens_of = [*tokens[: len(SHAPES)], *[None] * len(HEAPS)]
            found.append(
                {
                    **{"text": f"code-{prompt}-0-{temperature}-{top_p}", "kind": "code", "point": number},
                    **{"temperature": temperature, "top_p": top_p},
                    "tokens": {rule: [*tokens] if "traversal" in rule else tokens_of for rule in RULES},
                    "seconds": {family.name: [1.5] * len(tokens) for family in FAMILIES},
                    **{"overlaps": [0.8, 0.5], "chances": [1.0, 0.9 if number % 2 else 0.7]},
                    "scalars": [sign, 0.0],
                    "states": b64encode(np.array([sign, 1.0], dtype="<f2").tobytes()).decode(),
                }
            )
    return found


@cache
def chosen(gain=0.3, swing=0.0):
    return with_choices(lines(gain=gain, swing=swing))


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(report, "_NUM_RESAMPLES", 400)


def best(cell: Cell, group: str, is_speed: bool = False) -> Chosen:
    found = cell.best(SPECINFER, group, is_speed)
    assert found is not None
    return found


def test_best_shapes_and_their_difference_are_found():
    cell = Cell(chosen())
    root, delayed = (best(cell, group) for group in ("root-branched", "delayed"))
    assert (root.shape, delayed.shape) == (str(ROOT_BRANCHED[BEST_ROOT]), str(DELAYED[5]))
    middle, low, high = delayed.ahead(root)
    assert low < 0.3 / 2.5 < high
    assert middle == pytest.approx(0.12, abs=0.02)
    assert high - low < 0.05, "roots differ by more than shapes: the interval is paired"
    assert best(cell, "delayed", True).ratio == pytest.approx(delayed.ratio / 1.5)


def test_nothing_is_ahead_where_shapes_are_equal():
    """The mutant: a shape chosen and measured on the same roots would be ahead. The oracle in hindsight is, by its noise."""
    cell = Cell(chosen(gain=0.0))
    root, delayed, oracle = (best(cell, one) for one in ("root-branched", "delayed", "oracle"))
    _, low, high = delayed.ahead(root)
    assert low < 0.0 < high
    assert oracle.ahead(root)[1] > 0.0


def test_intervals_cover_the_difference():
    covered = 0
    for seed in range(30):
        of_run = lines(num_prompts=12, roots=2, sampling=((1.0, 1.0),))
        rng = np.random.default_rng(seed)
        for line in of_run:
            line["tokens"]["specinfer/i.i.d."] = (2.0 + rng.normal(0.0, 0.4, len(SHAPES) + len(HEAPS))).tolist()
        cell = Cell(of_run)
        _, low, high = best(cell, "delayed").ahead(best(cell, "root-branched"))
        covered += low <= 0.0 <= high
    assert covered >= 28


def test_selectors_learn_what_scalars_show():
    """The mutant: scalars of other roots predict nothing."""
    roots = chosen(swing=2.0)
    known = Cell(roots)
    rng = np.random.default_rng(3)
    shuffled = [
        {**line, **{key: other[key] for key in ("scalars", "states")}} for line, other in zip(roots, rng.permutation(roots))
    ]
    unknown = Cell(with_choices(shuffled))
    for is_speed in (False, True):
        counting, linear, network, oracle = (best(known, way, is_speed) for way in (*WAYS, "oracle"))
        assert linear.ahead(counting)[1] > 0.1
        assert network.ahead(counting)[1] > 0.0
        assert oracle.ratio >= linear.ratio
        assert best(unknown, "linear", is_speed).ratio < 1.02 * best(unknown, "counting", is_speed).ratio


def test_counting_learns_from_earlier_roots_alone():
    """One prompt's roots are all like the first: counting knows the best shape from the second root on."""
    roots = lines(gain=0.0, noise=0.0, num_prompts=6, roots=8, sampling=((0.6, 1.0),))
    for line in roots:
        if line["text"].startswith("code-5-"):
            for tokens in line["tokens"].values():
                tokens[LAST] = 9.0
    chosen = [
        one["chosen"]["counting"]["/".join(SPECINFER)][0] for one in with_choices(roots) if one["text"].startswith("code-5-")
    ]
    assert chosen[0] != LAST
    assert chosen[1:] == [LAST] * 7


def test_rules_without_exact_heaps_have_none():
    rows = {(row["rule"], row["drawn"]): row for row in rows_of(Cell(chosen()))}
    assert rows["specinfer", "i.i.d."]["tokens: heap"] == ""
    assert rows["traversal", "i.i.d."]["tokens: heap"] != ""
    assert rows["traversal", "i.i.d."]["tokens: root-branched over traversal's root-branched"].startswith("+0.0 (")


def test_acceptance_by_depth_counts_arriving_paths():
    roots = [{"overlaps": [0.9, 0.8], "chances": [1.0, 0.9]}, {"overlaps": [0.5, 0.2], "chances": [1.0, 0.1]}]
    first, second = depths_of([*roots, {"overlaps": [0.4], "chances": [1.0]}])
    assert first == pytest.approx((1.0, 0.6, 0.6))
    assert second == pytest.approx((1.0 / 3.0, 0.74, 0.5))


def test_report_has_every_cell(tmp_path):
    write_report({"pair": lines(), "no roots": []}, tmp_path)
    cells, summary, depths = (
        list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in ("cells", "summary", "depths")
    )
    assert len(cells) == 2 * 2 * len(RULES)
    assert len(summary) == len(RULES)
    page = [*csv.DictReader((tmp_path / "page.csv").read_text().splitlines())]
    assert len(page) == len(RULES)
    assert {len(row["oracle"].split()) for row in page} == {2}, "tokens, and speed"
    assert {row["depth"] for row in depths} == {"1", "2"}


def test_measured_roots_are_reported_without_models(tmp_path, monkeypatch):
    def measure(*_):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(command, "collect", measure)
    roots = [*lines(sampling=((0.6, 1.0),)), *({**one, "temperature": 0.7} for one in lines(sampling=((0.6, 1.0),)))]
    (tmp_path / "smollm2-head.jsonl").write_text("".join(json.dumps(one) + "\n" for one in roots))
    words = ["paper", "--measured", "--out", str(tmp_path), "--samplings", "0.6,1"]
    monkeypatch.setattr("sys.argv", words)
    command.main()
    summary = [*csv.DictReader((tmp_path / "summary.csv").read_text().splitlines())]
    assert {(row["pair"], row["roots"]) for row in summary} == {("smollm2-head", str(len(roots) // 2))}
