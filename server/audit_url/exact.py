"""Checks of texts that leave no choice: greedy texts alone, under load and without speculation; streams, stops, seeds, n."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.audit.outcomes import Tally, greedy_gaps, tally_gaps
from engine.core.types import SamplingParams
from server.audit_url.client import Answer, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, Offer
from server.audit_url.results import CheckResult, CheckVerdict
from server.audit_url.sources import Ids, Source

GREEDY = SamplingParams(temperature=0.0)
_NUM_REPEATED = 3  # prompts of the checks of streams, stop strings and seeds
_NUM_CHOICES = 3


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
        alone = self._client.complete_all(bodies, "greedy, one at a time", concurrency=1)
        if isinstance(alone[0], NotOffered):
            yield CheckResult("temperature 0", "arg max", 0, CheckVerdict.NOT_OFFERED, alone[0].message)
            return
        yield from self._judged("temperature 0, one at a time", alone, alone)
        in_load = self._client.complete_all(bodies * 2, "greedy, in load")
        yield from self._judged("temperature 0, in load", in_load, alone * 2)
        if self._offer.dialect.plain is not None:
            plain = self._client.complete_all(
                [{**body, **self._offer.dialect.plain} for body in bodies], "greedy, without speculation"
            )
            yield from self._judged("temperature 0, without speculation", plain, alone)
        texts = [answer for answer in alone if isinstance(answer, Answer)]
        yield self._streams(texts)
        yield self._stops(texts)
        yield self._seeds(seed)
        yield self._choices(seed)

    def _judged(
        self, setting: str, answers: Sequence[Answer | NotOffered], others: Sequence[Answer | NotOffered]
    ) -> Iterator[CheckResult]:
        """Yield the comparison of greedy tokens with the arg max, and the number of texts that differ from other answers'."""
        tally, num_unknown, num_unlike = Tally(), 0, 0
        for index, (answer, other) in enumerate(zip(answers, others, strict=True)):
            if isinstance(answer, NotOffered) or isinstance(other, NotOffered):
                continue
            found = self._tally(self._prompts[index % len(self._prompts)], answer)
            num_unknown += found is None
            tally += found or Tally()
            num_unlike += answer.samples[0].text != other.samples[0].text
        verdict = CheckVerdict.of(tally.num_tokens, tally.num_mismatch)
        detail = f"{tally.num_mismatch} wrong, {tally.num_near_tie} near ties, widest gap {tally.widest_gap:.2g}"
        if num_unlike:
            detail += f"; {num_unlike} texts differ from those sent alone"
        if num_unknown:
            detail += f"; the tokens of {num_unknown} texts are not known"
        yield CheckResult(setting, "arg max", tally.num_tokens, verdict, detail)

    def _tally(self, prompt: AuditPrompt, answer: Answer) -> Tally | None:
        """Compare each token with the arg max; None if the tokens are not known."""
        ids = self._ids(prompt, answer)
        if not ids:
            return None
        (rows_NV,) = self._source.rows(prompt.ids, [ids], self._greedy)
        if ends := list(self._source.end_ids):
            rows_NV = rows_NV.clone()
            rows_NV[:, ends[0]] = rows_NV[:, ends].amax(-1)
        known = (~rows_NV.isnan().any(-1)).nonzero()[:, 0].tolist()
        return tally_gaps(greedy_gaps(rows_NV[known], [ids[place] for place in known]), self._tolerance) if known else None

    def _ids(self, prompt: AuditPrompt, answer: Answer) -> Ids | None:
        return self._source.ids_of(answer.samples[0], prompt.ids, answer.usage.get("completion_tokens"))

    def _streams(self, wholes: Sequence[Answer]) -> CheckResult:
        """Compare streams with whole answers. If texts differ, a stream of near ties is right."""
        num_wrong = 0
        for prompt, whole in zip(self._prompts[:_NUM_REPEATED], wholes):
            stream = self._client.stream(self._offer.body(prompt, self._greedy))
            if isinstance(stream, NotOffered):
                return CheckResult("streams", "stream = whole", 0, CheckVerdict.NOT_OFFERED, stream.message)
            one, two = stream.samples[0], whole.samples[0]
            is_alike = (one.text, one.names, one.finish) == (two.text, two.names, two.finish)
            num_wrong += not is_alike and (one.text == two.text or not self._is_near_tie(prompt, stream))
        return _counted("streams", "stream = whole", min(_NUM_REPEATED, len(wholes)), num_wrong)

    def _is_near_tie(self, prompt: AuditPrompt, answer: Answer) -> bool:
        tally = self._tally(prompt, answer)
        return tally is not None and not tally.num_mismatch and tally.num_near_tie > 0

    def _stops(self, wholes: Sequence[Answer]) -> CheckResult:
        """End greedy texts at a string from their middle: the text is the part before it."""
        num, num_wrong = 0, 0
        for prompt, whole in zip(self._prompts[:_NUM_REPEATED], wholes):
            text = whole.samples[0].text
            stop = text[len(text) // 2 :][:4]
            if not stop.strip():
                continue
            answer = self._client.complete(self._offer.body(prompt, self._greedy, stop=[stop]))
            if isinstance(answer, NotOffered):
                return CheckResult("stop strings", "text before the string", 0, CheckVerdict.NOT_OFFERED, answer.message)
            found = answer.samples[0]
            num += 1
            is_right = (found.text, found.finish) == (text[: text.find(stop)], "stop")
            num_wrong += stop in found.text or (not is_right and text.startswith(found.text))
        return _counted("stop strings", "text before the string", num, num_wrong)

    def _seeds(self, seed: int) -> CheckResult:
        """Repeat seeded texts, one at a time, and try other seeds."""
        if not self._offer.takes_seed:
            return CheckResult("seeds", "same seed, same text", 0, CheckVerdict.NOT_OFFERED, self._offer.refused.get("seed", ""))
        prompts = self._prompts[:_NUM_REPEATED]
        bodies = [self._offer.body(prompt, self._sampled, seed + shift) for shift in (0, 0, 1000) for prompt in prompts]
        texts = _texts(self._client.complete_all(bodies, "seeds", concurrency=1))
        one, two, other = texts[: len(prompts)], texts[len(prompts) : 2 * len(prompts)], texts[2 * len(prompts) :]
        num_unlike = sum(first != second for first, second in zip(one, two))
        detail = f"{num_unlike} of {len(prompts)} differ" + ("; another seed changes no text" if one == other else "")
        is_wrong = 2 * num_unlike > len(prompts) or one == other
        return CheckResult(
            "seeds", "same seed, same text", len(texts), CheckVerdict.VIOLATION if is_wrong else CheckVerdict.OK, detail
        )

    def _choices(self, seed: int) -> CheckResult:
        """Request several texts at once: all come, they differ, and their tokens are counted together."""
        hot = replace(self._sampled, temperature=1.5)
        answer = self._client.complete(self._offer.body(self._prompts[0], hot, seed, n=_NUM_CHOICES))
        if isinstance(answer, NotOffered):
            return CheckResult("n", f"{_NUM_CHOICES} texts", 0, CheckVerdict.NOT_OFFERED, answer.message)
        texts = [sample.text for sample in answer.samples]
        listed, counted = sum(len(sample.names) for sample in answer.samples), answer.usage.get("completion_tokens")
        faults = {
            f"{len(texts)} came": len(texts) != _NUM_CHOICES,
            "all are alike": len(texts) > 1 and len(set(texts)) == 1,
            f"usage counts {counted} tokens, {listed} are listed": bool(listed)
            and counted is not None
            and not 0 <= counted - listed <= len(texts),
        }
        found = "; ".join(fault for fault, is_so in faults.items() if is_so)
        return CheckResult("n", f"{_NUM_CHOICES} texts", len(texts), CheckVerdict.VIOLATION if found else CheckVerdict.OK, found)


def usage_result(answers: Sequence[Answer], num_prompt_tokens: Sequence[int | None]) -> CheckResult:
    """Compare usage counts with listed tokens, an end token counted or not, and with the prompts that were sent."""
    num = num_wrong = 0
    for answer, num_prompt in zip(answers, num_prompt_tokens, strict=True):
        usage, names = answer.usage, answer.samples[0].names
        if not {"prompt_tokens", "completion_tokens", "total_tokens"} <= usage.keys():
            continue
        num += 1
        is_text_right = not names or abs(usage["completion_tokens"] - len(names)) <= (answer.samples[0].finish == "stop")
        is_prompt_right = num_prompt is None or usage["prompt_tokens"] == num_prompt
        is_sum_right = usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        num_wrong += not (is_text_right and is_prompt_right and is_sum_right)
    return _counted("usage", "counts", num, num_wrong)


def _counted(setting: str, check: str, num: int, num_wrong: int) -> CheckResult:
    return CheckResult(setting, check, num, CheckVerdict.of(num, num_wrong), f"{num_wrong} wrong" if num_wrong else "")


def _texts(answers: Sequence[Answer | NotOffered]) -> list[str]:
    return [answer.samples[0].text if isinstance(answer, Answer) else "" for answer in answers]
