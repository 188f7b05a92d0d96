"""Texts written by our library's passes: each in a lane of slots of its own; a text that is done gives its lane to the next.

Shape key: B texts, T packed tokens, F tapped layers, D model width.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.distill.generation.jobs import OpenText, Written, next_tokens
from engine.kv_cache.pool import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap


class _Lane:
    """A text, the slots it is written in, and the states of what has been fed of it."""

    def __init__(self, row: OpenText, slots: Sequence[int]) -> None:
        self.row, self.slots = row, slots
        self.num_fed = 0
        self.states: list[Float[Tensor, "T F D"]] = []

    def written(self) -> Written:
        return self.row.written(torch.cat(self.states) if self.states else None)


def write_in_lanes(model: CausalModel, rows: Sequence[OpenText], num_lanes: int, tap: StateTap | None) -> Iterator[Written]:
    """Yield texts as they are done, `num_lanes` of them written at a time."""
    length = max(len(row.ids) + row.order.max_tokens for row in rows)
    num_lanes = min(num_lanes, len(rows))
    cache = KVCache(num_lanes * length, model.device, dtype=model.cache_dtype)
    waiting = iter(rows)
    lanes = [_Lane(row, range(n * length, (n + 1) * length)) for n, row in enumerate(islice(waiting, num_lanes))]
    while lanes:
        _step(model, lanes, cache, tap)
        going: list[_Lane] = []
        for lane in lanes:
            if not lane.row.is_done:
                going.append(lane)
                continue
            yield lane.written()
            going += [_Lane(row, lane.slots) for row in islice(waiting, 1)]
        lanes = going


def _step(model: CausalModel, lanes: Sequence[_Lane], cache: KVCache, tap: StateTap | None) -> None:
    """Feed what is new of every text, and let it say its next token."""
    segments = [chain_segment(lane.row.ids[lane.num_fed :], lane.num_fed, lane.slots) for lane in lanes]
    batch = pack(segments, model.device)
    logits_BV = model.forward(batch, cache, torch.tensor(batch.starts[1:], device=model.device) - 1)
    if tap is not None:
        states_TFD = tap.latest().to("cpu", torch.bfloat16)
        for lane, states in zip(lanes, torch.split(states_TFD, [one.num_tokens for one in segments]), strict=True):
            lane.states.append(states.clone())
    for lane, token_id in zip(lanes, next_tokens(logits_BV, [lane.row for lane in lanes]), strict=True):
        lane.num_fed = len(lane.row.ids)
        lane.row.append(token_id, model.eos_token_ids)
