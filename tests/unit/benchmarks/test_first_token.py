"""The bound of a prompt's first token: the multiply-adds that no implementation avoids."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.peers.first_token import multiply_adds_of

SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61}


@pytest.mark.parametrize("own", [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1, "head_dim": 16}])
def test_bound_counts_all_layers(own: dict[str, int]) -> None:
    """Shared key heads and heads of another size than width / heads change the counts of three layers."""
    module = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **own), dtype=torch.float32)
    weights = sum(one.weight.numel() for name, one in module.named_modules() if isinstance(one, nn.Linear) and name != "lm_head")
    head_size = own.get("head_dim", 8)
    pairs = sum(range(1, 8))  # of a token and a token that it attends to
    scores_and_values = 2 * pairs * SIZES["num_attention_heads"] * head_size * SIZES["num_hidden_layers"]
    assert multiply_adds_of({**SIZES, **own}, 7) == (7 * weights, scores_and_values)
