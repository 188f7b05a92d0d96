"""The audit of a server: its requests, within the bound, and the report."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from engine.audit.plan import Setting
from engine.core.types import SamplingParams
from engine.sampling.distributions import truncates
from engine.utils.progress_bar import progress_bar
from server.audit_url.client import AnswerText, AuditedServerFailed, AuditedServerUnsuitable, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, discover
from server.audit_url.draws import DrawTests
from server.audit_url.exact import NAMES, ExactChecks, usage_result
from server.audit_url.report import CheckResult, CheckVerdict, ServerReport
from server.audit_url.sources import Draw, ServerSource, Source

_RESERVED = 50  # requests of the exact checks, at most
_SHORT = 6  # tokens of a draw
_NUM_EXACT = 6  # prompts of the exact checks
_NUM_DRAWN, _ENOUGH = 2, 300  # prompts of the draws; a setting with fewer than _ENOUGH draws has one of them
_LEAST_ALIKE = 5  # equal texts without a seed that cannot be chance
_LONG_SHARE = 0.05
_LEAST_GAP, _MOST_GAP = 1e-3, 0.5
_NUM_MEASURED = 60  # texts whose log-probabilities determine the gap
_LARGEST_ROUNDING = 0.25  # larger differences of log-probabilities have other causes
_SURELY_UNLIKELY = 1e-4  # a p-value for which another meaning of the parameters is tried
_SEED_STEP = 1000  # more than the texts of a request, whose seeds may be consecutive
_PAUSE_S = 2.0  # between requests to a server that has stopped answering
_ORDERS = {False: "temperature, then top-k, top-p, min-p", True: "top-k, top-p, min-p, then temperature"}  # by `cuts_first`
_LONG, _WITH_BIAS = "temperature 1, long", "temperature 1 with bias"
_SETTINGS = [SamplingParams(), SamplingParams(0.7), SamplingParams(1.5)]  # the first has 3 shares of the requests, others one
_SETTINGS += [SamplingParams(top_p=0.7), SamplingParams(top_k=4), SamplingParams(0.7, top_k=4), SamplingParams(min_p=0.1)]
_SETTINGS += [SamplingParams(1.5, top_p=0.8), SamplingParams(presence_penalty=1.5), SamplingParams(frequency_penalty=1.0)]
_SETTINGS += [SamplingParams(repetition_penalty=1.5)]
_NAMED = {Setting(sampling, "").sampling_name: sampling for sampling in _SETTINGS}
TEST_NAMES = (_LONG, *_NAMED, _WITH_BIAS, *NAMES)


@dataclass
class ServerAudit:
    """One audit: requests, then tests. `skipped` are parts of tests' names; `wait_s` is for a server that stopped answering."""

    client: CompletionClient
    source: Source
    prompts: Sequence[AuditPrompt]
    num_requests: int
    max_tokens: int
    alpha: float
    first_seed: int
    tie_gap: float | None = None
    skipped: Sequence[str] = ()
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        self._seeds = count(self.first_seed % 2**30, _SEED_STEP)
        self._answers: list[tuple[AuditPrompt, AnswerText]] = []
        self._drawn: list[tuple[SamplingParams, str, list[Draw]]] = []
        self._results: list[CheckResult] = []
        self._draws_without_seed = self._is_answering = True

    def run(self) -> ServerReport:
        """Run the audit within the bound of requests. Raises AuditedServerUnsuitable if nothing could be compared."""
        started_s, client, source = time.monotonic(), self.client, self.source
        with progress_bar(what="audit", total=self.num_requests, unit="request") as client.bar:
            self._offer = discover(client, self.prompts[0], source.has_weights)
            self._require_comparable()
            source.learn(self._offer)
            self._draws()
            gap = self._measured_gap() if self.tie_gap is None else self.tie_gap
            exact = ExactChecks(client, self._offer, source, gap, self.prompts[:_NUM_EXACT], self.max_tokens, next(self._seeds))
            for setting, check, function in exact.named():
                self._attempt(setting, check, function)
        for sampling, name, draws in progress_bar(self._drawn, what="tests", total=len(self._drawn), unit="setting", leave=False):
            self._results += self._tested(sampling, name, draws, gap)
        self._results += self._numbers(gap)
        server = (client.url, client.model, client.owner, source.about, _ORDERS[self._offer.dialect.meaning.cuts_first])
        numbers = (self.alpha, self.first_seed, gap, client.num_requests, time.monotonic() - started_s)
        return ServerReport(*server, *numbers, client.num_drafted, client.num_accepted, tuple(self._results))

    def _require_comparable(self) -> None:
        url, offer, length = self.client.url, self._offer, len(self.prompts[0].ids)
        if not self.source.has_weights and not offer.first.tops:
            raise AuditedServerUnsuitable(f"{url} lists no log-probabilities: give the model's --weights to compare texts with")
        num_read = offer.first.usage.get("prompt_tokens")
        if self.source.has_weights and offer.form != "ids" and num_read not in (None, length):
            detail = f"{url} reads a prompt of {length} tokens as {num_read}"
            raise AuditedServerUnsuitable(f"{detail}: it has another tokenizer or template than --weights")

    def _attempt(self, setting: str, check: str, function: Callable[[], list[CheckResult]]) -> None:
        """Add a test's results. A server that fails in the test is a result too, and later tests wait for it."""
        left_out, detail = CheckVerdict.NOT_JUDGED, "the server no longer answers"
        if any(part == setting or (part in setting and part not in TEST_NAMES) for part in self.skipped):
            detail = "left out by --skip"
        elif self._is_answering:
            try:
                self._results += function()
                return
            except NotOffered as refusal:
                left_out, detail = CheckVerdict.NOT_OFFERED, str(refusal)
            except AuditedServerUnsuitable:
                raise
            except AuditedServerFailed as error:
                self._is_answering = self._answers_again()
                self._results.append(CheckResult(setting, "answers", 1, 1, str(error)))
                return
        self._results.append(CheckResult(setting, check, detail=detail, left_out=left_out))

    def _answers_again(self) -> bool:
        """Wait for the server, which may be started again."""
        self.client.bar.set_description("waiting for the server", refresh=False)
        for number in range(1 + int(self.wait_s / _PAUSE_S)):
            time.sleep(_PAUSE_S if number else 0.0)
            with suppress(AuditedServerFailed):
                self.client.complete(self._offer.body(self.prompts[0], SamplingParams(max_tokens=2)))
                return True
        return False

    def _draws(self) -> None:
        """Request the samples of every setting that is offered and can be judged."""
        long, num_long = SamplingParams(max_tokens=self.max_tokens), int(_LONG_SHARE * self.num_requests)
        self._attempt(_LONG, "draws", lambda: self._requested(long, _LONG, num_long, self.prompts))
        settings = dict(_NAMED)
        if self.source.has_weights:  # ids are known
            best = self.source.rows([Draw(self.prompts[0].ids, (0,))], SamplingParams())[0][0].topk(2).indices.tolist()
            settings[_WITH_BIAS] = SamplingParams(logit_bias=((best[0], -100.0), (best[1], 1.5)))
        else:  # a temperature needs all tokens unless a top-k comes first
            is_judged = {name: (one.temperature == 1.0 or one.top_k) for name, one in settings.items()}
            settings = {name: one for name, one in settings.items() if is_judged[name] and one.repetition_penalty == 1.0}
        for index, (name, sampling) in enumerate(settings.items()):
            share, num_shares = (3, len(settings) + 2) if not index else (1, len(settings) - index)
            num = (self.num_requests - self.client.num_requests - _RESERVED) * share // num_shares
            prompts = self.prompts[:_NUM_DRAWN] if num >= _ENOUGH else self.prompts[index % _NUM_DRAWN :][:1]
            length = 2 * _SHORT if sampling.has_penalties else _SHORT  # tokens must come again
            made = replace(sampling, max_tokens=length)
            self._attempt(name, "draws", lambda: self._requested(made, name, num, prompts))  # noqa: B023

    def _requested(self, sampling: SamplingParams, name: str, num: int, prompts: Sequence[AuditPrompt]) -> list[CheckResult]:
        """Request the texts of a setting, every second one without a seed: servers draw these in another way."""
        plan = [prompts[index % len(prompts)] for index in range(num)]
        seeds = [None if self._draws_without_seed and index // len(prompts) % 2 else next(self._seeds) for index in range(num)]
        bodies = [self._offer.body(prompt, sampling, seed) for prompt, seed in zip(plan, seeds, strict=True)]
        answers = list(zip(plan, self.client.complete_all(bodies, name), strict=True))
        self._answers += answers
        if self._draws_without_seed and _are_alike(answers, seeds):
            self._draws_without_seed = False
            detail = "all are alike, so only texts with a seed are judged"
            result = CheckResult("seeds", "texts without a seed", detail=detail)
            return [result, *self._requested(sampling, name, num // 2, prompts)]
        draws = [draw for prompt, answer in answers if (draw := self.source.draw(prompt.ids, answer)) is not None]
        if len(draws) < num:  # leaving some out would be a selection by their tokens
            detail = f"the tokens of {num - len(draws)} of {num} texts are not known"
            return [CheckResult(name, "draws", detail=detail)]
        self._drawn.append((sampling, name, draws))
        return []

    def _measured_gap(self) -> float:
        """Return a gap from the differences that rounding makes between log-probabilities. Some servers report 0 for drafts."""
        gaps = [0.0]
        for draw in [draw for _, _, draws in self._drawn[1:2] for draw in draws[:_NUM_MEASURED] if draw.logprobs]:
            rows_NV = self.source.rows([draw], SamplingParams())[0].log_softmax(-1)
            pairs = zip(rows_NV, draw.token_ids, draw.logprobs)
            gaps += [abs(float(row_V[i]) - value) for row_V, i, value in pairs if value is not None and -5.0 < value < 0.0]
        median = statistics.median(gap for gap in gaps if gap < _LARGEST_ROUNDING)
        return min(_MOST_GAP, max(_LEAST_GAP, 10.0 * median))

    def _tested(self, sampling: SamplingParams, name: str, draws: Sequence[Draw], tolerance: float) -> list[CheckResult]:
        """Return the tests of one setting, by the meaning of its parameters that fits better."""
        meanings = [assumed := self._offer.dialect.meaning]
        if truncates(sampling) and sampling.temperature != 1.0:
            meanings.append(replace(assumed, cuts_first=not assumed.cuts_first))
        if sampling.presence_penalty or sampling.frequency_penalty:
            meanings.append(replace(assumed, penalties_see_prompt=not assumed.penalties_see_prompt))
        found: list[tuple[float, list[CheckResult]]] = []
        for meaning in meanings:
            results = DrawTests(draws, self.source, meaning, sampling, tolerance, self.first_seed).results(name)
            has_impossible = any(one.num_wrong and one.is_of_tokens for one in results)
            least = 0.0 if has_impossible else min((one.test.p_value for one in results if one.test is not None), default=1.0)
            if least >= _SURELY_UNLIKELY and found:
                what = "penalties count prompt and text in another way" if sampling.has_penalties else "another order of cuts"
                results = [CheckResult(name, "order", len(draws), detail=f"{what} than assumed"), *results]
            found.append((least, results))
            if least >= _SURELY_UNLIKELY:
                break
        return max(found, key=lambda pair: pair[0])[1]

    def _numbers(self, tolerance: float) -> Iterator[CheckResult]:
        """Yield the checks of usage and, without weights, of log-probabilities with one another."""
        is_counted = self.source.has_weights and self._offer.form == "ids"
        yield usage_result([(answer, len(prompt.ids) if is_counted else None) for prompt, answer in self._answers])
        if isinstance(source := self.source, ServerSource):
            is_wrong = source.widest_deviation > max(0.01, tolerance) or source.num_empty
            detail = f"widest difference {source.widest_deviation:.2g}, {source.num_empty} tokens without a list"
            yield CheckResult("log-probabilities", "alike after one text", source.num_lists, int(is_wrong), detail)


def _are_alike(answers: Sequence[tuple[AuditPrompt, AnswerText]], seeds: Sequence[int | None]) -> bool:
    """Return whether all texts without a seed are one, and those with a seed are many."""
    of_first = [(seed is None, one.text) for (prompt, one), seed in zip(answers, seeds) if prompt is answers[0][0]]
    unseeded, seeded = ([text for is_unseeded, text in of_first if is_unseeded is kind] for kind in (True, False))
    return len(unseeded) >= _LEAST_ALIKE and len(set(unseeded)) == 1 and 2 * len(set(seeded)) > len(seeded)
