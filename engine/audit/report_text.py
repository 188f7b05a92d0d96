"""Formats the report of `latebranch audit` as text. Knows records and columns."""

from collections.abc import Iterator

from engine.audit.report import AuditVerdict, ChoiceReport, Report, SampledReport
from engine.core.types import ModelInfo


def as_text(report: Report, info: ModelInfo, seconds: float) -> str:
    """Return the whole report: the audited engine, every check with its verdict and detection limit, and the outcome."""
    lines = [
        f"Audit of {info.name} ({info.dtype}, {info.device}), drafter {info.drafter}, first seed {report.first_seed}.",
        f"Reference: transformers' own plain forward, {report.reference_dtype}. {report.num_prompts} prompts, {seconds:.0f} s.",
        *_notes(report),
        "",
        f"Draws (each test's level is {report.level:.1e}: {report.alpha:g} over {report.num_tests} tests)",
        f"  {'test':<25}{'dists':>5}{'tokens':>8}{'G':>9}{'freedom':>9}{'p':>10}{'finds':>8}  verdict",
    ]
    for sampled in report.sampled:
        lines += _sampled(sampled, report.level)
    lines += ["", f"Choices (a near tie is a gap of at most {report.tie_tolerance:g} between logits)"]
    lines.append(f"  {'setting':<44}{'tokens':>8}{'right':>8}{'near ties':>11}{'wrong':>7}{'widest':>9}  verdict")
    for choice in (*report.greedy, *report.coupled):
        lines += _choice(choice)
    return "\n".join([*lines, "", _outcome(report)])


def _notes(report: Report) -> Iterator[str]:
    if report.reference_dtype == "bfloat16":
        yield f"In {report.reference_dtype} passes of different widths round differently: the tests include that rounding."


def _sampled(sampled: SampledReport, level: float) -> Iterator[str]:
    yield f"  {sampled.setting}: {sampled.num_texts} texts, {_drafts(sampled)}"
    for one in sampled.tests:
        test = one.test
        yield (
            f"    {one.name:<23}{one.num_laws:>5}{test.num_counted:>8}{test.statistic:>9.1f}{test.freedom:>9}"
            f"{test.p_value:>10.2g}{test.detectable(level):>8.3f}  {_verdict(test.p_value >= level)}"
        )
    support = sampled.support
    found = f"{support.num_mismatch} found, {support.num_near_tie} at the support's edge"
    yield f"    {'impossible tokens':<28}{support.num_tokens:>8}  {found:<34}  {_verdict(not support.num_mismatch)}"


def _choice(choice: ChoiceReport) -> Iterator[str]:
    tally = choice.tally
    yield (
        f"  {choice.setting:<44}{tally.num_tokens:>8}{tally.num_match:>8}{tally.num_near_tie:>11}{tally.num_mismatch:>7}"
        f"{tally.widest_gap:>9.1e}  {_verdict(choice.is_lossless)}"
    )
    unlike = "" if choice.num_unlike_texts is None else f"; {choice.num_unlike_texts} differ from those without speculation"
    yield f"    {choice.num_texts} texts, {_drafts(choice)}{unlike}"


def _drafts(part: SampledReport | ChoiceReport) -> str:
    return f"{part.num_accepted} of {part.num_drafted} drafted tokens accepted"


def _verdict(is_good: bool) -> str:
    return "ok" if is_good else "VIOLATION"


def _outcome(report: Report) -> str:
    if report.verdict is AuditVerdict.INCONCLUSIVE:
        return f"INCONCLUSIVE: no accepted drafts, or too few samples, in: {'; '.join(report.inconclusive)} (see docs/audit.md)."
    if report.is_lossless:
        found = "`finds`: the total variation distance that a test finds with probability .9, approximately."
        return f"LOSSLESS as far as this audit sees. {found}"
    return "NOT LOSSLESS: the lines marked VIOLATION cannot be chance, or very rarely (see docs/audit.md)."
