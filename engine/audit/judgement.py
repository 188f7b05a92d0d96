"""One chosen request and what a plain pass says of its first tokens, a few at a time.

Knows a request, its tokens and logits. Does not know which requests are chosen, nor when passes run.
Shape key: N neighbouring tokens of the text, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.outcomes import Support, Tally, greedy_gaps, support_of, tally_gaps
from engine.audit.pit import NUM_BINS, binned, transformed
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import SamplingContext
from engine.core.types import Request, SamplingParams
from engine.sampling.distributions import warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.sampling.noise import gumbels
from engine.structured_output.masks import GrammarMasks
from engine.teacher_forcing import KnownText


class Check(StrEnum):
    """What can be said of a request's tokens."""

    GREEDY = "greedy"  # each is the arg max
    COUPLED = "coupled"  # each is the arg max with the seed's noise
    SAMPLED = "sampled"  # each is a fresh draw


def check_of(request: Request) -> Check | None:
    """Return what can be checked of a request.

    A seed under another rule than coupled makes neither a choice nor a fresh draw; what typical-p keeps may hang on rounding far
    from any edge that is watched.
    """
    if request.sampling.is_greedy:
        return Check.GREEDY
    if request.sampling.typical_p < 1.0:
        return None
    if request.sampling.seed is None:
        return Check.SAMPLED
    return Check.COUPLED if request.speculation.verifier in (None, "coupled") else None


@dataclass
class Record:
    """A chosen request and its first tokens. Filled by the auditor until it is closed."""

    request: Request
    check: Check
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> KnownText:
        """What is to be fed again."""
        return KnownText(self.request.prompt_ids, tuple(self.token_ids))


class Judgement:
    """What is found of one record, its leading tokens first. Owns its sums; whoever gives the pass up throws it away whole."""

    def __init__(self, record: Record, tolerance: float, uniforms: Iterator[float], grammars: GrammarMasks | None = None) -> None:
        self.record = record
        self.tally = Tally()
        self.bins = [0] * NUM_BINS
        self._tolerance = tolerance
        self._uniforms = uniforms
        self._grammars = grammars
        self._history = list(record.request.prompt_ids)  # grows in place: a copy for every token would cost their square

    @property
    def num_judged(self) -> int:
        """Leading tokens that are judged."""
        return len(self._history) - len(self.record.request.prompt_ids)

    @property
    def is_done(self) -> bool:
        """Whether every token is judged."""
        return self.num_judged == len(self.record.token_ids)

    def add(self, logits_NV: Float[Tensor, "N V"]) -> None:
        """Judge the next N tokens by the raw logits before each."""
        token_ids = self.record.token_ids[self.num_judged : self.num_judged + len(logits_NV)]
        self.tally += self._judged(logits_NV, token_ids)
        self._history += token_ids

    def _judged(self, logits_NV: Tensor, token_ids: list[int]) -> Tally:
        sampling = self.record.request.sampling
        if not bool(torch.isfinite(logits_NV.amax(-1)).all()):
            return Tally(num_mismatch=len(token_ids))
        edited_NV = edited_logits(logits_NV, self._contexts(token_ids), self._grammars)
        if self.record.check is Check.GREEDY:
            return tally_gaps(greedy_gaps(edited_NV, token_ids), self._tolerance)

        def probs_of(params: SamplingParams) -> Tensor:
            return warped_probs(edited_NV, [params] * len(token_ids))

        support = support_of(probs_of, edited_NV, sampling, self._tolerance)
        if self.record.check is Check.COUPLED:
            gaps = support.coupled_gaps(self._noise(logits_NV), token_ids)
            return tally_gaps(gaps, self._tolerance / sampling.temperature)
        if support.is_testable:
            self._count_draws(support, token_ids)
        return support.tally(token_ids)

    def _count_draws(self, support: Support, token_ids: list[int]) -> None:
        """Put every draw into its bin."""
        uniforms = [next(self._uniforms) for _ in token_ids]
        new = binned(transformed(support.probs_NV, token_ids, uniforms))
        self.bins = [old + more for old, more in zip(self.bins, new, strict=True)]

    def _contexts(self, token_ids: list[int]) -> list[SamplingContext]:
        request = self.record.request
        num_prompt = len(request.prompt_ids)
        return [
            SamplingContext(request.sampling, self._history, num_prompt, tuple(token_ids[:place]))
            for place in range(len(token_ids))
        ]

    def _noise(self, logits_NV: Tensor) -> Tensor:
        """Return the noise of each token's absolute position under the request's seed."""
        seed, first = self.record.request.sampling.seed, len(self._history)
        assert seed is not None  # or the check would be another
        keys = [stream_key(seed, first + place, Stream.TOKEN) for place in range(len(logits_NV))]
        return gumbels(keys, logits_NV.shape[-1], logits_NV.device)
