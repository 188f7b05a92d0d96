"""From measurements to tables. Knows JSON lines only; runs anywhere.

A ratio is one of ours over another contender in tokens a second, in the same block of the same round. A measurement during which
others used the processors is left out, and with it the ratios it would be part of.
"""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.markdown import table

OURS = "latebranch"
REFERENCE = "transformers.float32"  # whose greedy texts others' are compared with
Line = Mapping[str, Any]
Rounds = Mapping[int, Line]  # a contender's lines in one section, by round
Section = tuple[int, float, str]  # concurrency, temperature, kind
_FIGURES = ("tokens/s", "first token, ms", "ms a token", "peak, GiB")


def report(path: Path, max_foreign_cpus: float, ours: Sequence[str] = (), is_short: bool = False) -> str:
    """Return a Markdown table for each concurrency, temperature and kind; `ours` are the columns of ratios, by default all.

    The short one has two tables for all of them: ratios alone, and what is not a ratio by contender.
    """
    lines, runs, quiet = _read(path, max_foreign_cpus)
    parts = [_preface(lines, len(runs), len(quiet), max_foreign_cpus)]
    sections = sorted(_sections(quiet).items())
    if is_short:
        return "\n\n".join([*parts, table(*_ratios_table(sections, ours)), _medians_table(sections)])
    for (concurrency, temperature, kind), contenders in sections:
        columns = _columns(contenders, ours)
        heading = f"### {concurrency} at a time, temperature {temperature:g}, {kind}"
        parts.append(f"{heading}\n\n{_table(contenders, columns)}")
    return "\n\n".join(parts)


def write_ratios(path: Path, max_foreign_cpus: float, ours: Sequence[str], to: TextIO) -> None:
    """Write the short report's ratios as CSV, with a column that names the model."""
    lines, _, quiet = _read(path, max_foreign_cpus)
    head, rows = _ratios_table(sorted(_sections(quiet).items()), ours)
    model = next(line["model"] for line in lines if line["type"] == "header")
    writer = csv.writer(to, lineterminator="\n")
    writer.writerows([["model", *head], *([model, *row] for row in rows)])


def _read(path: Path, max_foreign_cpus: float) -> tuple[list[Line], list[Line], list[Line]]:
    """Return all lines of a file, those of measurements, and those of measurements that others did not disturb."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [line for line in lines if line["type"] == "run"]
    return lines, runs, [line for line in runs if (line["foreign_cpus"] or 0.0) <= max_foreign_cpus]


def _columns(contenders: Iterable[str], ours: Sequence[str]) -> list[str]:
    """Return those of ours whose ratios are told."""
    return [name for name in sorted(contenders) if name.startswith(OURS) and (not ours or name in ours)]


def ratios(one: Rounds, other: Rounds) -> list[float]:
    """Return the ratios in tokens a second, in rounds that both have."""
    return [one[number]["tokens_per_s"] / other[number]["tokens_per_s"] for number in sorted(one.keys() & other.keys())]


def _sections(runs: Iterable[Line]) -> dict[Section, dict[str, dict[int, Line]]]:
    """Return the lines by section, contender and round."""
    found: dict[Section, dict[str, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for line in runs:
        found[line["concurrency"], line["temperature"], line["kind"]][line["contender"]][line["round"]] = line
    return found


def _preface(lines: Sequence[Line], num_runs: int, num_quiet: int, max_foreign_cpus: float) -> str:
    headers = [line for line in lines if line["type"] == "header"]
    names = ("model", "draft", "machine", "threads", "num_tokens", "command")
    told = [f"{name}: {', '.join(dict.fromkeys(str(header.get(name)) for header in headers))}." for name in names]
    told += dict.fromkeys(f"Left out: {why}." for header in headers for why in header.get("left_out", ()))
    told += [f"Failed: {line['contender']}: {_reason(line)}." for line in lines if line["type"] == "failed"]
    told.append(
        f"{num_runs - num_quiet} of {num_runs} measurements left out: others used more than {max_foreign_cpus:g} processors."
    )
    return "\n".join(told)


def _reason(line: Line) -> str:
    """Return the end of what went wrong: behind a traceback or a log, the error itself."""
    return str(line["reason"].strip().splitlines()[-1])


def _table(contenders: Mapping[str, Rounds], columns: Sequence[str]) -> str:
    heads = ["contender", *_FIGURES, "as generate", "rounds"]
    heads += [f"{name.removeprefix(OURS + '.')} over it" for name in columns]
    rows = [_row(name, contenders, columns) for name in sorted(contenders)]
    return table(heads, rows)


def _ratios_table(
    sections: Sequence[tuple[Section, Mapping[str, Rounds]]], ours: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of one table for all sections; of two of ours only the first by name is over the other."""
    columns = _columns(dict.fromkeys(name for _, contenders in sections for name in contenders), ours)
    rows = []
    for (concurrency, temperature, kind), contenders in sections:
        for peer, rounds in sorted(contenders.items()):
            told = [column for column in columns if column < peer or not peer.startswith(OURS)]
            cells = [_ratio_cell(ratios(contenders.get(column, {}), rounds)) if column in told else "" for column in columns]
            if told:
                rows.append([str(concurrency), f"{temperature:g}", kind, peer, *cells])
    return ["at a time", "T", "kind", "peer", *(f"{name.removeprefix(OURS + '.')} over it" for name in columns)], rows


def _medians_table(sections: Sequence[tuple[Section, Mapping[str, Rounds]]]) -> str:
    """Return seconds and bytes by concurrency and contender: medians over blocks of all kinds, temperatures and rounds."""
    together: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for (concurrency, _, _), contenders in sections:
        for name, rounds in contenders.items():
            together[concurrency, name] += rounds.values()
    rows = [
        [str(concurrency), name, *_figures(lines), str(len(lines))] for (concurrency, name), lines in sorted(together.items())
    ]
    return table(["at a time", "contender", *_FIGURES, "blocks"], rows)


def _row(name: str, contenders: Mapping[str, Rounds], columns: Sequence[str]) -> list[str]:
    rounds = contenders[name]
    against = [_ratio_cell(ratios(contenders[column], rounds)) if column != name else "" for column in columns]
    return [name, *_figures([*rounds.values()]), _equal_cell(rounds, contenders.get(REFERENCE, {})), str(len(rounds)), *against]


def _figures(lines: Sequence[Line]) -> list[str]:
    """Return what `_FIGURES` name."""
    tokens_per_s, first_s, token_s = (
        float(statistics.median(line[figure] for line in lines)) for figure in ("tokens_per_s", "first_s", "token_s")
    )
    peak_gib = max(line["peak_bytes"] for line in lines) / 2**30
    return [f"{tokens_per_s:.1f}", f"{first_s * 1e3:.0f}", f"{token_s * 1e3:.1f}", f"{peak_gib:.1f}"]


def _ratio_cell(values: Sequence[float]) -> str:
    """Return the median over rounds, the lowest and the highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–"


def _equal_cell(rounds: Rounds, reference: Rounds) -> str:
    """Return how many greedy texts are the reference's, of how many."""
    pairs = [
        (text, true)
        for number in rounds.keys() & reference.keys()
        if rounds[number]["token_ids"] and reference[number]["token_ids"]
        for text, true in zip(rounds[number]["token_ids"], reference[number]["token_ids"], strict=True)
    ]
    return f"{sum(text == true for text, true in pairs)} of {len(pairs)}" if pairs else "–"
