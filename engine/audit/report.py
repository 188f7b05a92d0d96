"""The results of an audit, and its verdict. The fields are the JSON output of `latebranch audit`."""

from dataclasses import dataclass
from enum import StrEnum

from engine.audit.chi_square import ChiSquare
from engine.audit.outcomes import Tally


class AuditVerdict(StrEnum):
    """The outcome of an audit."""

    LOSSLESS = "lossless"
    VIOLATION = "violation"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """A chi-square test of draws, summed over `num_laws`, one for each prompt and prefix."""

    name: str
    test: ChiSquare
    num_laws: int = 1


@dataclass(frozen=True, slots=True)
class SampledReport:
    """The draws of one setting: its distribution tests, and whether each token was possible."""

    setting: str
    num_texts: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    tests: tuple[DistributionTest, ...]
    num_tests: int
    support: Tally
    is_by_policy: bool = False

    @property
    def is_conclusive(self) -> bool:
        """Whether a violation could be found: drafts were accepted, and there are enough draws to test the first token.

        A policy may draft little or nothing; then the settings with a fixed tree provide the accepted drafts.
        """
        return (self.num_accepted > 0 or self.is_by_policy) and any(
            one.test.freedom for one in self.tests if one.name.startswith("first token")
        )

    def is_lossless(self, level: float) -> bool:
        """Whether no test rejects at this level and every token was possible."""
        return not self.support.num_mismatch and all(one.test.p_value >= level for one in self.tests)


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """Deterministic sequences of one setting; `num_unlike_texts` (coupled only) differ from the texts without speculation."""

    setting: str
    num_texts: int
    num_drafted: int
    num_accepted: int
    tally: Tally
    num_unlike_texts: int | None = None
    is_by_policy: bool = False

    @property
    def is_conclusive(self) -> bool:
        """Whether a violation could be found: drafts were accepted, or the policy chose to make none."""
        return self.num_accepted > 0 or self.is_by_policy

    @property
    def is_lossless(self) -> bool:
        """Whether every token was the expected one or nearly tied with it."""
        return not self.tally.num_mismatch


@dataclass(frozen=True, slots=True)
class Report:
    """The whole audit. The error level of each distribution test is `alpha` over the number of tests (Bonferroni)."""

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
        """Number of chi-square tests, including the tests of each prefix."""
        return sum(one.num_tests for one in self.sampled)

    @property
    def level(self) -> float:
        """The p-value below which a test rejects."""
        return self.alpha / max(1, self.num_tests)

    @property
    def verdict(self) -> AuditVerdict:
        """The outcome. A violation counts even if the rest of the audit is inconclusive."""
        if not self.is_lossless:
            return AuditVerdict.VIOLATION
        return AuditVerdict.INCONCLUSIVE if self.inconclusive else AuditVerdict.LOSSLESS

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """Settings in which this audit could not have found a violation."""
        parts: tuple[SampledReport | ChoiceReport, ...] = (*self.sampled, *self.greedy, *self.coupled)
        return tuple(one.setting for one in parts if not one.is_conclusive)

    @property
    def is_lossless(self) -> bool:
        """Whether no violation was found."""
        return all(one.is_lossless(self.level) for one in self.sampled) and all(
            one.is_lossless for one in (*self.greedy, *self.coupled)
        )
