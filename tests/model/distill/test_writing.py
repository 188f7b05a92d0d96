"""Texts generated many at a time: each is what the target alone would generate, whatever else is in its batch or leaves it."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from engine.attention.paged.graph_recorder import Unrecorded
from engine.distill.generation import torch_batches as columns
from engine.distill.generation.cuda_batches import generate_by_graphs
from engine.distill.generation.generate import generate
from engine.distill.generation.jobs import GeneratedText, GenerationJob, RunningJob, sampled_tokens
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap
from engine.testing import FAMILIES, tiny_model, tiny_module
from tests.model.native_models import KNOWN, native
from tests.needs import needs_library

LAYERS = (1, 3)
T = TypeVar("T")
PROMPTS = [tuple(range(5, 5 + length)) for length in (3, 9, 1, 14, 6, 2, 11, 4)]


def orders(temperature: float) -> dict[int, GenerationJob]:
    """Texts of many lengths, so that rows leave the batch and others take their places."""
    lengths = (20, 3, 18, 1, 9, 21, 2, 16)
    return {
        index: GenerationJob(prompt, temperature, 100 + index, length)
        for index, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    }


def written(model: CausalModel, temperature: float, batch: int = 8) -> dict[int, GeneratedText]:
    return {text.name: text for text in generate(model, orders(temperature), batch, LAYERS)}


IN_COLUMNS = [pytest.param(tiny_model, family, id=family) for family in (*FAMILIES, "gpt_oss")]
IN_LANES = [pytest.param(native, family, id=f"{family}-native", marks=needs_library) for family in KNOWN]
both_ways = pytest.mark.parametrize("model_of", [tiny_model, pytest.param(native, marks=needs_library)])


@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize(("model_of", "family"), [*IN_COLUMNS, *IN_LANES])
def test_greedy_tokens_equal_generate(model_of: Callable[[str], CausalModel], family: str, batch: int) -> None:
    texts, module = written(model_of(family), 0.0, batch), tiny_module(family)
    assert len(texts) == len(PROMPTS)
    for index, order in orders(0.0).items():
        ids = torch.tensor([order.prompt_ids])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=order.max_tokens, do_sample=False)
        assert texts[index].ids == expected[0].tolist()
        assert texts[index].num_prompt == len(order.prompt_ids)


@pytest.mark.parametrize("batch", [3, 8])
@both_ways
def test_states_are_the_models_own(model_of: Callable[[str], CausalModel], batch: int) -> None:
    for text in written(model_of("llama"), 1.0, batch).values():
        out = tiny_module()(input_ids=torch.tensor([text.ids[:-1]]), output_hidden_states=True)
        own = torch.stack([out.hidden_states[1][0], out.hidden_states[-1][0]], dim=1)
        assert torch.allclose(text.states_TFD.float(), own, rtol=0.01, atol=0.01)  # they are kept in bfloat16


@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_are_replayed_write_the_same(family: str, batch: int) -> None:
    """Runs here what a GPU captures. Junk before prompts, after sequences and in a partly filled batch belongs to no sequence."""
    model = tiny_model(family)
    for temperature in (0.0, 1.0):
        rows = [RunningJob(name, order) for name, order in orders(temperature).items()]
        tap = StateTap(model, LAYERS)
        replayed = {text.name: text for text in generate_by_graphs(model, rows, batch, tap, Unrecorded())}
        tap.close()
        expected = written(model, temperature)
        assert {name: text.ids for name, text in replayed.items()} == {name: text.ids for name, text in expected.items()}
        for name, text in expected.items():
            assert torch.allclose(replayed[name].states_TFD.float(), text.states_TFD.float(), rtol=0.02, atol=0.02)


class RunsWhatItRecords:
    """Runs a function while it is recorded, as a recorder of graphs does."""

    name = "runs"

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        run()
        return run


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_one_and_two_token_sequences_are_replayed(max_tokens: int) -> None:
    model = tiny_model()
    short = {name: dataclasses.replace(order, max_tokens=max_tokens) for name, order in orders(1.0).items()}
    tap, rows = StateTap(model, LAYERS), [RunningJob(name, order) for name, order in short.items()]
    replayed = {text.name: text.ids for text in generate_by_graphs(model, rows, 3, tap, RunsWhatItRecords())}
    tap.close()
    assert replayed == {text.name: text.ids for text in generate(model, short, 8, LAYERS)}


def test_prompts_are_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    whole = written(model, 1.0)
    monkeypatch.setattr(columns, "_TOKENS", 24)  # three columns of eight rows
    tap, rows = StateTap(model, LAYERS), [RunningJob(name, order) for name, order in orders(1.0).items()]
    replayed = {text.name: text for text in generate_by_graphs(model, rows, 8, tap, Unrecorded())}
    tap.close()
    for parts in (written(model, 1.0), replayed):
        assert {name: text.ids for name, text in parts.items()} == {name: text.ids for name, text in whole.items()}
        assert all(
            torch.allclose(parts[name].states_TFD.float(), text.states_TFD.float(), atol=0.02) for name, text in whole.items()
        )


@both_ways
def test_company_does_not_matter(model_of: Callable[[str], CausalModel]) -> None:
    alone, together = (written(model_of("llama"), 1.0, batch) for batch in (1, 8))
    assert {name: text.ids for name, text in alone.items()} == {name: text.ids for name, text in together.items()}
    assert len({tuple(text.ids[text.num_prompt :][:4]) for text in together.values()}) > 4, "all draw alike"


@both_ways
def test_empty_plan_generates_nothing(model_of: Callable[[str], CausalModel]) -> None:
    assert not list(generate(model_of("llama"), {}, 8))
    with pytest.raises(ValueError, match="0 texts"):
        next(generate(model_of("llama"), orders(0.0), 0))


def test_draws_follow_the_distribution() -> None:
    logits_V = torch.tensor([2.0, -1.0, float("-inf"), 0.5, 1.0])
    count = 4000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens = Counter(sampled_tokens(logits_V.expand(count, -1), torch.full((count,), 0.7), uniforms).tolist())
    probs_V = (logits_V / 0.7).softmax(-1)
    assert all(abs(tokens[token] / count - float(probs_V[token])) < 2 / count for token in range(5))
    assert sampled_tokens(logits_V[None], torch.zeros(1), torch.tensor([0.999])).tolist() == [0]


def test_the_engine_can_have_the_model_back() -> None:
    model = tiny_model()
    before = model.module.config._attn_implementation
    for _ in generate(model, orders(0.0), 8):
        assert model.module.config._attn_implementation != before
    assert model.module.config._attn_implementation == before
