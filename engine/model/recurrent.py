"""Recurrent layers of transformers' models over packed trees: each token continues from the state of its parent on its path.

The layer's own code computes a chain of certain tokens in one call. It computes the nodes of trees level by level, one token
each, as in `generate`. Its first and last linear layers read each token alone. They run once for all tokens of a pass, so that
their weights are not read again for each level.

Shape key: T packed tokens, D width, B sequences or nodes of a step, N tokens of each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine.attention.tree_attention import GatheredAttention

_CACHES = ("cache_params", "past_key_values")  # transformers' names of a layer's argument


class RecurrentLayers:
    """A model's recurrent layers: its parts with a convolution and a place in the cache.

    Inside `within` they continue from states by slot. Other passes run as before.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._context: GatheredAttention | None = None
        for layer in layers:
            layer.forward = partial(self._forward, layer, layer.forward, _Projections(layer))

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Take over a model's recurrent layers, if it has any."""
        layers = [part for part in module.modules() if hasattr(part, "layer_idx") and _has_convolution(part)]
        return cls(layers) if layers else None

    @contextmanager
    def within(self, context: GatheredAttention) -> Iterator[None]:
        """Let the layers process the batch of a context."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _forward(
        self,
        layer: Any,
        forward: Callable[..., Tensor],
        projections: "_Projections",
        hidden_states: Float[Tensor, "B T D"],
        **options: Any,
    ) -> Float[Tensor, "B T D"]:
        """Run a layer's own forward, in the steps of the context's batch if there is one."""
        options.pop("attention_context", None)
        if self._context is None:
            return forward(hidden_states, **options)
        (cache_name,) = [name for name in _CACHES if name in options]
        states, index = self._context.cache.states, layer.layer_idx
        out = torch.empty_like(hidden_states)
        with projections.of(hidden_states[0]):
            for step in self._context.path_steps:
                tokens_BN = torch.from_numpy(step.token_index_BN).to(hidden_states.device)
                own = _layer_cache([] if step.parents is None else states.read(index, step.parents))
                options[cache_name] = _cache_with(own, index)
                out[0, tokens_BN] = forward(projections.given(tokens_BN), **options)
                states.write(index, step.ends, _states_of(own))
            return projections.applied_last(out)


class _Projections:
    """A recurrent layer's first and last linear layers, which run once for all tokens of a pass.

    First ones are those that read the layer's own input; the last one, `out_proj`, returns the layer's output. A layer of another
    form runs them in each step.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._all_TD: Tensor | None = None  # the inputs of the pass that runs
        self._tokens_BN = self._given_BND = torch.empty(0)
        self._first: dict[nn.Module, Tensor] = {}  # outputs for all tokens
        self._last_inputs_TI: Tensor | None = None
        self._run_last: Callable[[Tensor], Tensor] | None = None
        for name, child in layer.named_children():
            if name.startswith("in_proj"):
                child.forward = partial(self._project_first, child, child.forward)
            elif name == "out_proj":
                child.forward = partial(self._project_last, child.forward)

    @contextmanager
    def of(self, hidden_states_TD: Float[Tensor, "T D"]) -> Iterator[None]:
        """Share the products of the layer's inputs."""
        self._all_TD = hidden_states_TD
        try:
            yield
        finally:
            self._all_TD = self._last_inputs_TI = None
            self._first.clear()

    def given(self, tokens_BN: Int[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        """Return the inputs of the next step."""
        assert self._all_TD is not None
        self._tokens_BN, self._given_BND = tokens_BN, self._all_TD[tokens_BN]
        return self._given_BND

    def applied_last(self, out_1TD: Float[Tensor, "1 T D"]) -> Float[Tensor, "1 T D"]:
        """Return the outputs of all steps."""
        if self._last_inputs_TI is None:
            return out_1TD
        assert self._run_last is not None
        return self._run_last(self._last_inputs_TI[None])

    def _project_first(self, child: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._all_TD is None or x is not self._given_BND:
            return forward(x)
        if child not in self._first:
            self._first[child] = forward(self._all_TD[None])[0]
        return self._first[child][self._tokens_BN]

    def _project_last(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._all_TD is None:
            return forward(x)
        if self._last_inputs_TI is None:
            self._last_inputs_TI, self._run_last = x.new_empty(len(self._all_TD), x.shape[-1]), forward
        self._last_inputs_TI[self._tokens_BN] = x
        return self._given_BND  # of the output's shape; `applied_last` replaces it


def _has_convolution(part: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in part.children())


def _layer_cache(states: list[Tensor]) -> Any:
    """Return transformers' cache of one layer: empty, or with a convolution's last inputs and perhaps a recurrent state."""
    from transformers.cache_utils import LinearAttentionLayer

    layer = LinearAttentionLayer()
    if states:
        layer.conv_states[0], layer.conv_kernel_size[0] = states[0], states[0].shape[-1]
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
        layer.device, layer.dtype = states[0].device, states[0].dtype
    if len(states) > 1:
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = states[1], True
    return layer


def _cache_with(layer: Any, index: int) -> Any:
    from transformers import Cache

    return Cache(layers=[layer] * (index + 1))


def _states_of(layer: Any) -> list[Tensor]:
    return [state for state in (layer.conv_states[0], layer.recurrent_states[0]) if state is not None]
