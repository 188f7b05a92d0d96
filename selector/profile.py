"""Measures the coefficients of the cost model when an engine starts, and keeps them for later starts on the same machine.

Times a grid of passes and a few real steps within a budget of seconds, and fits the coefficients to the medians. Rounds over
all sizes alternate, so a disturbance does not hit one size alone. A slow machine measures only the most informative sizes. A
profile is a small file in the weights cache. Its name covers everything that the times depend on. A replacement worker uses
a disturbed profile. The next start of a server measures it once more.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from engine.core.config import SchedulerConfig
from engine.core.policy import PassSize, StepFeedback, StepWork
from engine.core.tree import Expansion
from engine.utils.progress_bar import progress_bar
from engine.weights import WeightsCache
from selector import cost
from selector.cost import GENERIC_DRAFT, GENERIC_REST, KNOTS, Array, CostModel

_logger = logging.getLogger(__name__)

_VERSION = 5  # of the file and of the meaning of its coefficients
_BUDGET_S = 6.0
_SHORT, _LONG = 64, 768  # tokens of context
_FEWEST_SIZES = 4
_CHAINS = (1, 2, 4)  # lengths drafted in real steps, alternating; for the first and the last number of sequences
_ROUNDS = 5  # over these; the first is a warm-up
_MOST_MEASURED = 2  # starts that measure on a machine that is never quiet
_STEADY = 1.3  # largest ratio of the median to the least time of a size


class Bench(Protocol):
    """Runs and times passes and steps: the engine's step timer."""

    @property
    def limits(self) -> SchedulerConfig:
        """The limits of a step."""
        ...

    @property
    def longest_runs_s(self) -> tuple[float, float]:
        """Seconds for which steps of plain decoding, and steps with drafts of greedy and coupled rows, run in a row."""
        ...

    @property
    def facts(self) -> dict[str, str]:
        """Everything that a time depends on."""
        ...

    def time_pass(self, size: PassSize) -> tuple[StepWork, float]:
        """Return the work of a pass of that size, and its seconds."""
        ...

    def run_steps(self, num_rows: int, num_prompt: int, expansions: Sequence[Expansion]) -> list[StepFeedback]:
        """Return the feedback of real steps, one for each expansion."""
        ...


@dataclass(frozen=True)
class Profile:
    """Coefficients of the cost model, in its order. `is_sound` is false if the measurement was disturbed.

    `num_measured` counts the starts that measured it.
    """

    rest: tuple[float, ...]
    draft: tuple[float, ...]
    is_sound: bool = True
    num_measured: int = 1
    version: int = _VERSION

    def costs(self) -> CostModel:
        """Return a cost model with these coefficients."""
        return CostModel(self.rest, self.draft)

    def as_text(self, facts: dict[str, str]) -> str:
        """Return the file's text. The facts are for readers only."""
        return msgspec.json.format(msgspec.json.encode(asdict(self) | {"facts": facts}).decode())

    @classmethod
    def from_text(cls, text: str) -> "Profile":
        """Read the text of `as_text`; raise ValueError if it is something else."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        if found.version != _VERSION:
            raise ValueError(f"no profile of version {_VERSION}")
        found.costs()  # checks the coefficients
        return found


def grid(limits: SchedulerConfig) -> list[PassSize]:
    """Return the passes to time, the most informative first: one row's trees, plain batches, long contexts, many rows' trees."""
    sizes = [PassSize(*shape, _SHORT) for shape in ((1, 1), (1, 4), (1, 16), (4, 1), (1, 2), (1, 8))]
    sizes += [PassSize(1, 1, _LONG), PassSize(1, 8, _LONG), PassSize(1, 8, _SHORT, is_drawn=True)]
    sizes += [PassSize(16, 1, _SHORT), PassSize(32, 1, _SHORT), PassSize(4, 4, _LONG)]
    sizes += [PassSize(count // 8, 8, _SHORT) for count in KNOTS if count >= 32]
    most_tokens = min(limits.max_step_tokens, limits.num_slots - _SHORT)
    longest = max(1, limits.max_model_len - 16)
    within = [replace(size, num_context=min(size.num_context, longest)) for size in sizes if size.num_tokens <= most_tokens]
    return list(dict.fromkeys(within))


def measure(bench: Bench, clock: Callable[[], float] = time.perf_counter, budget_s: float = _BUDGET_S) -> Profile:
    """Return the profile of this machine.

    The first round takes up to half of the budget. A quarter is for drafting, and a quarter for repetitions, with equal time for
    each size. The first few sizes are measured twice even beyond the budget.
    """
    begin_s, sizes = clock(), grid(bench.limits)
    bar = progress_bar(what="measuring the cost of steps", total=round(budget_s), unit="s", leave=False)
    seen: dict[PassSize, tuple[StepWork, list[float]]] = {}

    def measure_pass(size: PassSize) -> None:
        work, seconds = bench.time_pass(size)
        seen.setdefault(size, (work, []))[1].append(seconds)
        bar.update(int(min(budget_s, clock() - begin_s)) - bar.n)

    for size in sizes:
        if len(seen) >= _FEWEST_SIZES and clock() - begin_s > budget_s / 2:
            break
        bench.time_pass(size)  # a warm-up: kernels are chosen and memory is allocated
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
    pass_times, draft_times = [times for _, times in seen.values()], [[step.draft_s for step in steps] for steps in drafted]
    profile = Profile(
        rest=_rest_coefficients(works, medians),
        draft=_draft_coefficients([_typical(steps) for steps in drafted], float(medians[0])),
        is_sound=_is_steady(pass_times) and _is_steady(draft_times),
    )
    found = {name: f"{value:.2e}" for name, value in profile.costs().coefficients.items()}
    _logger.info("measured the cost of steps in %.1f s", clock() - begin_s)
    _logger.debug("costs: %s", found)
    return profile


def _is_steady(times_by_size: Sequence[Sequence[float]]) -> bool:
    """Return whether the times of most sizes vary little."""
    ratios = [np.median(times) / max(min(times), 1e-9) for times in times_by_size]
    return not ratios or float(np.median(ratios)) < _STEADY


def _drafted(bench: Bench, budget_s: float) -> list[list[StepFeedback]]:
    """Return steps that draft, grouped by size: chains of each length for one sequence and, if there is time, for several.

    There are none if the model's length leaves too little room.
    """
    limits, drafted = bench.limits, list[list[StepFeedback]]()
    expansions = [Expansion(length, 1, 0) for length in _CHAINS] * _ROUNDS
    num_prompt = min(_SHORT, max(1, limits.max_model_len // 4))
    num_tokens = num_prompt + sum(2 + one.max_depth for one in expansions)
    for num_rows in (_CHAINS[0], _CHAINS[-1]):
        has_room = num_tokens <= limits.max_model_len and num_rows * num_tokens <= limits.num_slots
        spent_s = sum(step.draft_s + step.rest_s for steps in drafted for step in steps)
        if not has_room or num_rows > limits.max_running or spent_s > budget_s / 2:
            break
        ran = bench.run_steps(num_rows, num_prompt, expansions)[len(_CHAINS) :]
        drafted += [ran[place :: len(_CHAINS)] for place in range(len(_CHAINS))]
    return [steps for steps in drafted if steps]


def _typical(steps: Sequence[StepFeedback]) -> StepFeedback:
    """Return the step with the median drafting time, the lower one of two."""
    return sorted(steps, key=lambda step: step.draft_s)[(len(steps) - 1) // 2]


def _rest_coefficients(works: Sequence[StepWork], seconds_C: Array) -> tuple[float, ...]:
    """Return coefficients that fit the passes. T(N) continues beyond the largest pass with the last slope."""
    found = cost.fitted_coefficients([cost.rest_features(work) for work in works], seconds_C, GENERIC_REST)
    largest = max(work.num_tokens for work in works)
    last = max(1, sum(knot < largest for knot in KNOTS))
    found[1 + last : 1 + len(KNOTS)] = [found[last]] * (len(KNOTS) - last)
    return tuple(found)


def _draft_coefficients(steps: Sequence[StepFeedback], step_s: float) -> tuple[float, ...]:
    """Return coefficients that fit the drafting of steps: generic without drafts, nearly zero for features that no step has."""
    generic = tuple(factor * step_s for factor in GENERIC_DRAFT)
    drafting = [step for step in steps if step.work.num_rounds and step.draft_s > 0.0]
    if not drafting:
        return generic
    features = [cost.draft_features(step.work) for step in drafting]
    fitted = cost.fitted_coefficients(features, np.array([step.draft_s for step in drafting]), GENERIC_DRAFT)
    has_feature = map(any, zip(*features, strict=True))
    return tuple(
        one if is_seen else cost.LEAST_FACTOR * low for one, low, is_seen in zip(fitted, generic, has_feature, strict=True)
    )


def cached_profile(bench: Bench, cache: WeightsCache, is_hurried: bool = False) -> Profile:
    """Return this machine's cached profile, or measure and cache one.

    A disturbed one is measured again at the next start, unless that `is_hurried`. After _MOST_MEASURED starts it is used: steps
    correct the costs.
    """
    facts, num_measured = bench.facts, 0
    entry = cache.profile(_key(facts, bench.limits))
    try:
        cached = Profile.from_text(entry.read_text())
        if cached.is_sound or is_hurried or cached.num_measured >= _MOST_MEASURED:
            return cached
        num_measured = cached.num_measured
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.warning("%s is no profile (%s); it is measured again", entry, error)
    profile = replace(measure(bench), num_measured=num_measured + 1)
    try:
        entry.unlink(missing_ok=True)
        cache.obtain(entry, lambda target, _: target.write_text(profile.as_text(facts)))
    except OSError as error:
        _logger.warning("the profile cannot be kept in %s: %s", entry, error)
    return profile


def _key(facts: dict[str, str], limits: SchedulerConfig) -> str:
    """Return the file's name, a digest of the machine, the models and the measured sizes."""
    room = [limits.max_running, limits.num_slots, limits.max_model_len]
    everything = {"version": _VERSION, "facts": facts, "sizes": [astuple(size) for size in grid(limits)], "room": room}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:24]
