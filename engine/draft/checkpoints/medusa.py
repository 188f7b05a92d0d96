"""Medusa heads in torch (arXiv 2401.10774): head i predicts the token i + 2 places after a state of the target.

The token one place after the state is the root, which the target has chosen. Shape key: B sequences, L levels, D target width,
V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from engine.draft.checkpoints.decoder_layer import prepared, stored_linear
from engine.draft.checkpoints.files import CheckpointFiles
from engine.draft.checkpoints.shapes import MedusaShape
from engine.model.causal_lm import CausalModel
from engine.model.linear_backends import linear_of


class MedusaNetwork(nn.Module):
    """The heads on their target's device. Raise ValueError if they cannot be run."""

    def __init__(self, files: CheckpointFiles, shape: MedusaShape, target: CausalModel, linears: str, precision: str) -> None:
        super().__init__()
        self.shape, self.num_levels, self.width = shape, shape.num_heads, shape.width
        self.residuals = nn.ModuleList(nn.ModuleList(stored_linear(files, name) for name in names) for names in shape.residuals)
        has_own = f"{shape.outputs[0]}.weight" in files.shapes
        own = [stored_linear(files, name) for name in shape.outputs] if has_own else []
        self.outputs = nn.ModuleList(own or [_target_output(target)])
        self.dtype = prepared(self, target, linears, precision)

    def features(self, states: Sequence[Float[Tensor, "T D"]]) -> Float[Tensor, "T D"]:
        """Return the target's normed last state of each token."""
        return states[0].to(self.dtype)

    def level_logits(self, features_BD: Float[Tensor, "B D"], num_levels: int) -> Float[Tensor, "B L V"]:
        """Return the logits of the first heads."""
        levels = []
        for head, layers in enumerate(list(self.residuals)[:num_levels]):
            state_BD = features_BD
            for layer in layers:  # type: ignore[attr-defined]
                state_BD = state_BD + functional.silu(layer(state_BD))
            levels.append(self.outputs[0 if len(self.outputs) == 1 else head](state_BD).float())
        return torch.stack(levels, dim=1)


def _target_output(target: CausalModel) -> nn.Linear:
    return linear_of(target.output_rows(torch.arange(target.vocab_size, device=target.device)).float())
