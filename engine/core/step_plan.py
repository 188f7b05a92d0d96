"""What one step will do: a Row for each sequence that runs, self-contained, as far as the scheduler decides it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.core.rng_keys import StepKey
from engine.core.tree import FREE_GROWTH, Expansion, GrowthPrices, TreeKind
from engine.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """All that the law of one next token depends on beside the model: the parameters and the tokens before it.

    `history` is the committed text, its first `num_prompt_tokens` the prompt; `path_ids` are drafted tokens after it.
    """

    sampling: SamplingParams
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0
    path_ids: tuple[int, ...] = ()


class Feeding(Enum):
    """What a drafter knows a text by, and so which tokens it must be fed and when."""

    TARGET_CACHE = "target's cache"  # or nothing but the text: it has no cache that could fall behind
    OWN_CACHE = "own cache"  # fed every committed token, at once or later
    TARGET_FEATURES = "target's features"  # the same, but no token before the target has cached the one before it


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step.

    `certain_ids` are committed tokens the target has not cached: positions [context_len, context_len + len(certain_ids)).
    If `is_decoding` their last is the root, and a tree may grow from it; else this is a chunk of a prompt still to be fed.
    `slots` maps the logical positions [0, context_len + len(certain_ids) + expansion.num_draft_tokens) to cache slots: node v of
    the tree lies at position root_position + v, whatever its depth; it is the row's own copy, and nobody writes to it.
    `draft_ids` are the committed tokens the drafter is to be fed this step, from position `draft_len` on; the root is the last of
    them if a tree is to grow. `num_new_prompt_tokens` of the certain ones are prompt tokens fed for the first time (not again
    after a preemption). `history` is the whole committed text, a read-only view, of which the first `num_prompt_tokens` are the
    prompt. Of a row that `is_traced` all is kept that a trace tells. A tree that knows what its nodes are worth leaves out those
    that cost more, at `growth_costs`.
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
    growth_costs: GrowthPrices = FREE_GROWTH

    @property
    def end(self) -> int:
        """Logical position one past the certain tokens."""
        return self.context_len + len(self.certain_ids)

    @property
    def root_position(self) -> int:
        """Absolute position of the root."""
        return self.end - 1

    @property
    def key(self) -> StepKey:
        """Names this row's randomness in this step."""
        return StepKey(self.seed, self.root_position)

    def sampling_context(self, path_ids: tuple[int, ...]) -> SamplingContext:
        """Return what the law after these drafted tokens, the root's successors, depends on."""
        return SamplingContext(self.sampling, self.history, self.num_prompt_tokens, path_ids)

    @property
    def draw_kind(self) -> TreeKind:
        """How children are chosen: a greedy row ranks, a coupled one ranks with the noise; the tree decides for the others."""
        if self.sampling.is_greedy:
            return TreeKind.DETERMINISTIC
        return TreeKind.SHARED_NOISE if self.verifier == "coupled" else self.expansion.kind


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, oldest sequence first, and how many sequences lost their slots to make room.

    Of the `num_sought` prompt tokens of sequences that came to run, and others' since, `num_found` were cached already.
    """

    step: int
    rows: tuple[Row, ...]
    num_preempted: int = 0
    num_sought: int = 0
    num_found: int = 0

    @property
    def decoding(self) -> tuple[Row, ...]:
        """Rows that emit tokens this step."""
        return tuple(row for row in self.rows if row.is_decoding)
