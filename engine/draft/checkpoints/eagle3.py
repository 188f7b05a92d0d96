"""An EAGLE-3 head in torch (arXiv 2503.01840).

Its first layer reads a token's embedding beside a state of the preceding token. This is the target's fused state, or for a
drafted token the head's own state. Shape key: T tokens, P of them with logits, D target width, W inner width, M drafter's
vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.scoring import Scoring
from engine.attention.tree_attention import AttentionContext
from engine.draft.checkpoints.decoder_layer import (
    CheckpointLayer,
    embeddings_of,
    output_of,
    prepared,
    stored_linear,
    stored_norm,
    taken,
)
from engine.draft.checkpoints.files import CheckpointFiles
from engine.draft.checkpoints.shapes import Eagle3Shape
from engine.model.causal_lm import CausalModel
from engine.utils.rotary_table import RotaryTable


class Eagle3Network(nn.Module):
    """The head on its target's device. `linears` is a name of engine.model.linear_backends. Raise ValueError if it cannot run."""

    def __init__(self, files: CheckpointFiles, shape: Eagle3Shape, target: CausalModel, linears: str, precision: str) -> None:
        super().__init__()
        self.shape = shape
        eps = shape.layers.norm_eps
        self.fuse = stored_linear(files, "fc")
        self.fused_norms = nn.ModuleList(stored_norm(files, name.removesuffix(".weight"), eps) for name in shape.fused_norms)
        self.hidden_norm = stored_norm(files, "layers.0.hidden_norm", eps)
        self.layers = nn.ModuleList(CheckpointLayer(files, shape.layers, index) for index in range(shape.layers.num_layers))
        self.last_norm = stored_norm(files, "norm", eps)
        self.output = output_of(files, shape.vocab, target)
        self.dtype = prepared(self, target, linears, precision)
        self._embeddings_VW = embeddings_of(files, target, self.dtype)
        self._rotations = RotaryTable(shape.layers.rotary.table, target.device)

    def features(self, states: Sequence[Float[Tensor, "T D"]]) -> Float[Tensor, "T W"]:
        """Fuse the target's states after some layers into one feature for each token."""
        states = [state.to(self.dtype) for state in states]
        if len(self.fused_norms) == len(states) > 1:
            states = [norm(state) for norm, state in zip(self.fused_norms, states, strict=True)]
        fused = torch.cat(states, dim=-1)
        if len(self.fused_norms) == 1:
            fused = self.fused_norms[0](fused)
        return self.fuse(fused)  # type: ignore[no-any-return]

    def rotation(self, positions_T: Int[Tensor, " T"], end: int) -> Float[Tensor, "T R"]:
        """Return cosines and sines of positions below `end`."""
        return self._rotations.below(end).index_select(0, positions_T)

    def forward(
        self,
        states_TW: Float[Tensor, "T W"],
        ids_T: Int[Tensor, " T"],
        rotation_TR: Float[Tensor, "T R"],
        places_P: Int[Tensor, " P"] | None,
        context: AttentionContext,
        last_context: AttentionContext | None,
    ) -> tuple[Float[Tensor, "P M"], Float[Tensor, "P W"]]:
        """Feed tokens, each with the state before it. Return the logits at `places_P`, and the states that their children read.

        Only the keys of other tokens are needed, so the last layer attends for these tokens alone, by `last_context`. Without
        one it attends for all of them.
        """
        for index, layer in enumerate(self._layers):
            x, residual_TW = self._read(index, layer, states_TW, ids_T)
            key, value = layer.pairs(x, rotation_TR)
            context.cache.write(index, context.write_slots_T, key, value)
            is_last = index == len(self.layers) - 1
            wanted = places_P if is_last else None
            scoring = Scoring(self.shape.layers.head_size**-0.5, layer.window)
            if is_last and last_context is None:
                attended = taken(context.attended(index, layer.queries(x, rotation_TR), scoring), wanted)
            else:
                query_PHGK = layer.queries(taken(x, wanted), taken(rotation_TR, wanted))
                used = last_context if is_last and last_context is not None else context
                attended = used.attended(index, query_PHGK, scoring) if len(query_PHGK) else query_PHGK.flatten(1)
            states_TW = layer.after_attention(taken(residual_TW, wanted), attended)
        normed_PW = self.last_norm(states_TW)
        return self.output(normed_PW).float(), normed_PW if self.shape.feeds_normed else states_TW

    @property
    def _layers(self) -> list[CheckpointLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _read(
        self, index: int, layer: CheckpointLayer, states_TW: Float[Tensor, "T W"], ids_T: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "T X"], Float[Tensor, "T W"]]:
        """Return a layer's input and residual."""
        if index:
            return layer.input_norm(states_TW), states_TW
        normed_TW = self.hidden_norm(states_TW)
        embeddings_TW = self._embeddings_VW[ids_T].to(self.dtype)
        x = torch.cat([layer.input_norm(embeddings_TW), normed_TW], dim=-1)
        return x, normed_TW if self.shape.is_residual_normed else states_TW

    @property
    def fed_only_share(self) -> float:
        """The cost of a token without logits, as a share of the cost of a token with logits, in multiplications."""
        shape = self.shape.layers
        queries, output = shape.num_heads * shape.head_size, self.shape.vocab.num_known
        after_attention = queries + 3 * shape.inner  # of a layer; all counts are multiples of the inner width
        projections = (shape.num_layers + 1) * (queries + shape.pair_width)  # the first layer reads twice the width
        of_last = (2 if shape.num_layers == 1 else 1) * queries + after_attention
        whole = projections + shape.num_layers * after_attention + output
        return (whole - of_last - output) / whole
