"""Texts that a target writes without speculation, many at a time: what drafters are made from."""

from collections.abc import Iterator, Sequence

from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.policy import PlainDecoding
from engine.target import Target
from engine.types import ModelInfo, Request


def plain_answers(target: Target, config: SchedulerConfig, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
    """Yield each request with the tokens of its answer as it is done. `target` must have the slots that `config` counts."""
    model = target.model
    info = ModelInfo(
        "writer", model.vocab_size, model.max_positions, config.num_slots, model.eos_token_ids, "", "", "none", "coupled", "plain"
    )
    engine = Engine(info, config, target, None, PlainDecoding())
    answers: dict[str, tuple[Request, list[int]]] = {}
    for request in requests:
        engine.add(request)
        answers[request.request_id] = (request, [])
    while engine.has_work:
        for event in engine.step().events:
            answers[event.request_id][1].extend(event.token_ids)
            if event.finish is not None:
                yield answers.pop(event.request_id)
