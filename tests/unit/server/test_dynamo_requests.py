"""Requests of Dynamo's frontend become the engine's requests, or are refused by name. Dynamo is not needed.

The bodies are as Dynamo 1.6.1 sends them: every field is there, and null unless the client set it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.core.types import Grammar, GrammarKind, ModelInfo, Request, RequestDefaults
from server.dynamo.token_request import engine_request
from server.http.errors import ContextTooLong, InvalidRequest

MODEL = ModelInfo("tiny", 100, 64, 640, (2,), "float32", "cpu", "ngram", "traversal", "plain")
ID = "8a2e1b7c-5a1e-4f8e-9a53-0f6b5e9f0c11"


def body(ids: tuple[int, ...] = (10, 20, 30), **sections: Any) -> dict[str, Any]:
    stop = {"max_tokens": 12, "stop": None, "stop_token_ids": None, "stop_token_ids_visible": None, "stop_token_ids_hidden": [2]}
    options = [
        "n",
        "best_of",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ]
    options += ["use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding"]
    output = ["logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"]
    sent: dict[str, Any] = {
        "model": "tiny",
        "token_ids": list(ids),
        "stop_conditions": {**stop, "min_tokens": None, "ignore_eos": None, "max_thinking_tokens": None},
        "sampling_options": dict.fromkeys(options),
        "output_options": dict.fromkeys(output),
        "eos_token_ids": [2],
        "mdc_sum": "fb2b",
        "annotations": [],
        "routing": {},
        "router_config_override": None,
    }
    for name, section in sections.items():
        sent[name] = {**sent.get(name, {}), **section} if isinstance(section, Mapping) else section
    return sent


def accepted(sent: Mapping[str, Any], model: ModelInfo = MODEL) -> Request:
    return engine_request(sent, ID, "request", model)


def sent_again(sent: dict[str, Any], generated: tuple[int, ...]) -> dict[str, Any]:
    """Return the request as Dynamo's frontend sends it to the next worker."""
    stop = dict(sent["stop_conditions"])
    for name in ("max_tokens", "min_tokens"):
        stop[name] = stop[name] and max(0, stop[name] - len(generated))
    return {**sent, "token_ids": [*sent["token_ids"], *generated], "stop_conditions": stop}


@pytest.mark.parametrize("written", [0.7, 0.1, 1.0, 0.95, 1e-3, 1.7, 0.0])
def test_decimals_are_restored_from_32_bits(written: float) -> None:
    """Dynamo sends .7 as .699999988: unchanged, a seeded text would differ from that over our own HTTP."""
    import numpy as np

    rounded = float(np.float32(written))
    options = {"temperature": rounded, "presence_penalty": -rounded}
    sampling = accepted(body(sampling_options=options, annotations=["max_tokens:12"])).sampling
    assert (sampling.temperature, sampling.presence_penalty) == (written, -written)


def test_a_64_bit_number_is_not_changed() -> None:
    assert accepted(body(sampling_options={"temperature": 0.7})).sampling.temperature == 0.7


def test_missing_fields_are_the_models_defaults() -> None:
    defaults = RequestDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    sampling = accepted(body(), replace(MODEL, defaults=defaults)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    own = accepted(body(sampling_options={"top_k": -1, "repetition_penalty": 1.0}), replace(MODEL, defaults=defaults)).sampling
    assert (own.top_k, own.repetition_penalty) == (0, 1.0)


@pytest.mark.parametrize(("section", "name", "value"), [
    ("sampling_options", "n", 2),
    ("sampling_options", "best_of", 3),
    ("sampling_options", "use_beam_search", True),
    ("sampling_options", "length_penalty", 0.5),
    ("sampling_options", "dry_multiplier", 0.8),
    ("stop_conditions", "max_thinking_tokens", 5),
    ("stop_conditions", "bad_words", ["x"]),
    ("output_options", "prompt_logprobs", 1),
    ("output_options", "prompt_logprobs", 0),
    ("routing", "lora_name", "legal"),
    ("extra_args", "logit_bias", {"5": 1}),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused(section: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is not supported"):
        accepted({**body(), section: {name: value}})


@pytest.mark.parametrize("name", ["prompt_embeds", "multi_modal_data", "prefill_result", "bootstrap_info", "invented"])
def test_unknown_top_fields_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        accepted({**body(), name: {"a": 1}})
    accepted({**body(), name: None})


def test_neutral_and_frontend_fields_are_accepted() -> None:
    stop = {"stop": ["END"], "max_thinking_tokens": None}
    request = accepted(body(sampling_options={"n": 1, "best_of": 1, "use_beam_search": False}, stop_conditions=stop))
    assert request.sampling.max_tokens == 12


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_need_the_repeated_limit(name: str) -> None:
    """A resumed text must not forget which of its tokens were generated: the penalty counts them."""
    sent = body(sampling_options={name: 0.5})
    with pytest.raises(InvalidRequest, match=f"{name} counts generated tokens"):
        accepted(sent)
    request = accepted(sent_again({**sent, "annotations": ["max_tokens:12"]}, (40, 50)))
    assert (request.prompt_ids, request.progress.token_ids, request.sampling.max_tokens) == ((10, 20, 30), (40, 50), 12)


@pytest.mark.parametrize("annotation", ["max_tokens:11", "max_tokens:15", "max_tokens:x", "max_tokens:-1", "max_tokens:"])
def test_a_wrong_repeated_limit_is_refused(annotation: str) -> None:
    with pytest.raises(InvalidRequest, match="must repeat"):
        accepted(body(annotations=[annotation]))


def test_a_repeated_limit_needs_a_limit() -> None:
    with pytest.raises(InvalidRequest, match="must repeat"):
        accepted(body(annotations=["max_tokens:12"], stop_conditions={"max_tokens": None}))


@pytest.mark.parametrize("annotations", [[], ["max_tokens:12"]])
@pytest.mark.parametrize("num_sent", [0, 1, 4, 11])
def test_a_repeated_request_continues_its_text(annotations: list[str], num_sent: int) -> None:
    """Prompt and progress have the same ids, and the limits end at the same absolute position."""
    sent = body(annotations=annotations, stop_conditions={"min_tokens": 6}, sampling_options={"temperature": 1.0})
    first, again = accepted(sent), accepted(sent_again(sent, tuple(range(50, 50 + num_sent))))
    assert (*again.prompt_ids, *again.progress.token_ids) == (10, 20, 30, *range(50, 50 + num_sent))
    least = len(again.prompt_ids) + again.sampling.min_tokens
    assert len(again.prompt_ids) + again.sampling.max_tokens == len(first.prompt_ids) + first.sampling.max_tokens
    assert least == len(first.prompt_ids) + first.sampling.min_tokens or num_sent >= 6
    assert again.seed == first.seed  # also without a seed of the client's


def test_requests_without_a_seed_have_different_noise() -> None:
    assert engine_request(body(), "a", "1", MODEL).seed != engine_request(body(), "b", "2", MODEL).seed
    assert accepted(body(sampling_options={"seed": -5})).seed == -5


def test_a_missing_limit_is_the_room_left() -> None:
    assert accepted(body(stop_conditions={"max_tokens": None})).sampling.max_tokens == 61
    again = accepted(body((1, 2, 3, 4, 5), stop_conditions={"max_tokens": None}))
    assert again.sampling.max_tokens == 59


@pytest.mark.parametrize(("ids", "limit"), [((1,) * 60, 5), ((1,) * 64, None), ((1,) * 70, 1)])
def test_a_text_beyond_the_context_is_refused(ids: tuple[int, ...], limit: int | None) -> None:
    with pytest.raises(ContextTooLong):
        accepted(body(ids, stop_conditions={"max_tokens": limit}))


@pytest.mark.parametrize("ids", [(), (5, 100)])
def test_impossible_prompts_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        accepted(body(ids))


@pytest.mark.parametrize(("guide", "grammar"), [
    ({"json": {"type": "object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    ({"json": '{"type": "array"}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}')),
    ({"regex": "a+", "json": None}, Grammar(GrammarKind.REGEX, "a+")),
    ({"choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a","b"]')),
    ({"grammar": "start: /a/"}, Grammar(GrammarKind.LARK, "start: /a/")),
    ({"json": {"const": 9007199254740993}}, Grammar(GrammarKind.JSON_SCHEMA, '{"const":9007199254740993}')),
    ({"json": {"maximum": 2.5}}, Grammar(GrammarKind.JSON_SCHEMA, '{"maximum":2.5}')),
])  # fmt: skip
def test_guided_decoding_becomes_a_grammar(guide: dict[str, Any], grammar: Grammar) -> None:
    assert accepted(body(sampling_options={"guided_decoding": guide})).sampling.grammar == grammar


@pytest.mark.parametrize("guide", [
    {"regex": "a", "choice": ["a"]},
    {"json": {"type": "object"}, "whitespace_pattern": " *"},
    {"structural_tag": {"a": 1}},
    {"json": {"properties": {"a": {"enum": [1.2345678901234568e22]}}}},
])  # fmt: skip
def test_guided_decoding_is_refused_where_inexact(guide: dict[str, Any]) -> None:
    """Dynamo rounds a schema's integers beyond 64 bits, and another identifier would be forced."""
    with pytest.raises(InvalidRequest) as refusal:
        accepted(body(sampling_options={"guided_decoding": guide}))
    assert refusal.value.param == "guided_decoding"


def test_stop_tokens_salt_and_priority_arrive() -> None:
    request = accepted(body(stop_conditions={"stop_token_ids": [7, 2]}, routing={"cache_salt": "s", "priority": 3}))
    assert request.sampling.stop_token_ids == (7, 2)
    assert request.priority == -3  # the engine serves the lowest first
    assert request.cache_salt != accepted(body(routing={"cache_salt": "t"})).cache_salt
    assert accepted(body()).cache_salt == ""
