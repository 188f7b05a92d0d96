"""The records of an audit of a server, and its verdict. The fields are the JSON of `latebranch audit --url`."""

from dataclasses import dataclass
from enum import StrEnum

from engine.audit.chi_square import ChiSquare, RareTest
from engine.audit.report import AuditVerdict

ARG_MAX, ALL, IMPOSSIBLE, PAIRS = "arg max", "all tokens", "impossible tokens", "first two tokens"
TOO_FEW = "too few samples of likely tokens"


class CheckVerdict(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    VIOLATION = "VIOLATION"
    NOT_OFFERED = "not offered"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check in one setting. A statistical test has no verdict of its own: the report's level decides."""

    setting: str
    check: str
    num: int = 0
    verdict: CheckVerdict | None = None
    detail: str = ""
    test: ChiSquare | RareTest | None = None

    @classmethod
    def counted(cls, setting: str, check: str, num: int, num_wrong: int, detail: str | None = None) -> "CheckResult":
        """Return the result of so many cases, of which some are wrong."""
        verdict = CheckVerdict.VIOLATION if num_wrong else CheckVerdict.OK if num else CheckVerdict.NOT_JUDGED
        default = f"{num_wrong} wrong" if num_wrong else ""
        return cls(setting, check, num, verdict, default if detail is None else detail)

    @classmethod
    def tested(cls, setting: str, check: str, test: ChiSquare | RareTest) -> "CheckResult":
        """Return the result of a statistical test, which without a degree of freedom decides nothing."""
        if isinstance(test, ChiSquare) and not test.freedom:
            return cls(setting, check, 0, CheckVerdict.NOT_JUDGED, TOO_FEW)
        return cls(setting, check, test.num_counted, test=test)

    def at(self, level: float) -> CheckVerdict:
        """Return the verdict at a level of significance."""
        if self.test is not None:
            return CheckVerdict.VIOLATION if self.test.p_value < level else CheckVerdict.OK
        return self.verdict or CheckVerdict.OK

    @property
    def is_of_tokens(self) -> bool:
        """Whether the check is of the tokens' distribution, and not of what is reported beside them."""
        return self.test is not None or self.check in (ARG_MAX, IMPOSSIBLE)


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The whole audit. The error level of each statistical test is `alpha` over their number (Bonferroni)."""

    url: str
    model: str
    owner: str
    about: str
    order: str
    alpha: float
    first_seed: int
    tie_tolerance: float
    num_requests: int
    seconds: float
    num_drafted: int | None
    num_accepted: int
    results: tuple[CheckResult, ...]

    @property
    def num_tests(self) -> int:
        """Number of statistical tests."""
        return sum(one.test is not None for one in self.results)

    @property
    def level(self) -> float:
        """The p-value below which a test rejects."""
        return self.alpha / max(1, self.num_tests)

    @property
    def violations(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(one for one in self.results if one.at(self.level) is CheckVerdict.VIOLATION)

    @property
    def verdict(self) -> AuditVerdict:
        """The outcome. A violation counts even if the rest is inconclusive."""
        if self.violations:
            return AuditVerdict.VIOLATION
        return AuditVerdict.INCONCLUSIVE if self.inconclusive else AuditVerdict.LOSSLESS

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """The reasons why this audit could not have found a violation of speculation."""
        has_later = any(one.check in (ALL, PAIRS) and one.test is not None for one in self.results)
        has_greedy = any(one.check == ARG_MAX and one.num for one in self.results)
        reasons = {
            "no test of the tokens after the first has enough samples": not has_later,
            "no greedy token could be judged": not has_greedy,
            "no drafted token was accepted": bool(self.num_drafted) and not self.num_accepted,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)
