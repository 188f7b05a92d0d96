"""Bodies of requests that no client should send, and some that one might.

Of four kinds: fields with likely and unlikely values; a plausible body with parts replaced by junk; the bytes of either, damaged;
any bytes at all. Knows the fields of the API, not what the server makes of them.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from server.schemas.anthropic import CountRequest, MessagesRequest
from server.schemas.chat import ChatRequest
from server.schemas.completion import CompletionRequest
from server.schemas.fim import FimRequest
from server.schemas.infill import InfillRequest
from server.schemas.responses import ResponsesRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest

_MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", *_MESSAGES_PATHS),
    *("/infill", "/v1/fim/completions", "/tokenize", "/detokenize"),
)


@dataclass(frozen=True)
class Shot:
    """One request to send."""

    path: str
    content_type: str | None
    body: bytes


_HUGE = "x" * 5000
_TEXTS = ["", "hello", "a" * 300, "日本語 😀", "\ud800", "\x00", "<|im_start|>", "\n" * 50, "%s{0}{{x}}", "\u202e", _HUGE]
_NUMBERS = [*(0, 1, -1, 2, 3, 7, 20, 21, 128, 129, 399, 400, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)]
_FLOATS = [*(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 2.1, 1e-9, 1e-320, 1e308, -1e308)]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_SCHEMAS = [
    _SCHEMA,
    {},
    {"type": "objekt"},
    {"type": ["string", "null"], "maxLength": 3},
    {"$ref": "#"},
    {"$ref": "http://127.0.0.1:1/x"},
    {"$schema": "http://127.0.0.1:1/x", "type": "object"},
    {"pattern": "("},
    {"type": "string", "pattern": "(a|aa)+$"},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"enum": []},
    {"allOf": [{"type": "string"}, {"type": "object"}]},
    {"type": "object", "properties": {"x" * 200: True}, "additionalProperties": False, "minProperties": 2},
    {"x-guidance": {"whitespace_pattern": "("}},
    {"type": "array", "minItems": 10**9},
]
_GRAMMARS = ["", 'start: "a"', "start: start", 'root ::= "a" | root', "%json {", "start: /(/", "start: /a{99999}/", _HUGE]
_REGEXES = ["a+", "(", "[a-", "(a|b){1,3}", "(.*)*", "a{1,100000}", "\\p{Greek}", "(?=x)", "^$", "\ud800", "(a?){64}a{64}"]
_PARTS = [{"type": "text", "text": "hi"}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "x"}}, "hi", None]
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_MESSAGES: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "system", "content": "be brief"},
    {"role": "assistant", "content": "ok"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "c"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": ""},
    {"role": "user", "content": "\ud800"},
    {"role": "king", "content": "x"},
    {"role": "user"},
    {},
]
_TOOLS: list[Any] = [
    *({"type": "function", "function": {"name": "f", "parameters": schema}} for schema in _SCHEMAS),
    {"type": "function", "function": {"name": "f", "strict": True}},
    {"type": "function", "function": {"name": "no name"}},
    {"type": "function"},
]
_FLAT_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    _FLAT_CALL,
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "web_search_call", "id": "\ud800"},
    {"type": ["message"], "role": "user"},
    {"id": "\x00"},
]
_BLOCKS: list[Any] = [
    {"type": "text", "text": "hi"},
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1e300}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}], "is_error": True},
    {"type": "tool_result", "tool_use_id": "other", "content": [{"type": "image"}]},
    {"type": "redacted_thinking", "data": "\ud800"},
    {"type": "image", "source": {}},
    {"type": ["text"]},
    {"text": "hi"},
]
_TURNS: list[Any] = [
    *({"role": role, "content": [block]} for role in ("user", "assistant") for block in _BLOCKS),
    {"role": "assistant", "content": []},
    {"role": "assistant", "content": _BLOCKS[:3]},
    {"role": "user", "content": _BLOCKS[3:4] * 300},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []},
    {"role": "function", "name": "f", "content": "1"},
    {"role": "user", "name": "\x00", "content": "hi"},
]
_FIELDS: dict[str, list[Any]] = {
    "model": ["tiny", "", "other", _HUGE],
    "prompt": [*_TEXTS, ["a", "b"], [1, 2, 3], [[1], [2]], [], [[]], [400], [-1], ["a", 1], [True], [10**20], ["a"] * 200],
    "messages": [
        *([], _MESSAGES, *([message] for message in _MESSAGES), [_MESSAGES[0]] * 300),
        *([_MESSAGES[0], turn, _MESSAGES[0]] for turn in _TURNS),
    ],
    "input": [
        *_TEXTS,
        _ITEMS[:3],
        *([item] for item in _ITEMS),
        [_FLAT_CALL] * 200,
        [{"role": "user", "content": "a"}],
        [],
        [{"type": "message", "role": "user", "content": _PARTS}],
    ],
    "instructions": _TEXTS,
    "max_tokens": [1, 2, 5, *_NUMBERS],
    "max_completion_tokens": [1, 4, *_NUMBERS],
    "max_output_tokens": [1, 4, *_NUMBERS],
    "min_tokens": [0, 3, *_NUMBERS],
    "n": [1, 2, 3, *_NUMBERS],
    "best_of": [1, 3, *_NUMBERS],
    "temperature": [*_FLOATS, 1],
    "top_p": _FLOATS,
    "top_k": _NUMBERS,
    "min_p": _FLOATS,
    "typical_p": _FLOATS,
    "presence_penalty": [*_FLOATS, -2, 2],
    "frequency_penalty": [*_FLOATS, -2, 2],
    "repetition_penalty": [*_FLOATS, 0.01, 100],
    "seed": _NUMBERS,
    "stop": [*_TEXTS, ["a", "b"], [""], ["x"] * 20, [1]],
    "stop_token_ids": [[5], [0, 399], [400], [-1], list(range(300)), []],
    "ignore_eos": [True, False],
    "logit_bias": [
        {"5": 1},
        {"5": -100.0},
        {"400": 1},
        {"x": 1},
        {"5": 1e9},
        {"٣": 1},
        {"05": 1},
        {str(k): -100 for k in range(400)},
    ],
    "allowed_token_ids": [[5], [5, 6, 7], [], [400], [0], list(range(400))],
    "bad_words": [["a"], [" "], [""], ["hello", "日"], list("abcdefghijklmnopqrstuvwxyz"), [_HUGE], ["\ud800"]],
    "logprobs": [True, False, 0, 1, 5, 20, 21],
    "top_logprobs": [0, 1, 20, 21],
    "prompt_logprobs": [0, 1, 20, 21, True],
    "echo": [True, False],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}, {"x": 1}],
    "speculative": [
        {"enabled": False},
        {"verifier": "specinfer"},
        {"verifier": "traversal", "trunk": 2, "branches": 2, "depth": 2},
        {"tree": "heap", "max_nodes": 64},
        {"tree": "heap", "max_nodes": 2**31 - 1},
        {"trunk": 64, "branches": 16, "depth": 64},
        {"trace": True},
        {"verifier": "none"},
        {"branches": 3},
    ],
    "prediction": [{"type": "content", "content": text} for text in _TEXTS] + [{"type": "content", "content": _PARTS}],
    "response_format": [
        {"type": "json_object"},
        {"type": "text"},
        *({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}} for schema in _SCHEMAS),
    ],
    "structured_outputs": [
        *({"json": schema} for schema in _SCHEMAS),
        *({"regex": regex} for regex in _REGEXES),
        *({"grammar": grammar} for grammar in _GRAMMARS),
        *({"choice": choice} for choice in (["a", "b"], [], [""], ["\ud800"], ["x"] * 2000)),
        {"json": "{"},
        {"json_object": True, "whitespace_pattern": "("},
    ],
    "previous_response_id": [None, "resp_1", *_TEXTS],
    "store": [True, False],
    "text": [
        {"verbosity": "low"},
        {"format": {"type": "json_object"}},
        *({"format": {"type": "json_schema", "name": "s", "schema": schema}} for schema in _SCHEMAS),
        {"format": {"type": "json_schema"}},
    ],
    "include": [[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"], _TEXTS],
    "reasoning": [{"effort": "low"}, {"effort": "none", "summary": "auto"}, {"x": 1}],
    "tools": [
        [],
        [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        [{"type": "web_search"}],
        *([tool] for tool in _TOOLS),
        _TOOLS[:1] * 2,
        _TOOLS[:1] * 200,
    ],
    "tool_choice": [
        "none",
        "auto",
        "required",
        {"type": "function", "name": "f"},
        {"type": ["x"]},
        {"type": "function", "function": {"name": "f"}},
        {"type": "function"},
    ],
    "parallel_tool_calls": [True, False],
    "priority": [0, -1000, 1000, 1001],
    "timeout_s": [30, 1e-9, 0, -1],
    "user": _TEXTS,
    "request_id": ["r", "", "a b", "r" * 129, "\n"],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "truncate_prompt_tokens": [-1, 0, 1, 5, 2**31],
    "return_token_ids": [True, False],
    "return_tokens_as_token_ids": [True, False],
    "return_token_strs": [True, False],
    "tokens": [[5, 6], [], [400], [-1], [10**20], [True], list(range(400)) * 5],
    "metadata": [{}, {"a": "b"}, {str(k): "x" for k in range(17)}, {"a": 1}],
    "suffix": _TEXTS,
    "input_prefix": [*_TEXTS, ["a", 5]],
    "input_suffix": [*_TEXTS, ["a", 5]],
    "input_extra": [[], [{"text": "a", "filename": "b"}], [{"text": text} for text in _TEXTS], [{}], [{"text": "a"}] * 2000],
    "n_predict": [-1, 0, 4, *_NUMBERS],
    "n_indent": [0, 4, *_NUMBERS],
    "t_max_predict_ms": [0, 1, *_NUMBERS],
    "response_fields": [[""], ["content", "timings/prompt_n", "content/x", "/"], [_HUGE], ["a"] * 200],
    "return_tokens": [True, False],
    "samplers": [[], ["top_k", "infill"], 5],
    "system": [*_TEXTS, _BLOCKS[:1], _BLOCKS],
    "stop_sequences": [["a"], [""], ["x"] * 20, "a"],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}],
    "output_config": [
        *({"effort": "low"}, {"effort": "x"}),
        *({"format": {"type": "json_schema", "schema": schema}} for schema in _SCHEMAS),
    ],
    "context_management": [{"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "x"}]}],
    "thread": [None, {}, "x"],
    "functions": [[], [tool.get("function") for tool in _TOOLS[:2]], [{"name": "f"}] * 2, [{}]],
    "function_call": ["none", "auto", {"name": "f"}, {"name": "other"}, {}],
    "chat_template_kwargs": [{}, {"enable_thinking": False}, {"messages": []}, {"x": "y" * 20_000}, {"a": [[[[[[[[[1]]]]]]]]]}],
    "reasoning_effort": ["low", "none", "", _HUGE],
    "separate_reasoning": [True, False],
    "include_reasoning": [True, False],
    "random_seed": [*_NUMBERS, 0.5],
    "unheard_of": [1, None],
    "mirostat": [0, 2],
}
_ALWAYS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "messages"),
    "/v1/responses": ("model", "input"),
    **dict.fromkeys(_MESSAGES_PATHS, ("model", "messages")),
    "/v1/fim/completions": ("model", "prompt"),
    "/infill": ("input_prefix", "input_suffix"),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
_MODELS: tuple[type[BaseModel], ...] = (
    *(CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest),
    *(InfillRequest, FimRequest, TokenizeRequest, DetokenizeRequest),
)
_KNOWN = {path: [name for name in _FIELDS if name in model.model_fields] for path, model in zip(PATHS, _MODELS, strict=True)}
_PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hello", "messages": _MESSAGES[:1], "input": "hello", "tokens": [5, 6]}
_PLAIN |= {"input_prefix": "hello", "input_suffix": " world"}
_TYPES = [None, "application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data", "application/x+json"]

_ALPHABET = 'ab01"\\{}[]:,\x00\n \u00e9\u65e5\ud83d\ude00\ud800\u202e'


class Maker:
    """Makes requests up, the same for the same number."""

    def __init__(self, number: str) -> None:
        self._draw = random.Random(number)

    def shot(self) -> Shot:
        """Return any request."""
        draw = self._draw
        path = draw.choice((*PATHS[:4], *PATHS))
        kind = draw.randrange(10)
        body = json.dumps(self._spoilt(path) if kind in (4, 5, 6) else self._fields(path)).encode()
        if kind in (7, 8):
            body = self._damaged(body)
        if kind == 9:
            body = draw.choice(
                [b"", draw.randbytes(draw.randrange(60)), b'{"prompt":' + b"[" * draw.randrange(1, 400), b"null", b"[]"]
            )
        return Shot(path, "application/json" if draw.randrange(20) else draw.choice(_TYPES), body)

    def _fields(self, path: str) -> dict[str, Any]:
        """Return a body: what the route needs, mostly well, and a few fields more."""
        draw = self._draw
        body = {name: _PLAIN[name] for name in _ALWAYS[path] if draw.randrange(20)}
        if path == "/infill":
            body["n_predict"] = draw.randint(0, 6)
            body["stream"] = draw.randrange(4) == 0
        if path.startswith("/v1") and not path.endswith("count_tokens"):
            body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = draw.randint(1, 6)
            body["stream"] = draw.randrange(4) == 0
        known = _KNOWN[path] if draw.randrange(6) else list(_FIELDS)
        for name in draw.sample(known, min(len(known), draw.choice([0, 0, 1, 1, 2, 3, 5]))):
            values = _FIELDS[name] if draw.randrange(2) else _FIELDS[name][:3]  # likely ones come first
            body[name] = draw.choice(values) if draw.randrange(10) else self._junk(0)
        return body

    def _junk(self, depth: int) -> Any:
        """Return any JSON value."""
        draw = self._draw
        match draw.randrange(9 if depth < 3 else 7):
            case 0:
                return draw.choice([None, True, False])
            case 1:
                return draw.choice(_NUMBERS)
            case 2:
                return draw.choice(_FLOATS)
            case 3:
                return draw.choice(_TEXTS)
            case 4:
                return draw.randint(-(2**70), 2**70)
            case 5:
                return draw.uniform(-1e3, 1e3)
            case 6:
                return "".join(draw.choices(_ALPHABET, k=draw.randrange(12)))
            case 7:
                return [self._junk(depth + 1) for _ in range(draw.randrange(4))]
            case _:
                return {
                    "".join(draw.choices(_ALPHABET, k=draw.randrange(5))): self._junk(depth + 1) for _ in range(draw.randrange(4))
                }

    def _spoilt(self, path: str) -> Any:
        """Return a body with a part somewhere in it replaced."""
        draw = self._draw
        whole = {"body": json.loads(json.dumps(self._fields(path)))}
        holder: Any = whole
        key: Any = "body"
        for _ in range(draw.randint(1, 5)):
            inside = holder[key]
            places = list(inside) if isinstance(inside, dict) else list(range(len(inside))) if isinstance(inside, list) else []
            if not places:
                break
            holder, key = inside, draw.choice(places)
        holder[key] = self._junk(0)
        return whole["body"]

    def _damaged(self, body: bytes) -> bytes:
        """Return bytes with a few cut out, put in, doubled or changed."""
        draw, data = self._draw, bytearray(body)
        for _ in range(draw.randint(1, 4)):
            at = draw.randint(0, len(data))
            end = min(len(data), at + draw.randint(0, 8))
            match draw.randrange(5):
                case 0:
                    del data[at:end]
                case 1:
                    data[at:at] = draw.randbytes(draw.randrange(6))
                case 2:
                    data[at:at] = data[at:end] * draw.randint(1, 40)
                case 3:
                    data[at:end] = bytes(value ^ (1 << draw.randrange(8)) for value in data[at:end])
                case _:
                    del data[at:]
        return bytes(data)


def made_up(num: int, number: int) -> Iterator[Shot]:
    """Yield so many requests; `number` chooses which."""
    return (Maker(f"{number}/{index}").shot() for index in range(num))
