"""One request's state inside the engine: its tokens, its slot table and the lengths of its caches.

Knows integers only. The scheduler owns every Sequence; other parts see SequenceView and Row.
"""

import time
from array import array

from engine.core.policy import SequenceView
from engine.core.types import FinishReason, Request
from engine.scheduler.slot_allocator import Block, Salt


class Sequence:
    """A request in progress. Mutable; owned by the scheduler.

    Layout, in logical positions:

        token_ids  [ prompt ............ | generated ....... root ]      len == num_tokens
        slots      [ cached by the target ........ ]                     len == target_len <= num_tokens - 1
        draft_len  [ cached by the drafter .. ]                          draft_len <= target_len
        blocks     [ shared ..... ]                                      num_shared <= target_len

    The root, the last token, is never cached between steps: the next step feeds it.
    """

    def __init__(self, request: Request, seed: int, verifier: str) -> None:
        self.request = request
        self.request_id, self.group = request.request_id, request.group
        self.seed = seed
        self._prompt_len = len(request.prompt_ids)
        self.verifier = verifier
        self.token_ids: list[int] = [*request.prompt_ids, *request.progress.token_ids]
        self.slots = array("q")
        self.blocks: list[Block] = []  # of the prefix cache; their slots are the first of `slots`
        self.num_marked = 0  # blocks marked as drafted
        self.salt: Salt | None = None if request.cache_salt is None else (request.adapter, request.cache_salt)
        self.draft_len = 0
        self.num_prefix_hits = 0  # prompt tokens found in the prefix cache and not fed
        self.arrival_s = time.monotonic()
        self.queued_s: float | None = None
        self.needs_host = _needs_host(request)
        self.allows_drafts = request.speculation.allows_drafts
        self._num_counted_prompt = _num_fed_before(request)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, including tokens from earlier engines."""
        return len(self.token_ids) - self._prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - len(self.token_ids) + self._prompt_len

    @property
    def target_len(self) -> int:
        """Tokens whose keys and values the target has cached."""
        return len(self.slots)

    @property
    def num_shared(self) -> int:
        """Tokens in blocks, which other sequences may share."""
        return len(self.blocks) * len(self.blocks[0].slots) if self.blocks else 0

    @property
    def own_slots(self) -> "array[int]":
        """The slots that only this sequence uses."""
        return self.slots[self.num_shared :]

    @property
    def has_own_slots(self) -> bool:
        """Whether the sequence has slots outside blocks."""
        return len(self.slots) > self.num_shared

    @property
    def reads_prefixes(self) -> bool:
        """Whether it may use cached prefixes: not if the log-probabilities of its prompt are requested."""
        return self.salt is not None and self.request.sampling.num_prompt_logprobs is None

    @property
    def num_uncached(self) -> int:
        """Tokens that must still be fed to the target, the root included; at least 1."""
        return len(self.token_ids) - len(self.slots)

    def view(self) -> SequenceView:
        """Return the policy's view of the sequence."""
        return SequenceView(
            request_id=self.request_id,
            num_committed=self.num_tokens,
            num_generated=self.num_generated,
            num_remaining=self.num_remaining,
            num_uncached=self.num_uncached,
            sampling=self.request.sampling,
            speculation=self.request.speculation,
            verifier=self.verifier,
            needs_host=self.needs_host,
        )

    def leave_queue(self) -> None:
        """Record how long the sequence waited. A wait after a preemption is not recorded."""
        if self.queued_s is None:
            self.queued_s = time.monotonic() - self.arrival_s

    def count_prompt(self, end: int) -> int:
        """Return how many prompt tokens before position `end` are fed for the first time. Each is counted only once.

        Prompt tokens that an earlier engine fed for a resumed request are not counted again.
        """
        fresh = min(end, self._prompt_len) - self._num_counted_prompt
        if fresh <= 0:
            return 0
        self._num_counted_prompt += fresh
        return fresh

    def count_prefix_hits(self) -> int:
        """Return how many prompt tokens were found in the prefix cache since the last call."""
        fresh = self.count_prompt(self.target_len)
        self.num_prefix_hits += fresh
        return fresh

    def accept(self, new_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Return the part of `new_ids` that belongs to the output, and the finish reason if the output ends there."""
        stops, most = self.request.sampling.stop_token_ids, self.num_remaining
        if not self.request.sampling.max_tokens:  # only the prompt's log-probabilities are requested
            return [], FinishReason.LENGTH
        for count, token_id in enumerate(new_ids, start=1):
            if token_id in stops:
                return new_ids[:count], FinishReason.STOP
            if count == most:
                return new_ids[:count], FinishReason.LENGTH
        return new_ids, None

    def reset_caches(self) -> None:
        """Reset the caches' state: the sequence is fed from its start when it runs again."""
        self.slots, self.blocks, self.num_marked, self.draft_len = array("q"), [], 0, 0


def _needs_host(request: Request) -> bool:
    """Return whether the target's passes cannot choose one token after the other by themselves."""
    sampling = request.sampling
    edits = sampling.edits_logits or sampling.typical_p < 1.0
    return edits or sampling.num_logprobs is not None or request.speculation.is_traced


def _num_fed_before(request: Request) -> int:
    """Return how many leading prompt tokens earlier engines are known to have fed."""
    return len(request.prompt_ids) if request.progress.token_ids else request.progress.num_prompt_logprobs
