"""Speed-up of the served policy over plain decoding, with a confidence interval that is valid at any time.

Steps without prompts are collected by the number of decoding rows. A block of such steps gives a pair: the seconds that they
took, and the seconds that plain decoding would have taken for the same tokens, at the speed of the block's plain steps. The
speed-up r is the ratio of the two means. For the true r, the differences (plain - r policy) have mean 0. The interval contains
each r that a t-test of mean 0 does not reject, with the bound of Lindon, Ham, Tingley and Bojinov, "Anytime-Valid Linear Models
and Confidence Sequences" (arXiv 2210.08589): a mixture over effect sizes, for an unknown variance. So a reader can look at the
interval after each step, and stop at any.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.tree import PLAIN
from engine.core.types import StepStats
from engine.plain_comparison import COMPARED_EVERY

ERROR_RATE = 0.05  # of an interval, over all times together
_BLOCK_STEPS = 64  # at least, with one plain step
_MOST_STEPS = 4 * COMPARED_EVERY  # of a block without a plain step
_WINDOW_PAIRS = 1024  # after which a new interval begins, so that old steps do not hide a change
_FIRST_PAIRS = 64  # of a new interval before it replaces the last one
_PRIOR_PAIRS = 4.0  # sets where the interval is narrowest: at about eight times as many pairs
_LONGEST = 4.0  # typical steps: a longer step was interrupted by another program
_MEMORY = 0.95  # decay of the typical step's seconds


class Interval(NamedTuple):
    """An estimate of the speed-up, between its bounds. NaN between 0 and infinity: nothing is known."""

    estimate: float = math.nan
    lower: float = 0.0
    upper: float = math.inf


def most_t_squared(num_pairs: int) -> float:
    """Return the bound of the squared t-statistic of `num_pairs` values with mean 0, valid at all times together."""
    share = _PRIOR_PAIRS / (_PRIOR_PAIRS + num_pairs)
    ratio = (share * ERROR_RATE**2) ** (-1.0 / num_pairs)
    return (num_pairs - 1) * (ratio - 1.0) / (1.0 - ratio * share) if ratio * share < 1.0 else math.inf


class PairedSeconds:
    """Sums of pairs: seconds of plain decoding and of the policy for the same tokens."""

    def __init__(self) -> None:
        self.num_pairs = 0
        self._sums = [0.0] * 5  # plain, policy, their squares and product

    def add(self, plain_s: float, policy_s: float) -> None:
        """Add a pair."""
        self.num_pairs += 1
        values = (plain_s, policy_s, plain_s * plain_s, policy_s * policy_s, plain_s * policy_s)
        self._sums = [old + value for old, value in zip(self._sums, values, strict=True)]

    def interval(self) -> Interval:
        """Return the ratio of the means and its interval: the r between the roots of a quadratic (Fieller's theorem)."""
        if self.num_pairs < 2:
            return Interval()
        n = self.num_pairs
        plain, policy, plain_2, policy_2, product = (one / n for one in self._sums)
        estimate, bound = plain / policy, most_t_squared(n) / (n - 1)
        if math.isinf(bound):
            return Interval(estimate)
        # n (plain - r policy)^2 <= bound n (variance of plain - r policy) is a r^2 - 2 b r + c <= 0
        a = policy * policy - bound * max(0.0, policy_2 - policy * policy)
        b = plain * policy - bound * (product - plain * policy)
        c = plain * plain - bound * max(0.0, plain_2 - plain * plain)
        root = math.sqrt(max(0.0, b * b - a * c))
        return Interval(estimate, max(0.0, (b - root) / a), (b + root) / a) if a > 0.0 else Interval(estimate)


@dataclass
class _Block:
    """Steps with one number of decoding rows since its last pair, and the typical seconds of its plain and other steps."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_plain: int = 0
    plain_s: float = 0.0
    typical_s: dict[bool, float] = field(default_factory=dict)

    def within_typical(self, is_plain: bool, seconds: float) -> float:
        """Return a step's seconds without interruptions."""
        typical = self.typical_s.get(is_plain, seconds)
        bounded = min(seconds, _LONGEST * typical)
        self.typical_s[is_plain] = _MEMORY * typical + (1.0 - _MEMORY) * bounded
        return bounded


class SpeedupOverPlain:
    """Estimates the speed-up of decoding steps over plain decoding at the same number of rows."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._pairs, self._last = PairedSeconds(), Interval()

    def on_step(self, stats: StepStats) -> None:
        """Add a step. Steps that feed prompts are the same with and without drafts, and are left out.

        So are steps of requests that disable drafting: the policy does not choose for them.
        """
        num_rows = stats.num_decoding_rows
        feeds_prompt = stats.num_target_tokens != stats.num_row_steps + stats.num_draft_tokens
        if not num_rows or feeds_prompt or stats.num_undraftable_rows or stats.step_s <= 0.0:
            return
        block = self._blocks.setdefault(num_rows, _Block())
        is_plain = stats.expansions == {PLAIN.label: num_rows}
        seconds = stats.num_steps * block.within_typical(is_plain, stats.step_s / stats.num_steps)
        block.num_steps += stats.num_steps
        block.num_tokens += stats.num_generated_tokens
        block.seconds += seconds
        if is_plain:  # plain decoding chooses no tree and feeds no drafter
            block.num_plain += stats.num_steps
            block.plain_s += seconds * (1.0 - (stats.policy_s + stats.draft_s) / stats.step_s)
        if not block.num_plain and block.num_steps >= _MOST_STEPS:  # nothing decodes plainly here, such as under a fixed tree
            self._blocks[num_rows] = _Block(typical_s=block.typical_s)
        elif block.num_plain and block.num_steps >= _BLOCK_STEPS:
            self._add(block.plain_s / (block.num_plain * num_rows) * block.num_tokens, block.seconds)
            self._blocks[num_rows] = _Block(typical_s=block.typical_s)

    def _add(self, plain_s: float, policy_s: float) -> None:
        if self._pairs.num_pairs >= _WINDOW_PAIRS:
            self._last, self._pairs = self._pairs.interval(), PairedSeconds()
        self._pairs.add(plain_s, policy_s)

    def interval(self) -> Interval:
        """Return the current interval, or the last one while a new one has few pairs."""
        is_new = self._pairs.num_pairs < _FIRST_PAIRS and not math.isnan(self._last.estimate)
        return self._last if is_new else self._pairs.interval()
