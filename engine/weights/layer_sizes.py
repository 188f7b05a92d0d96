"""Bytes that a model's layers keep of a token, from its configuration: keys and values, or a recurrent state."""

import math
from typing import Any

STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # transformers' names of layers that keep a state
_WITHOUT_KEYS = {"linear_attention", "conv"}
_FLOAT32 = 4


def has_states(text: Any) -> bool:
    """Return whether a model of this configuration has layers that keep a state."""
    return bool(STATE_TYPES.intersection(getattr(text, "layer_types", None) or ()))


def key_bytes(text: Any, num_bytes: int) -> int:
    """Return the bytes of one token's keys and values in all layers, in numbers of `num_bytes`."""
    num_layers = text.num_hidden_layers - sum(kind in _WITHOUT_KEYS for kind in getattr(text, "layer_types", None) or ())
    if not num_layers:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * num_layers * heads * width * num_bytes)


def state_bytes(text: Any, num_bytes: int) -> int:
    """Return the bytes of the recurrent states after one token in all layers.

    Those of convolutions are in numbers of `num_bytes`, others in float32.
    """
    num_layers = sum(kind in STATE_TYPES for kind in getattr(text, "layer_types", None) or ())
    if not num_layers:
        return 0
    num_columns, num_inputs, shape = _sizes(text)
    return int(num_layers * (num_inputs * num_columns * num_bytes + math.prod(shape) * _FLOAT32))


def _sizes(text: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return the kernel size and the inputs of a layer's convolution, and the shape of its recurrent state."""
    if hasattr(text, "conv_L_cache"):
        return text.conv_L_cache, text.hidden_size, (0,)
    if hasattr(text, "linear_value_head_dim"):
        keys, values = (
            text.linear_num_key_heads * text.linear_key_head_dim,
            text.linear_num_value_heads * text.linear_value_head_dim,
        )
        return text.linear_conv_kernel_dim, 2 * keys + values, (values, text.linear_key_head_dim)
    if hasattr(text, "linear_head_dim"):
        width = text.linear_num_heads * text.linear_head_dim
        return text.linear_conv_kernel_dim, 3 * width, (width, text.linear_head_dim)
    if hasattr(text, "mamba_d_state"):
        width = text.mamba_n_heads * text.mamba_d_head
        return text.mamba_d_conv, width + 2 * text.mamba_n_groups * text.mamba_d_state, (width, text.mamba_d_state)
    width = text.num_heads * text.head_dim
    return text.conv_kernel, width + 2 * text.n_groups * text.state_size, (width, text.state_size)
