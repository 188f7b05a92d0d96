"""Log-probabilities of prompt tokens: where in a step's packed tokens the laws are that came before them, and what they said.

A prompt token's law is after the token before it, so a chunk tells of the tokens that follow its own; each is told once, whatever
is fed again after a preemption. Shape key: S packed tokens asked about, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from engine.core.step_plan import Row, StepPlan
from engine.core.tree import TokenTree
from engine.core.types import TokenEvent, TokenLogprobs
from engine.sampling.argmax import are_sound
from engine.verify.dispatch import logprobs_of

_ROWS_AT_ONCE = 64  # of the vocabulary's width, of which there are copies


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens of a row that this step tells of; `places` are the packed tokens before them."""

    row: Row
    places: range
    token_ids: tuple[int, ...]


def scored_by(plan: StepPlan, trees: Sequence[TokenTree]) -> list[Scored]:
    """Return what a step tells of prompts, for the rows that ask; `trees` are those of the decoding rows."""
    found, remaining, start = [], iter(trees), 0
    for row in plan.rows:
        if row.sampling.num_prompt_logprobs is not None and row.num_new_prompt_tokens:
            end = min(row.end, row.num_prompt_tokens)
            first, last = end - row.num_new_prompt_tokens, min(end, row.num_prompt_tokens - 1)
            places = range(start + first - row.context_len, start + last - row.context_len)
            found.append(Scored(row, places, tuple(row.history[first + 1 : last + 1])))
        start += len(row.certain_ids) + (next(remaining).num_nodes - 1 if row.is_decoding else 0)
    return found


class PromptScores(NamedTuple):
    """What a step tells of prompts, by request, and the requests whose laws are none: their logits are not finite."""

    told: Mapping[str, tuple[TokenLogprobs, ...]]
    broken: frozenset[str]


NO_SCORES = PromptScores({}, frozenset())


def scores_of(scored: Sequence[Scored], logits_SV: Float[Tensor, "S V"]) -> PromptScores:
    """Return the log-probabilities by request; `logits_SV` are those at all the places, in order."""
    scores: dict[str, tuple[TokenLogprobs, ...]] = {}
    is_sound = are_sound(logits_SV)
    broken = []
    first = 0
    for one in scored:
        if not all(is_sound[first : first + len(one.token_ids)]):
            broken.append(one.row.request_id)
        num_top = one.row.sampling.num_prompt_logprobs or 0
        parts: list[TokenLogprobs] = []
        for begin in range(0, len(one.token_ids), _ROWS_AT_ONCE):
            ids = one.token_ids[begin : begin + _ROWS_AT_ONCE]
            nodes = range(first + begin, first + begin + len(ids))
            parts.extend(logprobs_of(logits_SV, nodes, ids, num_top))
        scores[one.row.request_id] = tuple(parts)
        first += len(one.token_ids)
    return PromptScores({name: told for name, told in scores.items() if name not in broken}, frozenset(broken))


def with_scores(events: Sequence[TokenEvent], scores: Mapping[str, tuple[TokenLogprobs, ...]]) -> list[TokenEvent]:
    """Return a step's events with what it tells of prompts; a row that only fed a chunk gets an event of its own."""
    if not scores:
        return [*events]
    silent = scores.keys() - {event.request_id for event in events}
    told = [replace(event, prompt_logprobs=scores.get(event.request_id, ())) for event in events]
    return [*told, *(TokenEvent(name, prompt_logprobs=scores[name]) for name in scores if name in silent and scores[name])]
