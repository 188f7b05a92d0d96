"""Any request, streamed and not, has one text, log-probabilities and usage; log-probabilities are the target's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.tree import TreeKind
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from engine.verify import dispatch as judge
from server.answer_formats import completion
from tests.api.harness import data_of
from tests.conformance.served import MODEL, VOCAB_SIZE, app_of, real_engine, served, target_module

TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "日本語 😀", "stop here stop", "a"]
_ON_CHAINS = [name for name in VERIFIER_NAMES if is_exact(TreeKind.PATH, name)]
_OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.3, 1.0, 1.7]),
    "top_p": st.sampled_from([0.3, 0.9]),
    "top_k": st.sampled_from([1, 5, 50]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "typical_p": st.sampled_from([0.5, 0.9]),
    "presence_penalty": st.sampled_from([-1.5, 1.5]),
    "frequency_penalty": st.sampled_from([-1.0, 2.0]),
    "repetition_penalty": st.sampled_from([0.7, 1.8]),
    "logit_bias": st.dictionaries(st.integers(3, VOCAB_SIZE - 40).map(str), st.sampled_from([-100.0, 5.0]), max_size=4),
    "allowed_token_ids": st.lists(st.integers(3, VOCAB_SIZE - 40), min_size=2, max_size=30, unique=True),
    "bad_words": st.lists(st.sampled_from(["e", "the", "x y"]), max_size=2),
    "min_tokens": st.integers(0, 4),
    "stop": st.lists(st.sampled_from(["a", "e", " ", "th", "!", "日"]), min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.integers(3, VOCAB_SIZE - 40), min_size=1, max_size=20),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 6),
    "n": st.integers(1, 3),
    "prediction": st.sampled_from(TEXTS).map(lambda text: {"type": "content", "content": text}),
    "return_tokens_as_token_ids": st.booleans(),
    "structured_outputs": st.sampled_from([{"regex": "[a-z ]{3,9}"}, {"choice": ["yes", "néin"]}, {"json_object": True}]),
    "speculative": st.just({"enabled": False})
    | st.sampled_from(_ON_CHAINS).map(lambda name: {"verifier": name, "trunk": 3})
    | st.just({"verifier": "traversal", "trunk": 1, "branches": 2, "depth": 2}),
}
_BESIDE_NO_GRAMMAR = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "logit_bias")
_SHARED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "seed": st.integers(0, 2**63 - 1),
        "max_tokens": st.integers(4, 14),
        "return_token_ids": st.just(True),
    },
    optional=_OPTIONAL,
)
_COMPLETIONS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(TEXTS) | st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2) | st.just([40, 41, 42, 43])},
    optional={"logprobs": st.integers(0, 3), "echo": st.booleans()},
)
_CHATS = st.fixed_dictionaries(
    {"messages": st.sampled_from(TEXTS).map(lambda text: [{"role": "user", "content": text}])},
    optional={"logprobs": st.booleans()},
)


@contextmanager
def client() -> Iterator[httpx.Client]:
    with served(app_of(real_engine())) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def answered(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer, or what its stream adds up to: `choices`, `usage` and `metrics`."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()  # type: ignore[no-any-return]
    *chunks, last = data_of(response.text)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        choices[part["index"]] = _added(choices.get(part["index"]), part)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"], "metrics": last["metrics"]}


def _added(whole: Any, part: Any) -> Any:
    """Return an answer so far with one more chunk: texts and lists are joined, other fields are replaced."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return {key: _added(whole.get(key), part.get(key)) for key in {**whole, **part}}
    if isinstance(whole, list) and isinstance(part, list):
        return whole + part
    if isinstance(whole, str) and isinstance(part, str) and whole != "assistant":
        return whole + part
    return whole if part is None else part


def output_of(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a choice, whichever endpoint and form it has."""
    message = choice.get("message") or choice.get("delta") or {}
    text = choice["text"] if "text" in choice else message.get("content") or ""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        logprobs = {key: value for key, value in logprobs.items() if value not in (None, [])} or None
    return {
        "text": text,
        "logprobs": logprobs,
        "ids": choice.get("token_ids"),
        "ends": (choice["finish_reason"], choice.get("stop_reason")),
    }


def require_same(one: Any, other: Any) -> None:
    """Compare all but numbers exactly: choices that meet in one pass or in two have log-probabilities up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_same(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            require_same(left, right)
    else:
        assert one == (pytest.approx(other, abs=1e-4) if isinstance(other, float) else other)


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """Return usage without the counts of cached tokens, which grow the second time."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def check_one(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    whole = answered(client, path, body)
    streamed = answered(client, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    require_same([output_of(choice) for choice in streamed["choices"]], [output_of(choice) for choice in whole["choices"]])
    assert (without_cached(streamed["usage"]), streamed["metrics"]) == (without_cached(whole["usage"]), whole["metrics"])
    for choice in whole["choices"]:
        prompt_ids = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        check_logprobs(prompt_ids, choice, is_echoed=bool(body.get("echo")))


@torch.inference_mode()
def check_logprobs(prompt_ids: list[int], choice: dict[str, Any], is_echoed: bool) -> None:
    """Compare with one plain pass of transformers over the prompt and the text."""
    if not choice["logprobs"]:
        return
    ids = [*prompt_ids, *choice["token_ids"]]
    if "content" in choice["logprobs"]:
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    else:
        logprobs = choice["logprobs"]["token_logprobs"]
    if is_echoed:
        assert logprobs[0] is None
    first = 1 if is_echoed else len(prompt_ids)
    probs_TV = torch.log_softmax(target_module()(torch.tensor([ids]), use_cache=False).logits[0].double(), -1)
    expected = [float(probs_TV[at - 1, ids[at]]) for at in range(first, len(ids))]
    assert logprobs[1 if is_echoed else 0 :] == pytest.approx(expected, abs=1e-4)


def check(num_examples: int) -> None:
    with client() as http:

        @settings(max_examples=num_examples)
        @given(shared=_SHARED, own=_COMPLETIONS | _CHATS)
        def holds(shared: dict[str, Any], own: dict[str, Any]) -> None:
            if "structured_outputs" in shared:  # it decides where a completion ends, and leaves no room for masks
                shared = {name: value for name, value in shared.items() if name not in _BESIDE_NO_GRAMMAR}
            check_one(http, "/v1/completions" if "prompt" in own else "/v1/chat/completions", {**shared, **own})

        holds()


def test_streams_equal_answers_with_target_logprobs(conformance_examples: int):
    check(conformance_examples)


BODY = {"model": MODEL, "prompt": TEXTS[1], "max_tokens": 12, "seed": 5, "logprobs": 1, "echo": True, "return_token_ids": True}


def logprobs_after_temperature(logits_NV: Any, nodes: Any, ids: Any, num_top: int) -> Any:
    return _LOGPROBS_OF(logits_NV / 0.8, nodes, ids, num_top)


def offsets_begin_anew(entries: Any, num_top: int) -> Any:
    return _LOGPROBS(entries, num_top).model_copy(update={"text_offset": [entry.offset - entries[0].offset for entry in entries]})


def last_piece_forgotten(self: Any, piece: Any, usage: Any) -> Any:
    return (chunk for chunk in _CHUNKS(self, piece, usage) if piece.finish is None)


_LOGPROBS_OF, _LOGPROBS, _CHUNKS = judge.logprobs_of, completion._logprobs, completion.CompletionFormat.chunks


@pytest.mark.parametrize(
    ("where", "mutant"),
    [
        ("engine.engine.logprobs_of", logprobs_after_temperature),
        ("server.answer_formats.completion._logprobs", offsets_begin_anew),
        ("server.answer_formats.completion.CompletionFormat.chunks", last_piece_forgotten),
    ],
)
def test_single_request_kills_mutants(where: str, mutant: Any, monkeypatch: pytest.MonkeyPatch):
    with client() as http:
        check_one(http, "/v1/completions", BODY)
        monkeypatch.setattr(where, mutant)
        with pytest.raises((AssertionError, KeyError)):
            check_one(http, "/v1/completions", BODY)
