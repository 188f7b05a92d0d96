"""Converts a validated request to samples for the engine: prompt ids, limits, seeds, stop strings.

Knows what the engine loaded. Refuses fields that it could not honour, by their names.
"""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.core.rng_keys import derived_seed
from engine.core.types import ModelInfo, Request, SamplingParams, Speculation, group_of
from server.generation.encoding import PromptIds, encoded_chat, encoded_text, encoded_words, longest_text, require_served
from server.generation.generation import Generation, Sample
from server.generation.prompt_echo import EchoOptions, PromptEcho
from server.generation.sample import Choice
from server.generation.sampling import sampling_of
from server.http.auth import cache_salt_of
from server.http.errors import ContextTooLong, InvalidRequest
from server.reasoning.use import NUM_END_IDS, reasoning_use
from server.runtime import Runtime
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest, Prediction
from server.schemas.completion import CompletionRequest, Prompt
from server.text.codec import TextCodec
from server.tool_calls.use import NO_TOOLS, ToolUse, tool_use

_MAX_PROMPT_SCORES = 1 << 15  # log-probabilities of prompt tokens in one answer: writing them blocks the event loop
_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI default of /v1/completions


async def completion_generation(runtime: Runtime, body: CompletionRequest, tenant: str) -> Generation:
    """Return the samples of a completion request, submitted to the engine."""
    require_served(runtime, body.model)
    _check_num_choices(runtime, len(body.prompts) * body.num_samples, "n" if body.best_of is None else "best_of")
    _check_answer_tokens(runtime, body, "max_tokens")
    key = group_of(tenant)
    prompts = [await _prompt_ids(runtime, key, prompt, body.add_special_tokens is not False) for prompt in body.prompts]
    num_default = _default_tokens(runtime, _DEFAULT_COMPLETION_TOKENS)
    num_wanted = num_default if body.token_limit is None else body.token_limit
    prompts = [_truncated(runtime.engine.model, ids, body.truncate_prompt_tokens, num_wanted) for ids in prompts]
    room = min(_room(runtime.engine.model, ids, "prompt", body.token_limit) for ids in prompts)
    return await _submitted(runtime, body, prompts, min(num_wanted, room), tenant)


async def chat_generation(runtime: Runtime, body: ChatRequest, tenant: str, param: str = "messages") -> Generation:
    """Return the samples of a chat request, submitted to the engine; errors name the conversation `param`."""
    require_served(runtime, body.model)
    _check_num_choices(runtime, body.num_samples, "n")
    newer = "max_completion_tokens" if param == "messages" else "max_output_tokens"
    _check_answer_tokens(runtime, body, "max_tokens" if body.max_completion_tokens is None else newer)
    use = tool_use(runtime.tool_support, body)
    if use.grammar is not None and body.grammar is not None:  # both are in one grammar; this error names the format
        await runtime.grammars.require(body.grammar, body.grammar_param, group_of(tenant))
    ids = await encoded_chat(runtime, group_of(tenant), body.messages, body.offered_tools, body.form, param)
    most = runtime.engine.model.defaults.max_tokens
    ids = _truncated(runtime.engine.model, ids, body.truncate_prompt_tokens, body.token_limit or most or 1)
    room = _room(runtime.engine.model, ids, param, body.token_limit)
    num_wanted = _default_tokens(runtime, room) if body.token_limit is None else body.token_limit
    grammar_param = "tools" if use.grammar else body.grammar_param if body.grammar else None
    prompt_end = partial(runtime.codec.decode, ids[-NUM_END_IDS:], skips_special=False)
    use = replace(use, reasoning=reasoning_use(runtime.reasoning_support, body, grammar_param, prompt_end))
    return await _submitted(runtime, body, [ids], num_wanted, tenant, use)


def _default_tokens(runtime: Runtime, most: int) -> int:
    """Return the token limit of a request without its own: the least of `most`, the model's and the server's."""
    limits = (most, runtime.engine.model.defaults.max_tokens, runtime.settings.max_answer_tokens)
    return min(limit for limit in limits if limit is not None)


def _check_num_choices(runtime: Runtime, num_choices: int, param: str) -> None:
    limit = runtime.settings.most_choices
    if num_choices > limit:
        raise InvalidRequest(f"{num_choices} choices (prompts times {param}) are requested; the limit is {limit}", param)


def _check_answer_tokens(runtime: Runtime, body: GenerationRequest, param: str) -> None:
    limit = runtime.settings.max_answer_tokens
    if limit is not None and (body.token_limit or 0) > limit:
        raise InvalidRequest(f"{body.token_limit} tokens are requested; max_answer_tokens of this server is {limit}", param)


async def _prompt_ids(runtime: Runtime, key: str, prompt: Prompt, adds_special_tokens: bool) -> PromptIds:
    if isinstance(prompt, str):
        return await encoded_text(runtime, key, prompt, "prompt", adds_special_tokens)
    return tuple(prompt)


def _truncated(model: ModelInfo, ids: PromptIds, num_kept: int | None, num_wanted: int) -> PromptIds:
    """Return the last `num_kept` tokens of a prompt; for -1 as many as leave room for `num_wanted` tokens."""
    if num_kept is None:
        return ids
    return ids[-(max(1, longest_text(model) - num_wanted) if num_kept == -1 else num_kept) :]


def _room(model: ModelInfo, ids: PromptIds, param: str, token_limit: int | None) -> int:
    """Return how many tokens can follow a prompt. Refuse a prompt that is empty, has unknown ids, or leaves too little room."""
    if not ids:
        raise InvalidRequest("the prompt is empty", param)
    if max(ids) >= model.vocab_size:
        raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {model.vocab_size}", param)
    longest = longest_text(model)
    room = longest - len(ids)
    if room < (1 if token_limit is None else token_limit):
        wanted = "one more is needed" if token_limit is None else f"{token_limit} more are requested"
        raise ContextTooLong(
            f"prompt and answer together have at most {longest} tokens; the prompt has {len(ids)}, {wanted}", param
        )
    return room


async def _submitted(
    runtime: Runtime,
    body: GenerationRequest,
    prompts: Sequence[PromptIds],
    max_tokens: int,
    tenant: str,
    use: ToolUse = NO_TOOLS,
) -> Generation:
    """Submit one sample for each prompt and k < n, in the order of choice indices."""
    model, key = runtime.engine.model, group_of(tenant)
    _check_speculation(runtime, body)
    _check_prompt_scores(body, sum(map(len, prompts)))
    bad_words = await encoded_words(runtime, key, body.bad_words, "bad_words") if body.bad_words else ()
    grammar, param = (use.grammar, "tools") if use.grammar else (body.grammar, body.grammar_param)
    grammar = use.reasoning.constrained(grammar)
    sampling = sampling_of(model, body, max_tokens, bad_words, grammar, param)
    if grammar is not None:
        await runtime.grammars.require(grammar, param, key)
    prediction_ids = await _prediction_ids(runtime, key, body.prediction)
    meter = runtime.metrics.requests.meter(body.num_answers, max_tokens)
    group = uuid.uuid4().hex
    speculation = body.speculative.to_speculation() if body.speculative else Speculation()
    samples = [
        Sample(
            Request(
                request_id=f"{group}-{index}",
                prompt_ids=ids,
                sampling=_of_choice(sampling, index),
                speculation=speculation,
                prediction_ids=prediction_ids,
                tenant=tenant,
                cache_salt=cache_salt_of(tenant, body.cache_salt, runtime.settings.prefix_cache == "all"),
                priority=body.priority or 0,
            ),
            _choice(runtime.codec, model, body, use, index, ids),
            meter.sample(len(ids)),
        )
        for index, ids in enumerate(ids for ids in prompts for _ in range(body.num_samples))
    ]
    limits = runtime.time_limits.with_request_limit(body.timeout_s)
    return Generation(runtime.engine, samples, meter, sum(map(len, prompts)), limits).start()


def _choice(
    codec: TextCodec, model: ModelInfo, body: GenerationRequest, use: ToolUse, index: int, prompt_ids: PromptIds
) -> Choice:
    """Return the choice that builds the text of one sample."""
    echo = EchoOptions(body.gives_prompt_back, body.num_top_logprobs, body.prompt_logprobs)
    token_text = codec.named_token_text if body.return_tokens_as_token_ids else codec.token_text
    prompt = PromptEcho(prompt_ids, token_text, echo)
    detokenizer = codec.detokenizer(body.skip_special_tokens is not False, use.markers)
    keeps_stop = bool(body.include_stop_str_in_output)
    named_stop_ids = set(body.stop_token_ids or ()) - (set() if body.ignore_eos else set(model.eos_token_ids))
    options = (body.num_top_logprobs, keeps_stop, prompt, named_stop_ids, body.is_traced, use.reader(), body.min_tokens or 0)
    return Choice(index, detokenizer, body.stops, token_text, *options)


async def _prediction_ids(runtime: Runtime, key: str, prediction: Prediction | None) -> PromptIds:
    """Return the ids of a prediction; refuse a prediction that is longer than any answer."""
    if prediction is None or not (text := prediction.text):
        return ()
    ids = await encoded_text(runtime, key, text, "prediction", adds_special_tokens=False)
    if len(ids) > (longest := longest_text(runtime.engine.model)):
        raise ContextTooLong(
            f"prompt and answer together have at most {longest} tokens; the prediction has {len(ids)}", "prediction"
        )
    return ids


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling parameters of choice `index`. Each choice of a request has a seed of its own, across prompts too."""
    return sampling if sampling.seed is None else replace(sampling, seed=derived_seed(sampling.seed, index))


def _check_prompt_scores(body: GenerationRequest, num_prompt_tokens: int) -> None:
    """Refuse so many log-probabilities of prompt tokens that writing them would block the event loop."""
    if body.num_prompt_logprobs is None:
        return
    num_scores = num_prompt_tokens * body.num_samples * (1 + body.num_prompt_logprobs)
    if num_scores > _MAX_PROMPT_SCORES:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        text = f"{num_scores} log-probabilities of prompt tokens are requested; the limit is {_MAX_PROMPT_SCORES}"
        raise InvalidRequest(text, param)


def _check_speculation(runtime: Runtime, body: GenerationRequest) -> None:
    shape = body.speculative and body.speculative.expansion
    if not shape or shape.is_plain:
        return
    if runtime.engine.model.drafter == "none":
        raise InvalidRequest("this server has no drafter, so no tree shape can be honoured", "speculative")
    limit = runtime.settings.max_tree_tokens
    num_nodes = min(shape.num_draft_tokens, body.speculative.max_nodes or shape.num_draft_tokens) if body.speculative else 0
    if num_nodes > limit:
        text = f"a tree of {num_nodes} drafted tokens is requested; max_tree_tokens of this server is {limit}"
        raise InvalidRequest(text, "speculative")
