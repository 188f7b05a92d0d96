"""The scheduler of waiting and running sequences. A step has no phases, only rows with tokens to feed.

Enforces the token budget and owns the slot pool. FairQueue orders the waiting sequences. When slots run out, the youngest
sequence is preempted and later restarted; its text does not change, since randomness is keyed by position. Knows no tensors and
no models.
"""

import logging
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

import msgspec

from engine.core.cache_events import CacheEvent
from engine.core.config import SchedulerConfig
from engine.core.policy import BatchViews
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import FREE_GROWTH, PLAIN, Expansion, GrowthCosts, TokenTree
from engine.core.types import FinishReason
from engine.core.verifier_table import fitted
from engine.scheduler.cache_event_log import CacheEventLog
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.prompt_pacing import PromptPacing
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_allocator import BlockKey, IntegrityError, SlotAllocator
from engine.scheduler.token_budget import PLAIN_SHARE, TokenDemand, TokenShare, share_tokens

_logger = logging.getLogger(__name__)

_MOST_SCORED = 64  # prompt tokens per sequence and step if log-probabilities are requested: each needs a row of logits
_MOST_BEHIND = 64  # tokens of a plain row that the drafter may lack before it is fed


class RowResult(msgspec.Struct, frozen=True):
    """The outcome of a row. `drafted_len` counts leading nodes of `path` whose keys the drafter has cached."""

    tree: TokenTree
    path: tuple[int, ...]
    extra_id: int
    drafted_len: int


class MostSteps(msgspec.Struct, frozen=True):
    """The most steps in a row, if all rows decode plainly and if some draft."""

    plain: int = 1
    drafting: int = 1


ONE_STEP = MostSteps()


class Emission(msgspec.Struct, frozen=True):
    """Output tokens of one sequence, cut at stop tokens and limits, and the finish reason if it ends."""

    row: Row
    new_ids: tuple[int, ...]
    num_accepted: int
    finish: FinishReason | None
    queued_s: float | None = None  # set with a sequence's first tokens
    num_cached: int = 0  # prompt tokens from the prefix cache; set with a sequence's first tokens


class Scheduler:
    """Owns every Sequence, the slot pool and the prefix cache."""

    def __init__(self, config: SchedulerConfig, feeding: Feeding) -> None:
        self.pool = SlotAllocator(config.num_slots)
        self._cache_log = CacheEventLog() if config.has_cache_events else None
        self._prefix_cache = PrefixCache(config.prefix_block_tokens, self._cache_log)
        self._num_prefix_queries = self._num_prefix_hits = 0  # prompt tokens, since the last plan
        self.pacing = PromptPacing(config.decode_pace)
        self._config = config
        self._feeding = feeding
        self._waiting = FairQueue()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._composition = 0  # incremented whenever the set of running sequences changes
        self._decoding_batch: list[Sequence] | None = None  # the running sequences, once all of them decode
        self._step = 0
        self.traces_all = False  # whether all rows are traced, not only rows of requests that enable it

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
        """Slots that can be allocated, including slots of unused blocks."""
        return self.pool.num_free + self._prefix_cache.num_unused_slots

    @property
    def num_used_slots(self) -> int:
        """Slots that sequences hold."""
        return self.pool.num_used - self._prefix_cache.num_unused_slots

    @property
    def running_ids(self) -> Iterator[str]:
        """The requests that take part in each step, oldest first."""
        return (sequence.request.request_id for sequence in self._running)

    @property
    def running_adapters(self) -> tuple[str, ...]:
        """The LoRA adapters of running sequences."""
        return _adapters(self._running)

    @property
    def waiting_adapters(self) -> tuple[str, ...]:
        """The LoRA adapters of sequences that hold no slots yet."""
        return _adapters(set(self._by_id.values()).difference(self._running)) if self._waiting else ()

    @property
    def has_work(self) -> bool:
        """Whether there is a sequence."""
        return bool(self._by_id)

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """Return the changes of the prefix cache since the last call; none unless the configuration has them recorded."""
        return () if self._cache_log is None else self._cache_log.take()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if its id is in use."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"request id {sequence.request_id!r} is in use")
        self._by_id[sequence.request_id] = sequence
        if not self._config.prefix_block_tokens:
            sequence.salt = None
        self._waiting.push(sequence)

    def remove(self, request_id: str) -> bool:
        """End a sequence at once and free its slots. Return whether it existed."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        if not self._waiting.remove(sequence):
            self._stop_running(sequence)
        self._release(sequence)
        return True

    def fail(self, request_id: str) -> None:
        """End a sequence whose logits are not finite, and invalidate its cached prefix."""
        self._prefix_cache.invalidate(self._by_id[request_id])
        self.remove(request_id)

    def _release(self, sequence: Sequence) -> None:
        """Free all slots of a sequence."""
        self.pool.free([*self._prefix_cache.release(sequence), *sequence.own_slots])
        sequence.reset_caches()

    def admit(self) -> None:
        """Start waiting sequences in order while there are slots for their uncached tokens. Reuse cached prefixes."""
        for running in self._running:
            if running.draft_len < running.num_shared or running.num_uncached > 1:  # else no block is left to find
                self._extend_from_cache(running)
        if not self._waiting:
            return
        promised = sum(running.num_uncached for running in self._running)
        while len(self._running) < self._config.max_running and (sequence := self._waiting.first) is not None:
            if self._running and promised >= self.num_free:
                return
            self._prefix_cache.adopt(sequence)
            promised += sequence.num_uncached
            if self._running and promised > self.num_free:
                self._release(sequence)
                return
            if sequence.queued_s is None and sequence.reads_prefixes:
                self._num_prefix_queries += len(sequence.request.prompt_ids)
            sequence.leave_queue()
            self._extend_from_cache(sequence)
            self._running.append(self._waiting.pop())
            self._note_new_batch()

    def _extend_from_cache(self, sequence: Sequence) -> None:
        """Reuse the cached prefix of a running sequence."""
        self._prefix_cache.adopt(sequence)
        self._num_prefix_hits += sequence.count_prefix_hits()

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._note_new_batch()

    def _note_new_batch(self) -> None:
        """Record that the set of running sequences changed."""
        self._composition += 1
        self._decoding_batch = None

    def _stepping(self) -> list[Sequence]:
        """Return the running sequences that take part in the step, oldest first.

        Once all of them decode, the list is kept until the set of running sequences changes.
        """
        if self._decoding_batch is not None:
            return self._decoding_batch
        stepping = list(self._unblocked(self._without_long_prompts() if self.pacing.is_paused else self._running))
        if len(stepping) == len(self._running) and all(sequence.num_uncached == 1 for sequence in stepping):
            self._decoding_batch = stepping
        return stepping

    def _without_long_prompts(self) -> list[Sequence]:
        """Return the running sequences, without prompts longer than a step if one decodes and none might be preempted."""
        short = [sequence for sequence in self._running if sequence.num_uncached <= self._config.max_step_tokens]
        is_decoding = any(sequence.num_uncached == 1 for sequence in short)
        return short if is_decoding and sum(sequence.num_uncached for sequence in short) <= self.num_free else self._running

    def _unblocked(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences, except sequences whose next block is being computed for an older sequence.

        Simultaneous requests with the same prompt thus compute it once.
        """
        in_progress: set[BlockKey] = set()
        for sequence in running:
            key = self._prefix_cache.lookup_key(sequence)
            if key is None or key not in in_progress or sequence.has_own_slots:
                yield sequence
            if key is not None:
                in_progress.add(key)

    def views(self) -> BatchViews:
        """Return a policy's views of the sequences in the step, oldest first."""
        stepping = self._stepping()
        is_decoding = self._decoding_batch is not None or (
            self.pacing.is_paused and all(sequence.num_uncached == 1 for sequence in stepping)
        )
        composition = (self._composition, len(stepping)) if is_decoding else None  # more step once a paused prompt ends
        return BatchViews(lambda: [sequence.view() for sequence in stepping], len(stepping), composition)

    def plan(
        self,
        wanted: SequenceOf[Expansion],
        most_tokens: int | None = None,
        keeps_up: bool = True,
        growth_costs: GrowthCosts = FREE_GROWTH,
        most_steps: MostSteps = ONE_STEP,
    ) -> StepPlan:
        """Turn the wanted expansions, one for each of `views`, into rows within the token budget and the slots, oldest first.

        `most_tokens` lowers the budget of the configuration. `keeps_up` feeds drafters that fall behind plain rows.
        `growth_costs` apply to the policy's trees, not to trees that requests set. Up to `most_steps` run in a row.
        """
        max_tokens = min(self._config.max_step_tokens, most_tokens or self._config.max_step_tokens)
        sequences = self._stepping()
        trees = [self._permitted(sequence, expansion) for sequence, expansion in zip(sequences, wanted, strict=True)]
        if self._decoding_batch is not None and all(tree is PLAIN for tree in trees):
            shares = [PLAIN_SHARE] * len(trees)
        else:
            pairs = zip(sequences, trees, strict=True)
            shares = share_tokens([TokenDemand(_num_fed(one), self._num_draftable(one, tree)) for one, tree in pairs], max_tokens)
        rows: list[Row] = []
        num_preempted, draft_feed = 0, max_tokens
        most_behind = self._most_behind(sequences, trees) if keeps_up else None
        num_steps = 1 if most_steps is ONE_STEP else self._num_steps(sequences, trees, most_steps)
        self._step += 1
        for sequence, tree, share in zip(sequences, trees, shares, strict=True):
            num_certain = share.num_certain
            if num_preempted and sequence not in self._running:  # preempted to make room for an older one
                continue
            expansion = PLAIN if tree is PLAIN else self._fitted(sequence, tree, share, draft_feed)
            if num_certain > self.pool.num_free:
                num_preempted += self._make_room(sequence, num_certain)
                if sequence not in self._running:
                    continue
            draft_ids = self._draft_feed(sequence, num_certain, tree, expansion, most_behind)[:draft_feed]
            draft_feed -= len(draft_ids)
            num_later = (num_steps - 1) * (1 + expansion.max_depth)
            rows.append(self._row(sequence, num_certain, expansion, draft_ids, growth_costs, num_later))
        num_prefix_queries, self._num_prefix_queries = self._num_prefix_queries, 0
        num_prefix_hits, self._num_prefix_hits = self._num_prefix_hits, 0
        return StepPlan(self._step, tuple(rows), num_preempted, num_prefix_queries, num_prefix_hits, num_steps)

    def _num_steps(self, sequences: SequenceOf[Sequence], trees: SequenceOf[Expansion], most: MostSteps) -> int:
        """Return how many steps can run in a row: several if every sequence decodes and the host has no other work.

        No sequence that decodes plainly reaches its limit before the last step. Sequences that draft end a run themselves.
        """
        are_plain = all(tree.is_plain for tree in trees)
        has_adapters = any(sequence.request.adapter is not None for sequence in sequences)
        most_steps = most.plain if are_plain else 1 if has_adapters else most.drafting
        may_admit = bool(self._waiting) and len(self._running) < self._config.max_running
        if most_steps == 1 or len(sequences) < len(self._running) or may_admit or self.traces_all:
            return 1
        if not sequences or any(sequence.needs_host or sequence.num_uncached > 1 for sequence in sequences):
            return 1
        num_remaining = min([sequence.num_remaining for sequence in sequences])
        num_slots = len(sequences) if are_plain else sum([1 + tree.max_depth for tree in trees])  # of each step after the first
        num_free = self.num_free - (0 if are_plain else sum([tree.num_draft_tokens for tree in trees]))
        return max(1, min(most_steps, num_remaining, num_free // num_slots))

    def _permitted(self, sequence: Sequence, expansion: Expansion) -> Expansion:
        """Return the tree for a sequence: its request's if set, else the policy's, fitted to the verifier and to its limits.

        Greedy rows may have any tree. The depth is at most the number of remaining tokens minus the extra token.
        """
        speculation = sequence.request.speculation
        chosen = speculation.expansion or expansion
        if not speculation.is_enabled or chosen.is_plain:
            return PLAIN
        tree = chosen if sequence.request.sampling.is_greedy else fitted(chosen, sequence.verifier)
        most = tree.num_draft_tokens if speculation.max_nodes is None else min(speculation.max_nodes, tree.num_draft_tokens)
        return tree.limited(max(0, sequence.num_remaining - 1), most)

    def _num_draftable(self, sequence: Sequence, tree: Expansion) -> int:
        """Return the nodes that can be drafted: none if the drafter needs target features that are not computed yet."""
        lacks_features = self._feeding is Feeding.TARGET_FEATURES and sequence.num_uncached > 1
        return 0 if lacks_features else tree.num_draft_tokens

    def _fitted(self, sequence: Sequence, tree: Expansion, share: TokenShare, draft_feed: int) -> Expansion:
        """Limit a tree to its token share and to the free slots, of which one is reserved for each younger row.

        There is no tree on an unfinished prompt, nor if the drafter cannot be fed up to the root in this step.
        """
        is_behind = self._feeding is not Feeding.TARGET_CACHE and sequence.num_tokens - sequence.draft_len > draft_feed
        if tree.is_plain or share.num_certain < sequence.num_uncached or is_behind:
            return PLAIN
        num_younger = len(self._running) - self._running.index(sequence) - 1
        num_spare = self.num_free - share.num_certain - num_younger
        return tree.limited(tree.max_depth, max(0, min(share.max_draft_tokens, num_spare)))

    def _make_room(self, sequence: Sequence, num_slots: int) -> int:
        """Preempt the youngest sequences, finally this one, until `num_slots` are free. Return how many were preempted."""
        num_preempted = 0
        while num_slots > self.num_free and sequence in self._running:
            self._preempt(self._running[-1])
            num_preempted += 1
        return num_preempted

    def _row(
        self,
        sequence: Sequence,
        num_certain: int,
        expansion: Expansion,
        draft_ids: list[int],
        growth_costs: GrowthCosts,
        num_later: int,
    ) -> Row:
        """Allocate the sequence's slots, `num_later` of them for tokens of later steps, and return its row."""
        request, token_ids, context_len = sequence.request, sequence.token_ids, len(sequence.slots)
        num_drafted = 0 if expansion is PLAIN else expansion.num_draft_tokens
        sequence.slots.extend(self._allocated(num_certain + num_drafted + num_later))
        end = context_len + num_certain
        return Row(
            request_id=sequence.request_id,
            context_len=context_len,
            certain_ids=tuple(token_ids[context_len:end]),
            num_new_prompt_tokens=sequence.count_prompt(end),
            is_decoding=end == len(token_ids),
            draft_len=sequence.draft_len,
            draft_ids=tuple(draft_ids),
            expansion=expansion,
            slots=sequence.slots[:],
            sampling=request.sampling,
            verifier=sequence.verifier,
            seed=sequence.seed,
            history=token_ids,
            num_prompt_tokens=len(request.prompt_ids),
            is_traced=self.traces_all or request.speculation.is_traced,
            growth_costs=FREE_GROWTH if request.speculation.expansion else growth_costs,
            adapter=request.adapter,
            allows_drafts=sequence.allows_drafts,
        )

    def _allocated(self, count: int) -> list[int]:
        """Allocate slots, evicting unused blocks if too few are free."""
        pool = self.pool
        while pool.num_free < count and self._prefix_cache.num_unused_slots:
            pool.free(self._prefix_cache.evict())
        return pool.allocate(count)

    def _most_behind(self, sequences: SequenceOf[Sequence], trees: SequenceOf[Expansion]) -> int:
        """Return how many tokens of a plain row the drafter may lack in this step.

        Once it lacks too many of one row, rows half as far behind are fed too, in the same pass.
        """
        for one, tree in zip(sequences, trees, strict=True):
            is_behind = one.num_tokens - one.draft_len > _MOST_BEHIND
            if is_behind and tree.is_plain and one.request.speculation.is_enabled:
                return _MOST_BEHIND // 2
        return _MOST_BEHIND

    def _draft_feed(
        self, sequence: Sequence, num_certain: int, tree: Expansion, expansion: Expansion, most_behind: int | None
    ) -> list[int]:
        """Return the tokens to feed to the drafter: up to the root for a tree, else enough to keep it from falling behind.

        Must be called before the row's slots are allocated. A drafter that reads the target's features is fed one step later.
        With `most_behind` None, a row without a tree is not fed, not even its prompt.
        """
        end = len(sequence.slots) + num_certain
        if not (expansion is PLAIN or expansion.is_plain):
            return sequence.token_ids[sequence.draft_len : end]
        is_unfed = most_behind is None and tree.is_plain
        if is_unfed or self._feeding is Feeding.TARGET_CACHE or not sequence.request.speculation.is_enabled:
            return []
        reach = sequence.target_len if self._feeding is Feeding.TARGET_FEATURES else end
        is_prompt = end < sequence.num_tokens
        is_late = most_behind is not None and (is_prompt or reach - sequence.draft_len > most_behind)
        return sequence.token_ids[sequence.draft_len : reach] if is_late or not tree.is_plain else []

    def _preempt(self, sequence: Sequence) -> None:
        _logger.info("request %s preempted at %d tokens", sequence.request_id, sequence.num_tokens)
        self._stop_running(sequence)
        self._release(sequence)
        self._waiting.push_back(sequence)

    def commit_chunk(self, row: Row) -> None:
        """Record that the target, and the drafter if it was fed, have cached a chunk of a prompt."""
        sequence = self._by_id[row.request_id]
        self._keep(sequence, row.end, array("q"))
        sequence.draft_len = row.end if self._feeding is Feeding.TARGET_CACHE else row.draft_len + len(row.draft_ids)
        self._prefix_cache.publish(sequence)

    def commit(self, row: Row, result: RowResult) -> Emission:
        """Append the accepted path and the extra token, keep the path's slots and free the others. End a finished sequence.

        The path's slots move to the front of the tree's part of the table, in path order:

            table before  [ context | certain .. root  n1 n2 n3 n4 ]     path = root, n2, n4
            table after   [ context | certain .. root  n2 n4 ]           n1 and n3 are freed
        """
        sequence, token_ids = self._by_id[row.request_id], result.tree.token_ids
        is_first = sequence.num_generated == 0
        drafted = [token_ids[node] for node in result.path[1:]]
        new_ids, finish = sequence.accept([*drafted, result.extra_id])
        num_kept = min(len(drafted), len(new_ids))
        sequence.token_ids.extend(new_ids)
        self._waiting.charge(sequence, len(new_ids))
        end, slots = row.end, row.slots
        if len(slots) > end:
            path = result.path[: num_kept + 1]  # a stop token or limit may cut it
            self._keep(sequence, end - 1, array("q", [slots[end - 1 + node] for node in path]))
        sequence.draft_len = self._draft_len_after(row, result)
        self._prefix_cache.publish(sequence)
        self._prefix_cache.mark_finite(sequence)
        if finish is not None:
            self.remove(row.request_id)
        queued_s, num_cached = (sequence.queued_s, sequence.num_prefix_hits) if is_first else (None, 0)
        return Emission(row, tuple(new_ids), num_kept if row.is_drafting else 0, finish, queued_s, num_cached)

    def _draft_len_after(self, row: Row, result: RowResult) -> int:
        """Return how many tokens the drafter has cached. Nodes fed with substitutes for target features are fed again."""
        if self._feeding is Feeding.TARGET_CACHE:
            return row.root_position + len(result.path)
        if self._feeding is Feeding.TARGET_FEATURES or row.expansion.is_plain:
            return row.draft_len + len(row.draft_ids)
        if not result.drafted_len:  # not even the root was fed: the tree came from cached text only
            return row.draft_len
        return row.root_position + result.drafted_len

    def _keep(self, sequence: Sequence, num_kept: int, path_slots: "array[int]") -> None:
        """Reduce the table to its first `num_kept` slots followed by `path_slots`. Free the others."""
        if sequence.slots[num_kept:] == path_slots:
            return
        kept = set(path_slots)
        self.pool.free([slot for slot in sequence.slots[num_kept:] if slot not in kept])
        sequence.slots[num_kept:] = path_slots

    def check_integrity(self) -> None:
        """Raise IntegrityError unless sequences, tables and the pool agree. Valid between steps."""
        if len(self._by_id) != len(self._waiting) + len(self._running):
            raise IntegrityError("a sequence is neither waiting nor running, or both")
        blocks = self._prefix_cache.check(self._by_id.values())
        self.pool.check([blocks, *(sequence.own_slots for sequence in self._by_id.values())])
        for sequence in self._by_id.values():
            if not sequence.draft_len <= sequence.target_len < sequence.num_tokens:
                lengths = f"{sequence.draft_len} <= {sequence.target_len} < {sequence.num_tokens}"
                raise IntegrityError(f"{sequence.request_id}: {lengths} does not hold")


def _adapters(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({one.request.adapter for one in sequences if one.request.adapter is not None}))


def _num_fed(sequence: Sequence) -> int:
    """Return how many uncached tokens of a sequence may be fed to the target in a step."""
    is_scored = sequence.request.sampling.num_prompt_logprobs is not None
    return min(sequence.num_uncached, _MOST_SCORED) if is_scored else sequence.num_uncached
