"""Runs the comparison: every contender on the same prompts, interleaved, each block in an order of its own.

A block is a few prompts of one kind at one temperature in one round; ratios are taken within it. Appends one JSON line a
contender and block, so that a run cut short is a smaller run.
"""

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drafters.contenders import PLAINLY, Contender, Stable
from benchmarks.drafters.report import lines_of
from benchmarks.foreign import ForeignCpu
from engine.core.types import Request, SamplingParams, StepStats
from engine.engine import Engine
from engine.native import library
from engine.utils.progress_bar import progress_bar
from server.cli.bench_compare import OutputsDiffer, Run, run_case


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt in token ids, with the prediction of its answer, if there is one."""

    ids: tuple[int, ...]
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Design:
    """How much to measure, and `facts`: what else must be alike for measurements to be reported as one."""

    contenders: tuple[Contender, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    batch: int
    num_rounds: int
    verifier: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts that go through every contender, one after the other. `first` is the number of the first prompt of its kind."""

    round: int
    kind: str
    first: int
    temperature: float
    prompts: tuple[EncodedPrompt, ...]

    def requests(self, contender: Contender, design: Design) -> Iterable[Request]:
        """Yield a request a prompt. Seeds depend on round and prompt alone; texts end where the model ends them."""
        for index, prompt in enumerate(self.prompts, self.first):
            seed = None if self.temperature == 0 else 1000 * self.round + index
            sampling = SamplingParams(self.temperature, seed=seed, max_tokens=design.max_tokens)
            yield Request(
                f"{self.kind}-{index}", prompt.ids, sampling, contender.speculation(design.verifier), prompt.prediction_ids
            )


def blocks_of(design: Design, prompts: Mapping[str, Sequence[EncodedPrompt]], round_number: int) -> list[Block]:
    """Return a round's blocks in the order of this round."""
    blocks = [
        Block(round_number, kind, first, temperature, tuple(of_kind[first : first + design.batch]))
        for kind, of_kind in prompts.items()
        for first in range(0, len(of_kind), design.batch)
        for temperature in design.temperatures
    ]
    random.Random(round_number).shuffle(blocks)
    return blocks


class Measurement:
    """One run of a design. Its lines carry a name of their own, so that one file can hold many runs."""

    def __init__(self, design: Design, stable: Stable, out: Path) -> None:
        self._design, self._stable, self._out = design, stable, out
        self._name = time.strftime("%Y-%m-%dT%H:%M:%S")

    def run(self, prompts: Mapping[str, Sequence[EncodedPrompt]]) -> None:
        """Measure round by round, after those that the file has: a round's seeds are its own.

        Raises OutputsDiffer if speculation changed a greedy text in float32.
        """
        engines = {one.drafter: self._stable.engine(one.drafter) for one in self._design.contenders}
        first = num_rounds(self._out)
        self._write([self._header(engines)])
        for number in range(first, first + self._design.num_rounds):
            blocks = blocks_of(self._design, prompts, number)
            what = f"round {number - first + 1} of {self._design.num_rounds}"
            with progress_bar(blocks, what=what, total=len(blocks), unit="block") as bar:
                for block in bar:
                    bar.set_postfix_str(block.kind)
                    self._write(self._measured(block, engines))

    def _measured(self, block: Block, engines: Mapping[str, Engine]) -> list[dict[str, Any]]:
        order = list(self._design.contenders)
        random.Random(f"{block.round} {block.kind} {block.first} {block.temperature}").shuffle(order)
        runs, lines = {}, []
        for contender in order:
            watch = ForeignCpu()
            runs[contender] = run_case(
                engines[contender.drafter], iter(block.requests(contender, self._design)), self._design.batch
            )
            lines.append(self._line(block, contender, runs[contender], watch.cpus()))
        if block.temperature == 0 and not engines["none"].info.rounds_by_width:
            _require_equal(runs)
        return lines

    def _line(self, block: Block, contender: Contender, run: Run, foreign_cpus: float | None) -> dict[str, Any]:
        where = {"round": block.round, "kind": block.kind, "prompt": block.first, "temperature": block.temperature}
        names = {"drafter": contender.drafter, "tree": contender.tree_name}
        after = [step for step in run.steps if step.num_prompt_tokens == 0]
        parts = {"all": _sums(run.steps), "after_prompt": _sums(after)}
        return {"type": "run", "run": self._name, **where, **names, **parts, "foreign_cpus": foreign_cpus}

    def _header(self, engines: Mapping[str, Engine]) -> dict[str, Any]:
        design = {name: value for name, value in asdict(self._design).items() if name not in ("contenders", "facts")}
        drafters = {name: engine.info.drafter for name, engine in engines.items()}
        info = asdict(engines["none"].info)
        facts = {**{name: info[name] for name in ("name", "dtype", "device")}, "facts": dict(self._design.facts)}
        return {"type": "header", "run": self._name, **facts, "threads": library.num_threads(), "drafters": drafters, **design}

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with self._out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def num_rounds(path: Path) -> int:
    """Return how many rounds a file of measurements has, begun ones too."""
    lines = lines_of(path) if path.exists() else []
    return max((line["round"] + 1 for line in lines if line["type"] == "run"), default=0)


def _sums(steps: Sequence[StepStats]) -> dict[str, float]:
    """Return what the report needs of some steps, added up."""
    names = ("num_generated_tokens", "num_draft_tokens", "num_accepted_tokens")
    seconds = ("draft_s", "verify_s", "judge_s", "host_s", "step_s")
    drafting = [step.draft_s for step in steps if step.num_draft_tokens]
    counts = {
        "num_steps": sum(step.num_steps for step in steps),
        "num_decoding_rows": sum(step.num_row_steps for step in steps),
        "num_drafting_steps": len(drafting),
        "drafting_s": sum(drafting),
    }
    return {**counts, **{name: sum(getattr(step, name) for step in steps) for name in (*names, *seconds)}}


def _require_equal(runs: Mapping[Contender, Run]) -> None:
    for contender, run in runs.items():
        unlike = [name for name, ids in run.texts.items() if ids != runs[PLAINLY].texts[name]]
        if unlike:
            name = f"{contender.drafter} {contender.tree_name}"
            raise OutputsDiffer(f"{name} differs from plain decoding at temperature 0 on {', '.join(unlike)}")
