"""What the machine charges, measured when an engine starts and kept for the next start on the same machine.

Runs a grid of passes and a few real steps on the engine's rig, in interleaved rounds within a budget of seconds, and fits the
cost model's prices to the medians. A profile is a small file in the weights cache, named for all that its times depend on.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.config import SchedulerConfig
from engine.policy import PassSize, StepFeedback, StepWork
from engine.tree import PLAIN, Expansion
from engine.weights import WeightsCache
from selector.cost import (
    GENERIC_DRAFT,
    GENERIC_REST,
    KNOTS,
    Array,
    CostModel,
    Works,
    draft_features,
    fitted_prices,
    rest_features,
)

_logger = logging.getLogger(__name__)

_VERSION = 1  # of the file and of what its prices mean
_BUDGET_S = 6.0
_SHORT, _LONG = 64, 768  # tokens of context
_STEP_DEPTHS = (0, 1, 2, 4)
_FEWEST_SIZES, _FEWEST_ROUNDS = 8, 2
_CALM = 1.3  # median over least time of a pass, at most


class Bench(Protocol):
    """What can be timed: the engine's rig."""

    @property
    def limits(self) -> SchedulerConfig:
        """What no step may exceed."""
        ...

    @property
    def facts(self) -> dict[str, str]:
        """All that a time depends on."""
        ...

    def time_pass(self, size: PassSize) -> tuple[StepWork, float]:
        """Return what a pass of that size runs, and its seconds."""
        ...

    def run_steps(self, num_rows: int, num_prompt: int, expansions: Sequence[Expansion]) -> list[StepFeedback]:
        """Return what real steps cost."""
        ...


@dataclass(frozen=True)
class Profile:
    """Prices of the cost model, in its order, and whether they may be believed another day."""

    rest: tuple[float, ...]
    draft: tuple[float, ...]
    is_sound: bool = True

    def costs(self) -> CostModel:
        """Return a cost model that begins with these prices."""
        return CostModel(self.rest, self.draft)

    def as_text(self, facts: dict[str, str]) -> str:
        """Return the file's text; the facts are for people."""
        return json.dumps({"version": _VERSION, "rest": self.rest, "draft": self.draft, "facts": facts}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> "Profile":
        """Read what `as_text` wrote; raise ValueError if it is something else."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ValueError(f"no profile of version {_VERSION}")
        rest, draft = found.get("rest"), found.get("draft")
        if not (_are_prices(rest, len(GENERIC_REST)) and _are_prices(draft, len(GENERIC_DRAFT))):
            raise ValueError("no prices")
        return cls(tuple(found["rest"]), tuple(found["draft"]))


def grid(limits: SchedulerConfig) -> list[PassSize]:
    """Return the passes to time, small ones first: one row's trees, many rows', plain batches; short and long contexts."""
    rows = [PassSize(1, count, _SHORT) for count in (1, 2, 4, 8, 16)]
    rows += [PassSize(1, count, _LONG) for count in (1, 8)]
    rows += [PassSize(1, 8, _SHORT, is_drawn=True)]
    rows += [PassSize(count, 1, _SHORT) for count in (4, 16, 32)]
    rows += [PassSize(4, 4, _LONG)]
    rows += [PassSize(count // 8, 8, _SHORT) for count in KNOTS if count >= 32]
    most_tokens = min(limits.max_step_tokens, limits.num_slots - _SHORT)
    longest = max(1, limits.max_model_len - 16)
    within = [replace(size, num_context=min(size.num_context, longest)) for size in rows if size.num_tokens <= most_tokens]
    return list(dict.fromkeys(within))


def measure(bench: Bench, clock: Callable[[], float] = time.perf_counter, budget_s: float = _BUDGET_S) -> Profile:
    """Return this machine's prices. The first round stops short of what would not fit, others repeat it while they fit."""
    begin_s = clock()
    seen: dict[PassSize, tuple[StepWork, list[float]]] = {}
    for size in grid(bench.limits):
        bench.time_pass(size)  # the first time something is slower: kernels are chosen, memory is found
        work, seconds = bench.time_pass(size)
        seen[size] = (work, [seconds])
        if clock() - begin_s > budget_s / 2:
            break
    if not seen:
        return Profile(GENERIC_REST, GENERIC_DRAFT, is_sound=False)
    one_s = min(min(times) for _, times in seen.values())
    steps = _steps(bench, max(1, min(3, int(budget_s / 8 / one_s / len(_STEP_DEPTHS)))))
    round_s = sum(times[0] for _, times in seen.values())
    while clock() - begin_s + round_s < budget_s:
        for size, (_, times) in seen.items():
            times.append(bench.time_pass(size)[1])
    works = [work for work, _ in seen.values()]
    medians = np.array([float(np.median(times)) for _, times in seen.values()])
    profile = Profile(_rest_prices(works, medians), _draft_prices(steps, medians[0]), _is_sound(list(seen.values())))
    costs = profile.costs()
    _logger.info("profiled in %.1f s: %s", clock() - begin_s, {name: f"{price:.2e}" for name, price in costs.prices.items()})
    return profile


def _are_prices(found: Any, count: int) -> bool:
    return isinstance(found, list) and len(found) == count and all(isinstance(one, float) and isfinite(one) for one in found)


def _is_sound(seen: Sequence[tuple[StepWork, list[float]]]) -> bool:
    """Return whether enough was measured, and calmly enough, to be believed another day."""
    if len(seen) < _FEWEST_SIZES or any(len(times) < _FEWEST_ROUNDS for _, times in seen):
        return False
    return float(np.median([np.median(times) / min(times) for _, times in seen])) < _CALM


def _steps(bench: Bench, num_repeats: int) -> list[StepFeedback]:
    """Return real steps: plain ones and chains, of one sequence and of several; the first of several alike is left out."""
    expansions = [Expansion(depth, 1, 0) if depth else PLAIN for depth in _STEP_DEPTHS for _ in range(num_repeats)]
    num_prompt = min(_SHORT, bench.limits.max_model_len // 4)
    steps = []
    for num_rows in (1, 4)[: num_repeats if bench.limits.max_running >= 4 else 1]:
        ran = bench.run_steps(num_rows, num_prompt, expansions)
        steps += [one for index, one in enumerate(ran) if index % num_repeats or num_repeats == 1]
    return steps


def _rest_prices(works: Sequence[StepWork], seconds_C: Array) -> tuple[float, ...]:
    """Return prices that fit the passes; segments of T(N) beyond what was measured go on like the last."""
    prices = fitted_prices(rest_features(Works.of(works)), seconds_C, GENERIC_REST)
    largest = max(work.num_tokens for work in works)
    last = max(1, sum(knot < largest for knot in KNOTS))
    prices[1 + last : 1 + len(KNOTS)] = [prices[last]] * (len(KNOTS) - last)
    return tuple(prices)


def _draft_prices(steps: Sequence[StepFeedback], step_s: float) -> tuple[float, ...]:
    """Return prices that fit the drafting of real steps; the generic ones if nothing drafted."""
    drafting = [step for step in steps if step.work.num_passes and step.draft_s > 0.0]
    if not drafting:
        return tuple(price * step_s for price in GENERIC_DRAFT)
    features_CF = draft_features(Works.of([step.work for step in drafting]))
    return tuple(fitted_prices(features_CF, np.array([step.draft_s for step in drafting]), GENERIC_DRAFT))


def cached_profile(bench: Bench, cache: WeightsCache) -> Profile:
    """Return this machine's profile: the cache's, else a measured one, which is kept if it was a calm measurement."""
    facts = bench.facts
    entry = cache.profile(_key(facts, bench.limits))
    try:
        return Profile.from_text(entry.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.warning("%s is no profile (%s); it is measured again", entry, error)
    profile = measure(bench)
    if profile.is_sound:
        _keep(profile, facts, cache, entry)
    return profile


def _keep(profile: Profile, facts: dict[str, str], cache: WeightsCache, entry: Path) -> None:
    def make(target: Path, scratch: Path) -> None:  # noqa: ARG001 (nothing is kept aside)
        target.write_text(profile.as_text(facts))

    try:
        entry.unlink(missing_ok=True)
        cache.obtain(entry, make)
    except OSError as error:
        _logger.warning("the profile cannot be kept in %s: %s", entry, error)


def _key(facts: dict[str, str], limits: SchedulerConfig) -> str:
    everything = {"version": _VERSION, "facts": facts, "largest": min(limits.max_step_tokens, KNOTS[-1])}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]
