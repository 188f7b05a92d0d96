"""The fields that a server accepts, and their meaning. Defaults differ between servers, so an unusual default is no fault.

Sources: llama.cpp's common/sampling.cpp and tools/server/README.md, vLLM's sampling_params.py, OpenAI's API reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.types import SamplingParams
from server.audit_url.client import AnswerText, AuditedServerUnsuitable, Body, CompletionClient, NotOffered

_FLOATS = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Meaning:
    """The order of cuts, and what penalties count. Servers differ, and most do not document it."""

    cuts_first: bool = False  # top-k, top-p and min-p cut the distribution at temperature 1, and temperature comes last
    penalties_see_prompt: bool = False  # presence and frequency penalties count prompt tokens too


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server. `fields`: its names of ours; `always`: fields of every request; `plain`: fields without speculation."""

    meaning: Meaning = Meaning()
    ends_can_be_ignored: bool = False  # `ignore_eos` lets the end token be drawn like any other, and forbids nothing
    fields: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] | None = None


_DIALECTS = {  # by the owner of the listed models
    "latebranch": Dialect(ends_can_be_ignored=True, plain={"speculative": {"enabled": False}}),
    "vllm": Dialect(ends_can_be_ignored=True),
    "llamacpp": Dialect(
        meaning=Meaning(cuts_first=True, penalties_see_prompt=True),
        fields={"repetition_penalty": "repeat_penalty"},
        always={"cache_prompt": False, "repeat_last_n": 4096},
        plain={"speculative.n_max": 0},
    ),
}
# Every field is sent with its neutral value, because servers and models have defaults of their own. Values are tried in turn.
_COMPLETION_LISTS, _CHAT_LISTS = {"logprobs": (20, 5, 1)}, {"logprobs": (True,), "top_logprobs": (20, 5, 1)}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "top_k": (0, -1),
    **{name: (getattr(SamplingParams(), name),) for name in _FLOATS},
    "seed": (1,),
}


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt. Without a tokenizer its one `id` is a number of the prompt, and the text is sent."""

    text: str
    ids: tuple[int, ...]

    def field(self, form: str) -> dict[str, Any]:
        """Return the prompt's field in a request."""
        if form == "chat":
            return {"messages": [{"role": "user", "content": self.text}]}
        return {"prompt": list(self.ids) if form == "ids" else self.text}


@dataclass(frozen=True, slots=True)
class Offer:
    """The fields that a server accepts, with their neutral values, the first answer, and the refusals of other fields."""

    dialect: Dialect
    base: Mapping[str, Any]
    refused: Mapping[str, str]
    form: str  # of prompts: "ids", "text" or "chat"
    first: AnswerText

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens that answers list."""
        return int(self.base.get("top_logprobs", self.base.get("logprobs", 0)))

    def body(self, prompt: AuditPrompt, sampling: SamplingParams, seed: int | None = None, **more: Any) -> Body:
        """Return the body of a request."""
        fields = {name: value for name, value in self.base.items() if name != "seed"} | prompt.field(self.form)
        for name in ("temperature", "top_k", *_FLOATS):
            value = getattr(sampling, name)
            if value != getattr(SamplingParams(), name) or name == "temperature":
                fields[self.dialect.fields.get(name, name)] = value
        fields |= {"logit_bias": {str(i): bias for i, bias in sampling.logit_bias}} if sampling.logit_bias else {}
        fields |= {"seed": seed} if seed is not None and "seed" in self.base else {}
        return {**fields, "max_tokens": sampling.max_tokens, **more}


def discover(client: CompletionClient, prompt: AuditPrompt, has_tokenizer: bool) -> Offer:
    """Try every field, all together or else one by one. Raises AuditedServerUnsuitable if plain requests are refused."""
    dialect = _DIALECTS.get(client.owner.lower(), Dialect())
    neutral = {name: (value,) for name, value in dialect.always.items()} | (_CHAT_LISTS if client.is_chat else _COMPLETION_LISTS)
    neutral |= {dialect.fields.get(name, name): values for name, values in _NEUTRAL.items()}
    neutral |= {"ignore_eos": (True,)} if dialect.ends_can_be_ignored and not has_tokenizer else {}
    refusal = ""
    for form in ("chat",) if client.is_chat else ("ids", "text") if has_tokenizer else ("text",):
        plain = {**prompt.field(form), "max_tokens": 2, "temperature": 1.0}
        try:
            found = client.complete(plain)
            break
        except NotOffered as error:
            refusal = str(error)
    else:
        known = f" (the server lists {', '.join(client.models)})" if client.models else ""
        raise AuditedServerUnsuitable(f"{client.url} refuses a request for {client.model}: {refusal}{known}")
    base: dict[str, Any] = {}
    refused: dict[str, str] = {}
    tried = [{name: values[0] for name, values in neutral.items()}]
    tried += [{name: value} for name, values in neutral.items() for value in values]
    for fields in tried:
        if not fields.keys() <= base.keys():
            try:
                found = client.complete({**plain, **base, **fields})
                base |= fields
            except NotOffered as error:
                refused |= dict.fromkeys(fields, str(error))
    return Offer(dialect, base, refused, form, found[0])
