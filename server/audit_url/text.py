"""The report of `latebranch audit --url` as text and as one JSON line."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from engine.utils.finite_json import finite_json
from server.audit_url.results import ARG_MAX, TOO_FEW, CheckResult, CheckVerdict, ServerReport


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
    if passed:
        least, finds = min(test.p_value for test in passed.values()), min(test.detectable(level) for test in passed.values())
        num = max(test.num_counted for test in passed.values())
        yield f"  {f'{len(passed)} tests of frequencies':<24}{num:>7}  {'ok':<12}least p {least:.2g}, finds {finds:.3f}"
    for one in results:
        if one.check not in passed and one.detail != TOO_FEW:
            detail = one.detail if one.test is None else f"p {one.test.p_value:.2g}, finds {one.test.detectable(level):.3f}"
            detail += f"; finds {min(1.0, 2.3 / one.num):.4f}" if one.check == ARG_MAX and one.num else ""
            yield f"  {one.check:<24}{one.num:>7}  {one.at(level):<12}{detail}".rstrip()
    if few := [one.check for one in results if one.detail == TOO_FEW]:
        yield f"  {TOO_FEW}: {', '.join(few)}"


def _outcome(report: ServerReport) -> Iterator[str]:
    inconclusive, sound = f"INCONCLUSIVE: {'; '.join(report.inconclusive)}", "as far as this audit sees."
    if any(one.is_of_tokens for one in report.violations):
        yield "NOT LOSSLESS: the lines marked VIOLATION cannot be chance, or very rarely (see docs/audit.md)."
    elif report.violations:
        wrong = ", ".join(dict.fromkeys(one.check for one in report.violations))
        yield f"WRONG ANSWERS, by the lines marked VIOLATION: {wrong} (see docs/audit.md)."
        yield f"The tokens are {inconclusive}." if report.inconclusive else f"The tokens are lossless {sound}"
    else:
        yield f"{inconclusive} (see docs/audit.md)." if report.inconclusive else f"LOSSLESS {sound}"
    yield "`finds`: the total variation distance, or the share of wrong tokens, that is found with probability .9, approximately."


def as_json(report: ServerReport) -> str:
    """Return one line with the verdict and the whole report."""
    head = {"verdict": report.verdict, "inconclusive": report.inconclusive, "level": report.level, "num_tests": report.num_tests}
    results = []
    for one in report.results:
        numbers = (None, None) if one.test is None else (one.test.p_value, one.test.detectable(report.level))
        results.append(asdict(one) | {"verdict": one.at(report.level), "p_value": numbers[0], "finds": numbers[1]})
    return finite_json({**head, "report": {**asdict(report), "results": results}})
