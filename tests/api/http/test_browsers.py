"""Pages of other origins are refused before their bodies are read; names of other sites are not this machine's."""

import json
import socket

import pytest

from server.http.hosts import is_bound_to_loopback
from tests.api.harness import completion, in_process, make_app
from tests.fake_engine import FakeEngine

URL = "/v1/completions"
PAGE = "https://page.test"

# Headers of a request to http://localhost, and whether it comes from a page of another origin.
SENDERS = {
    "no browser": ({}, False),
    "own page": ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}, False),
    "own page of an old browser": ({"Origin": "http://localhost"}, False),
    "own page behind a proxy": ({"Sec-Fetch-Site": "same-origin", "Origin": "https://api.test"}, False),
    "own page behind a proxy with TLS": ({"Origin": "https://localhost"}, False),
    "typed address": ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, False),
    "other site": ({"Sec-Fetch-Site": "cross-site", "Origin": PAGE}, True),
    "other site without origin": ({"Sec-Fetch-Site": "cross-site"}, True),
    "other site without the newer header": ({"Origin": PAGE}, True),
    "other port": ({"Origin": "http://localhost:3000"}, True),
    "sibling": ({"Sec-Fetch-Site": "same-site"}, True),
    "sandboxed page": ({"Origin": "null"}, True),
    "origin that begins as ours": ({"Origin": "http://localhost.page.test"}, True),
    "unknown word": ({"Sec-Fetch-Site": "friendly"}, True),
}


@pytest.mark.parametrize("sender", SENDERS)
async def test_pages_of_other_origins_are_403(sender: str):
    """The bug: a page of any origin could send a request; it could not read the answer, but the server did the work."""
    headers, is_foreign = SENDERS[sender]
    async with in_process(engine := FakeEngine()) as client:
        for answer in (
            await client.post(URL, json=completion(), headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/", headers=headers),
        ):
            assert answer.status_code == (403 if is_foreign else 200)
            assert not is_foreign or answer.json()["error"]["code"] == "foreign_origin"
    assert bool(engine.requests) != is_foreign


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_origins_of_the_settings_are_let_in(origins: tuple[str, ...]):
    async with in_process(FakeEngine(), cors_origins=origins) as client:
        headers = {"Sec-Fetch-Site": "cross-site", "Origin": PAGE}
        assert (await client.post(URL, json=completion(), headers=headers)).status_code == 200
        other = {**headers, "Origin": PAGE + ".other.test"}
        assert (await client.post(URL, json=completion(), headers=other)).status_code == (200 if origins == ("*",) else 403)


async def test_cross_site_link_opens_only_pages():
    opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with in_process(FakeEngine()) as client:
        assert (await client.get("/", headers=opened)).status_code == 200
        assert (await client.get("/", headers={**opened, "Sec-Fetch-Dest": "iframe"})).status_code == 403
        assert (await client.post("/", headers=opened)).status_code == 403
        assert (await client.get("/v1/models", headers=opened)).status_code == 403
    async with in_process(FakeEngine(), playground=False) as client:
        assert (await client.get("/", headers=opened)).status_code == 403


@pytest.mark.parametrize(
    "headers", [[(b"host", b"localhost"), (b"origin", PAGE.encode())], [(b"host", b"page.test")]], ids=["origin", "host"]
)
async def test_a_refusal_reads_no_body(headers: list[tuple[bytes, bytes]]):
    sent = []

    async def receive():
        raise AssertionError("the body is read")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": URL, "raw_path": URL.encode(), "query_string": b"", "scheme": "http"}
    await make_app(FakeEngine())({**scope, "headers": headers, "http_version": "1.1"}, receive, send)
    assert sent[0]["status"] in (400, 403)
    assert json.loads(sent[1]["body"])["error"]["code"] in ("foreign_origin", "unknown_host")


HOSTS = [
    ("localhost", True),
    ("LocalHost:8000", True),
    ("127.0.0.1:1", True),
    ("[::1]:8000", True),
    ("[::1]", True),
    ("page.test", False),
    ("localhost.page.test:8000", False),
    ("localhost@page.test", False),
    ("127.0.0.1.page.test", False),
    ("10.0.0.1:8000", False),
    ("", False),
    ("[::1]page.test", False),
]


@pytest.mark.parametrize(("host", "is_known"), HOSTS)
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
async def test_on_loopback_no_other_name_is_answered(address: str, host: str, is_known: bool):
    """The bug: a page whose name resolves to 127.0.0.1 had the whole API in its own origin."""
    async with in_process(FakeEngine(), host=address) as client:
        answer = await client.post(URL, json=completion(), headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code == (200 if is_known else 400)
        assert is_known or answer.json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize("address", ["LOCALHOST", "127.1", "127.0.0.2", "0x7f000001", "::ffff:127.0.0.1", "machine.test"])
async def test_loopback_is_known_however_it_is_written(address: str, monkeypatch: pytest.MonkeyPatch):
    """The bug: any name was answered where the setting `host` was a loopback address in other words, as 127.1."""
    resolve = socket.getaddrinfo
    of_machine = {"machine.test": "127.0.1.1"}  # as /etc/hosts of Debian has it
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve(of_machine.get(host, host), *rest, **more))
    async with in_process(FakeEngine(), host=address) as client:
        for host, status in (("page.test", 400), ("localhost:8000", 200), (address if ":" not in address else "[::1]", 200)):
            assert (await client.get("/live", headers={"Host": host})).status_code == status


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "10.0.0.1", "no-such-name.invalid"])
def test_other_addresses_are_no_loopback(address: str):
    assert not is_bound_to_loopback(address)


async def test_more_names_are_answered_where_set():
    async with in_process(FakeEngine(), allowed_hosts=("Api.test",)) as client:
        for host, status in (("api.test", 200), ("api.test:443", 200), ("localhost", 200), ("x.api.test", 400)):
            assert (await client.get("/live", headers={"Host": host})).status_code == status
    async with in_process(FakeEngine(), host="0.0.0.0") as client:
        assert (await client.get("/live", headers={"Host": "any.test"})).status_code == 200
    async with in_process(FakeEngine(), host="0.0.0.0", allowed_hosts=("api.test",)) as client:
        assert (await client.get("/live", headers={"Host": "any.test"})).status_code == 400
