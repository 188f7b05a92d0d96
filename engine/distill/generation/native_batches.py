"""Generation by the library's passes. Each text has its own slots; a finished text gives them to the next.

Shape key: B texts, T packed tokens, F tapped layers, D model width.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from engine.attention.packing import pack
from engine.attention.segments import chain_segment
from engine.distill.generation.jobs import GeneratedText, RunningJob, next_tokens
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap


class _Lane:
    """A text, its slots, and the states of its fed tokens."""

    def __init__(self, row: RunningJob, slots: Sequence[int]) -> None:
        self.row, self.slots = row, slots
        self.num_fed = 0
        self.states: list[Float[Tensor, "T F D"]] = []

    def result(self) -> GeneratedText:
        return self.row.result(torch.cat(self.states) if self.states else None)


def generate_natively(
    model: CausalModel, rows: Sequence[RunningJob], num_lanes: int, tap: StateTap | None
) -> Iterator[GeneratedText]:
    """Yield texts as they finish, `num_lanes` at a time."""
    length = max(len(row.ids) + row.job.max_tokens for row in rows)
    num_lanes = min(num_lanes, len(rows))
    cache = KVCache(num_lanes * length, model.device, dtype=model.cache_dtype)
    waiting = iter(rows)
    lanes = [_Lane(row, range(n * length, (n + 1) * length)) for n, row in enumerate(islice(waiting, num_lanes))]
    while lanes:
        _step(model, lanes, cache, tap)
        running: list[_Lane] = []
        for lane in lanes:
            if not lane.row.is_done:
                running.append(lane)
                continue
            yield lane.result()
            running += [_Lane(row, lane.slots) for row in islice(waiting, 1)]
        lanes = running


def _step(model: CausalModel, lanes: Sequence[_Lane], cache: KVCache, tap: StateTap | None) -> None:
    """Feed the new tokens of every text, and append its next token."""
    segments = [chain_segment(lane.row.ids[lane.num_fed :], lane.num_fed, lane.slots) for lane in lanes]
    batch = pack(segments, model.device)
    logits_BV = model.forward(batch, cache, torch.tensor(batch.starts[1:], device=model.device) - 1)
    if tap is not None:
        states_TFD = tap.latest().to("cpu", torch.bfloat16)
        for lane, states in zip(lanes, torch.split(states_TFD, [segment.num_tokens for segment in segments]), strict=True):
            lane.states.append(states.clone())
    for lane, token_id in zip(lanes, next_tokens(logits_BV, [lane.row for lane in lanes]), strict=True):
        lane.num_fed = len(lane.row.ids)
        lane.row.append(token_id, model.eos_token_ids)
