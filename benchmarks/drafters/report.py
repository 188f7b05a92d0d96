"""From measurements to the table. Knows JSON lines only; runs anywhere.

A ratio is a contender's tokens a second over plain decoding's on the same prompts in the same block. Blocks in which others used
the processors are left out. Intervals are bootstrapped over blocks (prompts x rounds), kinds kept apart.
"""

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

_NUM_RESAMPLES = 1000
_PLAIN = "none"
Line = Mapping[str, Any]


class UnlikeRuns(ValueError):
    """Measurements that do not belong into one table."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One contender in one block."""

    kind: str
    block_efficiency: float
    ratio: float
    ratio_after_prompt: float | None  # None if the text was all in the steps that fed the prompt
    drafting: float | None  # seconds of drafting a step that drafted, in plain steps after the prompt


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the interval of 95 of 100 resampled means."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f})"


def report(path: Path, max_foreign_cpus: float) -> str:
    """Return a Markdown table for each temperature; blocks with more foreign processors than that are left out.

    Raises UnlikeRuns if the file has measurements that do not belong into one table.
    """
    lines = lines_of(path)
    facts = sorted({_facts(line) for line in lines if line["type"] == "header"})
    if len(facts) > 1:
        raise UnlikeRuns(f"{path} holds runs that differ: {' | '.join(facts)}")
    blocks = _blocks(lines)
    quiet = [block for block in blocks if not _is_disturbed(block, max_foreign_cpus)]
    parts = [_preface(facts, len(blocks), len(blocks) - len(quiet), max_foreign_cpus)]
    for temperature in sorted({_plain(block)["temperature"] for block in quiet}):
        here = [block for block in quiet if _plain(block)["temperature"] == temperature]
        parts.append(f"### Temperature {temperature:g}\n\n{_table(here)}")
    return "\n\n".join(parts)


def lines_of(path: Path) -> list[Line]:
    """Return what a file of measurements holds, but for lines that were cut off in writing."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _blocks(lines: Iterable[Line]) -> list[list[Line]]:
    """Return the lines of each block that has its plain decoding."""
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if line["type"] == "run":
            found[tuple(line[name] for name in ("run", "round", "kind", "prompt", "temperature"))].append(line)
    return [block for block in found.values() if any(line["drafter"] == _PLAIN for line in block)]


def _plain(block: Sequence[Line]) -> Line:
    return next(line for line in block if line["drafter"] == _PLAIN)


def _is_disturbed(block: Sequence[Line], max_foreign_cpus: float) -> bool:
    return any(line["foreign_cpus"] is not None and line["foreign_cpus"] > max_foreign_cpus for line in block)


def _facts(header: Line) -> str:
    """Return what must be alike."""
    names = ("name", "dtype", "device", "threads", "batch", "max_tokens", "verifier")
    facts = {**{name: header[name] for name in names}, **header["facts"]}
    return "; ".join(f"{name} {value}" for name, value in facts.items())


def _preface(facts: Sequence[str], num_blocks: int, num_disturbed: int, max_foreign_cpus: float) -> str:
    left_out = f"{num_disturbed} of {num_blocks} blocks left out: others used more than {max_foreign_cpus:g} processors."
    return "\n".join([*(f"{fact}." for fact in facts), left_out])


def _table(blocks: Sequence[Sequence[Line]]) -> str:
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for block in blocks:
        for line in block:
            samples[line["drafter"], line["tree"]].append(_sample(line, _plain(block)))
    kinds = sorted({sample.kind for every in samples.values() for sample in every})
    heads = ["drafter", "tree", "drafting", *kinds, "all: block efficiency", "ratio", "after the prompt", "blocks"]
    rows = [_row(drafter, tree, every, kinds) for (drafter, tree), every in sorted(samples.items(), key=_place)]
    return table(heads, rows)


def _place(entry: tuple[tuple[str, str], Sequence[Sample]]) -> tuple[bool, str, str]:
    """Plain decoding first."""
    (drafter, tree), _ = entry
    return drafter != _PLAIN, drafter, tree


def _sample(line: Line, plain: Line) -> Sample:
    one, other = line["all"], plain["all"]
    after, plain_after = line["after_prompt"], plain["after_prompt"]
    has_both = after["num_generated_tokens"] > 0 and plain_after["num_generated_tokens"] > 0
    drafted = after["num_drafting_steps"]
    plain_step_s = plain_after["verify_s"] / plain_after["num_steps"] if plain_after["num_steps"] else math.nan
    return Sample(
        kind=line["kind"],
        block_efficiency=one["num_generated_tokens"] / one["num_decoding_rows"],
        ratio=_tokens_per_s(one) / _tokens_per_s(other),
        ratio_after_prompt=_tokens_per_s(after) / _tokens_per_s(plain_after) if has_both else None,
        drafting=after["drafting_s"] / drafted / plain_step_s if has_both and drafted else None,
    )


def _tokens_per_s(sums: Mapping[str, float]) -> float:
    return sums["num_generated_tokens"] / sums["step_s"]


def _row(drafter: str, tree: str, samples: Sequence[Sample], kinds: Sequence[str]) -> list[str]:
    of_kind = {kind: [sample for sample in samples if sample.kind == kind] for kind in kinds}
    cells = [_kind_cell(of_kind[kind]) for kind in kinds]
    efficiency = statistics.mean(statistics.mean(s.block_efficiency for s in some) for some in of_kind.values() if some)
    ratios = {kind: [sample.ratio for sample in some] for kind, some in of_kind.items() if some}
    after = {kind: [s.ratio_after_prompt for s in some if s.ratio_after_prompt is not None] for kind, some in of_kind.items()}
    drafting = [sample.drafting for sample in samples if sample.drafting is not None]
    columns = [f"{statistics.mean(drafting):.3f}" if drafting else "–", *cells, f"{efficiency:.2f}"]
    return [drafter, tree, *columns, _interval_cell(ratios), _interval_cell(after), str(len(samples))]


def _kind_cell(samples: Sequence[Sample]) -> str:
    """Return block efficiency and ratio of one kind."""
    if not samples:
        return "–"
    efficiency = statistics.mean(sample.block_efficiency for sample in samples)
    return f"{efficiency:.2f}, {interval({'': [sample.ratio for sample in samples]})}"


def _interval_cell(ratios: Mapping[str, Sequence[float]]) -> str:
    known = {kind: values for kind, values in ratios.items() if values}
    return str(interval(known)) if known else "–"


def interval(ratios: Mapping[str, Sequence[float]]) -> Interval:
    """Return the geometric mean of ratios, kinds weighing the same, with a 95 % interval resampled within kinds."""
    logs = [[math.log(ratio) for ratio in of_kind] for of_kind in ratios.values()]
    generator = random.Random(0)
    means = sorted(_mean_of_means([generator.choices(some, k=len(some)) for some in logs]) for _ in range(_NUM_RESAMPLES))
    low, high = means[round(0.025 * (_NUM_RESAMPLES - 1))], means[round(0.975 * (_NUM_RESAMPLES - 1))]
    return Interval(*(math.exp(value) for value in (_mean_of_means(logs), low, high)))


def _mean_of_means(groups: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.fmean(group) for group in groups)
