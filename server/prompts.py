"""From a validated request to samples for the engine: prompt ids, limits, seeds, stop strings.

Knows what the engine loaded and refuses, by the field's name, what it could not honour.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.keys import derived_seed
from engine.service import EngineUnavailable
from engine.types import ModelInfo, Request, SamplingParams, Speculation
from server.choice import Choice
from server.errors import ContextTooLong, InvalidRequest, Overloaded, UnknownModel
from server.generation import Generation, Sample
from server.runtime import Runtime
from server.sampling import sampling_of
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest, Prediction
from server.schemas.completion import CompletionRequest, Prompt
from server.text import TextError
from server.tokenizer_thread import TokenizerBusy, TokenizerClosed

_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI default of /v1/completions
_TOKENIZER_RETRY_S = 2.0

PromptIds = tuple[int, ...]


async def completion_generation(runtime: Runtime, body: CompletionRequest, tenant: str) -> Generation:
    """Return the samples of a completion request, submitted to the engine."""
    _check_model(runtime, body.model)
    _check_num_choices(runtime, len(body.prompts) * body.num_samples)
    prompts = [await _prompt_ids(runtime, prompt) for prompt in body.prompts]
    room = min(_room(runtime.engine.model, ids, "prompt", body.token_limit) for ids in prompts)
    max_tokens = min(_DEFAULT_COMPLETION_TOKENS, room) if body.token_limit is None else body.token_limit
    return await _submitted(runtime, body, prompts, max_tokens, tenant)


async def chat_generation(runtime: Runtime, body: ChatRequest, tenant: str) -> Generation:
    """Return the samples of a chat request, submitted to the engine."""
    _check_model(runtime, body.model)
    codec = runtime.codec
    _check_num_choices(runtime, body.num_samples)
    messages = [message.to_template() for message in body.messages]
    num_bytes = sum(len(message["content"].encode()) for message in messages)
    ids = await _encoded(runtime, num_bytes, lambda: codec.encode_chat(messages), "messages")
    room = _room(runtime.engine.model, ids, "messages", body.token_limit)
    return await _submitted(runtime, body, [ids], room if body.token_limit is None else body.token_limit, tenant)


def _check_model(runtime: Runtime, name: str) -> None:
    if name != runtime.settings.served_name:
        raise UnknownModel(name)


def _check_num_choices(runtime: Runtime, num_choices: int) -> None:
    limit = runtime.settings.most_choices
    if num_choices > limit:
        raise InvalidRequest(f"{num_choices} choices (prompts times n) are asked for; at most {limit} are given", "n")


async def _prompt_ids(runtime: Runtime, prompt: Prompt) -> PromptIds:
    if isinstance(prompt, str):
        return await _encoded(runtime, len(prompt.encode()), lambda: runtime.codec.encode(prompt), "prompt")
    return tuple(prompt)


async def _encoded(runtime: Runtime, num_bytes: int, encode: Callable[[], PromptIds], param: str) -> PromptIds:
    """Return the ids of that many bytes of text, encoded beside the event loop; refuse what cannot fit before it is encoded."""
    codec, longest = runtime.codec, _longest(runtime.engine.model)
    if num_bytes > longest * codec.longest_token_bytes:
        raise ContextTooLong(f"prompt and answer together have at most {longest} tokens; {param} has {num_bytes} bytes", param)
    try:
        return await codec.thread.run(num_bytes, encode)
    except TokenizerBusy as error:
        raise Overloaded(str(error), "tokenizer_busy", _TOKENIZER_RETRY_S) from error
    except TokenizerClosed as error:
        raise EngineUnavailable("the server is shutting down") from error
    except TextError as error:
        raise InvalidRequest(str(error), param) from error


def _longest(model: ModelInfo) -> int:
    """Return the most tokens that prompt and answer can have together."""
    return min(model.max_model_len, model.num_slots)


def _room(model: ModelInfo, ids: PromptIds, param: str, token_limit: int | None) -> int:
    """Return the tokens that can follow a prompt; refuse one that is empty, unknown to the model, or leaves too little."""
    if not ids:
        raise InvalidRequest("the prompt is empty", param)
    if max(ids) >= model.vocab_size:
        raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {model.vocab_size}", param)
    longest = _longest(model)
    room = longest - len(ids)
    if room < (token_limit or 1):
        wanted = f"{token_limit or 1} more are asked for" if token_limit else "one more is needed"
        raise ContextTooLong(
            f"prompt and answer together have at most {longest} tokens; the prompt has {len(ids)}, {wanted}", param
        )
    return room


async def _submitted(
    runtime: Runtime, body: GenerationRequest, prompts: Sequence[PromptIds], max_tokens: int, tenant: str
) -> Generation:
    """Return one sample for each prompt and k < n, in the order of choice indices, submitted."""
    model, codec = runtime.engine.model, runtime.codec
    _check_speculation(runtime, body)
    sampling = sampling_of(model, body, max_tokens)
    prediction_ids = await _prediction_ids(runtime, body.prediction)
    meter = runtime.metrics.requests.meter(body.num_samples, max_tokens)
    group = uuid.uuid4().hex
    speculation = body.speculative.to_speculation() if body.speculative else Speculation()
    samples = [
        Sample(
            Request(f"{group}-{index}", ids, _of_choice(sampling, index), speculation, prediction_ids, tenant),
            Choice(index, codec.detokenizer(), body.stops, codec.token_text, body.num_top_logprobs),
            meter.sample(len(ids)),
        )
        for index, ids in enumerate(ids for ids in prompts for _ in range(body.num_samples))
    ]
    return await Generation(runtime.engine, samples, meter, sum(map(len, prompts))).start()


async def _prediction_ids(runtime: Runtime, prediction: Prediction | None) -> PromptIds:
    """Return the ids of a prediction; refuse one that is longer than any answer."""
    if prediction is None or not (text := prediction.text):
        return ()
    ids = await _encoded(runtime, len(text.encode()), lambda: runtime.codec.encode_more(text), "prediction")
    if len(ids) > (longest := _longest(runtime.engine.model)):
        raise ContextTooLong(
            f"prompt and answer together have at most {longest} tokens; the prediction has {len(ids)}", "prediction"
        )
    return ids


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return how choice `index` is drawn: each of a request has noise of its own, also those of different prompts."""
    return sampling if sampling.seed is None else replace(sampling, seed=derived_seed(sampling.seed, index))


def _check_speculation(runtime: Runtime, body: GenerationRequest) -> None:
    shape = body.speculative and body.speculative.expansion
    if not shape or shape.is_plain:
        return
    if runtime.engine.model.drafter == "none":
        raise InvalidRequest("this server has no drafter, so no tree shape can be honoured", "speculative")
    limit = runtime.settings.max_tree_tokens
    num_nodes = min(shape.num_draft_tokens, body.speculative.max_nodes or shape.num_draft_tokens) if body.speculative else 0
    if num_nodes > limit:
        asked = f"a tree of {num_nodes} drafted tokens is asked for"
        raise InvalidRequest(f"{asked}; max_tree_tokens of this server is {limit}", "speculative")
