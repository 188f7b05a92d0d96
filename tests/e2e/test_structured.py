"""Real weights constrained by a schema: the JSON is complete and valid, drafts are accepted, and it equals plain decoding."""

import json
import re
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from engine.build import build_engine
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.tree import Expansion
from engine.core.types import FinishReason, Grammar, GrammarKind, Request, SamplingParams, Speculation
from engine.weights import resolve
from server.settings import SHIPPED_DRAFTERS
from tests.model.driving import run

PRESET = "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "population": {"type": "integer", "minimum": 1000, "maximum": 99_999_999},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,9}( [a-z]{1,9}){1,6}\."),
    "choice": Grammar(GrammarKind.CHOICE, '["Paris", "Paris, France", "Rome"]'),
}
CONFIG = EngineConfig(
    model=PRESET,
    drafter="early-exit",
    lens=str(SHIPPED_DRAFTERS / "smollm2-135m-lens.safetensors"),
    expansion=Expansion(1, 2, 2),
    scheduler=SchedulerConfig(num_slots=4096, max_model_len=256),
)

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(900)]


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["city", "country", "population"]
    assert isinstance(value["city"], str)
    assert value["country"] in ("France", "Italy", "Japan")
    assert 1000 <= value["population"] <= 99_999_999


def test_completions_match_and_equal_plain_decoding():
    tokenizer = AutoTokenizer.from_pretrained(resolve(PRESET).folder)
    question = [{"role": "user", "content": "Tell me about the capital of France, its country and population, as JSON."}]
    prompt = tuple(tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"])
    sampling = {"greedy": SamplingParams(temperature=0.0, max_tokens=80), "seeded": SamplingParams(seed=4, max_tokens=80)}
    requests = [
        Request(f"{name} {kind}", prompt, replace(params, grammar=grammar))
        for name, grammar in GRAMMARS.items()
        for kind, params in sampling.items()
    ]
    engine = build_engine(CONFIG)
    session = run(engine, requests)
    plain = run(engine, [replace(request, speculation=Speculation(is_enabled=False)) for request in requests])
    assert session.texts() == plain.texts()
    assert sum(stats.num_accepted_tokens for stats in session.stats) > 10
    for name, outcome in session.outcomes.items():
        assert outcome.finish is FinishReason.STOP
        text = tokenizer.decode(outcome.ids, skip_special_tokens=True)
        if name.startswith("schema"):
            check_schema(text)
        elif name.startswith("regex"):
            assert re.fullmatch(GRAMMARS["regex"].text, text)
        else:
            assert text in ("Paris", "Paris, France", "Rome")
