"""Frozen configuration of one engine; nothing here reads files or the environment."""

from dataclasses import dataclass

from engine.core.tree import Expansion

BLOCK_TOKENS = 16  # of a cached prefix


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. Tokens are counted in packed rows of one target forward, slots in cached tokens.

    `max_waiting_tokens` bounds the prompt tokens in the queue; a request that waits alone may have more. Requests with the same
    cache salt share cached prefixes in blocks of `prefix_block_tokens`; 0 turns the prefix cache off. While prompts longer than a
    step are fed, decoding sequences keep `decode_pace` of their tokens a second. With `has_cache_events` changes of the prefix
    cache are recorded.
    """

    max_running: int = 32
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_step_tokens: int = 512
    num_slots: int = 32768
    max_model_len: int = 8192
    prefix_block_tokens: int = BLOCK_TOKENS
    decode_pace: float = 0.0
    has_cache_events: bool = False

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_waiting, self.max_waiting_tokens, self.num_slots, self.max_model_len) < 1:
            raise ValueError("every limit of the scheduler must be at least 1")
        if not 0 <= self.decode_pace < 1:
            raise ValueError(f"decode_pace ({self.decode_pace}) must be at least 0 and less than 1")
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running})")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the worker needs to load models and run.

    `model` and `draft_model` are references that engine.weights resolves. With `generation_config` auto the model's
    generation_config.json sets defaults of requests. `drafter` is `none`, `ngram`, `early-exit`, `head`, `model` or `checkpoint`;
    `lens` and `head` are the files of two of them, `checkpoint` is the folder of the last. A drafter that does not fit the target
    is replaced by `stand_in` with a warning, or refused if there is none. With `cached_text`, cached text is used for drafting
    beside a model. A match has at least `ngram_min_tokens` tokens. The last `recent_tokens` output tokens of each tenant are
    kept, and `total_recent_tokens` of all tenants together.

    `policy` is `plain`, `fixed` or `adaptive`; the caller of `build_engine` provides the last. It chooses among trees of the
    family of `expansion` up to `largest_expansion`, with the network in the file `selector`. With None it counts acceptance
    instead. `dtype` is float32, bfloat16, fp8, int8 or compact.
    `draft_dtype` is that of a draft model or head. None lets the engine choose: the device (cuda if available), the threads
    (one per physical core) and the fastest number format for drafting. `audit_share` of the requests have their first
    `audit_tokens` tokens checked when the engine is idle. Each step is appended to `trace_file`; None disables tracing.
    `cuda_graphs` is auto, on (an error if unsupported) or off. If `deterministic`, a row's
    logits have the same bits in any pass. With `kv_canary`, slot ownership is checked on every read.
    `lora` has the names and PEFT folders of adapters. `tensor_parallel` processes share out the target's layers.
    `is_restart`: the worker replaces a dead one.
    """

    model: str
    model_name: str | None = None
    drafter: str = "none"
    draft_model: str | None = None
    lens: str | None = None
    head: str | None = None
    checkpoint: str | None = None
    stand_in: str | None = None
    cached_text: bool = False
    ngram_min_tokens: int = 2
    recent_tokens: int = 0
    total_recent_tokens: int = 262_144
    verifier: str = "traversal"
    policy: str = "fixed"
    expansion: Expansion = Expansion(4, 1, 0)
    largest_expansion: Expansion | None = None
    selector: str | None = None
    dtype: str = "float32"
    draft_dtype: str | None = None
    device: str | None = None
    num_threads: int | None = None
    cuda_graphs: str = "auto"
    deterministic: bool = False
    audit_share: float = 0.0
    audit_tokens: int = 32
    trace_file: str | None = None
    kv_canary: bool = False
    generation_config: str = "auto"
    is_restart: bool = False
    lora: tuple[tuple[str, str], ...] = ()
    tensor_parallel: int = 1
    scheduler: SchedulerConfig = SchedulerConfig()
