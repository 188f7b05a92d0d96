"""Waiting and running sequences, and the step plan: no phases, only rows with tokens to feed.

Keeps the token budget and the slot pool; whose turn it is to run, FairQueue says. Preempts the youngest when slots run out and
starts it anew later (its text does not change: randomness is keyed by position). Knows no tensors and no models.
"""

import logging
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.core.config import SchedulerConfig
from engine.core.policy import BatchViews
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthPrices, TokenTree
from engine.core.types import FinishReason
from engine.core.verifier_table import fitted
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_pool import BlockKey, IntegrityError, SlotPool
from engine.scheduler.token_budget import Share, Wish, share_out

_logger = logging.getLogger(__name__)

_MOST_SCORED = 64  # prompt tokens of a sequence in a step, where each is scored by a law as wide as the vocabulary
_MOST_BEHIND = 64  # tokens that a drafter falls behind a plain row before it is fed


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row. `drafted_len` counts leading nodes of `path` whose keys the drafter has cached."""

    tree: TokenTree
    path: tuple[int, ...]
    extra_id: int
    drafted_len: int


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that leave the engine for one sequence, cut at stop tokens and limits, and why they are the last if they are."""

    row: Row
    new_ids: tuple[int, ...]
    num_accepted: int
    finish: FinishReason | None
    queued_s: float | None = None  # on a sequence's first tokens
    num_cached: int = 0  # prompt tokens found cached; on a sequence's first tokens


class Scheduler:
    """Owns every Sequence, the slot pool and the prefix cache."""

    def __init__(self, config: SchedulerConfig, feeding: Feeding) -> None:
        self.pool = SlotPool(config.num_slots)
        self._prefixes = PrefixCache(config.prefix_block_tokens)
        self._num_sought = self._num_found = 0  # prompt tokens, since the last plan
        self._config = config
        self._feeding = feeding
        self._waiting = FairQueue()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._composition = 0  # grows whenever somebody begins or ceases to run
        self._calm: list[Sequence] | None = None  # who steps in it, once all of them decode
        self._step = 0
        self.traces_all = False  # whether requests are traced that do not ask for it

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slots yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that take part in each step."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Slots that can be had, those of blocks that nobody uses among them."""
        return self.pool.num_free + self._prefixes.num_unused_slots

    @property
    def num_used_slots(self) -> int:
        """Slots that sequences hold."""
        return self.pool.num_used - self._prefixes.num_unused_slots

    @property
    def running_ids(self) -> list[str]:
        """The requests that take part in each step, oldest first."""
        return [sequence.request_id for sequence in self._running]

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._by_id)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in its turn; raise ValueError if its id is taken."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"request id {sequence.request_id!r} is in use")
        self._by_id[sequence.request_id] = sequence
        if not self._config.prefix_block_tokens:
            sequence.salt = None
        self._waiting.push(sequence)

    def remove(self, request_id: str) -> bool:
        """End a sequence at once and free its slots; return whether it was there."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        if not self._waiting.remove(sequence):
            self._leave(sequence)
        self._release(sequence)
        return True

    def fail(self, request_id: str) -> None:
        """End a sequence whose logits are none, and trust nothing that was cached for it."""
        self._prefixes.forget(self._by_id[request_id])
        self.remove(request_id)

    def _release(self, sequence: Sequence) -> None:
        """Let go of all that is cached for a sequence."""
        self.pool.free([*self._prefixes.release(sequence), *sequence.own_slots])
        sequence.forget_caches()

    def admit(self) -> None:
        """Let waiting sequences run in their turn while there is room for what they must be fed; nobody is fed what is cached."""
        for running in self._running:
            self._adopt(running)
        promised = sum(running.num_uncached for running in self._running) if self._waiting else 0
        while len(self._running) < self._config.max_running and (sequence := self._waiting.first) is not None:
            if self._running and promised >= self.num_free:
                return
            self._prefixes.adopt(sequence)
            promised += sequence.num_uncached
            if self._running and promised > self.num_free:
                self._release(sequence)
                return
            if sequence.queued_s is None and sequence.reads_prefixes:
                self._num_sought += len(sequence.request.prompt_ids)
            sequence.leave_queue()
            self._adopt(sequence)
            self._running.append(self._waiting.pop())
            self._compose()

    def _adopt(self, sequence: Sequence) -> None:
        """Let a running sequence go on from what is cached of its text."""
        self._prefixes.adopt(sequence)
        self._num_found += sequence.count_found()

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._compose()

    def _compose(self) -> None:
        """Note that other sequences run than before."""
        self._composition += 1
        self._calm = None

    def _stepping(self) -> list[Sequence]:
        """Return the running sequences that step, oldest first: all of them, once all decode, until one comes or goes."""
        if self._calm is not None:
            return self._calm
        stepping = list(self._unblocked())
        if len(stepping) == len(self._running) and all(sequence.num_uncached == 1 for sequence in stepping):
            self._calm = stepping
        return stepping

    def _unblocked(self) -> Iterator[Sequence]:
        """Yield the running sequences but those that are to be fed a block that an older one is being fed.

        So requests with one prompt that come together have it computed once.
        """
        under_way: set[BlockKey] = set()
        for sequence in self._running:
            key = self._prefixes.wanted(sequence)
            if key is None or key not in under_way or sequence.has_own_slots:
                yield sequence
            if key is not None:
                under_way.add(key)

    def views(self) -> BatchViews:
        """Return what a policy may see of the running sequences, oldest first."""
        stepping = self._stepping()
        composition = None if self._calm is None else self._composition
        return BatchViews(lambda: [sequence.view() for sequence in stepping], len(stepping), composition)

    def plan(
        self,
        wanted: SequenceOf[Expansion],
        most_tokens: int | None = None,
        keeps_up: bool = True,
        prices: GrowthPrices = FREE_GROWTH,
    ) -> StepPlan:
        """Turn wishes (one expansion for each of `views`) into rows that fit the step's tokens and the slots, oldest first.

        `most_tokens` makes the step smaller than the configuration does. `keeps_up` feeds drafters that plain rows leave behind.
        At `prices` the wished trees grow, but not those that requests ask for themselves.
        """
        max_tokens = min(self._config.max_step_tokens, most_tokens or self._config.max_step_tokens)
        sequences = self._stepping()
        wishes = [self._wish(sequence, expansion) for sequence, expansion in zip(sequences, wanted, strict=True)]
        claims = [Wish(_num_fed(one), self._num_claimed(one, wish)) for one, wish in zip(sequences, wishes, strict=True)]
        shares = share_out(claims, max_tokens)
        rows: list[Row] = []
        num_preempted, draft_feed = 0, max_tokens
        most_behind = self._most_behind(sequences, wishes) if keeps_up else None
        self._step += 1
        for sequence, wish, share in zip(sequences, wishes, shares, strict=True):
            if sequence not in self._running:  # preempted for the sake of an older one
                continue
            expansion = self._fitted(sequence, wish, share, draft_feed)
            num_preempted += self._make_room(sequence, share.num_certain)
            if sequence in self._running:
                draft_ids = self._draft_feed(sequence, share.num_certain, wish, expansion, most_behind)
                rows.append(self._row(sequence, share.num_certain, expansion, draft_ids[:draft_feed], prices))
                draft_feed -= len(rows[-1].draft_ids)
        num_sought, num_found, self._num_sought, self._num_found = self._num_sought, self._num_found, 0, 0
        return StepPlan(self._step, tuple(rows), num_preempted, num_sought, num_found)

    def _wish(self, sequence: Sequence, expansion: Expansion) -> Expansion:
        """Return what is wanted for a sequence: its own request's tree before the policy's, one its verifier is exact on.

        A greedy row takes any tree. No deeper than tokens remain, the extra one aside.
        """
        speculation = sequence.request.speculation
        if not speculation.is_enabled:
            return PLAIN
        asked = speculation.expansion or expansion
        if asked.is_plain:
            return PLAIN
        wish = asked if sequence.request.sampling.is_greedy else fitted(asked, sequence.verifier)
        most = wish.num_draft_tokens if speculation.max_nodes is None else min(speculation.max_nodes, wish.num_draft_tokens)
        return wish.limited(max(0, sequence.num_remaining - 1), most)

    def _num_claimed(self, sequence: Sequence, wish: Expansion) -> int:
        """Return how many nodes a sequence may hope for: none before the target has been where its drafter must look."""
        is_blind = self._feeding is Feeding.TARGET_FEATURES and sequence.num_uncached > 1
        return 0 if is_blind else wish.num_draft_tokens

    def _fitted(self, sequence: Sequence, wish: Expansion, share: Share, draft_feed: int) -> Expansion:
        """Trim a wish to its share and to the slots that younger rows can spare; nothing grows on an unfinished prompt.

        Nor does a tree grow far ahead of what the drafter has been fed.
        """
        is_behind = self._feeding is not Feeding.TARGET_CACHE and sequence.num_tokens - sequence.draft_len > draft_feed
        if wish.is_plain or share.num_certain < sequence.num_uncached or is_behind:
            return PLAIN
        num_younger = len(self._running) - self._running.index(sequence) - 1
        num_spare = self.num_free - share.num_certain - num_younger
        return wish.limited(wish.max_depth, max(0, min(share.max_draft_tokens, num_spare)))

    def _make_room(self, sequence: Sequence, num_slots: int) -> int:
        """Preempt the youngest until so many slots are free, at last the sequence itself; return how many were preempted."""
        num_preempted = 0
        while num_slots > self.num_free and sequence in self._running:
            self._preempt(self._running[-1])
            num_preempted += 1
        return num_preempted

    def _row(self, sequence: Sequence, num_certain: int, expansion: Expansion, draft_ids: list[int], prices: GrowthPrices) -> Row:
        """Give the sequence its slots and return its row."""
        context_len = sequence.target_len
        sequence.slots.extend(self._allocated(num_certain + expansion.num_draft_tokens))
        end = context_len + num_certain
        return Row(
            request_id=sequence.request_id,
            context_len=context_len,
            certain_ids=tuple(sequence.token_ids[context_len:end]),
            num_new_prompt_tokens=sequence.count_prompt(end),
            is_decoding=end == sequence.num_tokens,
            draft_len=sequence.draft_len,
            draft_ids=tuple(draft_ids),
            expansion=expansion,
            slots=sequence.slots[:],
            sampling=sequence.request.sampling,
            verifier=sequence.verifier,
            seed=sequence.seed,
            history=sequence.token_ids,
            num_prompt_tokens=len(sequence.request.prompt_ids),
            is_traced=self.traces_all or sequence.request.speculation.is_traced,
            growth_costs=FREE_GROWTH if sequence.request.speculation.expansion else prices,
        )

    def _allocated(self, count: int) -> list[int]:
        """Return free slots, those of blocks that nobody uses if there are too few others."""
        while self.pool.num_free < count and self._prefixes.num_unused_slots:
            self.pool.free(self._prefixes.evict())
        return self.pool.allocate(count)

    def _most_behind(self, sequences: SequenceOf[Sequence], wishes: SequenceOf[Expansion]) -> int:
        """Return the tokens that the drafter may be behind a plain row in this step.

        As soon as it is far behind one, those half as far behind are fed with it, in one pass.
        """
        rows = zip(sequences, wishes, strict=True)
        plain = [one for one, wish in rows if wish.is_plain and one.request.speculation.is_enabled]
        is_late = any(one.num_tokens - one.draft_len > _MOST_BEHIND for one in plain)
        return _MOST_BEHIND // 2 if is_late else _MOST_BEHIND

    def _draft_feed(
        self, sequence: Sequence, num_certain: int, wish: Expansion, expansion: Expansion, most_behind: int | None
    ) -> list[int]:
        """Return the tokens to feed the drafter: up to the root for a tree, else what keeps it from falling behind.

        Called before the row's slots are given. A drafter behind the target's features follows a step late. One that no tree
        waits for falls behind, where `most_behind` is None even of a prompt: what is never drafted from is not fed.
        """
        end = sequence.target_len + num_certain
        if not expansion.is_plain:
            return sequence.token_ids[sequence.draft_len : end]
        if self._feeding is Feeding.TARGET_CACHE or not sequence.request.speculation.is_enabled:
            return []
        reach = sequence.target_len if self._feeding is Feeding.TARGET_FEATURES else end
        is_prompt = end < sequence.num_tokens
        is_late = most_behind is not None and (is_prompt or reach - sequence.draft_len > most_behind)
        return sequence.token_ids[sequence.draft_len : reach] if is_late or not wish.is_plain else []

    def _preempt(self, sequence: Sequence) -> None:
        _logger.info("request %s preempted at %d tokens", sequence.request_id, sequence.num_tokens)
        self._leave(sequence)
        self._release(sequence)
        self._waiting.push_back(sequence)

    def commit_chunk(self, row: Row) -> None:
        """Record that a chunk of a prompt is cached by the target, and by the drafter if it was fed."""
        sequence = self._by_id[row.request_id]
        self._keep(sequence, row.end, array("q"))
        sequence.draft_len = row.end if self._feeding is Feeding.TARGET_CACHE else row.draft_len + len(row.draft_ids)
        self._prefixes.publish(sequence)

    def commit(self, row: Row, result: RowResult) -> Emission:
        """Append the accepted path and the extra token, keep the path's slots, free the others; finish if it ends here.

        The path's slots move to the front of the tree's part of the table, in path order:

            table before  [ context | certain .. root  n1 n2 n3 n4 ]     path = root, n2, n4
            table after   [ context | certain .. root  n2 n4 ]           n1 and n3 are freed
        """
        sequence = self._by_id[row.request_id]
        is_first = sequence.num_generated == 0
        drafted = [result.tree.token_ids[node] for node in result.path[1:]]
        new_ids, finish = sequence.accept([*drafted, result.extra_id])
        num_accepted = min(len(drafted), len(new_ids))
        sequence.token_ids.extend(new_ids)
        self._waiting.charge(sequence, len(new_ids))
        path = result.path[: num_accepted + 1]  # an end may cut it
        self._keep(sequence, row.root_position, array("q", [row.slots[row.root_position + node] for node in path]))
        sequence.draft_len = self._draft_len_after(row, result)
        self._prefixes.publish(sequence)
        self._prefixes.prove(sequence)
        if finish is not None:
            self.remove(row.request_id)
        queued_s, num_cached = (sequence.queued_s, sequence.num_found) if is_first else (None, 0)
        return Emission(row, tuple(new_ids), num_accepted, finish, queued_s, num_cached)

    def _draft_len_after(self, row: Row, result: RowResult) -> int:
        """Return how far the drafter keeps what it cached: what came of stand-ins for the target's features is fed anew."""
        if self._feeding is Feeding.TARGET_CACHE:
            return row.root_position + len(result.path)
        if row.expansion.is_plain or self._feeding is Feeding.TARGET_FEATURES:
            return row.draft_len + len(row.draft_ids)
        if not result.drafted_len:  # not even the root: a tree that did without the drafter left its tokens for later
            return row.draft_len
        return row.root_position + result.drafted_len

    def _keep(self, sequence: Sequence, num_kept: int, path_slots: "array[int]") -> None:
        """Make the table its first `num_kept` slots and then `path_slots`; free what falls out."""
        if sequence.slots[num_kept:] == path_slots:
            return
        kept = set(path_slots)
        self.pool.free([slot for slot in sequence.slots[num_kept:] if slot not in kept])
        sequence.slots[num_kept:] = path_slots

    def check_integrity(self) -> None:
        """Raise IntegrityError unless sequences, tables and the pool agree. Valid between steps."""
        if len(self._by_id) != len(self._waiting) + len(self._running):
            raise IntegrityError("a sequence is neither waiting nor running, or both")
        blocks = self._prefixes.check(self._by_id.values())
        self.pool.check([blocks, *(sequence.own_slots for sequence in self._by_id.values())])
        for sequence in self._by_id.values():
            if not sequence.draft_len <= sequence.target_len < sequence.num_tokens:
                lengths = f"{sequence.draft_len} <= {sequence.target_len} < {sequence.num_tokens}"
                raise IntegrityError(f"{sequence.request_id}: {lengths} does not hold")


def _num_fed(sequence: Sequence) -> int:
    """Return how many tokens the target may be fed of a sequence in a step, of those it lacks."""
    is_scored = sequence.request.sampling.num_prompt_logprobs is not None
    return min(sequence.num_uncached, _MOST_SCORED) if is_scored else sequence.num_uncached
