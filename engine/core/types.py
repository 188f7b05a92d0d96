"""Records that pass between the engine's rooms and across the process border. Frozen, free of torch.

They are plain dataclasses so that msgspec can carry them between processes as they are.
"""

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

from engine.core.enums import DraftSource as DraftSource
from engine.core.enums import FinishReason as FinishReason
from engine.core.row_trace import StepTrace
from engine.core.tree import Expansion


class ErrorCode(StrEnum):
    """Why the engine gave a request up: the `code` of the error on the wire and a label of metrics."""

    REFUSED = "request_refused"  # it can never run
    LOGITS_NOT_FINITE = "logits_not_finite"
    NO_POSSIBLE_TOKEN = "no_possible_token"  # its own masks leave none
    VERIFICATION_FAILED = "verification_failed"  # laws that are none
    WORKER_CRASHED = "worker_crashed"  # each worker that ran it died
    ENGINE_FAILED = "engine_failed"  # there is no worker to run it
    DISPLACED = "displaced"  # it waited in a full queue, and its place went to a key that had fewer there


class GrammarKind(StrEnum):
    """The notation of a grammar, and so what its text is."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON schema
    REGEX = "regex"  # a regular expression, in the syntax of Rust's regex crate
    CHOICE = "choice"  # a JSON array of the strings that may come
    LARK = "lark"  # llguidance's dialect of Lark, where %json {...} stands for a schema, or GBNF


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole generated text must match.

    Numbers in JSON have bounded lengths (docs/structured.md). The JSON of a Lark text stands between the two tokens `json_marks`;
    two empty strings: everywhere; None: nothing is known of it, so its numbers may have any length.
    """

    kind: GrammarKind
    text: str = ""
    json_marks: tuple[str, str] | None = None

    @property
    def has_known_json(self) -> bool:
        """Whether it is known where the text is JSON."""
        return self.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA) or self.json_marks is not None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn. Every field is honoured exactly under speculation.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 are off. With a `seed` the text is a pure
    function of (seed, prompt, sampling), whatever is drafted, unless the request names a verifier other than coupled.
    `num_logprobs` None returns no log-probabilities, 0 only the chosen tokens', k also the k likeliest. `stop_token_ids` end the
    request and are not part of its text; they come beside the model's own end tokens unless `ignore_eos`, and none of them can
    come before `min_tokens` tokens have. `num_prompt_logprobs` asks the same of the prompt's tokens, but for the first. With
    `max_tokens` 0 nothing is generated.

    `logit_bias` has (token id, bias) pairs. `repetition_penalty` looks at prompt and generated tokens, `presence_penalty` and
    `frequency_penalty` at generated ones alone; `allowed_token_ids`, unless None, are the only ones that can come, and the token
    sequences `bad_words` never do. With a `grammar` only texts come that match it, or begin so where a limit cuts them.
    engine.sampling.logits_processors says what each does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the law is a point mass at the arg max."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before temperature and truncation; only then does the law depend on the text before."""
        has_masks = self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0 or self.grammar is not None
        return self.has_penalties or bool(self.logit_bias) or has_masks


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's own wishes about speculation; None leaves the choice to the server's policy.

    A verifier or an expansion that comes alone is paired with one that is exact beside it (engine.core.verifier_table).
    `max_nodes` bounds the drafted tokens of every tree. `is_traced` asks to be told of every step.
    """

    is_enabled: bool = True
    expansion: Expansion | None = None
    verifier: str | None = None
    max_nodes: int | None = None
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What an engine that died has told of a request. It is history to the next one, which tells none of it again.

    `token_ids` were generated, and count as such: they are no part of the prompt. Of the prompt's log-probabilities
    `num_prompt_logprobs` have been told.
    """

    token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0


def _drawn_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `request_id` is unique among the living ones.

    `prediction_ids` are what the client expects to come; they are drafted from and change no law. What a `tenant` was told may be
    drafted from in its later requests and in nobody else's; the empty one shares nothing. Its name up to the first slash is that
    of a `group`, an API key's. Requests of the same `cache_salt` share what is cached of the same text; one that has None shares
    nothing. Groups take turns where requests wait, and a request of `priority` p waits as if it had come p requests of its group
    later, or earlier if p is below 0. `progress` is empty unless the request is resumed.

    `drawn_seed` is the seed of the noise of a request that names none. It is drawn once, where the request is made, and goes with
    it to each worker: the length of a step can depend on the noise of later positions, so that noise must not change behind it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    prediction_ids: tuple[int, ...] = ()
    tenant: str = ""
    cache_salt: str | None = ""
    priority: int = 0
    progress: Progress = field(default_factory=Progress)
    drawn_seed: int = field(default_factory=_drawn_seed, compare=False)

    @property
    def seed(self) -> int:
        """The seed of the request's noise, its own or the drawn one."""
        return self.drawn_seed if self.sampling.seed is None else self.sampling.seed

    @property
    def group(self) -> str:
        """The tenant's group; tenants without a name are one."""
        return group_of(self.tenant)


def group_of(tenant: str) -> str:
    """Return the group of a tenant."""
    return tenant.partition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's own log-probabilities (raw: before temperature and truncation) at one token. `rank` 1 is the likeliest."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 1


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step made of one request.

    `token_ids` are new and already cut at stop tokens and limits; a stop token itself is among them only as the last
    one and is not text (`stop_token_id` says which ended it). `logprobs` has an entry for each token or is empty.
    Exactly one event of a request carries `finish`; with `FinishReason.ERROR` it carries `error` and `error_code` too.
    `prompt_logprobs` go on through the prompt from its second token; all have come by the first token. `queued_s`, on a request's
    first tokens, is how long it waited before its first step, `num_cached_tokens` beside it how many prompt tokens were found
    cached and not fed. The last fields say how the tokens came:
    `num_draft_tokens` nodes were verified, `num_accepted_tokens` of the returned tokens, its first ones, were drafted. Of the
    nodes `num_predicted_tokens` had a token that the request's prediction foretold there; `predicted_places` are those of the
    returned tokens that came so. `trace` has all of it, for a request that is traced.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    queued_s: float | None = None
    num_cached_tokens: int = 0
    expansion: Expansion | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_predicted_tokens: int = 0
    predicted_places: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What the background audit found since it last told.

    `outcomes` counts tokens by check (greedy, coupled, sampled) and outcome (match, near_tie, mismatch); `pit_bins` counts draws
    by the bin of their probability integral transform; `num_dropped` chosen requests got no audit. `p_value` is that of all
    draws since the engine was built. `is_pass` says that the step was a pass of the audit, of `num_pass_tokens` tokens, or of
    none if it failed.
    """

    is_pass: bool = False
    num_pass_tokens: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    pit_bins: tuple[int, ...] = ()
    num_dropped: int = 0
    p_value: float = 1.0


STAGES = ("draft", "verify", "judge", "policy", "host")  # of a step; StepStats has the seconds of each as NAME_s


@dataclass(frozen=True, slots=True)
class StepStats:
    """Numbers of one engine step; counts are this step's own, gauges the state after it.

    `num_prompt_tokens` were fed for the first time; of `num_prefix_queries` prompt tokens that were looked for among the cached
    `num_prefix_hits` were found, and not fed.
    Seconds: `draft_s` growing trees, `verify_s` the target's forward, `judge_s` laws and verification, `policy_s` choosing
    expansions and learning from them, `host_s` the rest. `policy_reason` says why they were chosen; a policy that expects
    something says so before the step: `predicted_s` its seconds, `predicted_speedup` its tokens a second over plain decoding's.
    `accepted_per_depth[d]` counts sequences whose accepted path reached depth d + 1. `expansions` counts decoding rows by
    the label of the expansion they got; `drafted_by_source` and `accepted_by_source` tell drafted and accepted tokens apart by
    DraftSource. `expected_tokens` sums E[tau + 1 | tree] over the `num_expected_rows` decoding rows whose rule tells it;
    `num_realised_tokens` is what came out of the same rows, accepted depth + 1 before limits cut it: their difference is chance
    alone.
    """

    step: int
    num_running: int
    num_waiting: int
    num_used_slots: int
    num_slots: int
    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_decoding_rows: int = 0
    num_target_tokens: int = 0
    num_preemptions: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    expansions: dict[str, int] = field(default_factory=dict)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    num_expected_rows: int = 0
    expected_tokens: float = 0.0
    num_realised_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    judge_s: float = 0.0
    policy_s: float = 0.0
    host_s: float = 0.0
    step_s: float = 0.0
    policy_reason: str = ""
    predicted_s: float | None = None
    predicted_speedup: float = 1.0
    audit: AuditStats | None = None


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a request gets that leaves a parameter open, by the model's generation_config.json; None: the API's own default.

    `max_tokens` is an upper bound of the API's default.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front end must know of the loaded models."""

    name: str
    vocab_size: int
    max_model_len: int
    num_slots: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    drafter: str
    verifier: str
    policy: str
    has_same_bits: bool = False  # of a row's logits, in passes of any width
    cache_dtype: str | None = None  # of keys and values, where it is not `dtype`
    defaults: RequestDefaults = RequestDefaults()

    @property
    def rounds_by_width(self) -> bool:
        """Whether wide and narrow passes round so differently that more than the nearest of ties can fall either way."""
        return self.dtype == "bfloat16" and not self.has_same_bits
