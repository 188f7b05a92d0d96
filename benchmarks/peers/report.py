"""From measurements to tables. Knows JSON lines only; runs anywhere.

A ratio is one of ours over another contender in tokens a second, in the same block of the same round. A measurement during which
others used the processors is left out, and with it the ratios it would be part of.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

OURS = "latebranch"
REFERENCE = "transformers.float32"  # whose greedy texts others' are compared with
Line = Mapping[str, Any]
Rounds = Mapping[int, Line]  # a contender's lines in one section, by round
Section = tuple[int, float, str]  # concurrency, temperature, kind


def report(path: Path, max_foreign_cpus: float, ours: Sequence[str] = ()) -> str:
    """Return a Markdown table for each concurrency, temperature and kind; `ours` are the columns of ratios, by default all."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [line for line in lines if line["type"] == "run"]
    quiet = [line for line in runs if (line["foreign_cpus"] or 0.0) <= max_foreign_cpus]
    parts = [_preface(lines, len(runs), len(quiet), max_foreign_cpus)]
    for (concurrency, temperature, kind), contenders in sorted(_sections(quiet).items()):
        columns = [name for name in sorted(contenders) if name.startswith(OURS) and (not ours or name in ours)]
        heading = f"### {concurrency} at a time, temperature {temperature:g}, {kind}"
        parts.append(f"{heading}\n\n{_table(contenders, columns)}")
    return "\n\n".join(parts)


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
    heads = ["contender", "tokens/s", "first token, ms", "ms a token", "peak, GiB", "as generate", "rounds"]
    heads += [f"{name.removeprefix(OURS + '.')} over it" for name in columns]
    rows = [_row(name, contenders, columns) for name in sorted(contenders)]
    return table(heads, rows)


def _row(name: str, contenders: Mapping[str, Rounds], columns: Sequence[str]) -> list[str]:
    rounds = contenders[name]
    figures = [
        f"{_median(rounds, 'tokens_per_s'):.1f}",
        f"{_median(rounds, 'first_s') * 1e3:.0f}",
        f"{_median(rounds, 'token_s') * 1e3:.1f}",
        f"{max(line['peak_bytes'] for line in rounds.values()) / 2**30:.1f}",
    ]
    against = [_ratio_cell(ratios(contenders[column], rounds)) if column != name else "" for column in columns]
    return [name, *figures, _equal_cell(rounds, contenders.get(REFERENCE, {})), str(len(rounds)), *against]


def _median(rounds: Rounds, figure: str) -> float:
    return float(statistics.median(line[figure] for line in rounds.values()))


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
