"""Joins the results of several steps into one message. Knows results and the times of their steps only."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import structs

from engine.core.types import TokenEvent
from engine.worker.messages import StepResult


def joined_results(results: Sequence[tuple[float, StepResult]], now_s: float) -> list[StepResult]:
    """Return the results, given with the times of their steps, as they are sent together: the last one has the events of all.

    Events of a request keep their order. Its plain steps become one event, as if they had run in a row.
    """
    if len(results) == 1:
        return [result for _, result in results]
    by_request: dict[str, list[TokenEvent]] = defaultdict(list)
    for at_s, result in results:
        for event in result.events:
            late = structs.replace(event, delayed_s=now_s - at_s) if now_s > at_s else event
            by_request[event.request_id].append(late)
    events = tuple(event for of_request in by_request.values() for event in _joined(of_request))
    return [
        *(structs.replace(result, events=()) for _, result in results[:-1]),
        structs.replace(results[-1][1], events=events),
    ]


def _joined(events: Sequence[TokenEvent]) -> Iterator[TokenEvent]:
    for is_plain, run in groupby(events, _is_plain):
        steps = list(run)
        if not is_plain:
            yield from steps
            continue
        yield structs.replace(
            steps[-1],
            token_ids=tuple(token_id for event in steps for token_id in event.token_ids),
            logprobs=tuple(entry for event in steps for entry in event.logprobs),
            num_steps=sum(event.num_steps for event in steps),
        )


def _is_plain(event: TokenEvent) -> bool:
    """Whether the event has the tokens of plain steps and nothing else."""
    is_inside = event.finish is None and event.queued_s is None and bool(event.token_ids)
    return is_inside and not (event.num_draft_tokens or event.prompt_logprobs or event.trace)
