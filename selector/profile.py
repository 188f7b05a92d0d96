"""What the machine charges, measured when an engine starts and kept for the next start on the same machine.

Runs a grid of passes and a few real steps on the engine's rig, like with like in interleaved rounds within a budget of seconds,
and fits the cost model's prices to the medians. A slow machine is measured at the most telling sizes alone. A profile is a small
file in the weights cache, named for all that its times depend on. One of a disturbed measurement is used only by workers that
replace another.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from math import isfinite
from typing import Any, Protocol

import numpy as np

from engine.core.config import SchedulerConfig
from engine.core.policy import PassSize, StepFeedback, StepWork
from engine.core.tree import Expansion
from engine.utils.progress_bar import progress_bar
from engine.weights import WeightsCache
from selector.cost import (
    GENERIC_DRAFT,
    GENERIC_REST,
    KNOTS,
    LEAST_FACTOR,
    Array,
    CostModel,
    draft_features,
    fitted_prices,
    rest_features,
)

_logger = logging.getLogger(__name__)

_VERSION = 4  # of the file and of what its prices mean
_BUDGET_S = 6.0
_SHORT, _LONG = 64, 768  # tokens of context
_FEWEST_SIZES = 4
_CHAINS = (1, 2, 4)  # lengths drafted in real steps, in turns
_TURNS = 4  # the first aside: kernels are chosen in it
_MANY_ROWS = 4
_CALM = 1.3  # median over least time of what is alike, at most


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

    @property
    def unqueried_share(self) -> float:
        """What a token costs the drafter that it is merely fed, as a share of one that it is asked about."""
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
        prices = {"rest": self.rest, "draft": self.draft}
        return json.dumps({"version": _VERSION, **prices, "is_sound": self.is_sound, "facts": facts}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> "Profile":
        """Read what `as_text` wrote; raise ValueError if it is something else."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ValueError(f"no profile of version {_VERSION}")
        rest, draft = found.get("rest"), found.get("draft")
        if not (_are_prices(rest, len(GENERIC_REST)) and _are_prices(draft, len(GENERIC_DRAFT))):
            raise ValueError("no prices")
        return cls(tuple(found["rest"]), tuple(found["draft"]), found.get("is_sound", True) is True)


def grid(limits: SchedulerConfig) -> list[PassSize]:
    """Return the passes to time, the most telling first: one row's trees, plain batches, long contexts, many rows' trees."""
    sizes = [PassSize(*shape, _SHORT) for shape in ((1, 1), (1, 4), (1, 16), (4, 1), (1, 2), (1, 8))]
    sizes += [PassSize(1, 1, _LONG), PassSize(1, 8, _LONG), PassSize(1, 8, _SHORT, is_drawn=True)]
    sizes += [PassSize(16, 1, _SHORT), PassSize(32, 1, _SHORT), PassSize(4, 4, _LONG)]
    sizes += [PassSize(count // 8, 8, _SHORT) for count in KNOTS if count >= 32]
    most_tokens = min(limits.max_step_tokens, limits.num_slots - _SHORT)
    longest = max(1, limits.max_model_len - 16)
    within = [replace(size, num_context=min(size.num_context, longest)) for size in sizes if size.num_tokens <= most_tokens]
    return list(dict.fromkeys(within))


def measure(bench: Bench, clock: Callable[[], float] = time.perf_counter, budget_s: float = _BUDGET_S) -> Profile:
    """Return this machine's prices. Half of the budget is for a first round, a quarter for each size alike to be repeated in.

    The fewest sizes are measured twice, whatever that takes.
    """
    begin_s, sizes = clock(), grid(bench.limits)
    bar = progress_bar(what="measuring what steps cost here", total=round(budget_s), unit="s", leave=False)
    seen: dict[PassSize, tuple[StepWork, list[float]]] = {}

    def measure_pass(size: PassSize) -> None:
        work, seconds = bench.time_pass(size)
        seen.setdefault(size, (work, []))[1].append(seconds)
        bar.update(min(budget_s, clock() - begin_s) - bar.n)

    for size in sizes:
        if len(seen) >= _FEWEST_SIZES and clock() - begin_s > budget_s / 2:
            break
        bench.time_pass(size)  # the first time something is slower: kernels are chosen, memory is found
        measure_pass(size)
    drafted = _drafted(bench, budget_s / 4)
    share_s = budget_s / 4 / max(1, len(seen))
    while due := [size for size, (_, times) in seen.items() if len(times) == 1 or (len(times) + 1) * min(times) <= share_s]:
        for size in due:
            measure_pass(size)
    bar.close()
    if not seen:
        return Profile(GENERIC_REST, GENERIC_DRAFT, is_sound=False)
    works = [work for work, _ in seen.values()]
    medians = np.array([float(np.median(times)) for _, times in seen.values()])
    alike = [times for _, times in seen.values()], [[step.draft_s for step in steps] for steps in drafted]
    profile = Profile(
        rest=_rest_prices(works, medians),
        draft=_draft_prices([_typical(steps) for steps in drafted], medians[0]),
        is_sound=all(map(_is_calm, alike)),
    )
    prices = {name: f"{price:.2e}" for name, price in profile.costs().prices.items()}
    _logger.info("profiled in %.1f s: %s", clock() - begin_s, prices)
    return profile


def _are_prices(found: Any, count: int) -> bool:
    return isinstance(found, list) and len(found) == count and all(isinstance(one, float) and isfinite(one) for one in found)


def _is_calm(alike: Sequence[Sequence[float]]) -> bool:
    """Return whether times that should be alike are, on the whole."""
    return not alike or float(np.median([np.median(times) / max(min(times), 1e-9) for times in alike])) < _CALM


def _drafted(bench: Bench, budget_s: float) -> list[list[StepFeedback]]:
    """Return real steps that draft, like with like: chains of each length, of one sequence and (if there is time) of several.

    Lengths take turns, so that no disturbance meets one of them alone. None where a text is too short for that.
    """
    limits, drafted = bench.limits, list[list[StepFeedback]]()
    expansions = [Expansion(length, 1, 0) for length in _CHAINS] * (1 + _TURNS)
    num_prompt = min(_SHORT, max(1, limits.max_model_len // 4))
    num_tokens = num_prompt + sum(2 + one.max_depth for one in expansions)
    for num_rows in (1, _MANY_ROWS):
        has_room = num_tokens <= limits.max_model_len and num_rows * num_tokens <= limits.num_slots
        if (
            not has_room
            or num_rows > limits.max_running
            or sum(step.draft_s + step.rest_s for one in drafted for step in one) > budget_s / 2
        ):
            break
        ran = bench.run_steps(num_rows, num_prompt, expansions)[len(_CHAINS) :]
        drafted += [ran[place :: len(_CHAINS)] for place in range(len(_CHAINS))]
    return [steps for steps in drafted if steps]


def _typical(steps: Sequence[StepFeedback]) -> StepFeedback:
    """Return the step whose drafting took the median time, the lower one of two."""
    return sorted(steps, key=lambda step: step.draft_s)[(len(steps) - 1) // 2]


def _rest_prices(works: Sequence[StepWork], seconds_C: Array) -> tuple[float, ...]:
    """Return prices that fit the passes; segments of T(N) beyond what was measured go on like the last."""
    prices = fitted_prices(rest_features(works), seconds_C, GENERIC_REST)
    largest = max(work.num_tokens for work in works)
    last = max(1, sum(knot < largest for knot in KNOTS))
    prices[1 + last : 1 + len(KNOTS)] = [prices[last]] * (len(KNOTS) - last)
    return tuple(prices)


def _draft_prices(steps: Sequence[StepFeedback], step_s: float) -> tuple[float, ...]:
    """Return prices that fit the drafting of real steps; generic ones if nothing drafted, next to none for what no step has."""
    generic = tuple(price * step_s for price in GENERIC_DRAFT)
    drafting = [step for step in steps if step.work.num_rounds and step.draft_s > 0.0]
    if not drafting:
        return generic
    features_CF = draft_features(step.work for step in drafting)
    fitted = fitted_prices(features_CF, np.array([step.draft_s for step in drafting]), GENERIC_DRAFT)
    seen = zip(fitted, generic, (feature_C.any() for feature_C in features_CF.T), strict=True)
    return tuple(price if is_seen else LEAST_FACTOR * low for price, low, is_seen in seen)


def cached_profile(bench: Bench, cache: WeightsCache, is_hurried: bool = False) -> Profile:
    """Return this machine's profile: the cache's, else a measured one, which is kept.

    One that is not sound is measured again, unless `is_hurried`.
    """
    facts = bench.facts
    entry = cache.profile(_key(facts, bench.limits))
    try:
        cached = Profile.from_text(entry.read_text())
        if cached.is_sound or is_hurried:
            return cached
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.warning("%s is no profile (%s); it is measured again", entry, error)
    profile = measure(bench)
    try:
        entry.unlink(missing_ok=True)
        cache.obtain(entry, lambda target, _: target.write_text(profile.as_text(facts)))
    except OSError as error:
        _logger.warning("the profile cannot be kept in %s: %s", entry, error)
    return profile


def _key(facts: dict[str, str], limits: SchedulerConfig) -> str:
    """Return a name for the machine, the models and what is measured of them."""
    room = [limits.max_running, limits.num_slots, limits.max_model_len]
    everything = {"version": _VERSION, "facts": facts, "sizes": [astuple(size) for size in grid(limits)], "room": room}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]
