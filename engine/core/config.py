"""Frozen configuration of one engine; nothing here reads files or the environment."""

from dataclasses import dataclass

from engine.core.tree import Expansion

BLOCK_TOKENS = 16  # of a cached prefix


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. Tokens are counted in packed rows of one target forward, slots in cached tokens.

    `max_waiting_tokens` are those of the prompts that wait; one that waits alone may have more.
    Requests of one salt share what they have cached of the same text, in blocks of `prefix_block_tokens`; 0: nobody shares.
    """

    max_running: int = 32
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_step_tokens: int = 512
    num_slots: int = 32768
    max_model_len: int = 8192
    prefix_block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_waiting, self.max_waiting_tokens, self.num_slots, self.max_model_len) < 1:
            raise ValueError("every limit of the scheduler must be at least 1")
        if self.max_step_tokens < self.max_running:
            raise ValueError(f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running})")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the worker needs to load models and run.

    `model` and `draft_model` are references that engine.weights resolves. With `generation_config` auto the model's
    generation_config.json sets defaults of requests. `drafter` is `none`, `ngram`, `early-exit`, `head` or `model`; `lens` and
    `head` are the files of two of them. `stand_in` drafts in its place, with a warning, if it does not belong
    to the target; without one that is refused. Beside a model, cached text is drafted from where `cached_text` says
    so; a match of it has `ngram_min_tokens` tokens at least, and of each tenant's outputs the last `recent_tokens` are kept, of
    all tenants together `total_recent_tokens`.
    `policy` is `plain`, `fixed` or `adaptive` (made by whoever builds the engine); the last chooses among trees of the family of
    `expansion`, none beyond `largest_expansion`, by the network in the file `selector` (None counts acceptance; an optional one
    that does not fit is left out, with a warning). `dtype` is float32, bfloat16, int8 or compact, `draft_dtype` a draft
    model's or head's. None lets the engine choose: the device (cuda if there is one), threads (the physical processors), the
    number format in which the device drafts fastest. `audit_share` of the requests have their first `audit_tokens` tokens
    checked in idle moments. `trace_file` is appended to at every step; None traces nothing. `cuda_graphs` is auto, on (an error
    where there can be none) or off. With `kv_canary` every slot that is read is checked to be the reader's own.
    `is_restart`: the worker takes the place of one that died, while requests wait.
    """

    model: str
    model_name: str | None = None
    drafter: str = "none"
    draft_model: str | None = None
    lens: str | None = None
    head: str | None = None
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
    is_selector_optional: bool = False
    dtype: str = "float32"
    draft_dtype: str | None = None
    device: str | None = None
    num_threads: int | None = None
    cuda_graphs: str = "auto"
    audit_share: float = 0.0
    audit_tokens: int = 32
    trace_file: str | None = None
    kv_canary: bool = False
    generation_config: str = "auto"
    is_restart: bool = False
    scheduler: SchedulerConfig = SchedulerConfig()
