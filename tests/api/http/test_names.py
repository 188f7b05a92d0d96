"""Names of the served model, the list of models, and paths of kinds of models that are not served."""

import json
from pathlib import Path

import httpx
import pytest

import server.cli.main
from server.settings import Settings, SettingsError, load_settings
from tests.api.harness import chat, completion, in_process, over_loopback, sample
from tests.fake_engine import FakeEngine

NAMES = ("org/model", "alias", "gpt-4o")


async def test_every_alias_is_served_and_listed():
    engine = FakeEngine()
    async with in_process(engine, served_model_name=NAMES) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == list(NAMES)
        for name, card in zip(NAMES, cards, strict=True):
            assert (await client.get(f"/v1/models/{name}")).json() == card
            for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
                answer = await client.post(path, json={**body, "model": name})
                assert (answer.status_code, answer.json()["model"]) == (200, name)
            tokens = await client.post("/tokenize", json={"model": name, "prompt": "x"})
            assert tokens.status_code == 200
        for name in ("fake", "model", "org", "Alias", ""):
            refused = await client.post("/v1/chat/completions", json={**chat(), "model": name})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/models/fake")).status_code == 404
        assert any('model_name="org/model"' in name for name in await sample(client))


async def test_names_with_slashes_are_found():
    async with over_loopback(FakeEngine(), served_model_name=NAMES) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel"):
            assert (await client.get(path)).json()["id"] == "org/model"
        for path in ("/v1/models/org/", "/v1/models/org", "/v1/models/org/model/x"):
            assert (await client.get(path)).status_code == 404


def test_names_are_read_from_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "list.yaml").write_text(json.dumps({"served_model_name": ["a", "b"]}))
    assert load_settings(tmp_path / "list.yaml").served_names == ("a", "b")
    assert load_settings(None, {"served_model_name": "a, b,"}).served_names == ("a", "b")
    assert load_settings(None, {"model": "m", "served_model_name": ""}).served_names == ("m",)
    assert load_settings(None, {"model": "m", "model_name": "n"}).served_names == ("n",)
    monkeypatch.setenv("LATEBRANCH_SERVED_MODEL_NAME", "c,d")
    settings = load_settings()
    assert (settings.served_name, settings.to_engine_config().model_name) == ("c", "c")


@pytest.mark.parametrize(
    "fields", [{"served_model_name": "a,a"}, {"served_model_name": "x" * 1025}, {"served_model_name": "a", "model_name": "b"}]
)
def test_unsendable_names_are_refused(fields: dict[str, str]):
    with pytest.raises(SettingsError, match="served_model_name"):
        load_settings(None, fields)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that `serve` is called with."""
    calls: list[Settings] = []
    monkeypatch.setattr("server.process.serve", calls.append)
    monkeypatch.setattr("server.http.logs.configure_logging", lambda level, form: None)
    monkeypatch.setattr("server.preflight.require_startable", lambda settings: None)
    monkeypatch.setattr("server.cli.main.start_template", lambda module: None)
    return calls


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["qwen2.5-coder-1.5b"], "qwen2.5-coder-1.5b"),
        (["org/model", "--port", "9", "--strict"], "org/model"),
        (["--port", "9", "./folder"], "./folder"),
        (["a", "--model", "a"], "a"),
        (["--model", "b"], "b"),
        ([], "smollm2-135m"),
    ],
)
def test_a_model_may_be_an_argument(arguments: list[str], model: str, served: list[Settings]):
    """vLLM's command line, `serve MODEL`, was refused."""
    assert server.cli.main.main(["serve", *arguments]) == 0
    assert [settings.model for settings in served] == [model]


def test_a_model_named_twice_is_refused(served: list[Settings], capsys: pytest.CaptureFixture[str]):
    assert server.cli.main.main(["serve", "a", "--model", "b"]) == 2
    assert "twice" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        server.cli.main.main(["serve", "a", "b"])
    assert served == []


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/embeddings", "/embedding", "/embed", "/v1/engines/m/embeddings", "/api/embed"]
)
async def test_embeddings_are_refused_with_the_reason(path: str):
    async with in_process(FakeEngine()) as client:
        for response in (await client.post(path, json={"model": "fake", "input": "x"}), await client.get(path)):
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (404, "no_embeddings", "invalid_request_error")
            assert "generates text" in error["message"]
        for other in ("/v1/embeddings/x", "/v1/rerank", "/embeddingsx"):
            assert (await client.post(other, json={})).json()["error"]["code"] is None
