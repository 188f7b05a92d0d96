"""The scheduler's plan of one step: a self-contained Row for each running sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import msgspec

from engine.core.rng_keys import StepKey
from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthCosts, TreeKind
from engine.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The sampling parameters and earlier tokens that the distribution of one next token depends on.

    `history` is the committed text, which starts with `num_prompt_tokens` prompt tokens. `path_ids` are drafted tokens after it.
    """

    sampling: SamplingParams
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0
    path_ids: tuple[int, ...] = ()


class Feeding(Enum):
    """Which state a drafter keeps, and so which tokens it must be fed and when."""

    TARGET_CACHE = "target's cache"  # or none at all: the drafter has no cache of its own to feed
    OWN_CACHE = "own cache"  # fed every committed token, at once or later
    TARGET_FEATURES = "target's features"  # as OWN_CACHE, but a token only after the target has cached the one before it


class Row(msgspec.Struct, frozen=True):
    """One sequence's part of a step.

    `certain_ids` are committed tokens that the target has not cached: positions [context_len, context_len + len(certain_ids)).
    If `is_decoding`, the last of them is the root, from which a tree may grow. Else they are a chunk of a prompt. `slots` maps
    the logical positions [0, context_len + len(certain_ids) + expansion.num_draft_tokens) to cache slots, and positions of later
    steps in a row. Node v of the tree is at position root_position + v, whatever its depth. The table is the row's own copy; only
    drafting steps in a row reorder it, behind the root. `draft_ids` are the committed tokens to feed to the drafter in this step,
    from position `draft_len` on. The last is the root if a tree grows. `num_new_prompt_tokens` of the certain tokens are prompt
    tokens fed for the first time (not after a preemption). `history`
    is the whole committed text, a read-only view that starts with `num_prompt_tokens` prompt tokens. A row with `is_traced`
    keeps all data of a trace. A noise-aware tree leaves out nodes whose expected value is below their cost in `growth_costs`.
    The target runs the row under the LoRA adapter of that name; drafters run the base. `allows_drafts` is false if the request
    disables drafting.
    """

    request_id: str
    context_len: int
    certain_ids: tuple[int, ...]
    num_new_prompt_tokens: int
    is_decoding: bool
    draft_len: int
    draft_ids: tuple[int, ...]
    expansion: Expansion
    slots: Sequence[int]
    sampling: SamplingParams
    verifier: str
    seed: int
    history: Sequence[int]
    num_prompt_tokens: int
    is_traced: bool = False
    growth_costs: GrowthCosts = FREE_GROWTH
    adapter: str | None = None
    allows_drafts: bool = True

    @property
    def end(self) -> int:
        """Logical position one past the certain tokens."""
        return self.context_len + len(self.certain_ids)

    @property
    def root_position(self) -> int:
        """Absolute position of the root."""
        return self.context_len + len(self.certain_ids) - 1

    @property
    def key(self) -> StepKey:
        """The key of this row's randomness in this step."""
        return StepKey(self.seed, self.root_position)

    def sampling_context(self, path_ids: tuple[int, ...]) -> SamplingContext:
        """Return the context of the distribution after these drafted tokens, which follow the root."""
        return SamplingContext(self.sampling, self.history, self.num_prompt_tokens, path_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_tokens - (len(self.history) - self.num_prompt_tokens)

    @property
    def is_drafting(self) -> bool:
        """Whether a tree may grow from the row's root."""
        return self.expansion is not PLAIN and self.is_decoding and not self.expansion.is_plain

    @property
    def draw_kind(self) -> TreeKind:
        """How children are chosen: deterministic for a greedy row, with shared noise for a coupled one, else by the tree."""
        if self.sampling.is_greedy:
            return TreeKind.DETERMINISTIC
        return TreeKind.SHARED_NOISE if self.verifier == "coupled" else self.expansion.kind


class StepPlan(msgspec.Struct, frozen=True, dict=True):
    """The rows of one step, oldest sequence first. `num_preempted` sequences lost their slots to make room.

    With `num_steps` above 1, all rows decode and may go on for that many steps in a row: they have the slots for it.

    Since the last plan, `num_prefix_queries` prompt tokens were looked up in the prefix cache, and `num_prefix_hits` were found.
    """

    step: int
    rows: tuple[Row, ...]
    num_preempted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_steps: int = 1

    @cached_property
    def decoding(self) -> tuple[Row, ...]:
        """Rows that emit tokens this step."""
        return tuple([row for row in self.rows if row.is_decoding])
