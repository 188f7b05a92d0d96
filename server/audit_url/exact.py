"""Checks of texts that leave no choice: greedy texts alone, under load and without speculation; streams, stops, seeds, n."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.audit.outcomes import Tally
from engine.core.types import SamplingParams
from server.audit_url.client import AnswerText, CompletionClient, NotOffered
from server.audit_url.dialect import AuditPrompt, Offer
from server.audit_url.draws import greedy_tally
from server.audit_url.report import ARG_MAX, CheckResult
from server.audit_url.sources import Source

_NUM_REPEATED = 3  # prompts of the checks of streams, stop strings and seeds
_NUM_CHOICES = 3
_ALONE, _IN_LOAD, _PLAIN = (f"temperature 0, {kind}" for kind in ("one at a time", "in load", "without speculation"))
_Counted = tuple[int, int, str]  # cases, wrong ones, and what is wrong, if it is not their number alone


@dataclass
class ExactChecks:
    """The checks on a few prompts. `wholes` are the greedy texts that were sent alone: the first check provides them."""

    client: CompletionClient
    offer: Offer
    source: Source
    tolerance: float
    prompts: Sequence[AuditPrompt]
    length: int
    seed: int
    wholes: Sequence[AnswerText] = ()

    def __post_init__(self) -> None:
        self._sampled, self._zero = SamplingParams(max_tokens=min(self.length, 24)), SamplingParams(0.0, max_tokens=self.length)

    def named(self) -> Iterator[tuple[str, str, Callable[[], list[CheckResult]]]]:
        """Yield setting, check and function of each."""
        for (setting, check), function in _CHECKS.items():
            if setting != _PLAIN or self.offer.dialect.plain is not None:
                yield setting, check, lambda: [CheckResult(setting, check, *function(self))]  # noqa: B023

    def _texts(self, sampling: SamplingParams, seed: int | None = None, **more: object) -> list[AnswerText]:
        """Return texts after the first prompts, sent one at a time."""
        bodies = [self.offer.body(prompt, sampling, seed, **more) for prompt in self.prompts[:_NUM_REPEATED]]
        return self.client.complete_all(bodies, "exact checks", 1)

    def _tally(self, prompt: AuditPrompt, text: AnswerText) -> Tally | None:
        draw = self.source.draw(prompt.ids, text)
        return greedy_tally(self.source, draw, self.tolerance) if draw is not None and draw.token_ids else None

    def _greedy(self, concurrency: int | None, num_times: int, fields: Mapping[str, Any] | None = None) -> _Counted:
        """Compare greedy tokens with the arg max, and count the texts that differ from those sent alone."""
        prompts = [*self.prompts] * num_times
        bodies = [self.offer.body(prompt, self._zero, **(fields or {})) for prompt in prompts]
        found = self.client.complete_all(bodies, "greedy texts", concurrency)
        self.wholes = self.wholes or found
        tallies = [self._tally(*pair) for pair in zip(prompts, found, strict=True)]
        tally = sum((one for one in tallies if one is not None), Tally())
        num_unlike = sum(one.text != other.text for one, other in zip(found, [*self.wholes] * num_times))
        detail = f"{tally.num_mismatch} wrong, {tally.num_near_tie} near ties, widest gap {tally.widest_gap:.2g}"
        detail += f"; {num_unlike} texts differ from those sent alone" if num_unlike else ""
        detail += f"; the tokens of {tallies.count(None)} texts are not known" if None in tallies else ""
        return tally.num_tokens, tally.num_mismatch, detail

    def _without_speculation(self) -> _Counted:
        return self._greedy(None, 1, self.offer.dialect.plain)

    def _streams(self) -> _Counted:
        """Compare streams with whole answers. If texts differ, a stream of near ties is right."""
        num_wrong = 0
        streams = self._texts(self._zero, stream=True) if self.wholes else []
        for prompt, stream, whole in zip(self.prompts, streams, self.wholes):
            if stream.text == whole.text:
                is_listed = len(stream.names) == len(whole.names)  # streams may list fewer tokens
                num_wrong += stream.finish != whole.finish or (is_listed and stream.names != whole.names)
            else:
                tally = self._tally(prompt, stream)
                num_wrong += tally is None or tally.num_mismatch > 0 or not tally.num_near_tie
        return len(streams), num_wrong, ""

    def _stops(self) -> _Counted:
        """End greedy texts at a string from their middle: the text is the part before it."""
        texts = [(prompt, whole.text) for prompt, whole in zip(self.prompts[:_NUM_REPEATED], self.wholes)]
        num = num_wrong = 0
        for prompt, text, stop in ((prompt, text, text[len(text) // 2 :][:4]) for prompt, text in texts):
            if stop.strip():
                found = self.client.complete(self.offer.body(prompt, self._zero, stop=[stop]))[0]
                num += 1
                is_right = (found.text, found.finish) == (text[: text.find(stop)], "stop")
                num_wrong += stop in found.text or (not is_right and text.startswith(found.text))
        return num, num_wrong, ""

    def _seeds(self) -> _Counted:
        """Repeat seeded texts, one at a time, and try other seeds."""
        if "seed" not in self.offer.base:
            raise NotOffered(self.offer.refused.get("seed", ""))
        one, two, other = ([text.text for text in self._texts(self._sampled, self.seed + shift)] for shift in (0, 0, 1000))
        num_unlike = sum(first != second for first, second in zip(one, two))
        detail = f"{num_unlike} of {len(one)} differ" + ("; another seed changes no text" if one == other else "")
        return 3 * len(one), int(2 * num_unlike > len(one) or one == other), detail

    def _choices(self) -> _Counted:
        """Request several texts at once: all come, they differ, and their tokens are counted together."""
        body = self.offer.body(self.prompts[0], replace(self._sampled, temperature=1.5), self.seed, n=_NUM_CHOICES)
        texts = self.client.complete(body)
        num_listed, num_counted = sum(len(text.names) for text in texts), texts[0].num_tokens or 0
        faults = {
            f"{len(texts)} came": len(texts) != _NUM_CHOICES,
            "all are alike": len(texts) > 1 and len({text.text for text in texts}) == 1,
            f"usage counts {num_counted} tokens, {num_listed} are listed": 0 < num_counted < num_listed,
        }
        return len(texts), sum(faults.values()), "; ".join(fault for fault, is_so in faults.items() if is_so)


_CHECKS: Mapping[tuple[str, str], Callable[[ExactChecks], _Counted]] = {
    (_ALONE, ARG_MAX): partial(ExactChecks._greedy, concurrency=1, num_times=1),
    (_IN_LOAD, ARG_MAX): partial(ExactChecks._greedy, concurrency=None, num_times=2),
    (_PLAIN, ARG_MAX): ExactChecks._without_speculation,
    ("streams", "stream = whole"): ExactChecks._streams,
    ("stop strings", "text before the string"): ExactChecks._stops,
    ("seeds", "same seed, same text"): ExactChecks._seeds,
    ("n", f"{_NUM_CHOICES} texts"): ExactChecks._choices,
}
NAMES = tuple(setting for setting, _ in _CHECKS)


def usage_result(answers: Sequence[tuple[AnswerText, int | None]]) -> CheckResult:
    """Compare usage counts with listed tokens, an end token counted or not, and with the prompts' lengths, if known."""
    faults, num = dict.fromkeys(("generated tokens", "prompt tokens", "sum"), 0), 0
    for answer, num_prompt in answers:
        if answer.usage.keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}:
            num += 1
            prompt, generated, total = (answer.usage[f"{kind}_tokens"] for kind in ("prompt", "completion", "total"))
            num_unlisted = generated - len(answer.names)
            is_unlisted_right = abs(num_unlisted) <= (answer.finish == "stop") or (num_unlisted > 0 and not answer.has_ids)
            faults["generated tokens"] += bool(answer.names) and not is_unlisted_right
            faults["prompt tokens"] += num_prompt is not None and prompt != num_prompt
            faults["sum"] += total != prompt + generated
    detail = ", ".join(f"{name} of {count} answers wrong" for name, count in faults.items() if count)
    return CheckResult("usage", "counts", num, sum(faults.values()), detail)
