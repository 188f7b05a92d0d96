"""Texts to be written by a target alone, and what became of them.

Shape key: B texts, V vocabulary, T tokens, F tapped layers, D width."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE

_ROWS = 16  # of logits at a time, so that their laws stay in the processor's cache
_ROWS_ELSEWHERE = 256  # where a launch costs more, and it is their memory that counts


@dataclass(frozen=True)
class Order:
    """One text to write: a prompt, how to draw, and the most tokens of its answer. `seed` alone decides its randomness."""

    prompt_ids: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Written:
    """A prompt with the target's answer, its end token included, and the tapped states at every token but the last, bfloat16.

    States lie on the CPU, or where they were made (engine.distill.generation.cuda_batches).
    """

    name: int
    ids: list[int]
    num_prompt: int
    states_TFD: Float[Tensor, "T-1 F D"]


class OpenText:
    """A text while it is written."""

    def __init__(self, name: int, order: Order) -> None:
        self.name, self.order = name, order
        self.ids = list(order.prompt_ids)
        self.is_done = False
        generator = torch.Generator().manual_seed(order.seed)
        self.uniforms: list[float] = torch.rand(order.max_tokens, generator=generator).tolist()  # decide a token each

    @property
    def uniform(self) -> float:
        """What decides the next token."""
        return self.uniforms[min(len(self.ids) - len(self.order.prompt_ids), len(self.uniforms) - 1)]

    def append(self, token_id: int, end_ids: Sequence[int]) -> bool:
        """Take the next token; return whether the text is done by it."""
        if self.is_done:
            return False
        self.ids.append(token_id)
        self.is_done = token_id in end_ids or len(self.ids) == len(self.order.prompt_ids) + self.order.max_tokens
        return self.is_done

    def written(self, states_TFD: Float[Tensor, "T-1 F D"] | None) -> Written:
        """Return the text as it is; without states it has those of no layer."""
        if states_TFD is None:
            states_TFD = torch.empty(len(self.ids) - 1, 0, 0, dtype=torch.bfloat16)
        return Written(self.name, self.ids, len(self.order.prompt_ids), states_TFD)


def next_tokens(logits_BV: Float[Tensor, "B V"], rows: Sequence[OpenText]) -> list[int]:
    """Return what each text says next."""
    temperatures = torch.tensor([row.order.temperature for row in rows], device=logits_BV.device)
    uniforms = torch.tensor([row.uniform for row in rows], device=logits_BV.device)
    return drawn(logits_BV, temperatures, uniforms).tolist()


def drawn(
    logits_BV: Float[Tensor, "B V"], temperature_B: Float[Tensor, " B"], uniform_B: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Return a token of each row's law, by the inverse of its distribution function; the arg max at temperature 0."""
    tokens: list[Tensor] = []
    num_rows = _ROWS if logits_BV.device.type == "cpu" else _ROWS_ELSEWHERE
    for first in range(0, len(logits_BV), num_rows):
        logits = logits_BV[first : first + num_rows].float()
        temperature_B1 = temperature_B[first : first + num_rows, None]
        mass = torch.softmax(logits / temperature_B1.clamp_min(MIN_TEMPERATURE), -1).cumsum(-1)
        place = torch.searchsorted(mass, uniform_B[first : first + num_rows, None] * mass[:, -1:], right=True)
        token_B1 = torch.where(temperature_B1 > 0.0, place.clamp_max(logits.shape[-1] - 1), logits.argmax(-1, keepdim=True))
        tokens.append(token_B1[:, 0])
    return torch.cat(tokens)
