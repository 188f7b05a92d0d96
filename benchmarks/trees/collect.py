"""Measures: target-written texts, points along them, every contender at every point; one JSON line a measurement.

Tokens of a step are E[tau + 1 | tree] where the rule computes it exactly, else (greedy, coupled) the tokens themselves. Step
times are measured separately, by real growth and a real pass for one tree at a time, contenders in turn.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.trees.contenders import Contender, contenders_of
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import PLAIN, TokenTree
from engine.core.types import SamplingParams
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import grow, growers_of, learn
from engine.engine import Engine
from engine.profiling.counterfactual import Counterfactual, Point, TreeSpec
from engine.utils.progress_bar import progress_bar
from engine.verify.coupled import judge_greedy
from engine.verify.registry import create_verifier
from engine.verify.verdict import Verdict, Verifier

Prompts = Mapping[str, Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class Design:
    """How much to measure."""

    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_text_tokens: int
    point_stride: int
    time_every: int  # points of a temperature between two timed ones


class Collector:
    """Runs the design and writes its measurements."""

    def __init__(self, engine: Engine, design: Design, out: Path) -> None:
        self._engine, self._design, self._out = engine, design, out
        self._lab = Counterfactual(engine)
        self._verifiers: dict[str, Verifier] = {}
        self._calibrations = {temperature: Calibrations() for temperature in design.temperatures}
        self._num_points = 0
        self._seeds = count(1 << 40)  # of timed trees, each its own: noise that was made before would cost nothing
        self._num_at: Counter[float] = Counter()  # points by temperature

    def run(self, prompts: Prompts) -> None:
        """Measure prompt by prompt, kinds in turn, so that a run cut short has seen them all."""
        texts = [
            (kind, of_kind[index], SamplingParams(temperature=temperature), f"{kind}-{index}")
            for index in range(max(map(len, prompts.values())))
            for kind, of_kind in prompts.items()
            if index < len(of_kind)
            for temperature in self._design.temperatures
        ]
        with progress_bar(texts, what="measuring", total=len(texts), unit="text") as bar:
            for text in bar:
                self._text(*text)
                bar.set_postfix(points=self._num_points)

    def _text(self, kind: str, prompt: tuple[int, ...], sampling: SamplingParams, name: str) -> None:
        limited = replace(sampling, max_tokens=self._design.num_text_tokens, seed=len(prompt))
        (text,) = self._lab.generate([(prompt, limited)])
        self._lab.load(text)
        for point in range(len(prompt) + 1, len(text) - 1, self._design.point_stride):
            facts = {"kind": kind, "temperature": sampling.temperature, "point": f"{name}-{sampling.temperature}-{point}"}
            lines = [*self._judged(point, sampling, facts)]
            if self._num_at[sampling.temperature] % self._design.time_every == 0:
                lines += self._timed(point, sampling, facts)
            self._num_points += 1
            self._num_at[sampling.temperature] += 1
            self._write(lines)

    def _judged(self, at: int, sampling: SamplingParams, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        contenders = [one for budget in self._design.budgets for one in contenders_of(budget, sampling.is_greedy)]
        plantings = [TreeSpec(one.expansion, one.row_verifier, self._num_points) for one in contenders]
        calibrations = self._calibrations[sampling.temperature]
        point = self._lab.point(at, plantings, sampling, calibrations)
        verdicts: list[Verdict] = []
        for index, contender in enumerate(contenders):
            for name in contender.verifiers:
                verdict, judge_s = self._verdict(point, index, name)
                if name == contender.row_verifier:
                    verdicts.append(verdict)
                yield {
                    **{"type": "tokens", **facts, **_names(contender, name), "num_nodes": len(point.nodes[index]) - 1},
                    **{"tokens": verdict.expected_tokens or len(verdict.path), "judge_s": judge_s},
                }
        learn(calibrations, point.rows, point.growth, verdicts)

    def _verdict(self, point: Point, index: int, name: str) -> tuple[Verdict, float]:
        forest, row = point.growth.forest.subset([index]), point.rows[index]
        begin = time.perf_counter()
        if row.sampling.is_greedy:
            return judge_greedy(forest.trees, point.best_N(index))[0], time.perf_counter() - begin
        probs_NV = point.target_probs_NV(index)
        begin = time.perf_counter()
        verdict = self._verifier(name).judge(forest, probs_NV, [row.key])[0]
        return verdict, time.perf_counter() - begin

    def _verifier(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = create_verifier(name)
        return self._verifiers[name]

    def _timed(self, at: int, sampling: SamplingParams, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Time real growth and a real pass for each tree, plain decoding first."""
        plain = TreeSpec(PLAIN, "nss", 0)
        yield {"type": "time", **facts, "budget": 0, "expansion": "plain", **self._seconds(self._lab.row(at, plain, sampling))}
        for budget in self._design.budgets:
            for one in contenders_of(budget, sampling.is_greedy):
                row = self._lab.row(at, TreeSpec(one.expansion, one.row_verifier, next(self._seeds)), sampling)
                yield {"type": "time", **facts, **_names(one, one.row_verifier), **self._seconds(row)}

    def _seconds(self, row: Row) -> dict[str, float]:
        engine = self._engine
        assert engine.drafter is not None
        model = engine.target.model
        times = [time.perf_counter()]
        rows = [row] if not row.expansion.is_plain else []
        calibrations = self._calibrations[row.sampling.temperature]
        growth = grow(growers_of(engine.drafter, model.vocab_size, model.device), rows, calibrations) if rows else None
        times.append(time.perf_counter())
        trees = growth.forest.trees if growth else [TokenTree.single(row.certain_ids[-1])]
        engine.target.forward(StepPlan(0, (row,)), trees)
        times.append(time.perf_counter())
        return {"draft_s": times[1] - times[0], "verify_s": times[2] - times[1]}

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with self._out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _names(contender: Contender, verifier: str) -> dict[str, Any]:
    return {"budget": contender.budget, "expansion": str(contender.expansion), "verifier": verifier}
