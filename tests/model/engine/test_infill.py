"""Middles under speculation: greedy text is `generate`'s, and the distribution is the target's, ends of a middle included."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel, SequenceBiasLogitsProcessor

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.testing import tiny_engine, tiny_module, tiny_pair
from engine.worker.inprocess import InProcessEngine
from server.text.codec import TextCodec
from server.text.infill import Infill
from tests.api.harness import MODEL, in_process
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.tokenizers_for_tests import infilling

FAMILY = "santacoder"  # has no tokens for files, so that both routes make the same prompt
TOKENIZER = infilling(FAMILY)
V = len(TOKENIZER)
LIMITS = SchedulerConfig(num_slots=8192, max_model_len=256)
TEXTS = [("hello", " world"), ("", "the"), ("the quick", ""), ("日本語", "😀"), ("<fim-suffix>", "<fim-middle>")]
PAD = TOKENIZER.convert_tokens_to_ids("<fim-pad>")


@cache
def _infill() -> Infill:
    infill = TextCodec(TOKENIZER).infill
    assert infill is not None
    return infill


@cache
def _module() -> PreTrainedModel:
    return tiny_module(vocab_size=V)


ENDS = [*_infill().end_ids, _module().generation_config.eos_token_id]


@asynccontextmanager
async def _served() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server whose model drafts by trees of two paths."""
    pair = tiny_pair(noise=0.05, vocab_size=V)
    engine = InProcessEngine(lambda: tiny_engine(*pair, FixedExpansion(Expansion(1, 2, 2)), config=LIMITS), LIMITS)
    async with in_process(engine, tokenizer=TOKENIZER, max_choices=128) as client:
        yield client


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@torch.inference_mode()
def _generated(prompt: tuple[int, ...], bias: float) -> list[int]:
    """Return what `generate` adds to a prompt, with the ends of a middle as end tokens. These have a bias."""
    ids = torch.tensor([prompt])
    out = _module().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=30,
        eos_token_id=ENDS,
        pad_token_id=0,
        logits_processor=[SequenceBiasLogitsProcessor([[[token_id], bias] for token_id in ENDS])],
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bias", "finish"), [(-100.0, "length"), (7.0, "stop")])
async def test_a_greedy_middle_is_generates(bias: float, finish: str):
    biases = {str(token_id): bias for token_id in ENDS}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 30, "return_token_ids": True, "logit_bias": biases}
    async with _served() as client:
        for prefix, suffix in TEXTS:
            expected = _generated(_infill().prompt(prefix, suffix), bias)
            (choice,) = (await _post(client, "/v1/completions", **body, prompt=prefix, suffix=suffix))["choices"]
            assert (choice["token_ids"], choice["finish_reason"]) == (expected, finish)
            assert choice["text"] == TOKENIZER.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"top_k": 7, "seed": 4}], ids=str)
async def test_both_routes_write_the_same(fields: dict[str, Any]):
    async with _served() as client:
        for prefix, suffix in TEXTS:
            body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 20, "return_tokens": True, **fields}
            filled = await _post(client, "/infill", **body)
            body = {"model": MODEL, "prompt": prefix, "suffix": suffix, "max_tokens": 20, "return_token_ids": True, **fields}
            (choice,) = (await _post(client, "/v1/completions", **body))["choices"]
            assert (filled["content"], filled["tokens"]) == (choice["text"], choice["token_ids"])


TEMPERATURE = 2.0
ALLOWED = [*TOKENIZER.convert_tokens_to_ids(["h", "e", "l"]), PAD, *TOKENIZER.convert_tokens_to_ids(["<fim-middle>"]), ENDS[-1]]


@torch.inference_mode()
def _distribution(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the probabilities of middles of at most two tokens, by transformers' logits."""

    def after(*ids: int) -> dict[int, float]:
        logits = _module()(torch.tensor([[*prompt, *ids]])).logits[0, -1, ALLOWED].double()
        return dict(zip(ALLOWED, torch.softmax(logits / TEMPERATURE, -1).tolist(), strict=True))

    found: dict[tuple[int, ...], float] = {}
    for first, probability in after().items():
        if first in ENDS:
            found[first,] = probability
        else:
            found |= {(first, second): probability * share for second, share in after(first).items()}
    return found


async def test_middles_have_the_targets_distribution():
    """The last distribution is of another prompt: it must not fit."""
    prefix, suffix = "hello", " world"
    counts = Counter[tuple[int, ...]]()
    async with _served() as client:
        for seed in range(24):
            fields = {"temperature": TEMPERATURE, "allowed_token_ids": ALLOWED, "n": 128, "seed": seed}
            body = {"model": MODEL, "prompt": prefix, "suffix": suffix, "max_tokens": 2, "return_token_ids": True, **fields}
            answer = await _post(client, "/v1/completions", **body)
            counts.update(tuple(choice["token_ids"]) for choice in answer["choices"])
    assert z_of_counts(counts, _distribution(_infill().prompt(prefix, suffix))) < PASSES_BELOW
    assert z_of_counts(counts, _distribution(_infill().prompt(suffix, prefix))) > FAILS_ABOVE
