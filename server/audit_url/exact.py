"""Checks of texts that leave no choice: greedy texts alone, under load and without speculation; streams, stops, seeds, n."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.audit.outcomes import Tally, greedy_gaps, tally_gaps
from engine.core.types import SamplingParams
from server.audit_url.client import Answer, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, Offer
from server.audit_url.draws import merged
from server.audit_url.results import ARG_MAX, CheckResult, CheckVerdict
from server.audit_url.sources import Source

GREEDY = SamplingParams(temperature=0.0)
_NUM_REPEATED = 3  # prompts of the checks of streams, stop strings and seeds
_NUM_CHOICES = 3
_Counted = tuple[int, int, str | None]  # cases, wrong ones, and what is wrong if it is not the number


class _Refused(Exception):
    """The server refuses a field; the message is its own."""


class ExactChecks:
    """Runs the checks on a few prompts."""

    def __init__(
        self,
        client: CompletionClient,
        offer: Offer,
        source: Source,
        tolerance: float,
        prompts: Sequence[AuditPrompt],
        length: int,
    ) -> None:
        self._client, self._offer, self._source, self._tolerance = client, offer, source, tolerance
        self._prompts = prompts
        self._greedy = replace(GREEDY, max_tokens=length)
        self._sampled = SamplingParams(temperature=1.0, max_tokens=min(length, 24))

    def run(self, seed: int) -> Iterator[CheckResult]:
        """Yield every result."""
        bodies = [self._offer.body(prompt, self._greedy) for prompt in self._prompts]
        plain = self._offer.dialect.plain
        kinds = {"one at a time": (1, bodies), "in load": (None, bodies * 2)}
        kinds |= {"without speculation": (None, [{**body, **plain} for body in bodies])} if plain is not None else {}
        wholes: list[Answer] = []
        for kind, (concurrency, kind_bodies) in kinds.items():
            answers = self._client.complete_all(kind_bodies, f"greedy, {kind}", concurrency)
            refusal = next((answer.message for answer in answers if isinstance(answer, NotOffered)), None)
            if refusal is not None:
                yield CheckResult(f"temperature 0, {kind}", ARG_MAX, 0, CheckVerdict.NOT_OFFERED, refusal)
                if not wholes:
                    return
                continue
            found = [answer for answer in answers if isinstance(answer, Answer)]
            wholes = wholes or found
            yield self._judged(f"temperature 0, {kind}", found, wholes * 2)
        checks: dict[tuple[str, str], Callable[[Sequence[Answer], int], _Counted]] = {
            ("streams", "stream = whole"): self._streams,
            ("stop strings", "text before the string"): self._stops,
            ("seeds", "same seed, same text"): self._seeds,
            ("n", f"{_NUM_CHOICES} texts"): self._choices,
        }
        for (setting, name), check in checks.items():
            try:
                yield CheckResult.counted(setting, name, *check(wholes[:_NUM_REPEATED], seed))
            except _Refused as refused:
                yield CheckResult(setting, name, 0, CheckVerdict.NOT_OFFERED, str(refused))

    def _answer(self, prompt: AuditPrompt, sampling: SamplingParams, seed: int | None = None, **more: object) -> Answer:
        answer = self._client.complete(self._offer.body(prompt, sampling, seed, **more))
        if isinstance(answer, NotOffered):
            raise _Refused(answer.message)
        return answer

    def _judged(self, setting: str, answers: Sequence[Answer], others: Sequence[Answer]) -> CheckResult:
        """Compare greedy tokens with the arg max, and count the texts that differ from other answers'."""
        tally, num_unknown, num_unlike = Tally(), 0, 0
        for index, (answer, other) in enumerate(zip(answers, others)):
            found = self._tally(self._prompts[index % len(self._prompts)], answer)
            num_unknown += found is None
            tally += found or Tally()
            num_unlike += answer.samples[0].text != other.samples[0].text
        detail = f"{tally.num_mismatch} wrong, {tally.num_near_tie} near ties, widest gap {tally.widest_gap:.2g}"
        detail += f"; {num_unlike} texts differ from those sent alone" if num_unlike else ""
        detail += f"; the tokens of {num_unknown} texts are not known" if num_unknown else ""
        return CheckResult.counted(setting, ARG_MAX, tally.num_tokens, tally.num_mismatch, detail)

    def _tally(self, prompt: AuditPrompt, answer: Answer) -> Tally | None:
        """Compare each token with the arg max; None if the tokens are not known."""
        ids = self._source.ids_of(answer.samples[0], prompt.ids, answer.num_tokens)
        if not ids:
            return None
        (rows_NV,) = self._source.rows(prompt.ids, [ids], self._greedy)
        rows_NV = merged(rows_NV, self._source.groups, is_logit=True)
        known = (~rows_NV.isnan().any(-1)).nonzero()[:, 0].tolist()
        return tally_gaps(greedy_gaps(rows_NV[known], [ids[place] for place in known]), self._tolerance) if known else None

    def _streams(self, wholes: Sequence[Answer], seed: int) -> _Counted:  # noqa: ARG002
        """Compare streams with whole answers. If texts differ, a stream of near ties is right."""
        num_wrong = 0
        for prompt, whole in zip(self._prompts, wholes):
            stream = self._answer(prompt, self._greedy, stream=True)
            one, two = stream.samples[0], whole.samples[0]
            if one.text != two.text:
                tally = self._tally(prompt, stream)
                num_wrong += tally is None or tally.num_mismatch > 0 or not tally.num_near_tie
            else:
                is_listed = len(one.names) == len(two.names)  # streams may list fewer tokens
                num_wrong += one.finish != two.finish or (is_listed and one.names != two.names)
        return len(wholes), num_wrong, None

    def _stops(self, wholes: Sequence[Answer], seed: int) -> _Counted:  # noqa: ARG002
        """End greedy texts at a string from their middle: the text is the part before it."""
        num = num_wrong = 0
        for prompt, whole in zip(self._prompts, wholes):
            text = whole.samples[0].text
            stop = text[len(text) // 2 :][:4]
            if not stop.strip():
                continue
            found = self._answer(prompt, self._greedy, stop=[stop]).samples[0]
            num += 1
            is_right = (found.text, found.finish) == (text[: text.find(stop)], "stop")
            num_wrong += stop in found.text or (not is_right and text.startswith(found.text))
        return num, num_wrong, None

    def _seeds(self, wholes: Sequence[Answer], seed: int) -> _Counted:
        """Repeat seeded texts, one at a time, and try other seeds."""
        if not self._offer.takes_seed:
            raise _Refused(self._offer.refused.get("seed", ""))
        prompts = self._prompts[: len(wholes)]
        one, two, other = (
            [self._answer(prompt, self._sampled, seed + shift).samples[0].text for prompt in prompts] for shift in (0, 0, 1000)
        )
        num_unlike = sum(first != second for first, second in zip(one, two))
        detail = f"{num_unlike} of {len(prompts)} differ" + ("; another seed changes no text" if one == other else "")
        return 3 * len(prompts), int(2 * num_unlike > len(prompts) or one == other), detail

    def _choices(self, wholes: Sequence[Answer], seed: int) -> _Counted:  # noqa: ARG002
        """Request several texts at once: all come, they differ, and their tokens are counted together."""
        answer = self._answer(self._prompts[0], replace(self._sampled, temperature=1.5), seed, n=_NUM_CHOICES)
        texts = [sample.text for sample in answer.samples]
        listed, counted = [len(sample.names) for sample in answer.samples], answer.num_tokens or 0
        faults = {
            f"{len(texts)} came": len(texts) != _NUM_CHOICES,
            "all are alike": len(texts) > 1 and len(set(texts)) == 1,
            f"usage counts {counted} tokens, {sum(listed)} are listed": 0 < counted < sum(listed),
        }
        found = [fault for fault, is_so in faults.items() if is_so]
        return len(texts), len(found), "; ".join(found)


def usage_result(answers: Sequence[Answer], num_prompt_tokens: Sequence[int | None]) -> CheckResult:
    """Compare usage counts with listed tokens, an end token counted or not, and with the prompts that were sent."""
    faults = {"generated tokens": 0, "prompt tokens": 0, "sum": 0}
    num = 0
    for answer, num_prompt in zip(answers, num_prompt_tokens, strict=True):
        usage, sample = answer.usage, answer.samples[0]
        if not {"prompt_tokens", "completion_tokens", "total_tokens"} <= usage.keys():
            continue
        num += 1
        num_unlisted = usage["completion_tokens"] - len(sample.names)
        is_unlisted_right = abs(num_unlisted) <= (sample.finish == "stop") or (num_unlisted > 0 and not sample.has_ids)
        faults["generated tokens"] += bool(sample.names) and not is_unlisted_right
        faults["prompt tokens"] += num_prompt is not None and usage["prompt_tokens"] != num_prompt
        faults["sum"] += usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]
    detail = ", ".join(f"{name} of {count} answers wrong" for name, count in faults.items() if count)
    return CheckResult.counted("usage", "counts", num, sum(faults.values()), detail)
