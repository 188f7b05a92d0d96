"""Converts a request of Dynamo's frontend, a dict of token ids and options, to a request of the engine.

A field that cannot be honoured is refused by name. Knows Dynamo's fields and the engine's records. Does not import Dynamo.

After a worker is lost, the frontend sends the request to another one. The tokens that were generated are then the end of its
prompt, `max_tokens` and `min_tokens` are reduced by their number, and nothing marks them. Seeded noise depends on the absolute
position and a repetition penalty counts the prompt too, so the rest of the text is the same. The other penalties count generated
tokens alone. Requests with them repeat `max_tokens` in an annotation, which is sent again unchanged: the difference is the number
of generated tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.core.types import Grammar, GrammarKind, ModelInfo, Progress, Request, SamplingParams
from server.generation.encoding import longest_text
from server.generation.sampling_fields import chosen, require_distribution
from server.http.auth import cache_salt_of
from server.http.errors import ContextTooLong, InvalidRequest
from server.schemas.common import MAX_PRIORITY
from server.schemas.exact_json import exactly_dumped

SENT_LIMIT = "max_tokens:"  # the annotation that repeats a request's max_tokens
_EXACT = 1 << 53  # larger integers of a schema arrive as rounded floats

_STOPS = ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")
# Fields by section. The frontend uses the second group itself, or it changes no text. Any other field is refused unless null.
_HONOURED = {
    "": ("token_ids", "stop_conditions", "sampling_options", "output_options", "annotations", "routing", "extra_args"),
    "stop_conditions": ("max_tokens", "min_tokens", "ignore_eos", *_STOPS),
    "sampling_options": (
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed"),
        "guided_decoding",
    ),
    "output_options": ("logprobs",),
    "routing": ("cache_salt", "priority"),
    "extra_args": (),
}
_OF_FRONTEND = {
    "": (
        *("model", "eos_token_ids", "mdc_sum", "router_config_override", "router", "kv_hint"),
        *("migration_link", "jail_seed", "agent_context", "request_timestamp_ms"),
    ),
    "stop_conditions": ("stop",),
    "sampling_options": ("include_stop_str_in_output",),
    "output_options": ("skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"),
    "routing": (
        *("backend_instance_id", "decode_worker_id", "dp_rank", "expected_output_tokens", "priority_jump", "strict_priority"),
        *("allowed_worker_ids", "routing_constraints"),
    ),
    "extra_args": ("nvext",),
}
_ONE = ("n", "best_of")  # of sampling_options: 1 is the default
_GUIDES = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}


def engine_request(body: Mapping[str, Any], context_id: str, request_id: str, model: ModelInfo) -> Request:
    """Return the engine's request. `context_id` is the frontend's id, which a request keeps when it is sent again.

    Raises InvalidRequest. The grammar is not compiled yet.
    """
    sections = {name: body.get(name) or {} for name in _HONOURED if name}
    _refuse_unknown("", body)
    for name, section in sections.items():
        _refuse_unknown(name, section)
    ids = tuple(body["token_ids"])
    limit = sections["stop_conditions"].get("max_tokens")
    num_sent = _num_sent(body.get("annotations") or (), limit, len(ids))
    prompt, sent = ids[: len(ids) - num_sent], ids[len(ids) - num_sent :]
    _require_room(ids, limit, model)
    sampling = _sampling(sections, limit or longest_text(model) - len(ids), num_sent, model)
    if (sampling.presence_penalty or sampling.frequency_penalty) and not _limits(body.get("annotations") or ()):
        name = "presence_penalty" if sampling.presence_penalty else "frequency_penalty"
        reason = (
            f"{name} counts generated tokens, and Dynamo does not mark them when it moves a request to another worker. "
            f'Set max_tokens, and repeat it as "nvext": {{"annotations": ["{SENT_LIMIT}N"]}}'
        )
        raise InvalidRequest(reason, name)
    require_distribution(model, sampling, "guided_decoding")
    routing = sections["routing"]
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=sampling,
        cache_salt=cache_salt_of("", routing.get("cache_salt"), is_for_all=True),
        priority=max(-MAX_PRIORITY, min(-int(routing.get("priority") or 0), MAX_PRIORITY)),  # Dynamo's highest is served first
        progress=Progress(sent),
        drawn_seed=int.from_bytes(hashlib.sha256(context_id.encode()).digest()[:8]) >> 1,
    )


def _refuse_unknown(section: str, fields: Mapping[str, Any]) -> None:
    known = {*_HONOURED[section], *_OF_FRONTEND[section]}
    for name, value in fields.items():
        is_neutral = value is None or value is False or value in ({}, []) or (name in _ONE and value == 1)
        if name not in known and not is_neutral:
            raise InvalidRequest(f"{name} is not supported by this worker of Dynamo", name)


def _limits(annotations: Sequence[str]) -> list[str]:
    return [text.removeprefix(SENT_LIMIT) for text in annotations if text.startswith(SENT_LIMIT)]


def _num_sent(annotations: Sequence[str], limit: int | None, num_ids: int) -> int:
    """Return how many ids at the end of the prompt were generated; 0 without the annotation."""
    if not (limits := _limits(annotations)):
        return 0
    original = int(limits[0]) if limits[0].isascii() and limits[0].isdigit() else -1
    if len(limits) > 1 or limit is None or not 0 <= original - limit < num_ids:
        raise InvalidRequest(f"the annotation {SENT_LIMIT}{limits[0]} must repeat the request's max_tokens", "annotations")
    return original - limit


def _require_room(ids: tuple[int, ...], limit: int | None, model: ModelInfo) -> None:
    longest = longest_text(model)
    if not ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    if max(ids) >= model.vocab_size:
        raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {model.vocab_size}", "prompt")
    if len(ids) + (1 if limit is None else limit) > longest:
        wanted = "one more is needed" if limit is None else f"{limit} more are requested"
        too_long = f"prompt and answer together have at most {longest} tokens; the prompt has {len(ids)}, {wanted}"
        raise ContextTooLong(too_long, "prompt")


def _sampling(sections: Mapping[str, Mapping[str, Any]], limit: int, num_sent: int, model: ModelInfo) -> SamplingParams:
    stop, options, defaults = sections["stop_conditions"], sections["sampling_options"], model.defaults
    stops = [i for name in _STOPS for i in stop.get(name) or ()]
    min_tokens = stop.get("min_tokens") or 0
    return SamplingParams(
        temperature=chosen(_decimal(options.get("temperature")), defaults.temperature, 1.0),
        top_p=chosen(_decimal(options.get("top_p")), defaults.top_p, 1.0),
        top_k=max(0, chosen(options.get("top_k"), defaults.top_k, 0)),
        min_p=chosen(_decimal(options.get("min_p")), defaults.min_p, 0.0),
        presence_penalty=_decimal(options.get("presence_penalty")) or 0.0,
        frequency_penalty=_decimal(options.get("frequency_penalty")) or 0.0,
        repetition_penalty=chosen(_decimal(options.get("repetition_penalty")), defaults.repetition_penalty, 1.0),
        grammar=_grammar(options.get("guided_decoding")),
        seed=options.get("seed"),
        max_tokens=limit + num_sent,
        min_tokens=min_tokens + num_sent if min_tokens else 0,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        ignore_eos=bool(stop.get("ignore_eos")),
        num_logprobs=sections["output_options"].get("logprobs"),
    )


def _decimal(value: float | None) -> float | None:
    """Return the shortest decimal number that Dynamo, which has 32 bits for it, rounds to this value: .7 for .699999988."""
    if value is None or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))


def _grammar(guide: Mapping[str, Any] | None) -> Grammar | None:
    given = {name: value for name, value in (guide or {}).items() if value is not None}
    if not given:
        return None
    if len(given) > 1 or not _GUIDES.keys() >= given.keys():
        names = ", ".join(given.keys() - _GUIDES.keys()) or ", ".join(given)
        raise InvalidRequest(f"exactly one of {', '.join(_GUIDES)} is supported, without options, not {names}", "guided_decoding")
    name, value = next(iter(given.items()))
    if name == "json" and _has_rounded(value):
        raise InvalidRequest("Dynamo has rounded a number of the schema that is beyond 64 bits", "guided_decoding")
    return Grammar(_GUIDES[name], value if isinstance(value, str) else exactly_dumped(value))


def _has_rounded(value: Any) -> bool:
    """Return whether a schema has a float that may be a rounded integer."""
    if isinstance(value, dict | list):
        return any(map(_has_rounded, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and abs(value) >= _EXACT
