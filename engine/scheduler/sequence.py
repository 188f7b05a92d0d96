"""One request's state inside the engine: its tokens, its slot table and how far each cache has come.

Knows integers only. The scheduler owns every Sequence; others see SequenceView and Row.
"""

import time
from array import array

from engine.core.policy import SequenceView
from engine.core.types import FinishReason, Request
from engine.scheduler.slot_pool import Block


class Sequence:
    """A request in progress. Mutable; its one owner is the scheduler.

    Layout, in logical positions:

        token_ids  [ prompt ............ | generated ....... root ]      len == num_tokens
        slots      [ cached by the target ........ ]                     len == target_len <= num_tokens - 1
        draft_len  [ cached by the drafter .. ]                          draft_len <= target_len
        blocks     [ shared ..... ]                                      num_shared <= target_len

    The root, the last token, is never cached between steps: the next step feeds it.
    """

    def __init__(self, request: Request, seed: int, verifier: str) -> None:
        self.request = request
        self.seed = seed
        self.verifier = verifier
        self.token_ids: list[int] = [*request.prompt_ids, *request.progress.token_ids]
        self.slots = array("q")
        self.blocks: list[Block] = []  # whose slots the first ones are; the prefix cache's
        self.num_marked = 0  # blocks that are known to be drafted
        self.salt = request.cache_salt
        self.draft_len = 0
        self.num_found = 0  # prompt tokens that were found cached and not fed
        self.arrival_s = time.monotonic()
        self.queued_s: float | None = None
        self._num_counted_prompt = _num_told_of(request)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens that were generated so far, those that an engine before this one told included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - self.num_generated

    @property
    def target_len(self) -> int:
        """Tokens whose keys and values the target has cached."""
        return len(self.slots)

    @property
    def num_shared(self) -> int:
        """Tokens in blocks, which others may share."""
        return len(self.blocks) * len(self.blocks[0].slots) if self.blocks else 0

    @property
    def own_slots(self) -> "array[int]":
        """The slots that are the sequence's alone."""
        return self.slots[self.num_shared :]

    @property
    def has_own_slots(self) -> bool:
        """Whether there are any."""
        return len(self.slots) > self.num_shared

    @property
    def reads_prefixes(self) -> bool:
        """Whether it may go on from what others have cached: not if it is asked what the target says of its own prompt."""
        return self.salt is not None and self.request.sampling.num_prompt_logprobs is None

    @property
    def num_uncached(self) -> int:
        """Tokens the target must still be fed, the root included; at least 1."""
        return len(self.token_ids) - len(self.slots)

    def view(self) -> SequenceView:
        """Return what a policy may see."""
        return SequenceView(
            request_id=self.request_id,
            num_committed=self.num_tokens,
            num_generated=self.num_generated,
            num_remaining=self.num_remaining,
            num_uncached=self.num_uncached,
            sampling=self.request.sampling,
            speculation=self.request.speculation,
            verifier=self.verifier,
        )

    def leave_queue(self) -> None:
        """Note how long the sequence has waited; after a preemption the first wait stands."""
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self.arrival_s

    def count_prompt(self, end: int) -> int:
        """Return how many prompt tokens before position `end` are fed for the first time; each is counted once in a life.

        A request that is resumed lives on: what was told of its prompt is not counted again.
        """
        reached = min(end, len(self.request.prompt_ids))
        fresh = max(0, reached - self._num_counted_prompt)
        self._num_counted_prompt += fresh
        return fresh

    def count_found(self) -> int:
        """Return how many prompt tokens have been found cached since this was last asked; none of them is ever fed first."""
        fresh = self.count_prompt(self.target_len)
        self.num_found += fresh
        return fresh

    def accept(self, new_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return how much of `new_ids` belongs to the output, and why the output ends there if it does."""
        stops, most = self.request.sampling.stop_token_ids, self.num_remaining
        if not self.request.sampling.max_tokens:  # its prompt alone was asked about
            return [], FinishReason.LENGTH
        for count, token_id in enumerate(new_ids, start=1):
            if token_id in stops:
                return new_ids[:count], FinishReason.STOP
            if count == most:
                return new_ids[:count], FinishReason.LENGTH
        return new_ids, None

    def forget_caches(self) -> None:
        """Remember nothing cached: the sequence is fed anew when it is next run."""
        self.slots, self.blocks, self.num_marked, self.draft_len = array("q"), [], 0, 0


def _num_told_of(request: Request) -> int:
    """Return how many leading prompt tokens an engine before this one has fed, for all that is known of it."""
    return len(request.prompt_ids) if request.progress.token_ids else request.progress.num_prompt_logprobs
