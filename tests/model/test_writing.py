"""Texts written many at a time: each is what the target alone would write, whoever else is in its batch and whoever leaves it."""

from collections import Counter

import pytest
import torch

from engine.testing import FAMILIES, tiny_model, tiny_module
from engine.writing import Order, Written, drawn, write

LAYERS = (1, 3)
PROMPTS = [tuple(range(5, 5 + length)) for length in (3, 9, 1, 14, 6, 2, 11, 4)]


def orders(temperature: float) -> dict[int, Order]:
    """Texts of many lengths, so that rows leave the batch and others take their places."""
    lengths = (20, 3, 18, 1, 9, 21, 2, 16)
    return {
        index: Order(prompt, temperature, 100 + index, length)
        for index, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    }


def written(temperature: float, family: str = "llama", batch: int = 8) -> dict[int, Written]:
    return {text.name: text for text in write(tiny_model(family), orders(temperature), batch, LAYERS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_generate(family: str) -> None:
    texts, module = written(0.0, family), tiny_module(family)
    assert len(texts) == len(PROMPTS)
    for index, order in orders(0.0).items():
        ids = torch.tensor([order.prompt_ids])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=order.max_tokens, do_sample=False)
        assert texts[index].ids == expected[0].tolist()
        assert texts[index].num_prompt == len(order.prompt_ids)


def test_states_are_the_models_own() -> None:
    for text in written(1.0).values():
        out = tiny_module()(input_ids=torch.tensor([text.ids[:-1]]), output_hidden_states=True)
        own = torch.stack([out.hidden_states[1][0], out.hidden_states[-1][0]], dim=1)
        assert torch.allclose(text.states_TFD.float(), own, rtol=0.01, atol=0.01)  # they are kept in bfloat16


def test_company_does_not_matter() -> None:
    alone, together = written(1.0, batch=1), written(1.0)
    assert {name: text.ids for name, text in alone.items()} == {name: text.ids for name, text in together.items()}
    assert len({tuple(text.ids[text.num_prompt :][:4]) for text in together.values()}) > 4, "all draw alike"


def test_draws_follow_the_law() -> None:
    logits_V = torch.tensor([2.0, -1.0, float("-inf"), 0.5, 1.0])
    count = 4000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens = Counter(drawn(logits_V.expand(count, -1), torch.full((count,), 0.7), uniforms))
    law_V = (logits_V / 0.7).softmax(-1)
    assert all(abs(tokens[token] / count - float(law_V[token])) < 2 / count for token in range(5))
    assert drawn(logits_V[None], torch.zeros(1), torch.tensor([0.999])) == [0]


def test_the_engine_can_have_the_model_back() -> None:
    model = tiny_model()
    before = model.module.config._attn_implementation
    for _ in write(model, orders(0.0), 8):
        assert model.module.config._attn_implementation != before
    assert model.module.config._attn_implementation == before
