"""The store of responses by itself: age, and what closing ends."""

import asyncio
from typing import Any

from server.stored_responses.store import ResponseStore, StoredResponse, StoreLimits


def _response(name: str, previous: str | None = None, **fields: Any) -> StoredResponse:
    return StoredResponse(
        **{"id": name, "previous_id": previous, "input": "[]", "answer": "{}", "item_ids": (f"item-{name}",), **fields}
    )


def _store(**limits: Any) -> tuple[ResponseStore, list[float]]:
    now_s = [1000.0]
    store = ResponseStore(
        StoreLimits(**{"num_responses": 10, "num_bytes": 10_000, "age_s": 60.0, **limits}), None, lambda: now_s[0]
    )
    return store, now_s


async def test_old_responses_are_unknown_and_removed():
    store, now_s = _store()
    await store.add("a", _response("r"))
    now_s[0] += 60
    assert await store.get("a", "r") == _response("r", item_ids=())
    now_s[0] += 1
    assert await store.get("a", "r") is None
    assert await store.answers_with("a", ["item-r"]) == {}
    assert await store.chain("a", "r", 9) == "r"
    assert not await store.delete("a", "r")
    await store.add("b", _response("s"))
    (count,) = store._database.execute("SELECT COUNT(*) FROM responses").fetchone()
    assert count == 1, "those of every owner are removed"
    store.close()


async def test_chains_are_bounded_and_whole():
    store, _ = _store()
    for at in range(4):
        await store.add("a", _response(str(at), str(at - 1) if at else None))
    chain = await store.chain("a", "3", 4)
    assert not isinstance(chain, str)
    assert [one.id for one in chain] == ["0", "1", "2", "3"]
    assert await store.chain("a", "3", 3) == "0"
    assert await store.chain("b", "3", 4) == "3"
    await store.delete("a", "1")
    assert await store.chain("a", "3", 4) == "1"
    store.close()


async def test_items_end_with_their_response():
    store, _ = _store(num_responses=1)
    await store.add("a", _response("r"))
    await store.add("b", _response("r"))
    assert set(await store.answers_with("a", ["item-r", "item-r", "x", "日"])) == {"item-r"}
    await store.add("a", _response("s"))
    assert await store.answers_with("a", ["item-r"]) == {}
    assert set(await store.answers_with("b", ["item-r"])) == {"item-r"}
    store.close()


async def test_many_requests_use_one_store():
    """Threads take turns at the database."""
    store, _ = _store(num_responses=1000)
    await asyncio.gather(*(store.add("a", _response(str(at))) for at in range(100)))
    found = await asyncio.gather(*(store.get("a", str(at)) for at in range(100)))
    assert [one.id for one in found if one is not None] == [str(at) for at in range(100)]
    store.close()


async def test_a_closed_store_knows_nothing():
    store, _ = _store()
    await store.add("a", _response("r"))
    store.close()
    assert not await store.add("a", _response("s"))
    assert await store.get("a", "r") is None
    assert await store.answers_with("a", ["item-r"]) == {}
    store.close()
