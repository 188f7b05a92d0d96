"""Joins results of several steps that are sent together. Knows results and their times only."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import structs

from engine.core.types import TokenEvent
from engine.worker.messages import StepResult


def together(results: Sequence[tuple[float, StepResult]], now_s: float) -> Iterator[StepResult]:
    """Yield the results, given with their times, as one message has them: the last one has the events of all.

    Events of a request keep their order. Its plain steps become one event, as if they had run in a row.
    """
    by_request: dict[str, list[TokenEvent]] = defaultdict(list)
    for at_s, result in results:
        for event in result.events:
            late = structs.replace(event, held_s=now_s - at_s) if now_s > at_s else event
            by_request[event.request_id].append(late)
    for _, result in results[:-1]:
        yield structs.replace(result, events=())
    events = (event for of_request in by_request.values() for event in _joined(of_request))
    yield structs.replace(results[-1][1], events=tuple(events))


def _joined(events: Sequence[TokenEvent]) -> Iterator[TokenEvent]:
    for is_plain, run in groupby(events, _is_plain):
        *earlier, last = run
        if not is_plain:
            yield from (*earlier, last)
            continue
        yield structs.replace(
            last,
            token_ids=tuple(token_id for event in (*earlier, last) for token_id in event.token_ids),
            logprobs=tuple(entry for event in (*earlier, last) for entry in event.logprobs),
            num_steps=sum(event.num_steps for event in (*earlier, last)),
        )


def _is_plain(event: TokenEvent) -> bool:
    """Whether the event has the tokens of plain steps and nothing else."""
    is_inside = event.finish is None and event.queued_s is None and bool(event.token_ids)
    return is_inside and not (event.num_draft_tokens or event.prompt_logprobs or event.trace)
