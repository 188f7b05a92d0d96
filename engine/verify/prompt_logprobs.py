"""Log-probabilities of prompt tokens, read from the logits of a step's packed tokens.

A prompt token's distribution follows the token before it, so a chunk scores the tokens after each of its own. Each token is
scored once, even if it is fed again after a preemption. Shape key: S scored tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from msgspec import structs
from torch import Tensor

from engine.core.step_plan import Row, StepPlan
from engine.core.tree import TokenTree
from engine.core.types import TokenEvent, TokenLogprobs
from engine.sampling.argmax import are_valid
from engine.verify.dispatch import logprobs_of

_ROWS_AT_ONCE = 64  # bounds the memory of temporary copies


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens of a row that this step scores; `sources` are the packed tokens before them."""

    row: Row
    sources: range
    token_ids: tuple[int, ...]


def scored_prompt_tokens(plan: StepPlan, trees: Sequence[TokenTree]) -> list[ScoredTokens]:
    """Return the prompt tokens that a step scores, for rows with `num_prompt_logprobs`; `trees` belong to the decoding rows."""
    if {row.sampling.num_prompt_logprobs for row in plan.rows} == {None}:
        return []
    found, remaining, start = [], iter(trees), 0
    for row in plan.rows:
        if row.sampling.num_prompt_logprobs is not None and row.num_new_prompt_tokens:
            end = min(row.end, row.num_prompt_tokens)
            first, last = end - row.num_new_prompt_tokens, min(end, row.num_prompt_tokens - 1)
            sources = range(start + first - row.context_len, start + last - row.context_len)
            if sources:  # the last prompt token has no next one in the prompt
                found.append(ScoredTokens(row, sources, tuple(row.history[first + 1 : last + 1])))
        start += len(row.certain_ids) + (next(remaining).num_nodes - 1 if row.is_decoding else 0)
    return found


class PromptLogprobs(NamedTuple):
    """A step's prompt log-probabilities by request, and the requests that failed because their logits are not finite."""

    logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
    failed: frozenset[str]


NO_PROMPT_LOGPROBS = PromptLogprobs({}, frozenset())


def score_prompt_tokens(scored: Sequence[ScoredTokens], logits_SV: Float[Tensor, "S V"]) -> PromptLogprobs:
    """Return the log-probabilities by request; `logits_SV` are the logits at all sources, in order."""
    scores: dict[str, tuple[TokenLogprobs, ...]] = {}
    is_valid = are_valid(logits_SV)
    failed = []
    first = 0
    for one in scored:
        if not all(is_valid[first : first + len(one.token_ids)]):
            failed.append(one.row.request_id)
        num_top = one.row.sampling.num_prompt_logprobs or 0
        parts: list[TokenLogprobs] = []
        for begin in range(0, len(one.token_ids), _ROWS_AT_ONCE):
            ids = one.token_ids[begin : begin + _ROWS_AT_ONCE]
            nodes = range(first + begin, first + begin + len(ids))
            parts.extend(logprobs_of(logits_SV, nodes, ids, num_top))
        scores[one.row.request_id] = tuple(parts)
        first += len(one.token_ids)
    return PromptLogprobs({name: found for name, found in scores.items() if name not in failed}, frozenset(failed))


def with_prompt_logprobs(events: Sequence[TokenEvent], scores: Mapping[str, tuple[TokenLogprobs, ...]]) -> list[TokenEvent]:
    """Return a step's events with the prompt log-probabilities; a row that only fed a chunk gets an event of its own."""
    if not scores:
        return list(events)
    missing = scores.keys() - {event.request_id for event in events}
    completed = [structs.replace(event, prompt_logprobs=scores.get(event.request_id, ())) for event in events]
    return [*completed, *(TokenEvent(name, prompt_logprobs=scores[name]) for name in scores if name in missing and scores[name])]
