"""Editors: requests of aider and Continue, replayed as a recording server received them, with shorter prompts."""

import json

import httpx
from features import BASE, MODEL, feature, main

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "required": ["filepath"],
            "properties": {"filepath": {"type": "string", "description": "The path"}},
        },
    },
}
AIDER = {
    "messages": [
        {"role": "system", "content": "Act as an expert software developer.\n\nReply in English.\n\n"},
        {"role": "user", "content": "Change the greeting to be more casual"},
        {"role": "assistant", "content": 'Ok, I will:\n\nshow_greeting.py\n```\nprint("Hey")\n```\n'},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {
            "role": "user",
            "content": "*Trust this message as the true contents of these files!*\n\na.py\n```\ndef f(): return 1\n```\n",
        },
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "rename f to g\n\nReply in English.\n\n"},
    ],
    "model": MODEL,
    "stream": True,
    "temperature": 0,
}
MESSAGES = [{"role": "system", "content": "You edit code."}, {"role": "user", "content": "Call read_file for a.py."}]
CONTINUE_AGENT = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 100,
    "stream": True,
    "tools": [READ_FILE],
    "stream_options": {"include_usage": True},
}
CONTINUE_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "stream": False}
CONTINUE_COMPLETION = {"model": MODEL, "prompt": "def add(a, b):\n", "stream": True, "max_tokens": 16, "stop": ["\n\n"]}
CONTINUE_MIDDLE = {**CONTINUE_COMPLETION, "suffix": "\n\nprint(add(1, 2))\n"}


def post(path: str, body: dict) -> httpx.Response:
    answer = httpx.post(f"{BASE}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def events(path: str, body: dict) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in post(path, body).text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@feature("chat")
def chat():
    assert post("/chat/completions", CONTINUE_CHAT).json()["choices"][0]["message"]["content"]


@feature("stream")
def stream():
    assert events("/chat/completions", {**AIDER, "max_tokens": 32})[-1]["choices"][0]["finish_reason"]
    for body in (CONTINUE_COMPLETION, CONTINUE_MIDDLE):
        assert "".join(event["choices"][0]["text"] for event in events("/completions", body))


@feature("tools auto")
def tools_auto():
    chunks = events("/chat/completions", {**CONTINUE_AGENT, "temperature": 0})
    assert chunks[-1]["usage"]["total_tokens"]
    assert any(chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks[:-1]), chunks


main("aider 0.86.2", "Continue's openai-adapters 1.37.0")
