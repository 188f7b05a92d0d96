"""Host time: what a step does outside models' passes, a stage at a time, by load, with and without a drafter.

    python -m benchmarks.host --config configs/default.yaml --head HEAD --batches 1 16

Passes are timed where the library is called (the target's, and a draft head's with what grows its trees there), so that laying
out what a pass reads, calling it and taking up what it leaves are the host's. The library's loops over the vocabulary in
judging are separate, those of a pass that chooses tokens itself are the pass's. Several steps in a row count as one step with a
part of their time. Engines step in turns over the same requests, the one with the fewest tokens next. Medians are over the
steps that have all of the load, feed no prompt, and are of the engine's most frequent kind: plain, or drafting.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drafters.contenders import Stable
from benchmarks.load import Way, in_turns, is_full, mixed_prompts, requests_of
from benchmarks.markdown import table
from engine import engine as engine_module
from engine.core.types import Speculation, StepStats
from engine.engine import Engine, StepOutput
from engine.model.causal_lm import CausalModel
from engine.native import library
from engine.trace.stats import Stopwatch
from server.settings import load_settings

_OF_HEAD = "latebranch_decode of a draft head"
_PASSES = {"target's pass": ("latebranch_decode", "latebranch_steps"), "draft passes": ("latebranch_grow", _OF_HEAD)}
_LOOPS = "loops of verification"
_OF_VERIFICATION = ("latebranch_likeliest", "latebranch_walk", "latebranch_probs", "latebranch_choose")
_STAGES = ("follow", "choose", "plan", "draft", "forward", "verify", "trace", "commit", "learn", "report")
_WITHIN = {"forward": "target's pass", "draft": "draft passes", "verify": _LOOPS}  # parts of a stage that are reported separately
_HEADS = (*_PASSES, _LOOPS, *_STAGES)


class TimedLibrary:
    """The library, with the seconds of each of its functions since they were last taken."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that is timed, and is found at once the next time."""
        function = getattr(self._own, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self._seconds[_OF_HEAD if _is_of_head(name, args) else name] += time.perf_counter() - start
            return result

        setattr(self, name, timed)
        return timed

    def taken(self) -> dict[str, float]:
        """Return the seconds, and begin anew."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


def _is_of_head(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call is a pass of a draft head, which alone narrows its tokens."""
    return name == "latebranch_decode" and bool(args[0]._obj.token.weight)


@dataclass(frozen=True, slots=True)
class Step:
    """One step's numbers, and its seconds by part; they sum to `seconds`. Of several in a row, those of one."""

    stats: StepStats
    seconds: float
    parts: dict[str, float]


class Profiled:
    """An engine whose steps are noted by part. Replaces it where it is stepped."""

    def __init__(self, engine: Engine, timed: TimedLibrary) -> None:
        self._engine, self._timed = engine, timed
        self.steps: list[Step] = []
        self.add, self.check_integrity = engine.add, engine.check_integrity

    def step(self) -> StepOutput:
        """Step the engine."""
        self._timed.taken()
        start = time.perf_counter()
        output = self._engine.step()
        seconds = time.perf_counter() - start
        laps, native = dict(_watches[-1].laps), self._timed.taken()
        laps["report"] = seconds - sum(laps.values())
        parts = {name: sum(native[function] for function in functions) for name, functions in _PASSES.items()}
        if in_a_row := native["latebranch_draft_steps"]:  # which reports the seconds of growing trees itself
            parts["draft passes"] += laps["draft"]
            parts["target's pass"] += in_a_row - laps["draft"]
        parts[_LOOPS] = sum(native[function] for function in _OF_VERIFICATION)
        parts |= {stage: laps[stage] - (parts[_WITHIN[stage]] if stage in _WITHIN else 0.0) for stage in _STAGES}
        num_steps = output.stats.num_steps
        own = {part: spent / num_steps for part, spent in parts.items()}
        self.steps.append(Step(output.stats, seconds / num_steps, own))
        return output


_watches: list[Stopwatch] = []


class _NotedStopwatch(Stopwatch):
    """A stopwatch that can be found after its step; of several only the last is kept."""

    def __init__(self) -> None:
        super().__init__()
        _watches[:] = [self]


def profile(args: argparse.Namespace) -> str:
    """Return a Markdown table of medians in microseconds, a row for each load and engine."""
    config = load_settings(args.config, {"policy": "adaptive"}).to_tool_config()
    models: dict[tuple[str, str], CausalModel] = {}
    stable = Stable(config, {"draft_model": None, "lens": None, "head": str(args.head)}, models)
    timed = TimedLibrary(library.library())
    library.library = lambda: timed  # type: ignore[assignment, return-value]
    engine_module.Stopwatch = _NotedStopwatch  # type: ignore[misc]
    plain, policy = stable.engine("none"), stable.engine("head+ngram")
    ways = [Way("plain", plain, Speculation(is_enabled=False)), Way("policy", policy, Speculation())]
    engines = {way.name: Profiled(way.engine, timed) for way in ways}
    prompts = mixed_prompts(config.model, args.kinds, args.num_prompts)
    rows = []
    for number, batch in enumerate((args.batches[0], *args.batches)):  # the first warms up
        for engine in engines.values():
            engine.steps.clear()
        in_turns({way.name: (engines[way.name], requests_of(prompts, batch, number, way, args)) for way in ways}, batch)  # type: ignore[misc]
        rows += [row_of(name, engine.steps, batch) for name, engine in engines.items()]
    return table(["at a time", "engine", "steps", "us a step", "host", *_HEADS], rows[len(engines) :])


def row_of(name: str, steps: Sequence[Step], batch: int) -> list[str]:
    """Return the table's row of those of the steps that are like most of them."""
    full = [one for one in steps if is_full(one.stats, batch)]
    if not full:
        return [str(batch), f"{name}: no step has them all", "0", *("" for _ in ("us a step", "host", *_HEADS))]
    drafting = [one for one in full if one.stats.num_drafts]
    alike = drafting if 2 * len(drafting) > len(full) else [one for one in full if not one.stats.num_drafts]
    seconds = statistics.median(one.seconds for one in alike)
    host = statistics.median(1.0 - sum(one.parts[part] for part in _PASSES) / one.seconds for one in alike)
    kind = "drafting" if alike is drafting else "plain"
    cells = [f"{1e6 * statistics.median(one.parts[part] for one in alike):.0f}" for part in _HEADS]
    return [str(batch), f"{name}, {kind} steps", str(len(alike)), f"{1e6 * seconds:.0f}", f"{host:.1%}", *cells]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description="what a step does outside models' passes")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--head", type=Path, required=True, help="safetensors file of the draft head")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", default=["code", "maths", "prose"])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    print(profile(parser.parse_args()))


if __name__ == "__main__":
    main()
