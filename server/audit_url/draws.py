"""Tests of one setting's samples: the first tokens together, and all tokens.

The first token after a prompt is never drafted, and marginals can be right where joints are not.
Shape key: N tokens of one text, M of several, V columns, C compared values, G of a group.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from server.audit_url.dialect import Meaning
from server.audit_url.results import ALL, IMPOSSIBLE, PAIRS, CheckResult
from server.audit_url.sources import Draw, Ids, Source, has_cuts

_FIRSTS = ("first token", PAIRS, "first three tokens")
_RARE = (1e-3, 1e-5)
_ROWS_AT_ONCE = 64
_LEAST_SLACK = 0.01  # between log-probabilities: servers round them to a few digits
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


class DrawTests:
    """The tests of one setting's draws, all of which count, by one meaning of its parameters.

    All tokens are counted, and the first ones are tested after each text that is frequent enough.
    """

    def __init__(
        self, draws: Sequence[Draw], source: Source, meaning: Meaning, sampling: SamplingParams, tolerance: float, seed: int
    ) -> None:
        self._source, self._meaning, self._sampling, self._tolerance = source, meaning, sampling, tolerance
        self._key = stream_key(seed, 0, Stream.EXTRA)
        self._pit: list[float] = []
        self._support = Tally()
        self._observed_expected: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self._num = Counter[str]()
        self._firsts: list[list[ChiSquare]] = [[] for _ in _FIRSTS]
        self._untested: dict[tuple[Ids, Ids], Counter[int]] = defaultdict(Counter)
        draws = [draw for draw in draws if draw.token_ids]
        for draw in draws:
            for place, token_id in enumerate(draw.token_ids[: len(_FIRSTS)]):
                self._untested[draw.prompt, draw.token_ids[:place]][token_id] += 1
        size = max(1, _ROWS_AT_ONCE // max((len(draw.token_ids) for draw in draws), default=1))
        for first in range(0, len(draws), size):
            self._add(draws[first : first + size])

    def _edited(self, draw: Draw, rows_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return rows after bias and penalties."""
        edited_NV = rows_NV.clone()
        for token_id, bias in self._sampling.logit_bias:
            edited_NV[:, token_id] += bias
        counted = draw.prompt if self._meaning.penalties_see_prompt else ()
        for n in range(len(rows_NV) if self._sampling.has_penalties else 0):
            edited_NV[n] = penalised_row(edited_NV[n], draw.prompt, (*counted, *draw.token_ids[:n]), self._sampling)
        return edited_NV

    def _probs(self, edited_MV: Float[Tensor, "M V"], sampling: SamplingParams) -> Float[Tensor, "M V"]:
        """Return the distributions of edited rows, with other cuts in their place."""
        if self._meaning.cuts_first:
            is_cut_MV = warped(edited_MV, replace(sampling, temperature=1.0)) == 0
            probs_MV = torch.softmax(edited_MV.masked_fill(is_cut_MV, float("-inf")) / sampling.temperature, -1)
        else:
            probs_MV = warped(edited_MV, sampling)
        return merged(probs_MV, self._source.groups, is_logit=False)

    def _add(self, draws: Sequence[Draw]) -> None:
        rows = self._source.rows(draws, self._sampling)
        raw_MV, edited_MV = torch.cat(rows), torch.cat([self._edited(*pair) for pair in zip(draws, rows, strict=True)])
        known, rest = _known(raw_MV), self._source.rest
        places = [(draw, place) for draw in draws for place in range(len(draw.token_ids))]
        self._num["unknown"] += len(places) - len(known)
        if not known:
            return
        raw_MV, edited_MV, places = raw_MV[known], edited_MV[known], [places[index] for index in known]
        support = support_of(partial(self._probs, edited_MV), edited_MV, self._sampling, self._tolerance)
        probs_MV, ids = support.probs_NV, [draw.token_ids[place] for draw, place in places]
        for index, (draw, place) in enumerate(places):
            self._compare(draw, place, raw_MV[index], probs_MV[index])
            if rest is not None and probs_MV[index, ids[index]] == 0 < probs_MV[index, rest]:
                ids[index] = rest  # a token outside the list of likeliest ones
        self._support += support.tally(ids)
        if not support.is_testable:
            return
        self._pit += pit_values(probs_MV, ids, [uniform(self._key, len(self._pit) + index) for index in range(len(ids))])
        own_M = probs_MV.gather(-1, torch.tensor(ids)[:, None])
        for least in _RARE:
            pair = [(own_M < least).sum(), probs_MV.masked_fill(probs_MV >= least, 0.0).sum()]
            self._observed_expected[f"tokens below {least:g}"] += pair
        for (draw, place), token_id, row_V in zip(places, ids, probs_MV, strict=True):
            earlier = list(set(draw.token_ids[:place]) - {rest})
            self._observed_expected["repeated tokens"] += [token_id in earlier, row_V[earlier].sum()]
            counts = self._untested.pop((draw.prompt, draw.token_ids[:place]), Counter[int]())
            if counts.total() >= 2 * CELL:
                is_rest_V = torch.arange(len(row_V)) == (-1 if rest is None else rest)
                self._firsts[place].append(probs_test(row_V.masked_fill(is_rest_V, 0.0), counts))

    def _compare(self, draw: Draw, place: int, raw_V: Tensor, probs_V: Tensor) -> None:
        """Compare the reported log-probabilities, and the lists of likeliest tokens by rank, with those of the raw row."""
        reported, token_id = (draw.logprobs[place] if place < len(draw.logprobs) else None), draw.token_ids[place]
        if reported is None or any(token_id == group[0] for group in self._source.groups):
            return
        self._num["compared"] += 1
        if not self._is_near(raw_V.log_softmax(-1), token_id, reported, draw.tops[place]):
            self._num["wrong"] += 1
            self._num["processed"] += self._is_near(probs_V.log(), token_id, reported, draw.tops[place])

    def _is_near(self, row_V: Tensor, token_id: int, reported: float, top: Sequence[float]) -> bool:
        """Compare probabilities; a log-probability below -15 is only compared with that bound."""
        expected_C = torch.cat([row_V[token_id][None], row_V.topk(min(len(top), len(row_V))).values]).numpy()
        reported_C = np.array([reported, *sorted(top, reverse=True)])[: len(expected_C)]
        gaps_C = np.abs(np.maximum(expected_C, _LOWEST) - np.maximum(reported_C, _LOWEST))
        return bool(gaps_C.max() <= max(_LEAST_SLACK, 2.0 * self._tolerance))

    def results(self, name: str) -> list[CheckResult]:
        """Return every check, with the setting's name."""
        wrong, edge = self._support.num_mismatch, self._support.num_near_tie
        detail = f"{wrong} found, {edge} at the edge"
        if num_unknown := self._num["unknown"]:
            detail += f"; {num_unknown} tokens have no known distribution"
        if not is_testable(self._sampling, self._tolerance):
            detail += "; rounding is too coarse for tests of frequencies"
        results = [CheckResult.tested(name, check, test) for check, test in self._frequencies()]
        results.append(CheckResult.counted(name, IMPOSSIBLE, self._support.num_tokens, wrong, detail))
        if num := self._num["compared"]:
            detail = f"{self._num['wrong']} wrong" if self._num["wrong"] else ""
            if self._num["processed"]:
                detail += f", {self._num['processed']} of them after temperature, penalties and cuts"
            results.append(CheckResult.counted(name, "log-probabilities", num, self._num["wrong"], detail))
        return results

    def _frequencies(self) -> Iterator[tuple[str, ChiSquare | RareTest]]:
        """Yield the statistical tests by the names of their checks."""
        num = len(self._pit)
        if not num:
            return
        yield ALL, uniformity_test(bin_counts(self._pit))
        for check, (observed, expected) in self._observed_expected.items():
            both = likelihood_ratio_test([observed, num - observed], [expected, num - expected])
            if check == "repeated tokens" and both.freedom:
                yield check, both
            elif check == "repeated tokens" or not has_cuts(self._sampling):
                yield check, RareTest(int(observed), float(expected), num)
        for last, check in enumerate(_FIRSTS):
            free = [[test for test in tests if test.freedom] for tests in self._firsts[: last + 1]]
            joint = combined_test([*chain(*free)] if free[last] else [])
            yield check, replace(joint, num_counted=sum(test.num_counted for test in self._firsts[0]))
