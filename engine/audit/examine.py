"""Compares an engine's output with the reference: distribution tests of sampled tokens, exact checks of deterministic tokens.

Shape key: N positions of one sequence, M positions of several, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import ChiSquare, combined_test, likelihood_ratio_test
from engine.audit.collect import Collected, GeneratedSequence, SettingOutput
from engine.audit.outcomes import Tally, greedy_gaps, is_testable, support_of, tally_gaps, tie_tolerance
from engine.audit.pit import bin_counts, pit_values, uniformity_test
from engine.audit.plan import AuditPlan
from engine.audit.reference import Reference, penalised, warped
from engine.audit.report import ChoiceReport, DistributionTest, Report, SampledReport
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import SamplingParams
from engine.sampling.noise import gumbels
from engine.utils.progress_bar import progress_bar

CELL = 10.0  # tokens with a smaller expected count share a cell
_POSITIONS = ("first token", "second token", "third token")
_ROWS_AT_ONCE = 128


def examine(collected: Collected, reference: Reference) -> Report:
    """Return the report on the engine's output. Runs one plain forward of the reference over each sequence."""
    plan = collected.plan
    tolerance = tie_tolerance(reference.dtype)
    plain = {one.setting: one.texts for one in collected.plain}
    return Report(
        alpha=plan.alpha,
        first_seed=plan.first_seed,
        num_prompts=len(plan.prompts),
        reference_dtype=reference.dtype,
        tie_tolerance=tolerance,
        sampled=tuple(_examine_draws(one, plan, reference, tolerance) for one in collected.sampled),
        greedy=tuple(_examine_choices(one, reference, tolerance) for one in collected.greedy),
        coupled=tuple(_examine_choices(one, reference, tolerance, plain[one.setting]) for one in collected.coupled),
    )


def _examine_draws(output: SettingOutput, plan: AuditPlan, reference: Reference, tolerance: float) -> SampledReport:
    """Test the draws of one setting."""
    pit = _pit_of(output, plan, reference, tolerance)
    positions = _POSITIONS[: plan.max_tokens] if is_testable(output.setting.sampling, tolerance) else ()
    tests = [DistributionTest("all tokens", uniformity_test(bin_counts(pit.values)))]
    num_tests = 1
    for count, name in enumerate(positions):
        of_prefixes = list(_prefix_tests(output, count, plan.min_prefix_samples if count else 1, reference))
        if of_prefixes:
            tests += _summary(name, of_prefixes)
            num_tests += len(of_prefixes) + 1
    return SampledReport(
        setting=output.setting.name,
        num_texts=len(output.texts),
        num_tokens=pit.support.num_tokens,
        num_drafted=output.num_drafted,
        num_accepted=output.num_accepted,
        tests=tuple(tests),
        num_tests=num_tests,
        support=pit.support,
        is_by_policy=output.setting.expansion is None,
    )


def _summary(name: str, tests: Sequence[ChiSquare]) -> list[DistributionTest]:
    """Return the combined test, and the worst one. Tests without a degree of freedom are left out of the combination."""
    free = [test for test in tests if test.freedom]
    worst = min(tests, key=lambda test: test.p_value)
    return [DistributionTest(f"{name}, together", combined_test(free), len(free)), DistributionTest(f"{name}, worst", worst)]


@dataclass
class _Pit:
    """The PIT value of every draw of a setting, and whether each draw was possible."""

    values: list[float] = field(default_factory=list)
    support: Tally = field(default_factory=Tally)


def _pit_of(output: SettingOutput, plan: AuditPlan, reference: Reference, tolerance: float) -> _Pit:
    """Transform every draw, with uniforms independent of those that generated the sequences."""
    pit = _Pit()
    key = stream_key(plan.first_seed, plan.settings.index(output.setting), Stream.EXTRA)
    for passage in _passages(output, reference):
        support = support_of(passage.probs, passage.logits_MV, output.setting.sampling, tolerance)
        uniforms = [uniform(key, pit.support.num_tokens + index) for index in range(len(passage.token_ids))]
        if support.is_testable:
            pit.values += pit_values(support.probs_NV, passage.token_ids, uniforms)
        pit.support += support.tally(passage.token_ids)
    return pit


def _prefix_tests(output: SettingOutput, count: int, least: int, reference: Reference) -> Iterator[ChiSquare]:
    """Yield a test of the next token for each prompt and prefix of `count` tokens with at least `least` samples."""
    nexts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for text in output.texts:
        nexts.setdefault((text.prompt_ids, text.token_ids[:count]), []).append(text.token_ids[count])
    for (prompt, prefix), token_ids in nexts.items():
        if len(token_ids) >= least:
            logits_NV = reference.logits([(*prompt, *prefix)], count + 1)[0]
            last_NV = penalised(logits_NV, prompt, prefix, output.setting.sampling)[-1:]
            yield probs_test(warped(last_NV, output.setting.sampling)[0], Counter(token_ids))


def probs_test(probs_V: Float[Tensor, " V"], counts: Counter[int]) -> ChiSquare:
    """Test drawn tokens against a distribution; tokens with a small expected count share one cell."""
    total = counts.total()
    cells = (probs_V * total >= CELL).nonzero()[:, 0].tolist()
    expected = [float(probs_V[token_id]) * total for token_id in cells]
    observed = [counts[token_id] for token_id in cells]
    return likelihood_ratio_test([*observed, total - sum(observed)], [*expected, max(0.0, total - sum(expected))])


def _examine_choices(
    output: SettingOutput, reference: Reference, tolerance: float, plain: Sequence[GeneratedSequence] | None = None
) -> ChoiceReport:
    """Check each token of deterministic sequences, and of `plain` sequences without speculation that differ from them."""
    others = [two for one, two in zip(output.texts, plain, strict=True) if one != two] if plain is not None else []
    tally = Tally()
    for passage in _passages(replace(output, texts=(*output.texts, *others)), reference):
        tally += _choices_of(passage, output.setting.sampling, tolerance)
    unlike = None if plain is None else len(others)
    is_by_policy = output.setting.expansion is None
    return ChoiceReport(
        output.setting.name, len(output.texts), output.num_drafted, output.num_accepted, tally, unlike, is_by_policy
    )


@dataclass(frozen=True)
class _Passage:
    """Tokens of several sequences with the reference's penalised logits before each."""

    texts: tuple[GeneratedSequence, ...]
    logits_MV: Float[Tensor, "M V"]

    @property
    def token_ids(self) -> list[int]:
        """The tokens, sequence after sequence."""
        return [token_id for text in self.texts for token_id in text.token_ids]

    def probs(self, sampling: SamplingParams) -> Float[Tensor, "M V"]:
        """Return the expected distribution of each token."""
        return warped(self.logits_MV, sampling)

    def noise(self) -> Float[Tensor, "M V"]:
        """Return the noise that decides each token under the coupled rule: that of its absolute position."""
        keys = [
            stream_key(text.seed, len(text.prompt_ids) + place, Stream.TOKEN)
            for text in self.texts
            for place in range(len(text.token_ids))
        ]
        return gumbels(keys, self.logits_MV.shape[-1], self.logits_MV.device)


def _choices_of(passage: _Passage, sampling: SamplingParams, tolerance: float) -> Tally:
    if sampling.is_greedy:
        return tally_gaps(greedy_gaps(passage.logits_MV, passage.token_ids), tolerance)
    support = support_of(passage.probs, passage.logits_MV, sampling, tolerance)
    return tally_gaps(support.coupled_gaps(passage.noise(), passage.token_ids), tolerance / sampling.temperature)


def _passages(output: SettingOutput, reference: Reference) -> Iterator[_Passage]:
    """Yield all sequences, a few at a time; all of a setting have the same number of tokens."""
    num_tokens = len(output.texts[0].token_ids)
    num_texts = max(1, _ROWS_AT_ONCE // num_tokens)
    firsts = range(0, len(output.texts), num_texts)
    for first in progress_bar(firsts, what=f"{output.setting.name}, examined", total=len(firsts), unit="pass", leave=False):
        texts = output.texts[first : first + num_texts]
        # The last token is not fed: no token follows it.
        logits = reference.logits([(*text.prompt_ids, *text.token_ids[:-1]) for text in texts], num_tokens)
        penalised_NV = [
            penalised(logits_NV, text.prompt_ids, text.token_ids, output.setting.sampling)
            for text, logits_NV in zip(texts, logits, strict=True)
        ]
        yield _Passage(texts, torch.cat(penalised_NV))
