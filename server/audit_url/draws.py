"""Tests of one setting's samples: the first tokens together, and all tokens.

The first token after a prompt is never drafted, and marginals can be right where joints are not.
Shape key: N tokens of one text, V columns.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import ChiSquare, combined_test, likelihood_ratio_test
from engine.audit.examine import CELL
from engine.audit.outcomes import Tally, is_testable, support_of
from engine.audit.pit import NUM_BINS, bin_counts, pit_values, uniformity_test
from engine.audit.reference import penalised_row, warped
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import SamplingParams
from server.audit_url.dialect import Meaning
from server.audit_url.results import IMPOSSIBLE, PAIRS, CheckResult, RareTest
from server.audit_url.sources import Ids, Source, has_cuts

_JOINTS = ("first token", PAIRS, "first three tokens")
_RARE = (1e-3, 1e-5)
_ROWS_AT_ONCE = 128
_LEAST_SLACK = 0.01  # between log-probabilities: servers round them to a few digits
_LOWEST = -15.0  # log-probabilities below are taken as this


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled text after a prompt, with the reported log-probabilities of its tokens and lists of likeliest tokens."""

    prompt: Ids
    token_ids: Ids
    logprobs: tuple[float | None, ...] = ()
    tops: tuple[tuple[float, ...], ...] = ()


def merged(rows_NV: Float[Tensor, "N V"], groups: Sequence[Ids], *, is_logit: bool) -> Float[Tensor, "N V"]:
    """Return rows in which each group's first token has the group's probability, or its largest logit."""
    rows_NV = rows_NV.clone()
    for first, *others in groups:
        columns_NG = rows_NV[:, [first, *others]]
        rows_NV[:, others] = float("-inf") if is_logit else 0.0
        rows_NV[:, first] = columns_NG.amax(-1) if is_logit else columns_NG.sum(-1)
    return rows_NV


@dataclass(frozen=True, slots=True)
class Expectation:
    """The distributions of one setting: a source's rows with the edits, order of cuts and groups of tokens of a server."""

    source: Source
    meaning: Meaning
    sampling: SamplingParams

    def edited(self, prompt: Ids, text: Ids, rows_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return rows after bias and penalties; row n follows `text[:n]`."""
        edited_NV = rows_NV.clone()
        for token_id, bias in self.sampling.logit_bias:
            edited_NV[:, token_id] += bias
        counted = prompt if self.meaning.penalties_see_prompt else ()
        if self.sampling.has_penalties:
            pairs = enumerate(edited_NV)
            edited_NV = torch.stack([penalised_row(row_V, prompt, (*counted, *text[:n]), self.sampling) for n, row_V in pairs])
        return edited_NV

    def probs(self, edited_NV: Float[Tensor, "N V"], sampling: SamplingParams | None = None) -> Float[Tensor, "N V"]:
        """Return the distributions of edited rows."""
        sampling = sampling or self.sampling
        if self.meaning.cuts_first:
            is_cut_NV = warped(edited_NV, replace(sampling, temperature=1.0)) == 0
            probs_NV = torch.softmax(edited_NV.masked_fill(is_cut_NV, float("-inf")) / sampling.temperature, -1)
        else:
            probs_NV = warped(edited_NV, sampling)
        return merged(probs_NV, self.source.groups, is_logit=False)

    def after(self, prompt: Ids, prefix: Ids) -> Float[Tensor, " V"]:
        """Return the distribution of the next token."""
        text = (*prefix, -1)
        (rows_NV,) = self.source.rows(prompt, [text], self.sampling)
        return self.probs(self.edited(prompt, text, rows_NV)[-1:])[0]


def check_draws(name: str, draws: Sequence[Draw], expected: Expectation, tolerance: float, seed: int) -> list[CheckResult]:
    """Test one setting's draws, all of which count."""
    every = _EveryToken(expected, tolerance, seed)
    for draw_group in _groups(draws):
        every.add(draw_group)
    tests: dict[str, ChiSquare | RareTest] = every.tests()
    by_prompt: dict[Ids, list[Ids]] = defaultdict(list)
    for draw in draws:
        by_prompt[draw.prompt].append(draw.token_ids)
    if is_testable(expected.sampling, tolerance):
        known = _KnownDistributions(expected)
        for length, check in enumerate(_JOINTS, 1):
            joint = [_joint_test(known, prompt, texts, length) for prompt, texts in by_prompt.items()]
            tests[check] = combined_test([one for one in joint if one.freedom])
    return [*(CheckResult.tested(name, check, test) for check, test in tests.items()), *every.results(name)]


class _KnownDistributions:
    """The distributions after short texts, each computed once."""

    def __init__(self, expected: Expectation) -> None:
        self.rest, self.lasts = expected.source.rest, {group[0] for group in expected.source.groups}
        self._expected = expected
        self._found: dict[tuple[Ids, Ids], Tensor] = {}

    def after(self, prompt: Ids, prefix: Ids) -> Tensor | None:
        """Return the distribution of the next token, None if it is not known."""
        if (prompt, prefix) not in self._found:
            self._found[prompt, prefix] = self._expected.after(prompt, prefix)
        probs_V = self._found[prompt, prefix]
        return None if bool(probs_V.isnan().any()) else probs_V


def _joint_test(known: _KnownDistributions, prompt: Ids, texts: Sequence[Ids], length: int) -> ChiSquare:
    """Test the first tokens together. A cell is a sequence that expects enough draws, or the rest after a prefix."""
    expected: dict[Ids, float] = {}
    open_prefixes: list[tuple[Ids, float]] = [((), float(len(texts)))]
    rests: dict[Ids, float] = {}
    while open_prefixes:
        prefix, num = open_prefixes.pop()
        probs_V = known.after(prompt, prefix)
        if probs_V is None:
            expected[prefix] = num
            continue
        rests[prefix] = num
        for token_id in (probs_V * num >= CELL).nonzero()[:, 0].tolist():
            if token_id == known.rest:
                continue
            cell, share = (*prefix, token_id), float(probs_V[token_id]) * num
            rests[prefix] -= share
            if len(cell) < length and token_id not in known.lasts:
                open_prefixes.append((cell, share))
            else:
                expected[cell] = share
    observed = Counter(_cell_of(text[:length], expected, rests) for text in texts)
    cells = {**{(cell, True): num for cell, num in expected.items()}, **{(cell, False): num for cell, num in rests.items()}}
    return likelihood_ratio_test([observed[cell] for cell in cells], [max(0.0, num) for num in cells.values()])


def _cell_of(text: Ids, cells: dict[Ids, float], rests: dict[Ids, float]) -> tuple[Ids, bool]:
    """Return the cell of a text: the sequence it begins with, or the rest after its longest open prefix."""
    for length in range(len(text), -1, -1):
        if text[:length] in cells:
            return text[:length], True
        if text[:length] in rests:
            return text[:length], False
    raise AssertionError("the empty prefix is open")


def _groups(draws: Iterable[Draw]) -> Iterator[list[Draw]]:
    """Yield draws after one prompt with texts of one length, a few at a time."""
    by_kind: dict[tuple[Ids, int], list[Draw]] = defaultdict(list)
    for draw in draws:
        by_kind[draw.prompt, len(draw.token_ids)].append(draw)
    for (_, length), group in by_kind.items():
        size = max(1, _ROWS_AT_ONCE // max(1, length))
        yield from (group[first : first + size] for first in range(0, len(group), size) if length)


class _EveryToken:
    """The tests of all tokens at all positions."""

    def __init__(self, expected: Expectation, tolerance: float, seed: int) -> None:
        self._expected, self._tolerance = expected, tolerance
        self._key = stream_key(seed, 0, Stream.EXTRA)
        self._bins = [0] * NUM_BINS
        self._support = Tally()
        self._rare = {least: [0, 0.0] for least in _RARE}
        self._repeats = [0, 0.0]
        self._num = self._num_unknown = 0
        self._logprobs = Counter[str]()

    def add(self, group: Sequence[Draw]) -> None:
        """Test texts of one length after one prompt."""
        rows = self._expected.source.rows(group[0].prompt, [draw.token_ids for draw in group], self._expected.sampling)
        for draw, rows_NV in zip(group, rows, strict=True):
            is_known = (~rows_NV.isnan().any(-1)).tolist()
            self._num_unknown += is_known.count(False)
            places = [place for place, known in enumerate(is_known) if known]
            if places:
                edited_NV = self._expected.edited(draw.prompt, draw.token_ids, rows_NV)[places]
                self._add_tokens(draw, places, edited_NV)
                self._compare(draw, places, rows_NV[places], edited_NV)

    def _add_tokens(self, draw: Draw, places: Sequence[int], edited_NV: Tensor) -> None:
        expected, rest = self._expected, self._expected.source.rest
        support = support_of(lambda sampling: expected.probs(edited_NV, sampling), edited_NV, expected.sampling, self._tolerance)
        ids = [draw.token_ids[place] for place in places]
        if rest is not None:  # tokens outside the lists of likeliest ones
            pairs = zip(support.probs_NV, ids, strict=True)
            ids = [rest if row_V[token_id] == 0 and row_V[rest] > 0 else token_id for row_V, token_id in pairs]
        self._support += support.tally(ids)
        if not support.is_testable:
            return
        probs_NV = support.probs_NV
        uniforms = [uniform(self._key, self._num + index) for index in range(len(ids))]
        new = bin_counts(pit_values(probs_NV, ids, uniforms))
        self._bins = [old + more for old, more in zip(self._bins, new, strict=True)]
        self._num += len(ids)
        own_N = probs_NV.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        for least, counts in self._rare.items():
            counts[0] += int((own_N < least).sum())
            counts[1] += float(probs_NV.masked_fill(probs_NV >= least, 0.0).sum())
        for row_V, place, token_id in zip(probs_NV, places, ids, strict=True):
            earlier = set(draw.token_ids[:place]) - {rest}
            self._repeats[0] += token_id in earlier
            self._repeats[1] += float(row_V[list(earlier)].sum()) if earlier else 0.0

    def _compare(self, draw: Draw, places: Sequence[int], rows_NV: Tensor, edited_NV: Tensor) -> None:
        """Compare the reported log-probabilities, and the lists of likeliest tokens by rank, with those of the raw rows."""
        firsts = {group[0] for group in self._expected.source.groups}
        raw_NV, processed_NV = torch.log_softmax(rows_NV, -1), self._expected.probs(edited_NV).log()
        for index, place in enumerate(places[: len(draw.logprobs)]):
            token_id, reported = draw.token_ids[place], draw.logprobs[place]
            if reported is None or token_id in firsts:
                continue
            self._logprobs["all"] += 1
            if not self._is_near(raw_NV[index], token_id, reported, draw.tops[place]):
                self._logprobs["wrong"] += 1
                self._logprobs["processed"] += self._is_near(processed_NV[index], token_id, reported, draw.tops[place])

    def _is_near(self, row_V: Tensor, token_id: int, reported: float, top: Sequence[float]) -> bool:
        """Compare probabilities; a log-probability below -15 is only compared with that bound."""
        slack = max(_LEAST_SLACK, 2.0 * self._tolerance)
        likeliest = row_V.topk(min(len(top), len(row_V))).values.tolist()
        pairs = [(float(row_V[token_id]), reported), *zip(likeliest, sorted(top, reverse=True))]
        return all(abs(max(one, _LOWEST) - max(two, _LOWEST)) <= slack for one, two in pairs)

    def tests(self) -> dict[str, ChiSquare | RareTest]:
        """Return the statistical tests."""
        if not self._num:
            return {}
        num, expected = self._repeats
        both = likelihood_ratio_test([num, self._num - num], [expected, self._num - expected])
        repeated = both if both.freedom else RareTest(int(num), expected, self._num)
        tests = {"all tokens": uniformity_test(self._bins), "repeated tokens": repeated}
        if not has_cuts(self._expected.sampling):
            tests |= {f"tokens below {least:g}": RareTest(int(num), mean, self._num) for least, (num, mean) in self._rare.items()}
        return tests

    def results(self, name: str) -> Iterator[CheckResult]:
        """Yield the checks that no chance enters."""
        wrong, edge = self._support.num_mismatch, self._support.num_near_tie
        detail = f"{wrong} found, {edge} at the edge"
        if self._num_unknown:
            detail += f"; {self._num_unknown} tokens have no known distribution"
        if not is_testable(self._expected.sampling, self._tolerance):
            detail += "; rounding is too coarse for tests of frequencies"
        yield CheckResult.counted(name, IMPOSSIBLE, self._support.num_tokens, wrong, detail)
        if self._logprobs["all"] and self._expected.source.has_weights:
            num_wrong, num_processed = self._logprobs["wrong"], self._logprobs["processed"]
            detail = f"{num_wrong} wrong" if num_wrong else ""
            if num_processed:
                detail += f", {num_processed} of them after temperature, penalties and cuts"
            yield CheckResult.counted(name, "log-probabilities", self._logprobs["all"], num_wrong, detail)
