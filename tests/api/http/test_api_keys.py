"""Keys with names and roles: their syntax, the paths that they open, where their names appear; and invalid keys."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from server.http.api_keys import ApiKey, Role
from server.settings import SettingsError, load_settings
from tests.api.harness import completion, in_process
from tests.api.http.test_bounds import serving
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]
URL = "/v1/completions"
KEYS = tuple(map(SecretStr, ("plain-key", "alice:use-key", "prometheus:scrape:scrape-key", "root:admin:ad:min")))


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("k", ApiKey("k", "-", Role.ADMIN)),
        ("alice:k", ApiKey("k", "alice", Role.USE)),
        ("alice:use:k", ApiKey("k", "alice", Role.USE)),
        ("m-1.x_y:scrape:k", ApiKey("k", "m-1.x_y", Role.SCRAPE)),
        ("a:admin:k:with:colons", ApiKey("k:with:colons", "a", Role.ADMIN)),
    ],
)
def test_an_entry_has_key_name_and_role(entry: str, key: ApiKey):
    assert ApiKey.parse(entry) == key
    assert key.secret not in repr(key).replace("ApiKey", "")


@pytest.mark.parametrize("entry", [":k", "alice:", "alice:use:", "a b:k", "alice:root:k", "::k", "é:k", "alice:use:k k", "-:k"])
def test_invalid_key_entry_is_refused(entry: str):
    with pytest.raises(SettingsError) as error:
        load_settings(None, {"api_keys": f"good-key,{entry}"})
    assert "good-key" not in str(error.value)
    assert entry not in str(error.value)


def test_one_secret_with_two_roles_is_refused():
    with pytest.raises(SettingsError, match="two names or roles"):
        load_settings(None, {"api_keys": "a:use:same,b:admin:same"})
    assert len(load_settings(None, {"api_keys": "a:use:same,a:same,a:other"}).all_api_keys) == 2


@pytest.mark.parametrize("value", ["", " ", ",", " , ,", "\t"])
def test_empty_key_setting_prevents_start(value: str, monkeypatch: pytest.MonkeyPatch):
    """The bug: `LATEBRANCH_API_KEYS=` left the API open, though the API was meant to require a key."""
    monkeypatch.setenv("LATEBRANCH_API_KEYS", value)
    with pytest.raises(SettingsError, match="api_keys: is set, but has no key"):
        load_settings()
    monkeypatch.delenv("LATEBRANCH_API_KEYS")
    with pytest.raises(SettingsError, match="is set, but has no key"):
        load_settings(None, {"api_keys": value})


@pytest.mark.parametrize("text", ["[]", "['']", "[' ', 'key']", "''", "null"])
def test_blank_key_in_list_prevents_start(text: str, tmp_path: Path):
    """The bug: a blank entry of a YAML list was a key, and `Bearer` with nothing behind it opened the API."""
    (tmp_path / "s.yaml").write_text(f"api_keys: {text}\n")
    with pytest.raises(SettingsError, match="api_keys"):
        load_settings(tmp_path / "s.yaml")


def test_empty_key_variable_exits_in_one_line():
    program = "import sys; from server.cli.main import main; sys.exit(main(['serve']))"
    environment = {"PYTHONPATH": str(ROOT), "LATEBRANCH_API_KEYS": "", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "api_keys" in done.stderr


PATHS = {
    "/v1/models": {"plain-key", "use-key", "ad:min"},
    "/tokenizer_info": {"plain-key", "use-key", "ad:min"},
    "/ready": {"plain-key", "use-key", "ad:min"},
    "/metrics": {"plain-key", "scrape-key", "ad:min"},
    "/load": {"plain-key", "scrape-key", "ad:min"},
    "/v1/loads": {"plain-key", "scrape-key", "ad:min"},
    "/live": {"plain-key", "use-key", "scrape-key", "ad:min", "none"},
}


async def test_a_role_opens_its_own_paths_alone():
    async with in_process(engine := FakeEngine(), api_keys=KEYS) as client:
        for path, open_to in PATHS.items():
            for key in ("plain-key", "use-key", "scrape-key", "ad:min", "none", "alice:use-key"):
                status = (await client.get(path, headers=_as(key))).status_code
                is_known = key not in ("none", "alice:use-key")
                assert status == (200 if key in open_to or path == "/live" else 403 if is_known else 401), (path, key)
        refused = await client.post(URL, json=completion(), headers=_as("scrape-key"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_role")
        assert engine.requests == []
        assert (await client.post(URL, json=completion(), headers=_as("use-key"))).status_code == 200


async def test_the_access_log_has_name_and_address(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "server.access")
    async with in_process(FakeEngine(), api_keys=KEYS) as client:
        for key, name in (("use-key", "alice"), ("plain-key", "-"), ("wrong", "-"), ("scrape-key", "prometheus")):
            await client.get("/v1/models", headers=_as(key))
            record = caplog.records[-1]
            assert record.getMessage().endswith(f" ms from 127.0.0.1, key {name}")
            assert (record.client, record.key) == ("127.0.0.1", name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("proxies", "sent", "logged"),
    [
        ((), "203.0.113.7", "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.7", "203.0.113.7"),
        (("127.0.0.1",), "10.9.9.9, 203.0.113.7", "203.0.113.7"),  # the client's own words come first
        (("192.0.2.1",), "203.0.113.7", "127.0.0.1"),
    ],
)
async def test_a_trusted_proxy_names_the_clients_address(
    proxies: tuple[str, ...], sent: str, logged: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "server.access")
    async with serving(trusted_proxies=proxies) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/live", headers={"X-Forwarded-For": sent})).status_code == 200
    (record,) = [record for record in caplog.records if record.name == "server.access"]
    assert record.client == logged  # type: ignore[attr-defined]


def test_comments_of_a_key_file_open_nothing(tmp_path: Path):
    """A key that was commented out stayed a key, of role admin, with the `#` before it."""
    path = tmp_path / "keys"
    path.write_text("# old:\n#OLDKEY-0123456789\nalice:use:" + "k" * 16 + "\n")
    path.chmod(0o600)
    assert [key.name for key in load_settings(None, {"api_keys_file": str(path)}).all_api_keys] == ["alice"]
    path.write_text("#OLDKEY-0123456789\n")
    with pytest.raises(SettingsError, match="has no API key"):
        load_settings(None, {"api_keys_file": str(path)})


def test_weak_keys_are_warned_of(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("alice:use:" + "k" * 16 + "\n")
    path.chmod(0o600)
    assert load_settings(None, {"api_keys_file": str(path)}).warnings == ()
    path.chmod(0o644)
    (readable,) = load_settings(None, {"api_keys_file": str(path)}).warnings
    assert readable == f"every user of this machine may read {path}"
    (short,) = load_settings(None, {"api_keys": "alice:admin:" + "k" * 15}).warnings
    assert short == "1 of the API keys have fewer than 16 characters and can be guessed"
    (any_page,) = load_settings(None, {"api_keys": "k" * 16, "cors_origins": "*"}).warnings
    assert "cors_origins" in any_page
    (is_open,) = load_settings(None, {"host": "0.0.0.0"}).warnings
    assert "no API key" in is_open


WORKER = """
from functools import partial
from engine.worker.client import WorkerClient
from engine.core.config import EngineConfig, SchedulerConfig
from engine.worker.process import ProcessLauncher
from server.http.logs import configure_logging
from tests.clients import SWIFT, running
from tests.json_lines import talkative_engine

if __name__ == "__main__":
    import asyncio
    configure_logging("info", "json")
    logging = partial(configure_logging, "info", "json", is_worker=True)
    launcher = ProcessLauncher(EngineConfig("counting"), talkative_engine, configure_logging=logging)

    async def main():
        client = WorkerClient(launcher, SchedulerConfig(), SWIFT)
        async with running(client):
            pass
    asyncio.run(main())
"""


def test_the_workers_lines_are_json_too(tmp_path: Path):
    """The bug: `log_format: json` held for the server's lines; those of its worker were plain text."""
    (program := tmp_path / "main.py").write_text(WORKER)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    messages = [line["message"] for line in lines]
    for words in ("a plain line", "a line of transformers", "texts: 0 of 3", "a warning of a library"):
        assert any(words in message for message in messages), words
    assert len({line["process"] for line in lines}) == 2, "the server and its worker"
