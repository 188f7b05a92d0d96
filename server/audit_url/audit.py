"""The audit of a server: its requests, within the bound, and the report."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.audit.chi_square import ChiSquare
from engine.audit.outcomes import is_testable
from engine.audit.plan import Setting
from engine.core.types import SamplingParams
from engine.utils.progress_bar import progress_bar
from server.audit_url.client import Answer, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, dialect_of, discover
from server.audit_url.draws import Draw, DrawsTested, Expectation, test_draws
from server.audit_url.exact import ExactChecks, usage_result
from server.audit_url.results import TOO_FEW, CheckResult, CheckVerdict, ServerReport
from server.audit_url.sources import Ids, ModelSource, ServerSource, Source

_RESERVED = 50  # requests of the exact checks, at most
_SHORT = 6  # tokens of a draw
_NUM_EXACT = 6  # prompts of the exact checks
_NUM_DRAWN = 2  # prompts of the draws; a setting with fewer than _ENOUGH draws has one of them
_ENOUGH = 300
_LEAST_ALIKE = 5  # equal texts without a seed that cannot be chance
_LONG_SHARE = 0.05
_LEAST_GAP, _MOST_GAP = 1e-3, 0.5
_SEED_STEP = 1000  # more than the texts of a request, whose seeds may be consecutive
_SETTINGS = (  # with their shares of the requests
    (SamplingParams(), 3),
    (SamplingParams(0.7), 1),
    (SamplingParams(1.5), 1),
    (SamplingParams(top_p=0.7), 1),
    (SamplingParams(top_k=4), 1),
    (SamplingParams(0.7, top_k=4), 1),
    (SamplingParams(min_p=0.1), 1),
    (SamplingParams(1.5, top_p=0.8), 1),
    (SamplingParams(presence_penalty=1.5), 1),
    (SamplingParams(frequency_penalty=1.0), 1),
    (SamplingParams(repetition_penalty=1.5), 1),
)


@dataclass(frozen=True, slots=True)
class UrlOptions:
    """The size and the randomness of an audit."""

    num_requests: int
    max_tokens: int
    alpha: float
    first_seed: int
    tie_gap: float | None = None


class ServerAudit:
    """One audit: requests, then tests."""

    def __init__(self, client: CompletionClient, source: Source, prompts: Sequence[AuditPrompt], options: UrlOptions) -> None:
        self._client, self._source, self._prompts, self._options = client, source, prompts, options
        self._has_weights = isinstance(source, ModelSource)
        self._next_seed = options.first_seed % 2**30
        self._answers: list[tuple[AuditPrompt, Answer]] = []
        self._results: list[CheckResult] = []
        self._draws_without_seed = True

    def run(self) -> ServerReport:
        """Run the audit within the bound of requests."""
        with progress_bar(what="audit", total=self._options.num_requests, unit="request") as self._client.bar:
            return self._run()

    def _run(self) -> ServerReport:
        started_s = time.monotonic()
        self._offer = discover(self._client, dialect_of(self._client.owner), self._prompts[0], self._has_weights)
        if isinstance(self._source, ServerSource):
            self._source.num_top = int(self._offer.base.get("logprobs", 0))
        drawn = dict(self._draws())
        self._tolerance = self._tie_gap(drawn)
        exact = ExactChecks(
            self._client, self._offer, self._source, self._tolerance, self._prompts[:_NUM_EXACT], self._options.max_tokens
        )
        self._results += exact.run(self._seed())
        for sampling, (name, draws) in drawn.items():
            self._test(sampling, name, draws)
        self._results += self._numbers()
        client, options = self._client, self._options
        return ServerReport(
            url=client.url,
            model=client.model,
            owner=client.owner,
            about=self._source.about,
            order=self._offer.dialect.order,
            alpha=options.alpha,
            first_seed=options.first_seed,
            tie_tolerance=self._tolerance,
            num_requests=client.num_requests,
            seconds=time.monotonic() - started_s,
            num_drafted=client.num_drafted,
            num_accepted=client.num_accepted,
            results=tuple(self._results),
        )

    def _seed(self) -> int:
        self._next_seed = (self._next_seed + _SEED_STEP) % 2**31
        return self._next_seed

    def _draws(self) -> Iterator[tuple[SamplingParams, tuple[str, list[Draw]]]]:
        """Request the samples of every setting that is offered and can be judged."""
        settings = [(sampling, share) for sampling, share in self._settings() if self._source.offers(sampling)]
        num_long = int(_LONG_SHARE * self._options.num_requests)
        yield from self._requested(SamplingParams(max_tokens=self._options.max_tokens), num_long, self._prompts)
        for index, (sampling, share) in enumerate(settings):
            num_left = self._options.num_requests - self._client.num_requests - _RESERVED
            num = num_left * share // sum(share for _, share in settings[index:])
            prompts = self._prompts[:_NUM_DRAWN] if num >= _ENOUGH else self._prompts[index % _NUM_DRAWN :][:1]
            length = 2 * _SHORT if sampling.has_penalties else _SHORT  # tokens must come again
            yield from self._requested(replace(sampling, max_tokens=length), num, prompts)

    def _settings(self) -> Iterator[tuple[SamplingParams, int]]:
        yield from _SETTINGS
        if isinstance(self._source, ModelSource):  # ids are known
            best = self._source.rows(self._prompts[0].ids, [(0,)], SamplingParams())[0][0].topk(2).indices.tolist()
            yield SamplingParams(logit_bias=((best[0], -100.0), (best[1], 1.5))), 1

    def _requested(
        self, sampling: SamplingParams, num: int, prompts: Sequence[AuditPrompt]
    ) -> Iterator[tuple[SamplingParams, tuple[str, list[Draw]]]]:
        """Request the texts of a setting, every second one without a seed: servers draw these in another way."""
        name = _name_of(sampling)
        plan = [prompts[index % len(prompts)] for index in range(num)]
        is_seeded = [not (self._draws_without_seed and index // len(prompts) % 2) for index in range(num)]
        bodies = [
            self._offer.body(prompt, sampling, self._seed() if seeded else None)
            for prompt, seeded in zip(plan, is_seeded, strict=True)
        ]
        first = self._client.complete_all(bodies[:1], name)
        if isinstance(first[0], NotOffered):
            self._results.append(CheckResult(name, "draws", 0, CheckVerdict.NOT_OFFERED, first[0].message))
            return
        found = [*first, *self._client.complete_all(bodies[1:], name)]
        answers = [(prompt, answer) for prompt, answer in zip(plan, found, strict=True) if isinstance(answer, Answer)]
        self._answers += answers
        if self._draws_without_seed and self._are_alike(plan, is_seeded, found):
            self._draws_without_seed = False
            detail = "all are alike, so only texts with a seed are judged"
            self._results.append(CheckResult("seeds", "texts without a seed", num, CheckVerdict.NOT_JUDGED, detail))
            yield from self._requested(sampling, num // 2, prompts)
            return
        draws = [draw for prompt, answer in answers if (draw := self._draw(prompt, answer)) is not None]
        if len(draws) < len(found):  # leaving some out would be a selection by their tokens
            detail = f"the tokens of {len(found) - len(draws)} of {len(found)} texts are not known"
            self._results.append(CheckResult(name, "draws", 0, CheckVerdict.NOT_JUDGED, detail))
            return
        yield sampling, (name, draws)

    def _are_alike(self, plan: Sequence[AuditPrompt], is_seeded: Sequence[bool], found: Sequence[Answer | NotOffered]) -> bool:
        """Return whether texts without a seed are all equal, and texts with a seed differ."""
        texts: dict[bool, list[str]] = {False: [], True: []}
        for prompt, seeded, answer in zip(plan, is_seeded, found, strict=True):
            if prompt is plan[0] and isinstance(answer, Answer):
                texts[seeded].append(answer.samples[0].text)
        has_many = 2 * len(set(texts[True])) > len(texts[True])
        return len(texts[False]) >= _LEAST_ALIKE and len(set(texts[False])) == 1 and has_many

    def _draw(self, prompt: AuditPrompt, answer: Answer) -> Draw | None:
        sample = answer.samples[0]
        ids = self._source.ids_of(sample, prompt.ids, answer.usage.get("completion_tokens"))
        if ids is None or not self._has_weights:
            return None if ids is None else Draw(prompt.ids, ids)
        num_top = int(self._offer.base.get("logprobs", 0))
        tops = []
        for top in sample.tops:
            has_ids = all(isinstance(name, int) for name in top)  # tokens of one text share an entry
            tops.append(tuple(sorted(top.values(), reverse=True)[: num_top if has_ids else 1]))
        logprobs = sample.logprobs if len(tops) == len(sample.logprobs) else ()
        return Draw(prompt.ids, ids, logprobs, tuple(tops))

    def _tie_gap(self, drawn: dict[SamplingParams, tuple[str, list[Draw]]]) -> float:
        """Return the given gap, or one from the deviation of first tokens' log-probabilities: these are never drafted."""
        if self._options.tie_gap is not None:
            return self._options.tie_gap
        first: dict[tuple[Ids, int], float] = {}
        for _, draws in drawn.values():
            first |= {(draw.prompt, draw.token_ids[0]): draw.logprobs[0] or 0.0 for draw in draws if draw.logprobs}
        rows = {prompt: self._source.rows(prompt, [(0,)], SamplingParams())[0][0].log_softmax(-1) for prompt, _ in first}
        gaps = sorted(abs(float(rows[prompt][i]) - value) for (prompt, i), value in first.items() if value > -5.0)
        return min(_MOST_GAP, max(_LEAST_GAP, 10.0 * gaps[len(gaps) // 2])) if gaps else _LEAST_GAP

    def _test(self, sampling: SamplingParams, name: str, draws: Sequence[Draw]) -> None:
        """Add the tests of one setting."""
        expected = Expectation(self._source, self._offer.dialect, replace(sampling, max_tokens=16))
        tested = test_draws(draws, expected, self._tolerance, self._options.first_seed)
        for check, test in tested.tests.items():
            is_empty = isinstance(test, ChiSquare) and not test.freedom
            few = CheckResult(name, check, 0, CheckVerdict.NOT_JUDGED, TOO_FEW)
            self._results.append(few if is_empty else CheckResult(name, check, test.num_counted, test=test))
        support = tested.support
        verdict = CheckVerdict.VIOLATION if support.num_mismatch else CheckVerdict.OK
        detail = f"{support.num_mismatch} found, {support.num_near_tie} at the edge"
        if tested.num_unknown:
            detail += f"; {tested.num_unknown} tokens have no known distribution"
        if not is_testable(sampling, self._tolerance):
            detail += "; rounding is too coarse for tests of frequencies"
        self._results.append(CheckResult(name, "impossible tokens", support.num_tokens, verdict, detail))
        self._add_logprobs(name, tested)

    def _add_logprobs(self, name: str, tested: DrawsTested) -> None:
        if not self._has_weights or not tested.num_logprobs:
            return
        detail = f"{tested.num_wrong_logprobs} wrong"
        if tested.num_processed_logprobs:
            detail += f", {tested.num_processed_logprobs} of them after temperature, penalties and cuts"
        verdict = CheckVerdict.VIOLATION if tested.num_wrong_logprobs else CheckVerdict.OK
        self._results.append(CheckResult(name, "log-probabilities", tested.num_logprobs, verdict, detail))

    def _numbers(self) -> Iterator[CheckResult]:
        """Yield the checks of usage and, without weights, of log-probabilities with one another."""
        sent = [len(prompt.ids) if self._has_weights and self._offer.takes_ids else None for prompt, _ in self._answers]
        yield usage_result([answer for _, answer in self._answers], sent)
        if isinstance(self._source, ServerSource):
            source = self._source
            is_wrong = source.widest_deviation > max(0.01, self._tolerance) or source.num_empty
            detail = f"widest difference {source.widest_deviation:.2g}, {source.num_empty} tokens without a list"
            verdict = CheckVerdict.of(source.num_lists, int(is_wrong))
            yield CheckResult("log-probabilities", "alike after the same text", source.num_lists, verdict, detail)


def _name_of(sampling: SamplingParams) -> str:
    name = Setting(sampling, "").sampling_name
    return name + (" with bias" if sampling.logit_bias else "") + (", long" if sampling.max_tokens > 2 * _SHORT else "")
