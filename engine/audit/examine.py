"""Holds what an engine said against the reference: law tests of draws, and the right choice at each token that leaves none.

Shape key: N positions of one text, M positions of several, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import ChiSquare, compared, together
from engine.audit.collect import Collected, Said, Text
from engine.audit.outcomes import Tally, greedy_gaps, is_testable, support_of, tally_gaps, tie_tolerance
from engine.audit.pit import binned, evenness, transformed
from engine.audit.plan import AuditPlan
from engine.audit.reference import Reference, penalised, warped
from engine.audit.report import ChoiceReport, LawTest, Report, SampledReport
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import SamplingParams
from engine.sampling.noise import gumbels
from engine.utils.progress_bar import progress_bar

_CELL = 10.0  # tokens that expect fewer draws share a cell
_POSITIONS = ("first token", "second token", "third token")
_ROWS_AT_ONCE = 128


def examine(collected: Collected, reference: Reference) -> Report:
    """Return the report on everything the engine said. Takes one plain forward of the reference over each text."""
    plan = collected.plan
    tolerance = tie_tolerance(reference.dtype)
    plain = {said.setting: said.texts for said in collected.plain}
    return Report(
        alpha=plan.alpha,
        first_seed=plan.first_seed,
        num_prompts=len(plan.prompts),
        reference_dtype=reference.dtype,
        tie_tolerance=tolerance,
        sampled=tuple(_examine_draws(said, plan, reference, tolerance) for said in collected.sampled),
        greedy=tuple(_examine_choices(said, reference, tolerance) for said in collected.greedy),
        coupled=tuple(_examine_choices(said, reference, tolerance, plain[said.setting]) for said in collected.coupled),
    )


def _examine_draws(said: Said, plan: AuditPlan, reference: Reference, tolerance: float) -> SampledReport:
    """Test the draws of one setting."""
    pit = _pit_of(said, plan, reference, tolerance)
    positions = _POSITIONS[: plan.max_tokens] if is_testable(said.setting.sampling, tolerance) else ()
    tests = [LawTest("all tokens", evenness(binned(pit.values)))]
    num_tests = 1
    for count, name in enumerate(positions):
        of_prefixes = list(_prefix_tests(said, count, plan.min_prefix_samples if count else 1, reference))
        if of_prefixes:
            tests += _summary(name, of_prefixes)
            num_tests += len(of_prefixes) + 1
    return SampledReport(
        setting=said.setting.name,
        num_texts=len(said.texts),
        num_tokens=pit.support.num_tokens,
        num_drafted=said.num_drafted,
        num_accepted=said.num_accepted,
        tests=tuple(tests),
        num_tests=num_tests,
        support=pit.support,
        is_by_policy=said.setting.expansion is None,
    )


def _summary(name: str, tests: Sequence[ChiSquare]) -> list[LawTest]:
    """Return all tests that test something as one, and the worst of them. The others' draws would make the sum look surer."""
    free = [test for test in tests if test.freedom]
    worst = min(tests, key=lambda test: test.p_value)
    return [LawTest(f"{name}, together", together(free), len(free)), LawTest(f"{name}, worst", worst)]


@dataclass
class _Pit:
    """The transform of every draw of a setting, and whether each was possible."""

    values: list[float] = field(default_factory=list)
    support: Tally = field(default_factory=Tally)


def _pit_of(said: Said, plan: AuditPlan, reference: Reference, tolerance: float) -> _Pit:
    """Transform every draw; what makes it uniform is drawn here, apart from all that made the texts."""
    pit = _Pit()
    key = stream_key(plan.first_seed, plan.settings.index(said.setting), Stream.EXTRA)
    for passage in _passages(said, reference):
        support = support_of(passage.probs, passage.logits_MV, said.setting.sampling, tolerance)
        uniforms = [uniform(key, pit.support.num_tokens + index) for index in range(len(passage.token_ids))]
        if support.is_testable:
            pit.values += transformed(support.probs_NV, passage.token_ids, uniforms)
        pit.support += support.tally(passage.token_ids)
    return pit


def _prefix_tests(said: Said, count: int, least: int, reference: Reference) -> Iterator[ChiSquare]:
    """Yield a test of the token after each prompt and first `count` tokens that came at least `least` times."""
    nexts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for text in said.texts:
        nexts.setdefault((text.prompt_ids, text.token_ids[:count]), []).append(text.token_ids[count])
    for (prompt, prefix), token_ids in nexts.items():
        if len(token_ids) >= least:
            logits_NV = reference.logits([(*prompt, *prefix)], count + 1)[0]
            last_NV = penalised(logits_NV, prompt, prefix, said.setting.sampling)[-1:]
            yield _probs_test(warped(last_NV, said.setting.sampling)[0], Counter(token_ids))


def _probs_test(probs_V: Float[Tensor, " V"], counts: Counter[int]) -> ChiSquare:
    """Compare drawn tokens with a law; the many tokens too unlikely for a cell of their own share one."""
    total = counts.total()
    cells = (probs_V * total >= _CELL).nonzero()[:, 0].tolist()
    expected = [float(probs_V[token_id]) * total for token_id in cells]
    observed = [counts[token_id] for token_id in cells]
    return compared([*observed, total - sum(observed)], [*expected, max(0.0, total - sum(expected))])


def _examine_choices(said: Said, reference: Reference, tolerance: float, plain: Sequence[Text] | None = None) -> ChoiceReport:
    """Check each token of texts that leave no choice, and of those made `plain`, without speculation, that differ from them."""
    others = [two for one, two in zip(said.texts, plain, strict=True) if one != two] if plain is not None else []
    tally = Tally()
    for passage in _passages(replace(said, texts=(*said.texts, *others)), reference):
        tally += _choices_of(passage, said.setting.sampling, tolerance)
    unlike = None if plain is None else len(others)
    is_by_policy = said.setting.expansion is None
    return ChoiceReport(said.setting.name, len(said.texts), said.num_drafted, said.num_accepted, tally, unlike, is_by_policy)


@dataclass(frozen=True)
class _Passage:
    """Emitted tokens of several texts with the reference's penalised logits before each."""

    texts: tuple[Text, ...]
    logits_MV: Float[Tensor, "M V"]

    @property
    def token_ids(self) -> list[int]:
        """The tokens, text after text."""
        return [token_id for text in self.texts for token_id in text.token_ids]

    def probs(self, sampling: SamplingParams) -> Float[Tensor, "M V"]:
        """Return the laws the tokens should have been drawn from."""
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


def _passages(said: Said, reference: Reference) -> Iterator[_Passage]:
    """Yield all texts, a few at a time; all of a setting have the same number of tokens."""
    num_tokens = len(said.texts[0].token_ids)
    num_texts = max(1, _ROWS_AT_ONCE // num_tokens)
    firsts = range(0, len(said.texts), num_texts)
    for first in progress_bar(firsts, what=f"{said.setting.name}, examined", total=len(firsts), unit="pass", leave=False):
        texts = said.texts[first : first + num_texts]
        # The last token is not fed: nothing was said after it.
        logits = reference.logits([(*text.prompt_ids, *text.token_ids[:-1]) for text in texts], num_tokens)
        penalised_NV = [
            penalised(logits_NV, text.prompt_ids, text.token_ids, said.setting.sampling)
            for text, logits_NV in zip(texts, logits, strict=True)
        ]
        yield _Passage(texts, torch.cat(penalised_NV))
