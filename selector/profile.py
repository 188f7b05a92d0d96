"""What the machine charges, measured when an engine starts and kept for the next start on the same machine.

Runs a grid of passes and a few real steps on the engine's rig, like with like in interleaved rounds within a budget of seconds,
and fits the cost model's prices to the medians. A machine on which the budget is soon spent is measured at the most telling sizes
alone. A profile is a small file in the weights cache, named for all that its times depend on. One of a disturbed measurement is
used only by workers that replace another.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.config import SchedulerConfig
from engine.policy import PassSize, StepFeedback, StepWork
from engine.progress_bar import progress_bar
from engine.tree import Expansion
from engine.weights import WeightsCache
from selector.cost import (
    GENERIC_DRAFT,
    GENERIC_REST,
    KNOTS,
    Array,
    CostModel,
    draft_features,
    fitted_prices,
    rest_features,
)

_logger = logging.getLogger(__name__)

_VERSION = 4  # of the file and of what its prices mean
_BUDGET_S = 6.0
_MOST_BUDGETS = 4.0  # that are spent on a machine too slow for the fewest sizes and rounds within one
_SHORT, _LONG = 64, 768  # tokens of context
_FEWEST_SIZES, _FEWEST_ROUNDS = 4, 2
_CHAINS = (1, 2, 4)  # lengths drafted in real steps, in turns
_MANY_ROWS = 4
_FEWEST_TURNS, _MOST_TURNS = 2, 6  # beside the first, in which kernels are chosen
_STEP_PROMPT = 16  # tokens
_UNSEEN = 1e-3  # of a generic price
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
    def unasked_share(self) -> float:
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
    rows = [PassSize(1, count, _SHORT) for count in (1, 4, 16)]
    rows += [PassSize(4, 1, _SHORT)]
    rows += [PassSize(1, count, _SHORT) for count in (2, 8)]
    rows += [PassSize(1, count, _LONG) for count in (1, 8)]
    rows += [PassSize(1, 8, _SHORT, is_drawn=True)]
    rows += [PassSize(count, 1, _SHORT) for count in (16, 32)]
    rows += [PassSize(4, 4, _LONG)]
    rows += [PassSize(count // 8, 8, _SHORT) for count in KNOTS if count >= 32]
    most_tokens = min(limits.max_step_tokens, limits.num_slots - _SHORT)
    longest = max(1, limits.max_model_len - 16)
    within = [replace(size, num_context=min(size.num_context, longest)) for size in rows if size.num_tokens <= most_tokens]
    return list(dict.fromkeys(within))


def measure(bench: Bench, clock: Callable[[], float] = time.perf_counter, budget_s: float = _BUDGET_S) -> Profile:
    """Return this machine's prices. The first round stops short of what would not fit, others repeat it while they fit.

    What takes so many times as long as a token alone is repeated in every so manieth round: what a few tokens more take is small
    beside a pass, and most steps are small. The fewest sizes and rounds are not cut short but by a larger budget.
    """
    begin_s = clock()
    sizes = grid(bench.limits)
    bar = progress_bar(what="measuring what steps cost here", total=3 * len(sizes), unit="pass", leave=False)
    seen: dict[PassSize, tuple[StepWork, list[float]]] = {}
    for size in sizes:
        bench.time_pass(size)  # the first time something is slower: kernels are chosen, memory is found
        work, seconds = bench.time_pass(size)
        seen[size] = (work, [seconds])
        bar.update(2)
        if clock() - begin_s > budget_s * (0.5 if len(seen) >= _FEWEST_SIZES else _MOST_BUDGETS / 2):
            break
    bar.total = 3 * len(seen)
    if not seen:
        bar.close()
        return Profile(GENERIC_REST, GENERIC_DRAFT, is_sound=False)
    one_s = min(min(times) for _, times in seen.values())
    drafted = _drafted(bench, int(budget_s / 8 / one_s / len(_CHAINS)))
    num_rounds, due = 1, _due(seen, 2)
    while clock() - begin_s + sum(map(min, due.values())) < budget_s * (1.0 if num_rounds >= _FEWEST_ROUNDS else _MOST_BUDGETS):
        for size, times in due.items():
            times.append(bench.time_pass(size)[1])
            bar.update()
        num_rounds += 1
        due = _due(seen, num_rounds + 1)
        bar.total = bar.n + len(due)  # if another round fits
    bar.close()
    works = [work for work, _ in seen.values()]
    medians = np.array([float(np.median(times)) for _, times in seen.values()])
    is_whole = len(seen) >= min(_FEWEST_SIZES, len(grid(bench.limits))) and num_rounds >= _FEWEST_ROUNDS
    alike = [*(times for _, times in seen.values())], [[step.draft_s for step in steps] for steps in drafted]
    profile = Profile(
        rest=_rest_prices(works, medians),
        draft=_draft_prices([_typical(steps) for steps in drafted], medians[0]),
        is_sound=is_whole and all(map(_is_calm, alike)),
    )
    costs = profile.costs()
    _logger.info("profiled in %.1f s: %s", clock() - begin_s, {name: f"{price:.2e}" for name, price in costs.prices.items()})
    return profile


def _are_prices(found: Any, count: int) -> bool:
    return isinstance(found, list) and len(found) == count and all(isinstance(one, float) and isfinite(one) for one in found)


def _due(seen: dict[PassSize, tuple[StepWork, list[float]]], num_round: int) -> dict[PassSize, list[float]]:
    """Return the sizes that a round repeats, and their times: what takes k times as long as the fastest, each k-th round."""
    least_s = {size: min(times) for size, (_, times) in seen.items()}
    one_s = min(least_s.values())
    return {size: times for size, (_, times) in seen.items() if num_round % max(1, round(least_s[size] / one_s)) == 0}


def _is_calm(alike: Sequence[Sequence[float]]) -> bool:
    """Return whether times that should be alike are, on the whole; a single one is like itself and says nothing."""
    several = [times for times in alike if len(times) > 1]
    return not several or float(np.median([np.median(times) / max(min(times), 1e-9) for times in several])) < _CALM


def _drafted(bench: Bench, num_turns: int) -> list[list[StepFeedback]]:
    """Return real steps that draft, like with like: chains of each length, of one sequence and (if that is not slow) of several.

    Lengths take turns, so that no disturbance meets one of them alone. None where a text is too short for that.
    """
    limits = bench.limits
    num_prompt = min(_STEP_PROMPT, max(1, limits.max_model_len // 4))
    turn_tokens = sum(1 + length for length in _CHAINS)
    room = (min(limits.max_model_len, limits.num_slots) - num_prompt) // turn_tokens - 2
    num_turns, is_slow = max(_FEWEST_TURNS, min(_MOST_TURNS, num_turns)), num_turns < _FEWEST_TURNS
    if room < num_turns:
        return []
    expansions = [Expansion(length, 1, 0) for _ in range(1 + num_turns) for length in _CHAINS]
    longest = num_prompt + (2 + num_turns) * turn_tokens
    has_many = not is_slow and limits.max_running >= _MANY_ROWS and limits.num_slots >= _MANY_ROWS * longest
    drafted = []
    for num_rows in (1, _MANY_ROWS)[: 1 + has_many]:
        ran = bench.run_steps(num_rows, num_prompt, expansions)
        drafted += [ran[len(_CHAINS) + place :: len(_CHAINS)] for place in range(len(_CHAINS))]
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
    is_seen = [bool(feature_C.any()) for feature_C in features_CF.T]
    return tuple(price if seen else _UNSEEN * low for price, low, seen in zip(fitted, generic, is_seen, strict=True))


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
    """Return a name for the machine, the models and what is measured of them."""
    room = [limits.max_running, limits.num_slots, limits.max_model_len]
    everything = {"version": _VERSION, "facts": facts, "sizes": [astuple(size) for size in grid(limits)], "room": room}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]
