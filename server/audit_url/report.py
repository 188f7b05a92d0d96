"""The records of an audit of a server, which are its JSON, their verdict, and the report as text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby

from engine.audit.chi_square import ChiSquare, RareTest
from engine.audit.report import AuditVerdict
from engine.utils.finite_json import finite_json

ARG_MAX, ALL, IMPOSSIBLE, PAIRS = "arg max", "all tokens", "impossible tokens", "first two tokens"


class CheckVerdict(StrEnum):
    """The outcome of one check."""

    OK = "ok"
    VIOLATION = "VIOLATION"
    NOT_OFFERED = "not offered"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check in one setting: cases and wrong ones, or a statistical test, or the reason why it was not made."""

    setting: str
    check: str
    num: int = 0
    num_wrong: int = 0
    detail: str = ""
    test: ChiSquare | RareTest | None = None
    left_out: CheckVerdict | None = None

    def at(self, level: float) -> CheckVerdict:
        """Return the verdict at a level of significance."""
        is_wrong = self.num_wrong > 0 if self.test is None else self.test.p_value < level
        otherwise = CheckVerdict.OK if self.num and not self.is_too_small else CheckVerdict.NOT_JUDGED
        return self.left_out or (CheckVerdict.VIOLATION if is_wrong else otherwise)

    @property
    def is_too_small(self) -> bool:
        """Whether a test has no degree of freedom, so that it decides nothing."""
        return isinstance(self.test, ChiSquare) and not self.test.freedom

    @property
    def is_of_tokens(self) -> bool:
        """Whether the check is of the tokens' distribution, and not of what is reported beside them."""
        return self.is_test or self.check in (ARG_MAX, IMPOSSIBLE)

    @property
    def is_test(self) -> bool:
        """Whether a statistical test decides."""
        return self.test is not None and not self.is_too_small

    def line(self, level: float) -> str:
        """Return the check's line in the report."""
        detail = self.detail or (f"{self.num_wrong} wrong" if self.num_wrong else "")
        detail = detail if self.test is None else f"p {self.test.p_value:.2g}, finds {self.test.detectable(level):.3f}"
        detail += f"; finds {min(1.0, 2.3 / self.num):.4f}" if self.check == ARG_MAX and self.num else ""
        return f"  {self.check:<24}{self.num:>7}  {self.at(level):<12}{detail}".rstrip()


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
        return sum(one.is_test for one in self.results)

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
        otherwise = AuditVerdict.INCONCLUSIVE if self.inconclusive else AuditVerdict.LOSSLESS
        return AuditVerdict.VIOLATION if self.violations else otherwise

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """The reasons why this audit could not have found a violation of speculation."""
        has_later = any(one.check in (ALL, PAIRS) and one.is_test for one in self.results)
        has_greedy = any(one.check == ARG_MAX and one.num for one in self.results)
        reasons = {
            "no test of the tokens after the first has enough samples": not has_later,
            "no greedy token could be judged": not has_greedy,
            "no drafted token was accepted": bool(self.num_drafted) and not self.num_accepted,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)


def as_text(report: ServerReport) -> str:
    """Return the whole report: the server, every check with its verdict and detectable difference, and the outcome."""
    drafts = f"{report.num_accepted} of {report.num_drafted} drafted tokens accepted."
    lines = [
        f"Audit of {report.model} at {report.url} ({report.owner or 'unknown server'}), first seed {report.first_seed}.",
        f"Expected: {report.about}.",
        f"Order assumed: {report.order}. {'The server reports no drafts.' if report.num_drafted is None else drafts}",
        f"{report.num_requests} requests, {report.seconds:.0f} s.",
        "",
        f"Each test's level is {report.level:.1e}: {report.alpha:g} over {report.num_tests} tests. "
        f"A near tie is a gap of at most {report.tie_tolerance:.2g} between logits.",
    ]
    for setting, results in groupby(report.results, key=lambda one: one.setting):
        lines += [setting, *_lines(list(results), report.level)]
    return "\n".join([*lines, "", *_outcome(report)])


def _lines(results: Sequence[CheckResult], level: float) -> Iterator[str]:
    """Yield one line for all tests of frequencies that pass, and one for each other check."""
    passed = {one.check: one.test for one in results if one.test is not None and one.at(level) is CheckVerdict.OK}
    few = [one.check for one in results if one.is_too_small]
    if tests := passed.values():
        least, finds = min(test.p_value for test in tests), min(test.detectable(level) for test in tests)
        num = max(test.num_counted for test in tests)
        yield f"  {f'{len(tests)} tests of frequencies':<24}{num:>7}  {'ok':<12}least p {least:.2g}, finds {finds:.3f}"
    yield from (one.line(level) for one in results if one.check not in (*passed, *few))
    if few:
        yield f"  too few samples of likely tokens: {', '.join(few)}"


def _outcome(report: ServerReport) -> Iterator[str]:
    sound = "LOSSLESS as far as this audit sees."
    sound = f"INCONCLUSIVE: {'; '.join(report.inconclusive)} (see docs/audit.md)." if report.inconclusive else sound
    if any(one.is_of_tokens for one in report.violations):
        yield "NOT LOSSLESS: the lines marked VIOLATION cannot be chance, or very rarely (see docs/audit.md)."
    elif report.violations:
        wrong = ", ".join(dict.fromkeys(one.check for one in report.violations))
        yield f"WRONG ANSWERS, by the lines marked VIOLATION: {wrong} (see docs/audit.md)."
        yield f"The tokens: {sound}"
    else:
        yield sound
    yield "`finds`: the total variation distance, or the share of wrong tokens, that is found with probability .9, approximately."


def as_json(report: ServerReport) -> str:
    """Return one line with the verdict and the whole report."""
    head = {"verdict": report.verdict, "inconclusive": report.inconclusive, "level": report.level, "num_tests": report.num_tests}
    results = []
    for one in report.results:
        p_value, finds = (one.test.p_value, one.test.detectable(report.level)) if one.test is not None else (None, None)
        results.append(asdict(one) | {"verdict": one.at(report.level), "p_value": p_value, "finds": finds})
    return finite_json({**head, "report": {**asdict(report), "results": results}})
