"""Converts a validated request to samples in the engine, in four stages. Each refuses by name a field that it cannot honour."""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.core.rng_keys import derived_seed
from engine.core.types import Grammar, Request, SamplingParams, Speculation, group_of
from server.generation.encoding import (
    PromptIds,
    encoded_chat,
    encoded_infill,
    encoded_prompt,
    encoded_text,
    encoded_words,
    longest_text,
    require_infill,
    require_served,
)
from server.generation.generation import Generation, Sample
from server.generation.prompt_echo import EchoOptions, PromptEcho
from server.generation.sample import Choice
from server.generation.sampling_fields import require_distribution, sampling_of
from server.http.auth import cache_salt_of
from server.http.errors import ContextTooLong, InvalidRequest
from server.reasoning.request_reasoning import NO_REASONING, NUM_END_IDS, ReasoningUse, reasoning_use
from server.runtime import Runtime
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest
from server.schemas.completion import CompletionRequest
from server.schemas.infill import FillRequest, InfillRequest
from server.schemas.speculative import SpeculativeOptions
from server.text.parsed_text import CallReader
from server.tool_calls.request_tools import NO_TOOLS, ToolUse, tool_use

_MAX_PROMPT_SCORES = 1 << 15  # log-probabilities of prompt tokens in one answer: writing them blocks the event loop
_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI default of /v1/completions
_LEAST_MIDDLE = 128  # tokens that a prompt cut to fit leaves for the answer, if the request has no limit


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of a request. Errors name them `param`, its limit of tokens `limit_param`, its number of choices `num_param`.

    `encode` receives the most tokens of a prompt that leave room for the answer. `default_tokens` is the limit of a request
    without its own; None is the room that is left. `most_tokens` replaces all defaults, also the model's and the server's.
    `tools` refuses unsupported tools. `reasoning` receives the ids of the prompt and the field that requests a grammar, if there
    is one. `infill_param` requests the middle of a text. `reader` may end the text. `continues`: the text goes on with that of
    the prompt.
    """

    param: str
    limit_param: str
    num_param: str
    num_prompts: int
    encode: Callable[[int], Awaitable[list[PromptIds]]]
    default_tokens: int | None = None
    most_tokens: int | None = None
    tools: Callable[[], ToolUse] = lambda: NO_TOOLS
    reasoning: Callable[[PromptIds, str | None], ReasoningUse] = lambda _ids, _param: NO_REASONING
    infill_param: str | None = None
    reader: CallReader | None = None
    continues: bool = False


async def completion_generation(
    runtime: Runtime, body: CompletionRequest, tenant: str, default_tokens: int | None = _DEFAULT_COMPLETION_TOKENS
) -> Generation:
    """Return the samples of a completion request, submitted to the engine; `default_tokens` is its limit without its own."""

    async def encode(_: int) -> list[PromptIds]:
        return [await encoded_prompt(runtime, group_of(tenant), body, prompt) for prompt in body.prompts]

    num_param, infill_param = "n" if body.best_of is None else "best_of", None if body.suffix is None else "suffix"
    param, num_prompts = "prompt", len(body.prompts)
    source = PromptSource(
        param, "max_tokens", num_param, num_prompts, encode, default_tokens, infill_param=infill_param, continues=True
    )
    return await _Submission(runtime, body, tenant, source).run()


async def chat_generation(
    runtime: Runtime, body: ChatRequest, tenant: str, param: str = "messages", most_tokens: int | None = None
) -> Generation:
    """Return the samples of a chat request, submitted to the engine; errors name the conversation `param`.

    `most_tokens` is the token limit of a request without its own. Unlike a limit of its own, it may exceed the room that is left.
    """

    async def encode(_: int) -> list[PromptIds]:
        return [await encoded_chat(runtime, group_of(tenant), body.messages, body.offered_tools, body.form, param)]

    def reasoning(ids: PromptIds, grammar_param: str | None) -> ReasoningUse:
        prompt_end = partial(runtime.codec.decode, ids[-NUM_END_IDS:], skips_special=False)
        return reasoning_use(runtime.reasoning_support, body, grammar_param, prompt_end)

    tools = partial(tool_use, runtime.tool_support, body)
    newer = "max_completion_tokens" if param == "messages" else "max_output_tokens"
    limit_param = "max_tokens" if body.max_completion_tokens is None else newer
    continues = body.form.continues_last
    source = PromptSource(
        param, limit_param, "n", 1, encode, most_tokens=most_tokens, tools=tools, reasoning=reasoning, continues=continues
    )
    return await _Submission(runtime, body, tenant, source).run()


async def infill_generation(
    runtime: Runtime, body: InfillRequest, filling: FillRequest, tenant: str, reader: CallReader
) -> Generation:
    """Return the sample of an infill request, submitted to the engine as `filling`; `reader` may end its text."""
    is_cut = False

    async def encode(most: int) -> list[PromptIds]:
        nonlocal is_cut
        most -= 0 if filling.max_tokens is not None else min(_LEAST_MIDDLE, most // 4)
        ids, is_cut = await encoded_infill(runtime, group_of(tenant), body, most)
        return [ids]

    source = PromptSource("input_prefix", "n_predict", "n", 1, encode, infill_param="input_suffix", reader=reader, continues=True)
    generation = await _Submission(runtime, filling, tenant, source).run()
    generation.is_prompt_cut = is_cut
    return generation


@dataclass(frozen=True, slots=True)
class _Submission:
    """One request on its way to the engine. Requests of the endpoints differ in their source alone."""

    runtime: Runtime
    body: GenerationRequest
    tenant: str
    source: PromptSource

    @property
    def _begins_text(self) -> bool:
        """Whether an answer is a text of its own, whose first space may be left out."""
        return not self.source.continues and self.body.grammar is None

    async def run(self) -> Generation:
        use, sampling = await self._check()
        prompts, bad_words, prediction = await self._encode(sampling.max_tokens)
        use, sampling = await self._fit(use, prompts, prediction, replace(sampling, bad_words=bad_words))
        return self._submit(use, prompts, prediction, sampling)

    async def _check(self) -> tuple[ToolUse, SamplingParams]:
        """Check all but grammars that needs no encoded text. The sampling parameters have no bad words yet, and the most tokens
        possible.
        """
        body, source, settings = self.body, self.source, self.runtime.settings
        require_served(self.runtime, body.model)
        if (num_choices := source.num_prompts * body.num_samples) > (most := settings.most_choices):
            reason = f"{num_choices} choices (prompts times {source.num_param}) are requested; the limit is {most}"
            raise InvalidRequest(reason, source.num_param)
        if settings.max_answer_tokens is not None and (body.token_limit or 0) > settings.max_answer_tokens:
            reason = f"{body.token_limit} tokens are requested; max_answer_tokens of this server is {settings.max_answer_tokens}"
            raise InvalidRequest(reason, source.limit_param)
        use, model = source.tools(), self.runtime.engine.model
        if body.speculative is not None:
            _check_tree(body.speculative, model.drafter, settings.max_tree_tokens)
        defaults = (source.default_tokens, model.defaults.max_tokens, settings.max_answer_tokens)
        limits = defaults if (own := source.most_tokens or body.token_limit) is None else (own,)
        max_tokens = min([longest_text(model), *(limit for limit in limits if limit is not None)])
        end_ids = require_infill(self.runtime, source.infill_param).end_ids if source.infill_param else ()
        sampling = sampling_of(model, body, max_tokens, use.grammar or body.grammar, end_ids)
        require_distribution(model, sampling, use.grammar_param or body.grammar_param)
        return use, sampling

    async def _encode(self, max_tokens: int) -> tuple[list[PromptIds], tuple[PromptIds, ...], PromptIds]:
        """Return the ids of the prompts, truncated if requested, of the bad words and of the prediction."""
        body, runtime, key = self.body, self.runtime, group_of(self.tenant)
        longest, num_kept = longest_text(runtime.engine.model), body.truncate_prompt_tokens or 0
        most = max(1, longest - (max_tokens if max_tokens < longest else 1))
        prompts = [ids[-(most if num_kept == -1 else num_kept) :] for ids in await self.source.encode(most)]
        bad_words = await encoded_words(runtime, key, body.bad_words, "bad_words") if body.bad_words else ()
        expected = body.prediction.text if body.prediction else ""
        begins = self._begins_text
        prediction = await encoded_text(runtime, key, expected, "prediction", False, begins) if expected else ()
        return prompts, bad_words, prediction

    async def _fit(
        self, use: ToolUse, prompts: Sequence[PromptIds], prediction: PromptIds, sampling: SamplingParams
    ) -> tuple[ToolUse, SamplingParams]:
        """Check all that needs encoded texts, and the grammar, which may begin behind reasoning.

        Return the use with reasoning, and the sampling parameters with the room left.
        """
        body, model, param = self.body, self.runtime.engine.model, self.source.param
        if not all(prompts):
            raise InvalidRequest("the prompt is empty", param)
        for last, field in ((max(map(max, prompts)), param), (max(prediction, default=0), "prediction")):
            if last >= model.vocab_size:
                raise InvalidRequest(f"token id {last} is outside the vocabulary of {model.vocab_size}", field)
        longest, num_prompt = longest_text(model), max(map(len, prompts))
        too_long = f"prompt and answer together have at most {longest} tokens; the "
        if longest - num_prompt < (1 if body.token_limit is None else body.token_limit):
            wanted = "one more is needed" if body.token_limit is None else f"{body.token_limit} more are requested"
            raise ContextTooLong(f"{too_long}prompt has {num_prompt}, {wanted}", param)
        if len(prediction) > longest:
            raise ContextTooLong(f"{too_long}prediction has {len(prediction)}", "prediction")
        num_scores = sum(map(len, prompts)) * body.num_samples * (1 + (body.num_prompt_logprobs or 0))
        if body.num_prompt_logprobs is not None and num_scores > _MAX_PROMPT_SCORES:
            reason = f"{num_scores} log-probabilities of prompt tokens are requested; the limit is {_MAX_PROMPT_SCORES}"
            raise InvalidRequest(reason, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs")
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, longest - num_prompt))
        require_distribution(model, sampling, use.grammar_param or body.grammar_param)
        grammar_param = None if sampling.grammar is None else use.grammar_param or body.grammar_param
        use = replace(use, reasoning=self.source.reasoning(prompts[0], grammar_param))
        if (grammar := use.reasoning.constrained(sampling.grammar)) is not None and grammar_param is not None:
            await self._require(grammar, grammar_param, use)
        return use, replace(sampling, grammar=grammar)

    async def _require(self, grammar: Grammar, param: str, use: ToolUse) -> None:
        """Refuse a grammar that cannot be compiled, and a format beside forced calls, which is in no grammar.

        If a grammar is of calls and of a format, the error names the part that cannot be compiled.
        """
        grammars, key, own = self.runtime.grammars, group_of(self.tenant), self.body.grammar
        try:
            await grammars.require(grammar, param, key)
        except InvalidRequest:
            if own is not None:
                await grammars.require(own, self.body.grammar_param, key)
            raise
        if own is not None and use.is_forced:
            await grammars.require(own, self.body.grammar_param, key)

    def _submit(self, use: ToolUse, prompts: Sequence[PromptIds], prediction: PromptIds, sampling: SamplingParams) -> Generation:
        """Submit one sample for each prompt and k < n, in the order of choice indices, each with a seed of its own."""
        body, runtime, tenant, group = self.body, self.runtime, self.tenant, uuid.uuid4().hex
        meter = runtime.metrics.requests.meter(body.num_answers, sampling.max_tokens)
        may_be_cut = bool(body.stops) or use.max_calls is not None or self.source.reader is not None
        samples = [
            Sample(
                Request(
                    request_id=f"{group}-{index}",
                    prompt_ids=ids,
                    sampling=replace(sampling, seed=None if sampling.seed is None else derived_seed(sampling.seed, index)),
                    speculation=body.speculative.to_speculation() if body.speculative else Speculation(),
                    prediction_ids=prediction,
                    tenant=tenant,
                    cache_salt=cache_salt_of(tenant, body.cache_salt, runtime.settings.prefix_cache == "all"),
                    priority=body.priority or 0,
                    adapter=body.model if body.model in runtime.settings.adapters else None,
                    needs_each_event=bool(body.stream) or may_be_cut,
                ),
                self._choice(use, index, ids),
                meter.sample(len(ids)),
            )
            for index, ids in enumerate(ids for ids in prompts for _ in range(body.num_samples))
        ]
        limits = runtime.time_limits.with_request_limit(body.timeout_s)
        return Generation(runtime.engine, samples, meter, prompts, limits).start()

    def _choice(self, use: ToolUse, index: int, ids: PromptIds) -> Choice:
        """Return the choice that builds the text of one sample."""
        body, codec, end_ids = self.body, self.runtime.codec, self.runtime.engine.model.eos_token_ids
        token_text = codec.named_token_text if body.return_tokens_as_token_ids else codec.token_text
        skips_special = body.skip_special_tokens is not False
        begins = self._begins_text or (body.gives_prompt_back and codec.has_text(ids, skips_special))
        return Choice(
            index,
            codec.detokenizer(skips_special, use.markers, begins),
            body.stops,
            token_text,
            body.num_top_logprobs,
            bool(body.include_stop_str_in_output),
            PromptEcho(ids, token_text, EchoOptions(body.gives_prompt_back, body.num_top_logprobs, body.prompt_logprobs)),
            set(body.stop_token_ids or ()).difference(() if body.ignore_eos else end_ids),
            body.is_traced,
            self.source.reader or use.reader(),
            body.min_tokens or 0,
        )


def _check_tree(options: SpeculativeOptions, drafter: str, most_nodes: int) -> None:
    """Refuse a tree that this server does not draft."""
    tree = options.expansion
    if tree is None or tree.is_plain:
        return
    if drafter == "none":
        raise InvalidRequest("this server has no drafter, so no tree shape can be honoured", "speculative")
    num_nodes = min(tree.num_draft_tokens, options.max_nodes or tree.num_draft_tokens)
    if num_nodes > most_nodes:
        reason = f"a tree of {num_nodes} drafted tokens is requested; max_tree_tokens of this server is {most_nodes}"
        raise InvalidRequest(reason, "speculative")
