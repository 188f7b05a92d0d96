"""Reads the event stream of /v1/responses, and holds it to the order that clients rely on."""

import json
from typing import Any

ENDS = ("response.completed", "response.incomplete")


def events_of(body: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which must be named by its type; [DONE] must end it."""
    *blocks, done = body.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response of the last event, after comparing its output with what the other events add up to."""
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    output: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            assert event["item"].get("content", []) == []
            assert event["item"].get("arguments", "") == ""
            output.append(event["item"])
            is_open = True
            continue
        item = output[-1]
        assert is_open
        assert event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            assert event["item"] == item | {"status": event["item"]["status"]}
            output[-1], is_open = event["item"], False
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert (event["content_index"], event["part"]["text"]) == (len(item["content"]), "")
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][event["content_index"]]
        elif kind == "function_call_arguments.delta":
            assert event["delta"]
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert event["delta"] or event["logprobs"]
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            part = item["content"][event["content_index"]]
            assert (event["text"], event.get("logprobs")) == (part["text"], part.get("logprobs"))
    assert not is_open
    assert last["type"] in ENDS
    response = last["response"]
    assert response["output"] == output
    assert {name: response[name] for name in ("id", "created_at")} == {
        name: created["response"][name] for name in ("id", "created_at")
    }
    assert last["type"] == f"response.{response['status']}"
    return response  # type: ignore[no-any-return]


def without_ids(response: dict[str, Any], has_cache: bool = False) -> dict[str, Any]:
    """Return a response without what differs between two answers to one request; with a cache, that is the speed too."""
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    rest = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    if has_cache:
        del rest["metrics"], rest["usage"]["input_tokens_details"]
    return {**rest, "output": output}
