"""The report of `latebranch audit --url` as text and as one JSON line."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from engine.audit.report import AuditVerdict
from engine.utils.finite_json import finite_json
from server.audit_url.results import TOO_FEW, CheckResult, ServerReport


def as_text(report: ServerReport) -> str:
    """Return the whole report: the server, every check with its verdict and detectable difference, and the outcome."""
    lines = [
        f"Audit of {report.model} at {report.url} ({report.owner or 'unknown server'}), first seed {report.first_seed}.",
        f"Expected: {report.about}.",
        f"Order assumed: {report.order}. {_drafts(report)}",
        f"{report.num_requests} requests, {report.seconds:.0f} s.",
        "",
        f"Each test's level is {report.level:.1e}: {report.alpha:g} over {report.num_tests} tests. "
        f"A near tie is a gap of at most {report.tie_tolerance:.2g} between logits.",
    ]
    for setting, results in groupby(report.results, key=lambda one: one.setting):
        lines.append(f"{setting}")
        lines += _lines(list(results), report.level)
    return "\n".join([*lines, "", *_outcome(report)])


def _lines(results: Sequence[CheckResult], level: float) -> Iterator[str]:
    """Yield a line for each check, and one for all tests with too few samples."""
    yield from (_line(one, level) for one in results if one.detail != TOO_FEW)
    if few := [one.check for one in results if one.detail == TOO_FEW]:
        yield f"  {TOO_FEW}: {', '.join(few)}"


def _line(one: CheckResult, level: float) -> str:
    detail = one.detail
    if one.test is not None:
        detail = f"p {one.test.p_value:.2g}, finds {one.test.detectable(level):.3f}"
    elif one.check == "arg max" and one.num:
        detail += f"; finds {min(1.0, 2.3 / one.num):.4f}"
    return f"  {one.check:<24}{one.num:>7}  {one.at(level):<12}{detail}".rstrip()


def _drafts(report: ServerReport) -> str:
    if report.num_drafted is None:
        return "The server reports no drafts."
    return f"{report.num_accepted} of {report.num_drafted} drafted tokens accepted."


def _outcome(report: ServerReport) -> Iterator[str]:
    if report.verdict is AuditVerdict.VIOLATION:
        yield "NOT LOSSLESS: the lines marked VIOLATION cannot be chance, or very rarely (see docs/audit.md)."
    elif report.verdict is AuditVerdict.INCONCLUSIVE:
        yield f"INCONCLUSIVE: {'; '.join(report.inconclusive)} (see docs/audit.md)."
    else:
        yield "LOSSLESS as far as this audit sees."
    yield "`finds`: the total variation distance, or the share of wrong tokens, that is found with probability .9, approximately."


def as_json(report: ServerReport) -> str:
    """Return one line with the verdict and the whole report."""
    head = {"verdict": report.verdict, "inconclusive": report.inconclusive, "level": report.level, "num_tests": report.num_tests}
    results = [
        {
            **asdict(one),
            "verdict": one.at(report.level),
            "p_value": None if one.test is None else one.test.p_value,
            "finds": None if one.test is None else one.test.detectable(report.level),
        }
        for one in report.results
    ]
    return finite_json({**head, "report": {**asdict(report), "results": results}})
