"""Tests of one setting's samples: the first tokens together, and all tokens.

The first token after a prompt is never drafted, and marginals can be right where joints are not.
Shape key: N tokens of one text, M of several, V columns, C compared values, G of a group.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.chi_square import ChiSquare, RareTest, combined_test, likelihood_ratio_test
from engine.audit.examine import CELL, probs_test
from engine.audit.outcomes import Tally, greedy_gaps, is_testable, support_of, tally_gaps
from engine.audit.pit import bin_counts, pit_values, uniformity_test
from engine.audit.reference import penalised_row, warped
from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.types import SamplingParams
from engine.sampling.distributions import truncates
from server.audit_url.dialect import Meaning
from server.audit_url.report import ALL, IMPOSSIBLE, PAIRS, CheckResult
from server.audit_url.sources import Draw, Ids, Source

_FIRSTS, _REPEATED = ("first token", PAIRS, "first three tokens"), "repeated tokens"
_RARE = {f"tokens below {least:g}": least for least in (1e-3, 1e-5)}
_ROWS_AT_ONCE = 64
_LEAST_SLACK = 0.01  # between log-probabilities: servers round them to a few digits
_TAIL, _MOST_TAIL = 8.0, 0.25  # rounding moves tokens below _LIKELY by several gaps; a cut moves likely ones too
_LIKELY = -2.0
_LOWEST = -15.0  # log-probabilities below are taken as this


def merged(rows_NV: Float[Tensor, "N V"], groups: Sequence[Ids], *, is_logit: bool) -> Float[Tensor, "N V"]:
    """Return rows in which each group's first token has the group's probability, or its largest logit."""
    rows_NV = rows_NV.clone()
    for group in groups:
        columns_NG = rows_NV[:, list(group)]
        rows_NV[:, list(group)] = float("-inf") if is_logit else 0.0
        rows_NV[:, group[0]] = columns_NG.amax(-1) if is_logit else columns_NG.sum(-1)
    return rows_NV


def greedy_tally(source: Source, draw: Draw, tolerance: float) -> Tally:
    """Compare each token of a greedy text with the arg max, where it is known."""
    (rows_NV,) = source.rows([draw], SamplingParams(temperature=0.0))
    known = _known(rows_NV)
    rows_NV = merged(rows_NV[known], source.groups, is_logit=True)
    return tally_gaps(greedy_gaps(rows_NV, [draw.token_ids[place] for place in known]), tolerance) if known else Tally()


def _known(rows_NV: Tensor) -> list[int]:
    return (~rows_NV.isnan().any(-1)).nonzero()[:, 0].tolist()


@dataclass
class _DrawTable:
    """What is known of a setting's tokens; `counts` and `firsts` of the first ones, after each text that is frequent enough."""

    counts: dict[tuple[Ids, Ids], Counter[int]]
    firsts: Sequence[list[ChiSquare]] = field(default_factory=lambda: [[] for _ in _FIRSTS])
    pit: list[float] = field(default_factory=list)
    support: Tally = field(default_factory=Tally)
    num: Counter[str] = field(default_factory=Counter)
    observed_expected: dict[str, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(2)))


@dataclass(frozen=True)
class DrawTests:
    """The tests of one setting's draws, all of which count, by one meaning of its parameters."""

    draws: Sequence[Draw]
    source: Source
    meaning: Meaning
    sampling: SamplingParams
    tolerance: float
    seed: int

    def results(self, name: str) -> list[CheckResult]:
        """Return every check, with the setting's name."""
        table = self._table()
        wrong, num = table.support.num_mismatch, table.num
        detail = f"{wrong} found, {table.support.num_near_tie} at the edge"
        detail += f"; {num['unknown']} tokens have no known distribution" if num["unknown"] else ""
        detail += "" if is_testable(self.sampling, self.tolerance) else "; rounding is too coarse for tests of frequencies"
        results = [CheckResult(name, check, test.num_counted, test=test) for check, test in self._frequencies(table)]
        results.append(CheckResult(name, IMPOSSIBLE, table.support.num_tokens, wrong, detail))
        if num["compared"]:
            detail = f"{num['wrong']} wrong, {num['processed']} of them after temperature, penalties and cuts"
            results.append(
                CheckResult(name, "log-probabilities", num["compared"], num["wrong"], detail if num["processed"] else "")
            )
        return results

    def _frequencies(self, table: _DrawTable) -> Iterator[tuple[str, ChiSquare | RareTest]]:
        """Yield the statistical tests by the names of their checks."""
        if not (num := len(table.pit)):
            return
        yield ALL, uniformity_test(bin_counts(table.pit))
        for check, (observed, expected) in table.observed_expected.items():
            both = likelihood_ratio_test([observed, num - observed], [expected, num - expected])
            if check == _REPEATED or not truncates(self.sampling):
                yield check, both if check == _REPEATED and both.freedom else RareTest(int(observed), float(expected), num)
        for last, check in enumerate(_FIRSTS):
            free = [[test for test in tests if test.freedom] for tests in table.firsts[: last + 1]]
            joint = combined_test([*chain(*free)] if free[last] else [])
            yield check, replace(joint, num_counted=sum(test.num_counted for test in table.firsts[0]))

    def _table(self) -> _DrawTable:
        draws, counts = [draw for draw in self.draws if draw.token_ids], defaultdict[tuple[Ids, Ids], Counter[int]](Counter)
        for draw in draws:
            for place, token_id in enumerate(draw.token_ids[: len(_FIRSTS)]):
                counts[draw.prompt, draw.token_ids[:place]][token_id] += 1
        table = _DrawTable(counts)
        size = max(1, _ROWS_AT_ONCE // max((len(draw.token_ids) for draw in draws), default=1))
        for first in range(0, len(draws), size):
            self._fill(table, draws[first : first + size])
        return table

    def _edited(self, draw: Draw, rows_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return rows after bias and penalties."""
        edited_NV = rows_NV.clone()
        for token_id, bias in self.sampling.logit_bias:
            edited_NV[:, token_id] += bias
        counted = draw.prompt if self.meaning.penalties_see_prompt else ()
        for n in range(len(rows_NV) if self.sampling.has_penalties else 0):
            edited_NV[n] = penalised_row(edited_NV[n], draw.prompt, (*counted, *draw.token_ids[:n]), self.sampling)
        return edited_NV

    def _probs(self, edited_MV: Float[Tensor, "M V"], sampling: SamplingParams) -> Float[Tensor, "M V"]:
        """Return the distributions of edited rows, with other cuts in their place."""
        if self.meaning.cuts_first:
            is_cut_MV = warped(edited_MV, replace(sampling, temperature=1.0)) == 0
            probs_MV = torch.softmax(edited_MV.masked_fill(is_cut_MV, float("-inf")) / sampling.temperature, -1)
        else:
            probs_MV = warped(edited_MV, sampling)
        return merged(probs_MV, self.source.groups, is_logit=False)

    def _fill(self, table: _DrawTable, draws: Sequence[Draw]) -> None:
        rows = self.source.rows(draws, self.sampling)
        raw_MV, edited_MV = torch.cat(rows), torch.cat([self._edited(*pair) for pair in zip(draws, rows, strict=True)])
        known, rest = _known(raw_MV), self.source.rest
        places = [(draw, place) for draw in draws for place in range(len(draw.token_ids))]
        table.num["unknown"] += len(places) - len(known)
        if not known:
            return
        raw_MV, edited_MV, places = raw_MV[known], edited_MV[known], [places[index] for index in known]
        support = support_of(partial(self._probs, edited_MV), edited_MV, self.sampling, self.tolerance)
        probs_MV, ids = support.probs_NV, [draw.token_ids[place] for draw, place in places]
        for index, (draw, place) in enumerate(places):
            table.num.update(self._compared(draw, place, raw_MV[index], probs_MV[index]))
            if rest is not None and probs_MV[index, ids[index]] == 0 < probs_MV[index, rest]:
                ids[index] = rest  # a token outside the list of likeliest ones
        table.support += support.tally(ids)
        if not support.is_testable:
            return
        key = stream_key(self.seed, 0, Stream.EXTRA)
        table.pit += pit_values(probs_MV, ids, [uniform(key, len(table.pit) + index) for index in range(len(ids))])
        own_M = probs_MV.gather(-1, torch.tensor(ids)[:, None])
        for check, least in _RARE.items():
            table.observed_expected[check] += [(own_M < least).sum(), probs_MV.masked_fill(probs_MV >= least, 0.0).sum()]
        for (draw, place), token_id, row_V in zip(places, ids, probs_MV, strict=True):
            earlier = list(set(draw.token_ids[:place]) - {rest})
            table.observed_expected[_REPEATED] += [token_id in earlier, row_V[earlier].sum()]
            counts = table.counts.pop((draw.prompt, draw.token_ids[:place]), Counter[int]())
            if counts.total() >= 2 * CELL:
                is_rest_V = torch.arange(len(row_V)) == (-1 if rest is None else rest)
                table.firsts[place].append(probs_test(row_V.masked_fill(is_rest_V, 0.0), counts))

    def _compared(self, draw: Draw, place: int, raw_V: Tensor, probs_V: Tensor) -> Iterator[str]:
        """Compare reported log-probabilities, the likeliest by rank, with those of the raw row. Those below -15 are alike."""
        reported, token_id = (draw.logprobs[place] if place < len(draw.logprobs) else None), draw.token_ids[place]
        if reported is None or any(token_id == group[0] for group in self.source.groups):
            return
        yield "compared"
        top = sorted(draw.tops[place], reverse=True)[: len(raw_V)]
        reported_C = torch.tensor([reported, *top], dtype=torch.float64).clamp(min=_LOWEST)
        rows = (raw_V.log_softmax(-1), probs_V.log())
        gaps = [torch.cat([row_V[token_id, None], row_V.topk(len(top)).values]).clamp(min=_LOWEST) - reported_C for row_V in rows]
        slack = max(_LEAST_SLACK, 2.0 * self.tolerance)
        slack_C = torch.where(reported_C < _LIKELY, max(slack, min(_TAIL * self.tolerance, _MOST_TAIL)), slack)
        is_near, is_near_processed = (bool((gap_C.abs() <= slack_C).all()) for gap_C in gaps)
        if not is_near:
            yield from ("wrong", "processed")[: 1 + is_near_processed]
