"""LoRA adapters over HTTP: names of models, the engine's requests, the settings and the metric."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.types import StepStats
from server.cli.settings_flags import add_settings_flags, settings_of
from server.metrics import ServerMetrics
from server.settings import Settings, SettingsError, load_settings
from tests.api.harness import MODEL, chat, completion, in_process, sample
from tests.fake_engine import FakeEngine

LORA = ("one=/folders/one", "team/two=/folders/a=b")
MESSAGES = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": completion(n=2, stream=False),
    "/v1/chat/completions": chat(),
    "/v1/messages": MESSAGES,
    "/v1/responses": {"input": "hello"},
}


async def test_adapters_are_listed_with_their_parent():
    async with in_process(FakeEngine(), served_model_name=("base", "alias"), lora=LORA) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("base", None),
            ("alias", None),
            ("one", "base"),
            ("team/two", "base"),
        ]
        for card in cards:
            assert (await client.get(f"/v1/models/{card['id']}")).json() == card
        anthropic = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [card["id"] for card in anthropic["data"]] == ["base", "alias", "one", "team/two"]
        assert (await client.get("/v1/models/two")).status_code == 404


@pytest.mark.parametrize("path", BODIES)
async def test_model_of_a_request_chooses_its_adapter(path):
    """Each sample of a request runs under the adapter that `model` names; the base's names run none."""
    engine = FakeEngine()
    async with in_process(engine, lora=LORA) as client:
        for name, adapter in ((MODEL, None), ("one", "one"), ("team/two", "team/two")):
            engine.requests.clear()
            answer = await client.post(path, json={**BODIES[path], "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert engine.requests
            assert {request.adapter for request in engine.requests} == {adapter}
        refused = await client.post(path, json={**BODIES[path], "model": "two"})
        assert refused.status_code == 404


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (("one",), "'one' is not NAME=FOLDER"),
        (("=x",), "is not NAME=FOLDER"),
        (("one=",), "is not NAME=FOLDER"),
        (("a,b=x",), "is not NAME=FOLDER"),
        (("a" * 2000 + "=x",), "is not NAME=FOLDER"),
        (("one=x", "one=y"), "has a name twice"),
        (("m=x",), "m is a name of the model"),
    ],
)
def test_wrong_names_are_refused(lora, reason):
    with pytest.raises(SettingsError, match=reason):
        load_settings(None, {"model": "m", "lora": lora})


def test_an_alias_cannot_be_an_adapter():
    with pytest.raises(SettingsError, match="b is a name of the model"):
        load_settings(None, {"served_model_name": ("a", "b"), "lora": ("b=x",)})


def test_adapters_are_read_from_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    expected = {"a": "x", "b": "y=z"}
    (tmp_path / "list.yaml").write_text(json.dumps({"lora": ["a=x", "b=y=z"]}))
    assert load_settings(tmp_path / "list.yaml").adapters == expected
    command = argparse.ArgumentParser()
    add_settings_flags(command)
    assert settings_of(command.parse_args(["--lora", "a=x", "--lora", "b=y=z"])).adapters == expected
    monkeypatch.setenv("LATEBRANCH_LORA", "a=x, b=y=z")
    assert load_settings().adapters == expected
    assert load_settings().to_engine_config().lora == tuple(expected.items())
    assert load_settings().to_tool_config().lora == ()


async def test_metric_names_adapters_in_use():
    """The series has vLLM's labels alone. A gateway takes the series with the latest time."""
    engine = FakeEngine()
    async with in_process(engine, lora=LORA) as client:
        idle = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
        assert (await sample(client))[idle] > 1e9
        stats = StepStats(1, 2, 1, 0, 1, running_adapters=("one", "team/two"), waiting_adapters=("one",))
        for listener in engine.listeners:
            listener(stats)
        busy = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="one,team/two",waiting_lora_adapters="one"}'
        found = [name for name in await sample(client) if name.startswith("vllm:lora_requests_info")]
        assert found == [busy]


def test_metric_is_absent_without_adapters():
    assert Settings().adapters == {}
    assert b"lora" not in ServerMetrics("m", 100, lambda: FakeEngine().health).render()
