"""Records that the engine's packages and processes exchange. Frozen, free of torch.

They are plain dataclasses, which msgspec encodes without conversion. Records of each step are structs, which are made faster.
"""

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from engine.core.enums import DraftSource as DraftSource
from engine.core.enums import FinishReason as FinishReason
from engine.core.row_trace import RowTrace
from engine.core.tree import Expansion


class ErrorCode(StrEnum):
    """Why a request failed in the engine: the `code` of the HTTP error and a label of metrics."""

    REFUSED = "request_refused"  # it can never run
    LOGITS_NOT_FINITE = "logits_not_finite"
    NO_POSSIBLE_TOKEN = "no_possible_token"  # the request's masks leave no token
    VERIFICATION_FAILED = "verification_failed"  # invalid probabilities
    WORKER_CRASHED = "worker_crashed"  # each worker that ran it died
    ENGINE_FAILED = "engine_failed"  # no worker can be started
    DISPLACED = "displaced"  # the queue was full, and its place went to a key with a smaller share


class GrammarKind(StrEnum):
    """The notation of a grammar's text."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON schema
    REGEX = "regex"  # a regular expression, in the syntax of Rust's regex crate
    CHOICE = "choice"  # a JSON array of the allowed strings
    LARK = "lark"  # llguidance's dialect of Lark, where %json {...} embeds a schema, or GBNF


@dataclass(frozen=True, slots=True)
class FreeBlock:
    """Free text before a constrained text, between two tokens of the model: `<think>...</think>`.

    Two line breaks follow the `closing` token. With an `opening` token the whole block may be missing. Without one the prompt has
    opened the block.
    """

    opening: str | None
    closing: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the generated text must match: the whole text, or the text after a free `block`.

    Numbers in JSON have bounded lengths (docs/structured.md). In a Lark text, JSON is between the two tokens `json_marks`. Two
    empty strings: the whole text is JSON. None: unknown, so numbers may have any length.
    """

    kind: GrammarKind
    text: str = ""
    json_marks: tuple[str, str] | None = None
    block: FreeBlock | None = None

    @property
    def has_known_json(self) -> bool:
        """Whether it is known where the text is JSON."""
        return self.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA) or self.json_marks is not None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled. Every field is exact under speculation.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 are off. With a `seed` the text is a pure
    function of (seed, prompt, sampling), for any drafts, unless the request names a verifier other than coupled. `num_logprobs`
    None returns no log-probabilities. 0 returns the log-probabilities of the generated tokens, k also the k most likely tokens.
    `num_prompt_logprobs` is the same for the prompt without its first token. `stop_token_ids` end the request and are not part of
    its text. The model's end tokens are added unless `ignore_eos`. No stop token is possible before `min_tokens` tokens. With
    `max_tokens` 0 nothing is generated.

    `logit_bias` has (token id, bias) pairs. `repetition_penalty` counts prompt and generated tokens. `presence_penalty` and
    `frequency_penalty` count generated tokens only. `allowed_token_ids`, unless None, are the only possible tokens. The token
    sequences `bad_words` are impossible. With a `grammar` the text matches it, or is a prefix of a match if a limit cuts it.
    engine.sampling.logits_processors defines each.
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
        """Whether the distribution is a point mass at the arg max."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are edited before temperature and truncation. The edits may depend on the text so far."""
        has_masks = self.allowed_token_ids is not None or bool(self.bad_words) or self.min_tokens > 0 or self.grammar is not None
        return self.has_penalties or bool(self.logit_bias) or has_masks


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's own speculation settings. None leaves the choice to the server's policy.

    If only one of verifier and expansion is given, the other is chosen so that the pair is exact (engine.core.verifier_table).
    `max_nodes` bounds the drafted tokens of every tree. `is_traced`: the request's events carry a trace of each step.
    """

    is_enabled: bool = True
    expansion: Expansion | None = None
    verifier: str | None = None
    max_nodes: int | None = None
    is_traced: bool = False

    @property
    def allows_drafts(self) -> bool:
        """Whether the request leaves any drafting to the server."""
        return self.is_enabled and not (self.expansion is not None and self.expansion.is_plain)


@dataclass(frozen=True, slots=True)
class Progress:
    """The output of a request from earlier engines, now dead. The next engine continues after it and does not emit it again.

    `token_ids` count as generated tokens, not as prompt. `num_prompt_logprobs` is the number of emitted prompt log-probabilities.
    """

    token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0


def _drawn_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `request_id` is unique among live requests.

    `prediction_ids` is the output that the client expects. It is used for drafting and does not change the distribution. Outputs
    of a `tenant` may be used for drafting in later requests of the same tenant only; the empty tenant shares nothing. The
    tenant's name up to the first slash is its `group`, an API key. Requests with the same `cache_salt` share cached prefixes;
    None shares nothing. Its text after the first slash is the client's own salt. The queue serves groups in turn. Within its
    group, a request of `priority` p is queued as if p more requests had arrived before it. A negative p means fewer requests.
    `progress` is empty unless the request is resumed.
    The target runs under the LoRA adapter named `adapter`; None is the base. Requests of different adapters share no prefixes.
    Events of a request that does not need each one (`needs_each_event`) may come late, but for the first token's and the last.

    `drawn_seed` seeds the noise of a request without a seed. It is drawn once, when the request is created, and is the same in
    each worker. The length of a step can depend on the noise of later positions, so the noise must not change on a restart.
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
    adapter: str | None = None
    needs_each_event: bool = True
    drawn_seed: int = field(default_factory=_drawn_seed, compare=False)

    @property
    def seed(self) -> int:
        """The seed of the request's noise: the one it names, else `drawn_seed`."""
        return self.drawn_seed if self.sampling.seed is None else self.sampling.seed

    @property
    def group(self) -> str:
        """The tenant's group. The empty tenant has the empty group."""
        return group_of(self.tenant)


def group_of(tenant: str) -> str:
    """Return the group of a tenant."""
    return tenant.partition("/")[0]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's raw log-probabilities (before temperature and truncation) at one token. `rank` 1 is the most likely."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 1


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The output of one step for one request, or of `num_steps` of plain decoding in a row.

    `token_ids` are the new tokens, already cut at stop tokens and limits. A stop token can only be the last and is not text;
    `stop_token_id` names it. `logprobs` has an entry for each token or is empty. Exactly one event of a request carries
    `finish`; with `FinishReason.ERROR` it carries `error` and `error_code` too. `prompt_logprobs` continue from event to event,
    starting with the second prompt token, and are complete at the first generated token. An event with a request's first tokens
    carries `queued_s`, its time in the queue, and `num_cached_tokens`, its prompt tokens from the prefix cache. The worker sent
    the event `delayed_s` seconds after its step.

    The other fields describe speculation. `num_draft_tokens` nodes were verified. The first `num_accepted_tokens` of the
    returned tokens were drafted. `num_predicted_tokens` of the nodes were drafted from the request's prediction;
    `predicted_places` are the indices of these tokens in `token_ids`. `trace` describes the whole step, for a request
    that is traced.
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
    trace: RowTrace | None = None
    num_steps: int = 1
    delayed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditStats:
    """Findings of the background audit since the last report.

    `outcomes` counts tokens by check (greedy, coupled, sampled) and outcome (match, near_tie, mismatch). `pit_bins` counts
    samples by the bin of their probability integral transform. `num_dropped` selected requests were not audited. `p_value`
    covers all samples since the engine was built. `is_pass`: the step was a pass of the audit, over `num_pass_tokens` tokens, 0
    if it failed.
    """

    is_pass: bool = False
    num_pass_tokens: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    pit_bins: tuple[int, ...] = ()
    num_dropped: int = 0
    p_value: float = 1.0


STAGES = ("draft", "verify", "judge", "policy", "host")  # of a step; StepStats has the seconds of each as NAME_s


class StepStats(msgspec.Struct, frozen=True):
    """Statistics of one engine step. Counts are of this step, gauges describe the state after it.

    `num_steps` of plain decoding ran in a row: counts, seconds and tokens are of all of them, `num_decoding_rows` of one.

    `running_adapters` and `waiting_adapters` are the LoRA adapters of requests in either state. `num_prompt_tokens` were fed
    for the first time. `num_prefix_queries` prompt tokens were looked up in the prefix cache; `num_prefix_hits` of them were
    found and not fed. Seconds: `draft_s` growing trees, `verify_s` the target's forward, `judge_s` distributions and
    verification, `policy_s` choosing expansions and learning from feedback, `host_s` the rest. The target's pass reads at
    least `num_read_bytes` of weights and cached keys, and its products have `num_operations`. `policy_reason` is the reason
    of the policy's choice. The policy may predict a step: `predicted_s` its seconds, `predicted_speedup` its tokens per
    second relative to plain decoding. `accepted_per_depth[d]` counts sequences whose accepted path reached depth d + 1.
    `expansions` counts decoding rows by their expansion's label. The requests of `num_undraftable_rows` decoding rows disable
    drafting. `drafted_by_source` and `accepted_by_source` count drafted
    and accepted tokens by DraftSource. `expected_tokens` sums E[tau + 1 | tree] over the `num_expected_rows` decoding rows
    whose verifier computes it. `num_realised_tokens` sums accepted depth + 1 over the same rows, before limits cut it. The
    two differ by chance alone.
    """

    step: int
    num_running: int
    num_waiting: int
    num_used_slots: int
    num_slots: int
    num_steps: int = 1
    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_decoding_rows: int = 0
    num_undraftable_rows: int = 0
    num_target_tokens: int = 0
    num_read_bytes: int = 0
    num_operations: int = 0
    num_preemptions: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    expansions: dict[str, int] = msgspec.field(default_factory=dict)
    drafted_by_source: dict[str, int] = msgspec.field(default_factory=dict)
    accepted_by_source: dict[str, int] = msgspec.field(default_factory=dict)
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
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    audit: AuditStats | None = None

    @property
    def num_row_steps(self) -> int:
        """Steps of decoding rows: those of several steps in a row count each."""
        return self.num_steps * self.num_decoding_rows


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Default sampling parameters from the model's generation_config.json. None: the API's default.

    `max_tokens` is an upper bound of the API's default.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine reads and multiplies at most, measured when an engine starts: bytes and operations a second."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded models for the front end."""

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
    has_same_bits: bool = False  # a row's logits have the same bits in passes of any width
    cache_dtype: str | None = None  # of keys and values, where it is not `dtype`
    adapters: tuple[str, ...] = ()  # names of the loaded LoRA adapters
    defaults: RequestDefaults = RequestDefaults()
    peaks: Peaks | None = None  # of a served engine

    @property
    def rounds_by_width(self) -> bool:
        """Whether wide and narrow passes round so differently that near ties can be decided differently."""
        return self.dtype in ("bfloat16", "fp8") and not self.has_same_bits
