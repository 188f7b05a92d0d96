"""Teacher forcing: computes the target's logits after every token of a known text, which is fed as if it were drafted.

Each step is a chain of known tokens that is accepted in full. To the scheduler and the target it is an ordinary sequence with
smaller chunks. No drafter, no verifier and no randomness take part. Shape key: N consecutive tokens of the text, V vocabulary.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from engine.core.step_plan import Row
from engine.core.tree import Expansion, TokenTree
from engine.core.types import Request, SamplingParams
from engine.model.target import Target
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence

_ID = "teacher-forcing"
_ANY_TREE = "coupled"  # a verifier that is exact on every tree; it is never called
MAX_CHUNK_TOKENS = 64  # of one step, since requests that arrive meanwhile wait for it
MAX_CHUNK_LOGITS = 8  # rows of logits of one step, since the caller's work on them delays requests too


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt and at least one token after it, under a LoRA adapter or the base."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    adapter: str | None = None


@dataclass(frozen=True)
class ForcedStep:
    """One pass: the raw logits before each of the text's next N tokens, or None for a chunk of the prompt."""

    num_tokens: int
    logits_NV: Float[Tensor, "N V"] | None


class TeacherForcing:
    """Runs one text at a time. The caller ensures that the scheduler has no other sequences."""

    def __init__(self, scheduler: Scheduler, target: Target) -> None:
        self._scheduler = scheduler
        self._target = target
        self._text: KnownText | None = None

    @property
    def is_running(self) -> bool:
        """Whether a text is being fed."""
        return self._text is not None

    @property
    def num_used_slots(self) -> int:
        """Slots in use, all by the text."""
        return self._scheduler.num_used_slots

    def start(self, text: KnownText) -> None:
        """Start to feed a text. The scheduler must be empty."""
        sampling = SamplingParams(max_tokens=len(text.token_ids))
        request = Request(_ID, text.prompt_ids, sampling, cache_salt=None, adapter=text.adapter)
        self._scheduler.add(Sequence(request, 0, _ANY_TREE))
        self._text = text

    def stop(self) -> None:
        """Stop feeding and free the slots at once. Does nothing if no text is being fed."""
        if self._text is not None:
            self._scheduler.remove(_ID)
            self._text = None

    def step(self) -> ForcedStep:
        """Feed the next chunk of the text. The last chunk ends it."""
        if self._text is None:
            raise RuntimeError("no text is being fed")
        self._scheduler.admit()
        plan = self._scheduler.plan([Expansion(MAX_CHUNK_LOGITS - 1, 1, 0)], MAX_CHUNK_TOKENS)
        (row,) = plan.rows
        num_tokens = len(row.certain_ids) + row.expansion.num_draft_tokens
        if not row.is_decoding:
            self._target.forward(plan, [])
            self._target.end_step(row)
            self._scheduler.commit_chunk(row)
            return ForcedStep(num_tokens, None)
        tree = _chain(row, self._text)
        logits_NV = self._target.forward(plan, [tree])
        self._commit(row, tree, self._text)
        return ForcedStep(num_tokens, logits_NV)

    def _commit(self, row: Row, tree: TokenTree, text: KnownText) -> None:
        """Accept the whole chain and the known token after it, which may be the last of the text."""
        extra_id = text.token_ids[_num_forced(row, text) + tree.num_nodes - 1]
        path = tuple(range(tree.num_nodes))
        self._target.end_step(row, path)
        emission = self._scheduler.commit(row, RowResult(tree, path, extra_id, drafted_len=0))
        if emission.finish is not None:
            self._text = None


def _num_forced(row: Row, text: KnownText) -> int:
    """Return how many tokens of the text are committed."""
    return row.end - len(text.prompt_ids)


def _chain(row: Row, text: KnownText) -> TokenTree:
    """Return the text's next tokens as a chain after the row's last token."""
    first = _num_forced(row, text)
    drafted = text.token_ids[first : first + row.expansion.num_draft_tokens]
    return TokenTree.chain((row.certain_ids[-1], *drafted))
