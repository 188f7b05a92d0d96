"""A served model's generation_config.json: greedy text is `generate`'s with it, and drafts change nothing."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.worker.inprocess import InProcessEngine
from server.adaptive_engine import served_engine
from server.app import create_app
from server.settings import Settings
from tests.api.harness import until
from tests.conformance.folder import served_folder
from tests.tokenizers_for_tests import byte_level

PROMPT_IDS = [40, 41, 42, 40, 41, 43, 40, 41]
SETTINGS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.5, "max_new_tokens": 12}
SERVER = {"device": "cpu", "num_slots": 512, "max_model_len": 128, "policy": "fixed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder whose generation settings define how to sample."""
    path = served_folder(tmp_path_factory.mktemp("model"))
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **SETTINGS}))
    return path


async def served_choice(folder: Path, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Serve the folder, drafting from cached text, and return the choice of a completion request."""
    chosen = Settings.model_validate({**SERVER, "model": str(folder), **settings})
    config = chosen.to_engine_config()
    app = create_app(chosen, InProcessEngine(lambda: served_engine(config), config.scheduler), byte_level())
    runtime = app.state.runtime
    runtime.begin()
    try:
        await until(lambda: runtime.is_ready or runtime.fatal)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"model": str(folder), "prompt": PROMPT_IDS, "return_token_ids": True, **body}
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])
    finally:
        await runtime.stop(0)


@torch.inference_mode()
def generated(folder: Path, **settings: Any) -> list[int]:
    """Return what `generate` adds to the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([PROMPT_IDS])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **settings)
    return [int(token_id) for token_id in out[0, len(PROMPT_IDS) :]]


async def test_greedy_tokens_equal_generate_with_settings(folder: Path) -> None:
    """The file was ignored: without its penalty another text comes, of another length."""
    with_file, without = generated(folder), generated(folder, repetition_penalty=1.0, max_new_tokens=16)
    assert with_file != without[: len(with_file)]
    assert len(with_file) == 12
    assert (await served_choice(folder, {"temperature": 0}))["token_ids"] == with_file
    assert (await served_choice(folder, {"temperature": 0}, generation_config="none"))["token_ids"] == without


async def test_request_values_override_the_file(folder: Path) -> None:
    own = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 14}
    assert (await served_choice(folder, own))["token_ids"] == generated(folder, repetition_penalty=1.0, max_new_tokens=14)


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
async def test_prompt_is_scored_by_the_served_model(folder: Path, policy: str) -> None:
    """`max_tokens` 0 beside `echo`, of an engine with a drafter and a policy."""
    scored = await served_choice(folder, {"max_tokens": 0, "echo": True, "logprobs": 1}, policy=policy)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        distribution = model(torch.tensor([PROMPT_IDS])).logits[0, :-1].double().log_softmax(-1)
    logprobs = scored["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx([float(row[i]) for row, i in zip(distribution, PROMPT_IDS[1:], strict=True)], abs=1e-4)
    assert (scored["token_ids"], scored["finish_reason"]) == ([], "length")
