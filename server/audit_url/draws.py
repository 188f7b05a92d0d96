"""Statistical tests of one setting's samples: first, second and third tokens, joints of two and three, and all tokens.

The first token after a prompt is never drafted, and marginals can be right where joints are not.
Shape key: N tokens of one text, V columns.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import POWER_QUANTILE, ChiSquare, combined_test, likelihood_ratio_test
from engine.audit.examine import CELL, probs_test
from engine.audit.outcomes import Tally, is_testable, support_of
from engine.audit.pit import NUM_BINS, bin_counts, pit_values, uniformity_test
from engine.audit.reference import penalised_row, warped
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import SamplingParams
from server.audit_url.dialect import Dialect
from server.audit_url.sources import Ids, Source, has_cuts

_LEAST_PREFIX_SAMPLES = 25
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


@dataclass(frozen=True, slots=True)
class RareTest:
    """A test that unlikely tokens are no more frequent than expected: a count against a bound of its tail, Poisson's.

    Hoeffding 1956: of independent trials with one mean, equal chances spread the count most.
    """

    num_observed: int
    expected: float
    num_counted: int

    @property
    def p_value(self) -> float:
        """Probability of a count at least as large."""
        return _poisson_tail(self.num_observed, self.expected)

    def detectable(self, level: float) -> float:
        """Return the share of replaced tokens that a test at this level detects with probability .9, approximately."""
        least = 1
        while _poisson_tail(least, self.expected) >= level:
            least += 1
        return min(1.0, (least + POWER_QUANTILE * math.sqrt(least) - self.expected) / max(1, self.num_counted))


def _poisson_tail(count: int, mean: float) -> float:
    if count == 0:
        return 1.0
    tail = torch.special.gammainc(torch.tensor(float(count)).double(), torch.tensor(mean).double())
    return float(tail)


@dataclass(frozen=True, slots=True)
class DrawsTested:
    """The tests of a setting's draws by name, its impossible tokens, and the log-probabilities that differ from the source's."""

    tests: dict[str, ChiSquare | RareTest]
    support: Tally
    num_unknown: int
    num_logprobs: int
    num_wrong_logprobs: int
    num_processed_logprobs: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """The distributions of one setting: a source's rows with the edits, order of cuts and end tokens of a server."""

    source: Source
    dialect: Dialect
    sampling: SamplingParams

    def edited(self, prompt: Ids, text: Ids, rows_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return rows after bias and penalties; row n follows `text[:n]`."""
        edited_NV = rows_NV.clone()
        for token_id, bias in self.sampling.logit_bias:
            edited_NV[:, token_id] += bias
        counted = prompt if self.dialect.penalties_see_prompt else ()
        if self.sampling.has_penalties:
            pairs = enumerate(edited_NV)
            edited_NV = torch.stack([penalised_row(row_V, prompt, (*counted, *text[:n]), self.sampling) for n, row_V in pairs])
        return edited_NV

    def probs(self, edited_NV: Float[Tensor, "N V"], sampling: SamplingParams | None = None) -> Float[Tensor, "N V"]:
        """Return the distributions of edited rows, the end tokens merged into one."""
        sampling = sampling or self.sampling
        if self.dialect.cuts_first:
            is_cut_NV = warped(edited_NV, replace(sampling, temperature=1.0)) == 0
            probs_NV = torch.softmax(edited_NV.masked_fill(is_cut_NV, float("-inf")) / sampling.temperature, -1)
        else:
            probs_NV = warped(edited_NV, sampling)
        if len(self.source.end_ids) > 1:
            ends = list(self.source.end_ids)
            total_N = probs_NV[:, ends].sum(-1)
            probs_NV[:, ends] = 0.0
            probs_NV[:, ends[0]] = total_N
        return probs_NV

    def after(self, prompt: Ids, prefix: Ids) -> Float[Tensor, " V"]:
        """Return the distribution of the next token."""
        text = (*prefix, 0)
        (rows_NV,) = self.source.rows(prompt, [text], self.sampling)
        return self.probs(self.edited(prompt, text, rows_NV)[-1:])[0]


def test_draws(draws: Sequence[Draw], expected: Expectation, tolerance: float, seed: int) -> DrawsTested:
    """Test one setting's draws, all of which count."""
    tests: dict[str, ChiSquare | RareTest] = {}
    by_prompt: dict[Ids, list[Ids]] = defaultdict(list)
    for draw in draws:
        by_prompt[draw.prompt].append(draw.token_ids)
    if is_testable(expected.sampling, tolerance):
        known = _KnownDistributions(expected)
        for length, name in enumerate(("first token", "second token", "third token")):
            found = [one for prompt, texts in by_prompt.items() for one in _next_tests(known, prompt, texts, length)]
            tests[name] = combined_test([one for one in found if one.freedom])
        for length, name in ((2, "first two"), (3, "first three")):
            joint = [_joint_test(known, prompt, texts, length) for prompt, texts in by_prompt.items()]
            tests[name] = combined_test([one for one in joint if one.freedom])
    every = _EveryToken(expected, tolerance, seed)
    for draw_group in _groups(draws):
        every.add(draw_group)
    return every.result(tests)


class _KnownDistributions:
    """The distributions after short texts, each computed once."""

    def __init__(self, expected: Expectation) -> None:
        self.rest, self.end_ids = expected.source.rest, expected.source.end_ids[:1]
        self._expected = expected
        self._found: dict[tuple[Ids, Ids], Tensor] = {}

    def after(self, prompt: Ids, prefix: Ids) -> Tensor | None:
        """Return the distribution of the next token, None if it is not known."""
        if (prompt, prefix) not in self._found:
            self._found[prompt, prefix] = self._expected.after(prompt, prefix)
        probs_V = self._found[prompt, prefix]
        return None if bool(probs_V.isnan().any()) else probs_V


def _next_tests(known: _KnownDistributions, prompt: Ids, texts: Sequence[Ids], length: int) -> Iterator[ChiSquare]:
    """Yield a test of the next token after each frequent prefix."""
    nexts: dict[Ids, list[int]] = defaultdict(list)
    for text in texts:
        if len(text) > length:
            nexts[text[:length]].append(text[length])
    for prefix, token_ids in nexts.items():
        is_frequent = not length or len(token_ids) >= _LEAST_PREFIX_SAMPLES
        if is_frequent and (probs_V := known.after(prompt, prefix)) is not None:
            yield probs_test(probs_V, Counter(_listed(probs_V[None], token_ids, known.rest)))


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
            if len(cell) < length and token_id not in known.end_ids:
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


def _listed(probs_NV: Tensor, token_ids: Sequence[int], rest: int | None) -> list[int]:
    """Return the tokens, or the column of the rest for tokens without a column of their own; one row has all tokens."""
    if rest is None:
        return list(token_ids)
    rows = probs_NV.expand(len(token_ids), -1)
    return [rest if row_V[i] == 0 and row_V[rest] > 0 else i for row_V, i in zip(rows, token_ids, strict=True)]


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
        support = support_of(
            lambda sampling: self._expected.probs(edited_NV, sampling), edited_NV, self._expected.sampling, self._tolerance
        )
        probs_NV = support.probs_NV
        ids = _listed(probs_NV, [draw.token_ids[place] for place in places], self._expected.source.rest)
        self._support += support.tally(ids)
        if not support.is_testable:
            return
        uniforms = [uniform(self._key, self._num + index) for index in range(len(ids))]
        new = bin_counts(pit_values(probs_NV, ids, uniforms))
        self._bins = [old + more for old, more in zip(self._bins, new, strict=True)]
        self._num += len(ids)
        own_N = probs_NV.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        for least, counts in self._rare.items():
            counts[0] += int((own_N < least).sum())
            counts[1] += float(probs_NV.masked_fill(probs_NV >= least, 0.0).sum())
        for row_V, place in zip(probs_NV, places, strict=True):
            earlier = set(draw.token_ids[:place])
            self._repeats[0] += draw.token_ids[place] in earlier
            self._repeats[1] += float(row_V[list(earlier)].sum()) if earlier else 0.0

    def _compare(self, draw: Draw, places: Sequence[int], rows_NV: Tensor, edited_NV: Tensor) -> None:
        """Compare the reported log-probabilities, and the lists of likeliest tokens by rank, with the raw rows."""
        raw_NV, processed_NV = torch.log_softmax(rows_NV, -1), self._expected.probs(edited_NV).log()
        for index, place in enumerate(places[: len(draw.logprobs)]):
            token_id, reported = draw.token_ids[place], draw.logprobs[place]
            if reported is None or token_id in self._expected.source.end_ids:
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

    def result(self, tests: dict[str, ChiSquare | RareTest]) -> DrawsTested:
        """Return everything found, with the tests of the first tokens."""
        every: dict[str, ChiSquare | RareTest] = {}
        if self._num:
            every = {"all tokens": uniformity_test(self._bins)}
            num, expected = self._repeats
            both = likelihood_ratio_test([num, self._num - num], [expected, self._num - expected])
            every["repeated tokens"] = both if both.freedom else RareTest(int(num), expected, self._num)
            if not has_cuts(self._expected.sampling):
                for least, (count, mean) in self._rare.items():
                    every[f"tokens below {least:g}"] = RareTest(int(count), mean, self._num)
        numbers = (self._logprobs[name] for name in ("all", "wrong", "processed"))
        return DrawsTested(every | tests, self._support, self._num_unknown, *numbers)
