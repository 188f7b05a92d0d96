"""Unknown fields of a request: which are ignored, and which are refused (docs/decisions has the reasons).

Knows names and values at the top level of a request. Inside a known field every unknown field is refused.
"""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from server.http.errors import InvalidRequest
from server.schemas.anthropic import MessagesRequest
from server.schemas.chat import ChatRequest
from server.schemas.completion import CompletionRequest
from server.schemas.responses import ResponsesRequest

MAX_IGNORED = 16
_VALID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # safe in a header and in a log line
_LIKENESS = 0.8  # difflib's ratio from which a name counts as a misspelling of another

# A field that one endpoint honours is never ignored by another. Otherwise a client would assume, for example, that its seed is
# used.
_HARMLESS = frozenset(
    {
        *("metadata", "priority", "request_id", "service_tier", "store", "user", "verbosity"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
_REQUESTS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
_OF_GENERATION = {name for request in _REQUESTS for name in request.model_fields} - _HARMLESS

# Fields of other servers that change the text or the reported data, with the values that change nothing. Fields that only
# adjust another one (mirostat_tau, xtc_threshold, dry_base) are not listed: without that field they change nothing.
_OUTPUT_CHANGING: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    **{"audio": (), "modalities": (["text"],), "moderation": ()},
    **{"reasoning": (), "web_search_options": (), "max_output_tokens": ()},
    # vLLM
    **{"use_beam_search": (False,), "length_penalty": (1.0,), "early_stopping": (False,), "logits_processors": ([],)},
    **{"spaces_between_special_tokens": (True,), "prompt_embeds": (), "logprob_token_ids": (), "kv_transfer_params": ()},
    **{"guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": ()},
    **{"structural_tag": (), "vllm_xargs": ({},), "repetition_detection": (), "thinking_token_budget": ()},
    **{"mm_processor_kwargs": ({},), "documents": ([],), "reasoning_budget": (-1,), "lora_request": ()},
    # SGLang
    **{"regex": (), "ebnf": (), "json_schema": (), "stop_regex": ([],), "no_stop_trim": (False,), "lora_path": ()},
    **{"custom_logit_processor": (), "return_hidden_states": (False,), "max_new_tokens": (), "min_new_tokens": (0,)},
    # llama.cpp
    **{"mirostat": (0,), "mirostat_mode": (0,), "dynatemp_range": (0,), "xtc_probability": (0,), "dry_multiplier": (0,)},
    **{"tfs_z": (1,), "tfs": (1,), "typical": (1,), "top_n_sigma": (-1,), "nsigma": (0,), "adaptive_target": (-1,)},
    **{"repeat_penalty": (1,), "samplers": (), "sampler_order": (), "grammar": ("",), "n_predict": (), "n_probs": (0,)},
    **{"post_sampling_probs": (False,), "min_keep": (0, 1), "t_max_predict_ms": (0,), "penalize_nl": (False,), "lora": ([],)},
    # TensorRT-LLM, transformers, TGI and others
    **{"beam_width": (1,), "num_beams": (1,), "beam_search_diversity_rate": (0,), "diversity_penalty": (0,), "top_p_min": ()},
    **{"top_p_decay": (1,), "top_p_reset_ids": (), "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,)},
    **{"embedding_bias": (), "end_id": (), "do_sample": (True,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_a": (0,)},
    **{"penalty_alpha": (0,), "guidance_scale": (1,), "negative_prompt": ("",), "watermark": (False,), "suppress_tokens": ([],)},
    **{"max_length": (), "min_length": (0,), "num_predict": (), "stop_sequences": ([],), "truncate": (), "truncation": ()},
    **{"return_logprob": (False,), "logprob_start_len": (), "top_logprobs_num": (0,), "transforms": ([],), "format": ("",)},
    **{"system": ("",), "instructions": ("",), "input": (), "inputs": (), "images": ([],), "template": ("",), "raw": (False,)},
    **{"think": (False,), "thinking": (), "enable_thinking": (False,), "random_seed": (), "safe_prompt": (False,)},
    **{"stop_strings": ([],), "stop_words": ([],), "stop_sequence": ([],), "eos_token_id": (), "forced_eos_token_id": ()},
    **{"bad_words_ids": ([],), "force_words_ids": ([],), "sequence_bias": ({},), "begin_suppress_tokens": ([],)},
    **{"num_return_sequences": (1,), "num_beam_groups": (1,), "renormalize_logits": (False,), "return_full_text": (False,)},
    **{"rep_pen": (1,), "repeat_last_n": (-1,), "temperature_last": (False,), "dynamic_temperature": (False,)},
    **{"sampler_priority": (), "grammar_string": ("",), "ban_eos_token": (False,), "custom_token_bans": ("",)},
    **{"add_bos_token": (True,), "response_schema": (), "response_mime_type": ("text/plain",), "n_indent": (0,)},
    # objects in which a client may nest sampling fields
    **{"extra_body": ({},), "options": ({},), "parameters": ({},), "sampling_params": ({},), "generation_config": ({},)},
    **{"smoothing_factor": (0,), "banned_tokens": ([],), "banned_strings": ([],), "forced_bos_token_id": (), "bad": ([],)},
}


def without_unknown(
    body: Mapping[str, Any], known: Collection[str], ignorable: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the known fields, and the names of the ignored fields; raise InvalidRequest for a field that may change the output.

    Fields of the names `ignorable` are ignored with any value.
    """
    unknown = [name for name in body if name not in known]
    if len(unknown) > MAX_IGNORED:
        raise InvalidRequest(f"more than {MAX_IGNORED} unknown parameters", unknown[MAX_IGNORED])
    for name in unknown:
        if name not in ignorable:
            _require_harmless(name, body[name], known)
    return {name: value for name, value in body.items() if name in known}, unknown


def _require_harmless(name: str, value: object, known: Collection[str]) -> None:
    """Raise InvalidRequest for a field that changes the output, for a misspelling of a known field, and for an invalid name."""
    if name in _OUTPUT_CHANGING:
        neutral = (None, *_OUTPUT_CHANGING[name])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            raise InvalidRequest(f"{name}: not supported by this server; accepted: {', '.join(map(json.dumps, neutral))}", name)
    elif name in _OF_GENERATION:
        if value is not None:
            raise InvalidRequest(f"{name}: not honoured by this endpoint; accepted: null", name)
    elif meant := _meant(name, known):
        raise InvalidRequest(f"unknown parameter: {name}; is {meant} meant?", name)
    elif not _VALID_NAME.fullmatch(name):
        raise InvalidRequest(f"unknown parameter: {name or repr(name)}", name or None)


def _meant(name: str, known: Collection[str]) -> str | None:
    """Return the known field with a similar name, or None."""
    plain = {_plain(one): one for one in known}
    likest = difflib.get_close_matches(_plain(name[:64]), plain, n=1, cutoff=_LIKENESS)
    return plain[likest[0]] if likest else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
