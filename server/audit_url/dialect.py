"""The fields that a server accepts, and their meaning. Defaults differ between servers, so an unusual default is no fault.

Sources: llama.cpp's common/sampling.cpp and tools/server/README.md, vLLM's sampling_params.py, OpenAI's API reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.types import SamplingParams
from server.audit_url.client import Answer, AuditedServerFailed, Body, CompletionClient, NotOffered


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server. `fields`: its names of ours; `always`: fields of every request; `plain`: fields without speculation."""

    cuts_first: bool = False  # top-k, top-p and min-p cut the distribution at temperature 1, and temperature comes last
    penalties_see_prompt: bool = False  # presence and frequency penalties count prompt tokens too
    ends_can_be_ignored: bool = False  # `ignore_eos` lets the end token be drawn like any other, and forbids nothing
    fields: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] | None = None

    @property
    def order(self) -> str:
        """The order of cuts and temperature, in words."""
        return "top-k, top-p, min-p, then temperature" if self.cuts_first else "temperature, then top-k, top-p, min-p"


_DIALECTS = {
    "latebranch": Dialect(ends_can_be_ignored=True, plain={"speculative": {"enabled": False}}),
    "vllm": Dialect(ends_can_be_ignored=True),
    "llamacpp": Dialect(
        cuts_first=True,
        penalties_see_prompt=True,
        fields={"repetition_penalty": "repeat_penalty"},
        always={"cache_prompt": False, "repeat_last_n": -1},
        plain={"speculative.n_max": 0},
    ),
}
_LOGPROBS = (20, 5, 1)
# Every field is sent with its neutral value, because servers and models have defaults of their own.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("logprobs", _LOGPROBS),
    ("return_token_ids", (True,)),
    ("return_tokens_as_token_ids", (True,)),
    ("top_p", (1.0,)),
    ("top_k", (0, -1)),
    ("min_p", (0.0,)),
    ("presence_penalty", (0.0,)),
    ("frequency_penalty", (0.0,)),
    ("repetition_penalty", (1.0,)),
    ("seed", (1,)),
)


def dialect_of(owner: str) -> Dialect:
    """Return the kind of server that lists its models as owned by `owner`."""
    return _DIALECTS.get(owner.lower(), Dialect())


@dataclass(frozen=True, slots=True)
class Offer:
    """The fields that a server accepts, with their neutral values, and the refusals of the others."""

    dialect: Dialect
    base: Mapping[str, Any]
    refused: Mapping[str, str]
    takes_seed: bool
    takes_ids: bool

    def body(self, prompt: "AuditPrompt", sampling: SamplingParams, seed: int | None = None, **more: Any) -> Body:
        """Return the body of a completion."""
        fields: dict[str, Any] = {**self.base, "prompt": list(prompt.ids) if self.takes_ids else prompt.text}
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(sampling, name)
            if value != getattr(SamplingParams(), name) or name == "temperature":
                fields[self.dialect.fields.get(name, name)] = value
        if sampling.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        if seed is not None and self.takes_seed:
            fields["seed"] = seed
        return {**fields, "max_tokens": sampling.max_tokens, **more}


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt. Without a tokenizer its one `id` is a number of the prompt, and the text is sent."""

    text: str
    ids: tuple[int, ...]


def discover(client: CompletionClient, dialect: Dialect, prompt: AuditPrompt, has_tokenizer: bool) -> Offer:
    """Try every field, all together or else one by one. Raises AuditedServerFailed if plain completions are refused."""
    neutral = [(dialect.fields.get(name, name), values) for name, values in _NEUTRAL]
    if dialect.ends_can_be_ignored and not has_tokenizer:
        neutral.append(("ignore_eos", (True,)))
    prompts: Sequence[Any] = [list(prompt.ids), prompt.text] if has_tokenizer else [prompt.text]
    for number, form in enumerate(prompts, 1):
        base: dict[str, Any] = {"prompt": form, "max_tokens": 2, "temperature": 1.0, **dialect.always}
        first = client.complete(base)
        if isinstance(first, Answer):
            break
        if number == len(prompts):
            raise AuditedServerFailed(f"{client.url} refuses a completion: {first.message}")
    refused: dict[str, str] = {}
    whole = {**base, **{name: values[0] for name, values in neutral}}
    if isinstance(client.complete(whole), Answer):
        base = whole
    else:
        for name, values in neutral:
            for value in values:
                found = client.complete({**base, name: value})
                if not isinstance(found, NotOffered):
                    base[name] = value
                    break
                refused[name] = found.message
    refused = {name: message for name, message in refused.items() if name not in base}
    kept = {name: value for name, value in base.items() if name not in ("prompt", "max_tokens", "temperature", "seed")}
    return Offer(dialect, kept, refused, "seed" in base, isinstance(base["prompt"], list))
