"""Stored responses: conversations that go on by an id, GET, DELETE and input items, apart for each key, within bounds."""

import sqlite3
import stat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from server.settings import SettingsError
from tests.api.answer_formats.test_responses_tools import TOOLS, called, responses, text_of
from tests.api.harness import MODEL, chat, in_process, make_app, over_loopback
from tests.api.responses_events import events_of, folded
from tests.api.tool_calls.test_tools import _engine, written
from tests.fake_engine import FakeEngine, emits
from tests.tokenizers_for_tests import byte_level, calling

URL = "/v1/responses"
KEYS = tuple(SecretStr(f"{name}-0123456789abcdef") for name in ("one", "two"))


def _as(key: SecretStr) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.get_secret_value()}"}


def _fake(text: str = "fine") -> FakeEngine:
    return FakeEngine(script=emits(byte_level().encode(text)), max_model_len=2000)


async def _created(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json=responses(**fields))
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def _status(client: httpx.AsyncClient, response_id: str, **fields: Any) -> int:
    return (await client.get(f"{URL}/{response_id}", **fields)).status_code


async def test_a_conversation_goes_on_by_its_id():
    """The prompt is that of the chat with all messages; instructions are those of the last request alone."""
    engine = _fake()
    async with in_process(engine) as client:
        first = await _created(client, input="a", instructions="old")
        second = await _created(client, input="b", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        third = await _created(
            client, input=[{"role": "user", "content": "c"}], previous_response_id=second["id"], instructions="new"
        )
        texts = ["a", "fine", "b", "fine", "c"]
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
        await client.post("/v1/chat/completions", json=chat(messages=[{"role": "system", "content": "new"}, *messages]))
        fork = await _created(client, input="b", previous_response_id=first["id"])
        assert fork["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert engine.requests[2].prompt_ids == engine.requests[3].prompt_ids
    assert third["usage"]["input_tokens"] == len(engine.requests[2].prompt_ids)


async def test_outputs_of_calls_continue_a_stored_response():
    """As agents do it: only the results of the calls are sent, with the id of the response that made them."""
    engine = _engine("hm" + written("time", "{}"))
    async with in_process(engine, tokenizer=calling()) as client:
        first = await _created(client, tools=TOOLS)
        (call,) = [item for item in first["output"] if item["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        second = await _created(client, tools=TOOLS, input=[output], previous_response_id=first["id"])
        listed = (await client.get(f"{URL}/{second['id']}/input_items", params={"order": "asc"})).json()["data"]
        assert [item["type"] for item in listed] == ["message", "message", "function_call", "function_call_output"]
        whole = await _created(client, tools=TOOLS, input=[{"role": "user", "content": "hello"}, *first["output"], output])
        assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        refused = await client.post(URL, json=responses(input=[output | {"call_id": "x"}], previous_response_id=first["id"]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0.call_id")
    assert engine.requests[1].prompt_ids == engine.requests[2].prompt_ids
    assert called(second)


async def test_stored_items_are_found_by_reference():
    """The Vercel client replaces earlier texts by references."""
    engine = _fake()
    async with in_process(engine) as client:
        first = await _created(client, input="a")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        for given in (reference, {"id": reference["id"]}, first["output"][0]):
            turns = [{"role": "user", "content": "a"}, given, {"role": "user", "content": "b"}]
            second = await _created(client, input=turns)
        third = await _created(client, input=[reference], previous_response_id=second["id"])
        items = (await client.get(f"{URL}/{third['id']}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["fine", "fine", "b", "fine", "a"]
        assert len({item["id"] for item in items}) == 5
        kept = await _created(client, input="a", store=False)
        unknown = {"type": "item_reference", "id": kept["output"][0]["id"]}
        refused = await client.post(URL, json=responses(input=[{"role": "user", "content": "a"}, unknown]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input.1.id")
        assert (await client.delete(f"{URL}/{first['id']}")).status_code == 200
        assert (await client.post(URL, json=responses(input=[reference]))).status_code == 404
    assert len({request.prompt_ids for request in engine.requests[1:4]}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_the_answer(stream: bool):
    async with in_process(_fake()) as client:
        response = await client.post(URL, json=responses(stream=stream, metadata={"a": "b"}, max_output_tokens=3))
        answer = folded(events_of(response.text)) if stream else response.json()
        assert answer["store"] is True
        assert (await client.get(f"{URL}/{answer['id']}")).json() == answer
        head = await client.head(f"{URL}/{answer['id']}")
        assert (head.status_code, head.content) == (200, b"")
        deleted = await client.delete(f"{URL}/{answer['id']}")
        assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
        assert await _status(client, answer["id"]) == 404
        assert (await client.delete(f"{URL}/{answer['id']}")).status_code == 404


async def test_unstored_response_is_unknown():
    async with in_process(_fake()) as client:
        answer = await _created(client, store=False)
        assert answer["store"] is False
        paths = [answer["id"], "resp_0", "x", "resp_%00", "%F0%9F", "r" * 5000, "日"]
        for path in paths:
            for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                response = await client.request(method, f"{URL}/{path}{end}")
                error = response.json()["error"]
                assert (response.status_code, error["type"], error["param"]) == (404, "invalid_request_error", None), path
                assert error["message"].startswith("Response with id '")
                assert len(error["message"]) < 200
        for name in (answer["id"], "", "x" * 1024, "日", "resp_\x00"):
            error = (await client.post(URL, json=responses(previous_response_id=name))).json()["error"]
            assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
        long = await client.post(URL, json=responses(previous_response_id="x" * 1025))
        assert (long.status_code, long.json()["error"]["code"]) == (400, None)


async def test_a_failed_response_is_not_stored():
    async with in_process(FakeEngine(script=emits([5, 6, 7]), fail_after=1)) as client:
        events = events_of((await client.post(URL, json=responses(stream=True))).text)
        failed = events[-1]["response"]
        assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
        assert failed["error"] == {"code": "server_error", "message": "the step failed"}
        assert [item["status"] for item in failed["output"]] == ["incomplete"]
        assert (events[-2]["type"], events[-2]["error"]["message"], events[-2]["message"]) == ("error", *["the step failed"] * 2)
        assert await _status(client, failed["id"]) == 404


async def test_response_id_is_unknown_to_other_keys():
    async with in_process(_fake(), api_keys=KEYS) as client:
        mine, other = map(_as, KEYS)
        answer = (await client.post(URL, json=responses(), headers=mine)).json()
        item = answer["output"][0]["id"]
        for headers, status in ((other, 404), (mine, 200)):
            assert await _status(client, answer["id"], headers=headers) == status
            assert await _status(client, f"{answer['id']}/input_items", headers=headers) == status
            body = responses(input=[{"type": "item_reference", "id": item}])
            assert (await client.post(URL, json=body, headers=headers)).status_code == status
            body = responses(previous_response_id=answer["id"])
            response = await client.post(URL, json=body, headers=headers)
            assert response.status_code == (400 if status == 404 else 200)
        assert (await client.delete(f"{URL}/{answer['id']}", headers=other)).status_code == 404
        assert await _status(client, answer["id"], headers=mine) == 200
        assert (await client.delete(f"{URL}/{answer['id']}", headers=mine)).status_code == 200
        assert (await client.get(f"{URL}/{answer['id']}")).status_code == 401


async def test_each_key_has_its_own_bound():
    async with in_process(_fake(), api_keys=KEYS, stored_responses=2) as client:
        mine, other = map(_as, KEYS)
        kept = (await client.post(URL, json=responses(), headers=mine)).json()["id"]
        for _ in range(5):
            await client.post(URL, json=responses(), headers=other)
        assert await _status(client, kept, headers=mine) == 200


async def test_the_least_recently_used_are_removed():
    async with in_process(_fake(), stored_responses=2) as client:
        first, second = [(await _created(client))["id"] for _ in range(2)]
        third = (await _created(client, previous_response_id=first))["id"]
        assert [await _status(client, one) for one in (first, second, third)] == [200, 404, 200]
        fourth = (await _created(client))["id"]
        broken = await client.post(URL, json=responses(previous_response_id=third))
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert first in broken.json()["error"]["message"], "the response that is missing"
        assert (await client.get(f"{URL}/{third}/input_items")).status_code == 404
        assert [await _status(client, one) for one in (first, third, fourth)] == [404, 200, 200]


async def test_response_over_byte_limit_is_not_stored():
    """It removes no other response either."""
    async with in_process(_fake(), stored_responses_bytes=6000) as client:
        small = (await _created(client))["id"]
        large = (await _created(client, metadata={str(at): "x" * 1000 for at in range(8)}))["id"]
        assert [await _status(client, one) for one in (small, large)] == [200, 404]
        more = [(await _created(client))["id"] for _ in range(5)]
        assert [await _status(client, one) for one in (small, more[-1])] == [404, 200]


async def test_zero_limit_stores_no_responses():
    async with in_process(_fake(), stored_responses=0) as client:
        answer = await _created(client, store=True)
        assert (answer["store"], await _status(client, answer["id"])) == (False, 404)
        assert (await client.post(URL, json=responses(previous_response_id=answer["id"]))).status_code == 400
        assert (await client.post(URL, json=responses(input=[{"id": answer["output"][0]["id"]}]))).status_code == 404


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_file_keeps_responses_across_restarts(keeps: bool, tmp_path: Path):
    path = tmp_path / "responses.sqlite"
    settings: dict[str, Any] = {"stored_responses_file": str(path)} if keeps else {}
    async with in_process(_fake(), api_keys=KEYS, **settings) as client:
        answer = (await client.post(URL, json=responses(input="a"), headers=_as(KEYS[0]))).json()
    async with in_process(_fake(), api_keys=KEYS, **settings) as client:
        assert await _status(client, answer["id"], headers=_as(KEYS[0])) == (200 if keeps else 404)
        assert await _status(client, answer["id"], headers=_as(KEYS[1])) == 404
        body = responses(input="b", previous_response_id=answer["id"])
        assert (await client.post(URL, json=body, headers=_as(KEYS[0]))).status_code == (200 if keeps else 400)
    if keeps:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert all(key.get_secret_value().encode() not in path.read_bytes() for key in KEYS)


def test_an_unusable_file_stops_the_start(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("no database, but a text of some length\n" * 100)
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    for path in (text, newer, tmp_path, tmp_path / "missing" / "x.sqlite"):
        with pytest.raises(SettingsError, match="stored_responses_file"):
            make_app(FakeEngine(), stored_responses_file=str(path))
    assert text.read_text().startswith("no database")


async def test_a_full_disk_costs_the_response_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "responses.sqlite"
    async with in_process(_fake(), stored_responses_file=str(path)) as client:
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE items")
        database.close()
        answer = await _created(client)
        assert text_of(answer) == "fine"
        assert await _status(client, answer["id"]) == 404
    assert "cannot be stored" in caplog.text


async def test_input_items_come_in_pages():
    async with in_process(_fake()) as client:
        turns = [{"role": "user", "content": str(at)} for at in range(7)]
        turns[3] |= {"id": "msg_mine"}
        turns[4] |= {"id": "msg_mine"}
        first = await _created(client, input=turns)
        answer = await _created(client, input="end", previous_response_id=first["id"])
        url = f"{URL}/{answer['id']}/input_items"
        texts: list[str] = []
        params: dict[str, Any] = {"limit": 2, "order": "asc"}
        while True:
            page = (await client.get(url, params=params)).json()
            texts += [item["content"][0]["text"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            params["after"] = page["last_id"]
            if not page["has_more"]:
                break
        assert texts == [*map(str, range(7)), "fine", "end"]
        latest = (await client.get(url)).json()
        assert [item["content"][0]["text"] for item in latest["data"]] == texts[::-1]
        assert {item["role"] for item in latest["data"]} == {"user", "assistant"}
        assert (await client.get(url, params={"after": latest["last_id"]})).json()["data"] == []
        for wrong, param in (
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "x"}, "after"),
        ):
            response = await client.get(url, params=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_stored_response_is_not_streamed():
    async with in_process(_fake()) as client:
        answer = await _created(client)
        for value in ("true", "x"):
            response = await client.get(f"{URL}/{answer['id']}", params={"stream": value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
        assert (await client.get(f"{URL}/{answer['id']}", params={"stream": "false", "include": "x"})).status_code == 200


async def test_the_official_client_keeps_and_removes_responses():
    async with (
        over_loopback(_fake()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = await client.responses.create(model=MODEL, input="a")
        second = await client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text == "fine"
        items = [item async for item in client.responses.input_items.list(second.id, limit=1)]
        assert [item.type for item in items] == ["message"] * 3
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="Previous response"):
            await client.responses.create(model=MODEL, input="b", previous_response_id=second.id)
