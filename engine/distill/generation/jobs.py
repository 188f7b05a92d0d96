"""Jobs of offline generation by a target without speculation, and their results.

Shape key: B texts, V vocabulary, T tokens, F tapped layers, D width."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE

_ROWS = 16  # of logits at a time on a CPU, so that their distributions stay in its cache
_ROWS_ELSEWHERE = 256  # on a GPU launches cost more; memory is the limit


@dataclass(frozen=True)
class GenerationJob:
    """One text to generate: prompt, temperature, seed, and the most tokens of its answer. Only `seed` decides its randomness."""

    prompt_ids: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class GeneratedText:
    """A prompt with the target's answer, end token included, and the tapped states at every token but the last, bfloat16.

    States are on the CPU, or on the model's device (engine.distill.generation.cuda_batches).
    """

    name: int
    ids: list[int]
    num_prompt: int
    states_TFD: Float[Tensor, "T-1 F D"]


class RunningJob:
    """A text while it is generated."""

    def __init__(self, name: int, job: GenerationJob) -> None:
        self.name, self.job = name, job
        self.ids = list(job.prompt_ids)
        self.is_done = False
        generator = torch.Generator().manual_seed(job.seed)
        self.uniforms: list[float] = torch.rand(job.max_tokens, generator=generator).tolist()  # one for each token

    @property
    def uniform(self) -> float:
        """The uniform number that decides the next token."""
        return self.uniforms[min(len(self.ids) - len(self.job.prompt_ids), len(self.uniforms) - 1)]

    def append(self, token_id: int, end_ids: Sequence[int]) -> bool:
        """Append a token; return whether it ends the text."""
        if self.is_done:
            return False
        self.ids.append(token_id)
        self.is_done = token_id in end_ids or len(self.ids) == len(self.job.prompt_ids) + self.job.max_tokens
        return self.is_done

    def result(self, states_TFD: Float[Tensor, "T-1 F D"] | None) -> GeneratedText:
        """Return the text; without states its tensor has no layers."""
        if states_TFD is None:
            states_TFD = torch.empty(len(self.ids) - 1, 0, 0, dtype=torch.bfloat16)
        return GeneratedText(self.name, self.ids, len(self.job.prompt_ids), states_TFD)


def next_tokens(logits_BV: Float[Tensor, "B V"], rows: Sequence[RunningJob]) -> list[int]:
    """Return each text's next token."""
    temperatures = torch.tensor([row.job.temperature for row in rows], device=logits_BV.device)
    uniforms = torch.tensor([row.uniform for row in rows], device=logits_BV.device)
    return sampled_tokens(logits_BV, temperatures, uniforms).tolist()


def sampled_tokens(
    logits_BV: Float[Tensor, "B V"], temperature_B: Float[Tensor, " B"], uniform_B: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Return a token of each row, by inversion of its distribution function; the arg max at temperature 0."""
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
