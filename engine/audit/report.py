"""What an audit found: records, and the one place where a verdict is formed. Knows numbers only."""

from dataclasses import dataclass
from enum import StrEnum

from engine.audit.chi_square import ChiSquare
from engine.audit.outcomes import Tally


class Verdict(StrEnum):
    """The outcome of an audit."""

    LOSSLESS = "lossless"
    VIOLATION = "violation"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class LawTest:
    """One chi-square test of draws; `num_laws` says over how many laws, one each prompt and prefix, it is summed."""

    name: str
    test: ChiSquare
    num_distributions: int = 1


@dataclass(frozen=True, slots=True)
class SampledReport:
    """The draws of one setting: its law tests, and whether each token could have been drawn at all."""

    setting: str
    num_texts: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    tests: tuple[LawTest, ...]
    num_tests: int
    support: Tally
    is_by_policy: bool = False

    @property
    def is_conclusive(self) -> bool:
        """Whether there was something to be found: drafts that were accepted, and draws enough for the first token's laws.

        A policy may draft little or nothing; a tree that was asked for is audited beside it.
        """
        return (self.num_accepted > 0 or self.is_by_policy) and any(
            one.test.freedom for one in self.tests if one.name.startswith("first token")
        )

    def is_lossless(self, level: float) -> bool:
        """Whether no test at this level and no token speaks against the setting."""
        return not self.support.num_mismatch and all(one.test.p_value >= level for one in self.tests)


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """Texts of one setting that leave no choice. `num_unlike_texts` differ from those without speculation (coupled ones only)."""

    setting: str
    num_texts: int
    num_drafted: int
    num_accepted: int
    tally: Tally
    num_unlike_texts: int | None = None
    is_by_policy: bool = False

    @property
    def is_conclusive(self) -> bool:
        """Whether there was something to be found: drafts that were accepted, unless the policy chose to make none."""
        return self.num_accepted > 0 or self.is_by_policy

    @property
    def is_lossless(self) -> bool:
        """Whether every token was the right one or nearly tied with it."""
        return not self.tally.num_mismatch


@dataclass(frozen=True, slots=True)
class Report:
    """The whole audit. The law tests share the error level `alpha`: each is held against alpha over their number (Bonferroni)."""

    alpha: float
    first_seed: int
    num_prompts: int
    reference_dtype: str
    tie_tolerance: float
    sampled: tuple[SampledReport, ...]
    greedy: tuple[ChoiceReport, ...]
    coupled: tuple[ChoiceReport, ...]

    @property
    def num_tests(self) -> int:
        """Chi-square tests made, each prefix's own among them."""
        return sum(one.num_tests for one in self.sampled)

    @property
    def level(self) -> float:
        """The p-value below which one test speaks against the engine."""
        return self.alpha / max(1, self.num_tests)

    @property
    def verdict(self) -> Verdict:
        """What the audit has shown. A violation is one however little there was to find it in."""
        if not self.is_lossless:
            return Verdict.VIOLATION
        return Verdict.INCONCLUSIVE if self.inconclusive else Verdict.LOSSLESS

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """Settings of which this audit could have found nothing."""
        parts: tuple[SampledReport | ChoiceReport, ...] = (*self.sampled, *self.greedy, *self.coupled)
        return tuple(one.setting for one in parts if not one.is_conclusive)

    @property
    def is_lossless(self) -> bool:
        """Whether nothing was found."""
        return all(one.is_lossless(self.level) for one in self.sampled) and all(
            one.is_lossless for one in (*self.greedy, *self.coupled)
        )
