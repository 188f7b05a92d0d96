"""The check of one request's first tokens by the logits of a plain pass, a few tokens at a time.

Shape key: N consecutive tokens of the sequence, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from engine.audit.outcomes import Support, Tally, greedy_gaps, support_of, tally_gaps
from engine.audit.pit import NUM_BINS, bin_counts, pit_values
from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import SamplingContext
from engine.core.types import Request, SamplingParams
from engine.sampling.distributions import warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.sampling.noise import gumbels
from engine.structured_output.masks import GrammarMasks
from engine.teacher_forcing import KnownText


class Check(StrEnum):
    """How a request's tokens can be checked."""

    GREEDY = "greedy"  # each is the arg max
    COUPLED = "coupled"  # each is the arg max with the seed's noise
    SAMPLED = "sampled"  # each is an independent draw


def check_of(request: Request) -> Check | None:
    """Return how a request can be checked, None if it cannot.

    With a seed and another rule than coupled, tokens are neither a predictable arg max nor independent draws. With typical-p,
    rounding may change the kept tokens by more than the tolerance covers.
    """
    if request.sampling.is_greedy:
        return Check.GREEDY
    if request.sampling.typical_p < 1.0:
        return None
    if request.sampling.seed is None:
        return Check.SAMPLED
    return Check.COUPLED if request.speculation.verifier in (None, "coupled") else None


@dataclass
class AuditRecord:
    """A selected request and its first tokens."""

    request: Request
    check: Check
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> KnownText:
        """The tokens to feed again."""
        return KnownText(self.request.prompt_ids, tuple(self.token_ids), self.request.adapter)


class RecordCheck:
    """The check of one record, from its first token on. It is discarded if its pass is dropped."""

    def __init__(
        self, record: AuditRecord, tolerance: float, uniforms: Iterator[float], grammars: GrammarMasks | None = None
    ) -> None:
        self.record = record
        self.tally = Tally()
        self.bins = [0] * NUM_BINS
        self._tolerance = tolerance
        self._uniforms = uniforms
        self._grammars = grammars
        self._history = list(record.request.prompt_ids)  # grows in place: copies would have quadratic cost

    @property
    def num_checked(self) -> int:
        """Number of checked tokens."""
        return len(self._history) - len(self.record.request.prompt_ids)

    @property
    def is_done(self) -> bool:
        """Whether every token is checked."""
        return self.num_checked == len(self.record.token_ids)

    def add(self, logits_NV: Float[Tensor, "N V"]) -> None:
        """Check the next N tokens by the raw logits before each."""
        token_ids = self.record.token_ids[self.num_checked : self.num_checked + len(logits_NV)]
        self.tally += self._checked(logits_NV, token_ids)
        self._history += token_ids

    def _checked(self, logits_NV: Tensor, token_ids: list[int]) -> Tally:
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
        """Count every draw in the bin of its PIT value."""
        uniforms = [next(self._uniforms) for _ in token_ids]
        new = bin_counts(pit_values(support.probs_NV, token_ids, uniforms))
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
        assert seed is not None  # true of every coupled check
        keys = [stream_key(seed, first + place, Stream.TOKEN) for place in range(len(logits_NV))]
        return gumbels(keys, logits_NV.shape[-1], logits_NV.device)
