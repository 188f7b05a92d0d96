"""The audit of a server: its requests, within the bound, and the report."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.audit.plan import Setting
from engine.core.types import SamplingParams
from engine.utils.progress_bar import progress_bar
from server.audit_url.client import Answer, AuditedServerUnsuitable, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, Meaning, dialect_of, discover
from server.audit_url.draws import Draw, Expectation, check_draws
from server.audit_url.exact import ExactChecks, usage_result
from server.audit_url.results import CheckResult, CheckVerdict, ServerReport
from server.audit_url.sources import ServerSource, Source, has_cuts, is_unreadable

_RESERVED = 50  # requests of the exact checks, at most
_SHORT = 6  # tokens of a draw
_NUM_EXACT = 6  # prompts of the exact checks
_NUM_DRAWN = 2  # prompts of the draws; a setting with fewer than _ENOUGH draws has one of them
_ENOUGH = 300
_LEAST_ALIKE = 5  # equal texts without a seed that cannot be chance
_LONG_SHARE = 0.05
_LEAST_GAP, _MOST_GAP = 1e-3, 0.5
_NUM_MEASURED = 60  # texts whose log-probabilities determine the gap
_LARGEST_ROUNDING = 0.25  # larger differences of log-probabilities have other causes
_SURELY_UNLIKELY = 1e-4  # a p-value for which another meaning of the parameters is tried
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
_Drawn = list[tuple[SamplingParams, str, list[Draw]]]


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
        self._next_seed = options.first_seed % 2**30
        self._answers: list[tuple[AuditPrompt, Answer]] = []
        self._results: list[CheckResult] = []
        self._draws_without_seed = True

    def run(self) -> ServerReport:
        """Run the audit within the bound of requests."""
        started_s = time.monotonic()
        client, options, source = self._client, self._options, self._source
        with progress_bar(what="audit", total=options.num_requests, unit="request") as client.bar:
            self._offer = discover(client, dialect_of(client.owner), self._prompts[0], source.has_weights)
            self._learn()
            drawn = list(self._draws())
            tolerance = options.tie_gap if options.tie_gap is not None else self._measured_gap(drawn)
            exact = ExactChecks(client, self._offer, source, tolerance, self._prompts[:_NUM_EXACT], options.max_tokens)
            self._results += exact.run(self._seed())
        for sampling, name, draws in progress_bar(drawn, what="tests", total=len(drawn), unit="setting", leave=False):
            self._results += self._tested(sampling, name, draws, tolerance)
        self._results += self._numbers(tolerance)
        return ServerReport(
            url=client.url,
            model=client.model,
            owner=client.owner,
            about=source.about,
            order=self._offer.dialect.meaning.order,
            alpha=options.alpha,
            first_seed=options.first_seed,
            tie_tolerance=tolerance,
            num_requests=client.num_requests,
            seconds=time.monotonic() - started_s,
            num_drafted=client.num_drafted,
            num_accepted=client.num_accepted,
            results=tuple(self._results),
        )

    def _learn(self) -> None:
        """Prepare the source. Raises AuditedServerUnsuitable if nothing could be compared."""
        url, offer, prompt = self._client.url, self._offer, self._prompts[0]
        if not self._source.has_weights and not offer.first.tops:
            raise AuditedServerUnsuitable(f"{url} lists no log-probabilities: give the model's --weights to compare texts with")
        num_read = offer.num_prompt_tokens
        if self._source.has_weights and offer.form != "ids" and num_read not in (None, len(prompt.ids)):
            detail = f"{url} reads a prompt of {len(prompt.ids)} tokens as {num_read}"
            raise AuditedServerUnsuitable(f"{detail}: it has another tokenizer or template than --weights")
        self._source.learn(offer)

    def _seed(self) -> int:
        self._next_seed = (self._next_seed + _SEED_STEP) % 2**31
        return self._next_seed

    def _draws(self) -> Iterator[tuple[SamplingParams, str, list[Draw]]]:
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
        if self._source.has_weights:  # ids are known
            best = self._source.rows(self._prompts[0].ids, [(0,)], SamplingParams())[0][0].topk(2).indices.tolist()
            yield SamplingParams(logit_bias=((best[0], -100.0), (best[1], 1.5))), 1

    def _requested(
        self, sampling: SamplingParams, num: int, prompts: Sequence[AuditPrompt]
    ) -> Iterator[tuple[SamplingParams, str, list[Draw]]]:
        """Request the texts of a setting, every second one without a seed: servers draw these in another way."""
        name = _name_of(sampling)
        plan = [prompts[index % len(prompts)] for index in range(num)]
        is_seeded = [not (self._draws_without_seed and index // len(prompts) % 2) for index in range(num)]
        seeds = [self._seed() if seeded else None for seeded in is_seeded]
        bodies = [self._offer.body(prompt, sampling, seed) for prompt, seed in zip(plan, seeds, strict=True)]
        found = self._client.complete_all(bodies[:1], name)
        if not any(isinstance(answer, NotOffered) for answer in found):
            found += self._client.complete_all(bodies[1:], name)
        if refusals := [answer.message for answer in found if isinstance(answer, NotOffered)]:
            self._results.append(CheckResult(name, "draws", 0, CheckVerdict.NOT_OFFERED, refusals[0]))
            return
        answers = [(prompt, answer) for prompt, answer in zip(plan, found, strict=True) if isinstance(answer, Answer)]
        self._answers += answers
        if self._draws_without_seed and _are_alike(answers, is_seeded):
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
        yield sampling, name, draws

    def _draw(self, prompt: AuditPrompt, answer: Answer) -> Draw | None:
        sample = answer.samples[0]
        ids = self._source.ids_of(sample, prompt.ids, answer.num_tokens)
        if ids is None or not self._source.has_weights or len(sample.tops) != len(sample.logprobs):
            return None if ids is None else Draw(prompt.ids, ids)
        tops = []
        for top in sample.tops:  # tokens of one text share an entry, and unreadable ones do
            num = self._offer.num_top if all(isinstance(name, int) for name in top) else 0 if any(map(is_unreadable, top)) else 1
            tops.append(tuple(sorted(top.values(), reverse=True)[:num]))
        return Draw(prompt.ids, ids, sample.logprobs, tuple(tops))

    def _measured_gap(self, drawn: _Drawn) -> float:
        """Return a gap from the differences that rounding makes between log-probabilities."""
        gaps: list[float] = []
        for _, _, draws in drawn[1:2]:
            for draw in draws[:_NUM_MEASURED] if self._source.has_weights else ():
                rows_NV = self._source.rows(draw.prompt, [draw.token_ids], SamplingParams())[0].log_softmax(-1)
                pairs = zip(rows_NV, draw.token_ids, draw.logprobs)
                gaps += [abs(float(row_V[i]) - value) for row_V, i, value in pairs if value is not None and value > -5.0]
        gaps = sorted(gap for gap in gaps if gap < _LARGEST_ROUNDING)
        return min(_MOST_GAP, max(_LEAST_GAP, 10.0 * gaps[len(gaps) // 2])) if gaps else _LEAST_GAP

    def _tested(self, sampling: SamplingParams, name: str, draws: Sequence[Draw], tolerance: float) -> list[CheckResult]:
        """Return the tests of one setting, by the meaning of its parameters that fits better."""
        found: list[tuple[float, list[CheckResult]]] = []
        for meaning in _meanings(self._offer.dialect.meaning, sampling):
            expected = Expectation(self._source, meaning, replace(sampling, max_tokens=16))
            results = check_draws(name, draws, expected, tolerance, self._options.first_seed)
            has_impossible = any(one.verdict is CheckVerdict.VIOLATION and one.is_of_tokens for one in results)
            least = 0.0 if has_impossible else min((one.test.p_value for one in results if one.test is not None), default=1.0)
            found.append((least, results))
            if least >= _SURELY_UNLIKELY:
                break
        number = max(range(len(found)), key=lambda index: found[index][0])
        if not number:
            return found[0][1]
        what = "penalties count prompt and text in another way" if sampling.has_penalties else "another order of cuts"
        return [CheckResult(name, "order", len(draws), CheckVerdict.OK, f"{what} than assumed"), *found[number][1]]

    def _numbers(self, tolerance: float) -> Iterator[CheckResult]:
        """Yield the checks of usage and, without weights, of log-probabilities with one another."""
        is_counted = self._source.has_weights and self._offer.form == "ids"
        sent = [len(prompt.ids) if is_counted else None for prompt, _ in self._answers]
        yield usage_result([answer for _, answer in self._answers], sent)
        if isinstance(source := self._source, ServerSource):
            is_wrong = source.widest_deviation > max(0.01, tolerance) or source.num_empty
            detail = f"widest difference {source.widest_deviation:.2g}, {source.num_empty} tokens without a list"
            yield CheckResult.counted("log-probabilities", "alike after one text", source.num_lists, int(is_wrong), detail)


def _meanings(assumed: Meaning, sampling: SamplingParams) -> Iterator[Meaning]:
    """Yield the meanings that a setting's parameters may have, the assumed one first."""
    yield assumed
    if has_cuts(sampling) and sampling.temperature != 1.0:
        yield replace(assumed, cuts_first=not assumed.cuts_first)
    if sampling.presence_penalty or sampling.frequency_penalty:
        yield replace(assumed, penalties_see_prompt=not assumed.penalties_see_prompt)


def _are_alike(answers: Sequence[tuple[AuditPrompt, Answer]], is_seeded: Sequence[bool]) -> bool:
    """Return whether all texts without a seed are one, and those with a seed are many."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for (prompt, answer), seeded in zip(answers, is_seeded, strict=True):
        if prompt is answers[0][0]:
            texts[seeded].append(answer.samples[0].text)
    has_many = 2 * len(set(texts[True])) > len(texts[True])
    return len(texts[False]) >= _LEAST_ALIKE and len(set(texts[False])) == 1 and has_many


def _name_of(sampling: SamplingParams) -> str:
    name = Setting(sampling, "").sampling_name
    return name + (" with bias" if sampling.logit_bias else "") + (", long" if sampling.max_tokens > 2 * _SHORT else "")
