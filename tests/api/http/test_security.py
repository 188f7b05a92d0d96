"""Keys and certificates, malformed requests, and client data that is never logged."""

import asyncio
import contextlib
import logging
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from server.http.protocol import MAX_HEAD_BYTES
from server.process import Server, _uvicorn_config
from server.settings import Settings, SettingsError, load_settings
from tests.api.harness import MODEL, completion, in_process, make_app, until
from tests.fake_engine import FakeEngine

SECRET = "sk-very-secret-1"
URL = "/v1/completions"


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_file_keys_work_beside_other_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(f"{SECRET}\n\n  second  \n")
    async with in_process(FakeEngine(), api_keys=(SecretStr("third"),), api_keys_file=str(path)) as client:
        for key, status in ((SECRET, 200), ("second", 200), ("third", 200), ("", 401), (SECRET + "x", 401), (SECRET[:-1], 401)):
            assert (await client.get("/v1/models", headers=_as(key))).status_code == status
        assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("text", [None, "", "\n \n", "with space\n", "schlüssel\n", "bell\a\n"])
def test_invalid_key_file_is_refused(tmp_path: Path, text: str | None):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as error:
        load_settings(None, {"api_keys_file": str(path)})
    assert not text or not text.strip() or text.strip() not in str(error.value), "a key is no text for a terminal"


def test_settings_error_contains_no_key():
    with pytest.raises(SettingsError) as error:
        load_settings(None, {"api_keys": f"{SECRET},schlüssel", "port": "x"})
    assert SECRET not in str(error.value)


async def test_no_key_is_written_anywhere(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine()
    async with in_process(engine, api_keys=(SecretStr(SECRET),), log_requests="texts") as client:
        await client.post(URL, json=completion(user="u"), headers=_as(SECRET))
        await client.post(URL, json=completion(), headers=_as(SECRET + "-wrong"))
        await client.post(URL, json=completion(n=0), headers=_as(SECRET))
        answers = [
            await client.get(path, headers=_as(SECRET)) for path in ("/metrics", "/tokenizer_info", "/openapi.json", "/health")
        ]
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert SECRET not in "\n".join([*ours, *(answer.text for answer in answers)])
    assert SECRET not in engine.requests[0].tenant
    assert SECRET not in repr(Settings(api_keys=(SecretStr(SECRET),)))


async def test_more_headers_than_anybody_needs_are_431():
    async with in_process(FakeEngine()) as client:
        headers = {f"X-H{k}": "1" for k in range(101)}
        response = await client.get("/live", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (431, "too_many_headers")
        assert (await client.get("/live", headers=dict(list(headers.items())[:80]))).status_code == 200


class _Quiet(Server):
    def capture_signals(self):
        return contextlib.nullcontext()


async def _serving(settings: Settings):
    """Return a real server as `latebranch serve` configures it, its task, and its port."""
    app = make_app(FakeEngine(), **settings.model_dump(exclude_unset=True, exclude={"model"}))
    server = _Quiet(_uvicorn_config(app, settings), app.state.runtime, 0.0)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started and app.state.runtime.is_ready)
    return server, task, server.servers[0].sockets[0].getsockname()[1]


async def _raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_malformed_http_receives_a_json_error():
    server, task, port = await _serving(Settings(model=MODEL, port=0))
    try:
        long_head = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * MAX_HEAD_BYTES + b"\r\n"
        for data in (b"no http at all\r\n\r\n", long_head, b"GET /" + b"a" * MAX_HEAD_BYTES):
            head, _, body = (await _raw(port, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert b"application/json" in head
            assert httpx.Response(400, content=body).json()["error"]["type"] == "invalid_request_error"
    finally:
        server.should_exit = True
        await task


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *kind, "-keyout", key, "-out", cert, *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_https_is_spoken_with_a_certificate(certificate: tuple[str, str]):
    cert, key = certificate
    server, task, port = await _serving(Settings(model=MODEL, port=0, ssl_certfile=cert, ssl_keyfile=key))
    try:
        assert server.config.ssl is not None
        assert server.config.ssl.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert server.config.ssl.protocol == ssl.PROTOCOL_TLS_SERVER, "any version from the minimum on"
        trust = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=trust, base_url=f"https://127.0.0.1:{port}") as client:
            answer = await client.post(URL, json=completion())
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 16)
            stream = await client.post(URL, json=completion(max_tokens=40, stream=True))
            assert stream.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}") as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/live")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/live")
    finally:
        server.should_exit = True
        await task


def test_unusable_certificate_is_refused_at_start(certificate: tuple[str, str]):
    cert, key = certificate
    for values in ({"ssl_keyfile": key}, {"ssl_certfile": cert + "x"}, {"ssl_certfile": cert, "ssl_keyfile": key + "x"}):
        with pytest.raises(SettingsError, match=r"ssl_keyfile is given only|cannot be read"):
            load_settings(None, values)


async def test_of_two_equal_keys_the_last_counts():
    engine = FakeEngine()
    async with in_process(engine) as client:
        body = b'{"model": "fake", "prompt": "x", "max_tokens": 3, "max_tokens": 5}'
        await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert engine.requests[0].sampling.max_tokens == 5


@pytest.mark.parametrize("form", ["text", "json"])
def test_client_text_cannot_forge_log_lines(form: str):
    """A line of its own, a colour or a cursor movement: written as an escape, also in the traceback of an exception."""
    program = f"""
import logging
from server.http.logs import configure_logging
configure_logging("info", {form!r})
evil = "a\\nINFO [x] forged\\r\\x1b[31m\\x9b1m\\u2028forged"
logging.getLogger("t").info("user %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    logging.getLogger("t").exception("failed")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=Path(__file__).parents[3])
    text = result.stderr.decode()
    assert not any(control in text for control in "\r\x1b\x9b\u2028")
    lines = text.splitlines()
    assert not any(line.startswith("INFO [x] forged") for line in lines)
    assert sum("forged" in line and not line.startswith(("  ", "\t")) for line in lines) == (1 if form == "text" else 2)
