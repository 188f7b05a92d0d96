"""Random work for a scheduler: submit, step, abort, preempt, passes that go wrong; caches are simulated.

A slot's content is the whole text up to its token and the salt of its writer. So a wrongly kept or shared slot is seen, and
so is a wrong length. A bad pass writes bad content, and so does every pass that reads it; its distribution is invalid.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.config import SchedulerConfig
from engine.core.policy import BatchViews
from engine.core.step_plan import Feeding, Row, StepPlan
from engine.core.tree import PLAIN, ROOT, Expansion, TokenTree
from engine.core.types import FinishReason, Request, SamplingParams, Speculation, StepStats
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.slot_allocator import Block
from tests.strategies import expansions

Text = tuple[int, ...]
STOP = 2


@dataclass
class SimulatedCache:
    """What a model would have cached: for each slot the salt and the text that ends in its token."""

    texts: dict[int, tuple[str, Text]] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)

    def judge(self, slots, start: int, is_good: bool) -> bool:
        """Note whether what a pass wrote from `start` on is good, which what it read must be too; return it."""
        is_good = is_good and self.bad.isdisjoint(slots[:start])
        (self.bad.difference_update if is_good else self.bad.update)(slots[start:])
        return is_good

    def write(self, slots, start: int, text: Text, end: int, salt: str) -> None:
        for position in range(start, end):
            self.texts[slots[position]] = salt, text[: position + 1]

    def check(self, slots, length: int, text: Text, salt: str) -> None:
        for position in range(length):
            assert self.texts[slots[position]] == (salt, text[: position + 1]), f"position {position} of {length}"


def step_stats(step_s: float, num_decoding_rows: int) -> StepStats:
    """Return the statistics of a step, as far as a scheduler reads them."""
    return StepStats(0, 0, 0, 0, 0, step_s=step_s, num_decoding_rows=num_decoding_rows)


def random_tree(rng: random.Random, root_id: int, expansion: Expansion) -> TokenTree:
    """Return any tree that a growth within the expansion could leave: never more nodes, never deeper."""
    parents, ids, depths = [-1], [root_id], [0]
    for _ in range(rng.randint(0, expansion.num_draft_tokens)):
        parent = rng.choice([node for node, depth in enumerate(depths) if depth < expansion.max_depth])
        token_id = rng.randrange(STOP, 12)
        if (parent, token_id) in zip(parents, ids):
            continue  # drawn before: the same node
        parents.append(parent)
        ids.append(token_id)
        depths.append(depths[parent] + 1)
    draws = tuple(tuple(child for child, parent in enumerate(parents) if parent == node) for node in range(len(parents)))
    return TokenTree(tuple(parents), tuple(ids), draws)


def random_fed(rng: random.Random, tree: TokenTree) -> set[int]:
    fed = {ROOT}
    for node in range(1, tree.num_nodes):
        if tree.parents[node] in fed and rng.random() < 0.7:
            fed.add(node)
    return fed


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps, aborts; a small pool makes it preempt."""

    scheduler_class = Scheduler

    @initialize(
        num_slots=st.integers(16, 40),
        max_step_tokens=st.integers(4, 20),
        max_running=st.integers(1, 4),
        feeding=st.sampled_from(Feeding),
        block_tokens=st.sampled_from([0, 1, 2, 2, 3]),
        share_bad=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def start(self, num_slots, max_step_tokens, max_running, feeding, block_tokens, share_bad):
        config = SchedulerConfig(
            max_running=max_running, max_step_tokens=max_step_tokens, num_slots=num_slots, prefix_block_tokens=block_tokens
        )
        self.config, self.feeding, self.share_bad = config, feeding, share_bad
        self.scheduler = self.scheduler_class(config, feeding)
        self.target, self.draft = SimulatedCache(), SimulatedCache()
        self.alive: dict[str, Request] = {}
        self.ended: dict[str, FinishReason] = {}
        self.begun: set[str] = set()
        self.scored: dict[str, int] = {}
        self.count = 0
        self.is_mid_step = False
        self.stepped: dict[Hashable, list[str]] = {}

    @rule(
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        is_enabled=st.integers(0, 4),
        wish=st.none() | expansions(),
        priority=st.sampled_from([0, 0, 0, -2, 3]),
        num_common=st.sampled_from([0, 3, 6, 9, 12]),
        salt=st.sampled_from(["", "", "", "/other", None]),
        adapter=st.sampled_from([None, None, None, "adapter"]),
        is_scored=st.sampled_from([False, False, False, True]),
    )
    def submit(self, num_prompt, max_tokens, is_enabled, wish, priority, num_common, salt, adapter, is_scored):
        max_tokens = min(max_tokens, self.config.num_slots - num_prompt)
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,), num_prompt_logprobs=0 if is_scored else None)
        own = 100 * self.count + 20
        # few different tokens: blocks of the same tokens stand in different places
        prompt = tuple(12 + place % 3 if place < num_common else own + place for place in range(num_prompt))
        speculation = Speculation(is_enabled > 0, wish)
        request = Request(str(self.count), prompt, sampling, speculation, cache_salt=salt, priority=priority, adapter=adapter)
        self.scheduler.add(Sequence(request, self.count, "traversal"))
        with pytest.raises(ValueError, match="in use"):
            self.scheduler.add(Sequence(request, 0, "traversal"))
        self.alive[request.request_id] = request
        self.count += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(list(self.alive)))
        assert self.scheduler.remove(request_id)
        assert not self.scheduler.remove(request_id)
        self.end(request_id, FinishReason.ABORT)

    @precondition(lambda self: self.alive)
    @rule(seed=st.integers(0, 2**32), wanted=st.lists(expansions(), min_size=4, max_size=4), repeat=st.integers(1, 3))
    def steps(self, seed, wanted, repeat):
        for offset in range(repeat):
            self.step(random.Random(seed + offset), wanted)

    def step(self, rng: random.Random, wanted: list[Expansion]) -> None:
        self.is_mid_step = True
        self.scheduler.admit()
        self.check_admission()
        views = self.scheduler.views()
        self.check_composition(views)
        plan = self.scheduler.plan(wanted[: len(views)])
        self.check_plan(plan, [view.request_id for view in views])
        self.scheduler.pacing.before_step(plan)
        for row in plan.rows:
            self.run(rng, row)
        self.scheduler.pacing.after_step(step_stats(rng.random(), len(plan.decoding)), [])
        self.is_mid_step = False

    def check_composition(self, views: BatchViews) -> None:
        """Steps of one composition have the same sequences, all of which decode; while a prompt is fed there is none."""
        names = [view.request_id for view in views]
        assert len(views) == len(names)
        is_whole = names == [*self.scheduler.running_ids] or self.scheduler.pacing.is_paused
        all_decode = all(view.num_uncached == 1 for view in views) and is_whole
        assert (views.composition is not None) == all_decode
        if views.composition is not None:
            assert self.stepped.setdefault(views.composition, names) == names

    def check_plan(self, plan: StepPlan, running: list[str]) -> None:
        assert sum(len(row.certain_ids) + row.expansion.num_draft_tokens for row in plan.rows) <= self.config.max_step_tokens
        assert sum(len(row.draft_ids) for row in plan.rows) <= self.config.max_step_tokens
        written = [slot for row in plan.rows for slot in row.slots[row.context_len :]]
        read = [slot for row in plan.rows for slot in row.slots[: row.context_len]]
        assert len(written) == len(set(written))
        assert not set(written).intersection(read)
        assert [row.request_id for row in plan.rows] == running[: len(plan.rows)]
        assert len(plan.rows) + plan.num_preempted >= len(running)
        assert plan.rows or not self.alive

    def check_admission(self) -> None:
        for request_id in self.scheduler.running_ids:
            if request_id not in self.begun:
                self.begun.add(request_id)
                later = [request_id for request_id in self.alive if request_id not in self.begun]
                assert all(self.turn(request_id) < self.turn(waiting) for waiting in later), "admitted out of turn"

    def owner(self, request_id: str) -> str:
        """Return the group of requests that may read a request's caches."""
        salt = self.alive[request_id].cache_salt if self.config.prefix_block_tokens else None
        return request_id if salt is None else f"salt {salt} of {self.alive[request_id].adapter}"

    def turn(self, request_id: str) -> tuple[int, int]:
        """Return a request's place in the queue: each unit of priority lets one later request pass."""
        number = int(request_id)
        return number + self.alive[request_id].priority, number

    def run(self, rng: random.Random, row: Row) -> None:
        """Do to the simulated caches what the models would do for this row, and commit."""
        text = tuple(row.history)
        owner = self.owner(row.request_id)
        self.check_row(row, text, owner)
        self.target.write(row.slots, row.context_len, text, row.end, owner)
        self.draft.write(row.slots, row.draft_len, text, row.draft_len + len(row.draft_ids), owner)
        is_good = self.target.judge(row.slots, row.context_len, is_good=rng.random() >= self.share_bad)
        if not row.is_decoding:
            self.scheduler.commit_chunk(row)
            return
        if not is_good:
            self.scheduler.fail(row.request_id)
            self.end(row.request_id, FinishReason.ERROR)
            assert all(block.slots[0] not in row.slots for block in self.found()), "found although its distribution was invalid"
            return
        tree = random_tree(rng, text[-1], row.expansion)
        fed = random_fed(rng, tree) if not row.expansion.is_plain else set()
        for node in range(1, tree.num_nodes):
            node_text = text + tuple(tree.token_ids[v] for v in tree.path(node)[1:])
            self.target.texts[row.slots[row.root_position + node]] = owner, node_text
            if node in fed:
                is_stand_in = self.feeding is Feeding.TARGET_FEATURES
                self.draft.texts[row.slots[row.root_position + node]] = owner, () if is_stand_in else node_text
        path = tree.path(rng.randrange(tree.num_nodes))
        drafted_len = next((i for i, node in enumerate(path) if node not in fed), len(path))
        self.commit(row, RowResult(tree, path, rng.randrange(STOP, 12), drafted_len), text)

    def check_row(self, row: Row, text: Text, owner: str) -> None:
        assert len(row.slots) == row.end + row.expansion.num_draft_tokens
        assert row.certain_ids, "nothing is fed, and so nothing is returned"
        assert row.certain_ids == text[row.context_len : row.end]
        assert row.is_decoding == (row.end == len(text))
        assert row.is_decoding or row.expansion.is_plain
        assert row.draft_ids == text[row.draft_len : row.draft_len + len(row.draft_ids)]
        assert row.expansion.is_plain or row.draft_len + len(row.draft_ids) == row.end
        speculation = self.alive[row.request_id].speculation
        assert speculation.is_enabled or (row.expansion == PLAIN and not row.draft_ids)
        self.target.check(row.slots, row.context_len, text, owner)
        if self.feeding is not Feeding.TARGET_CACHE:
            self.draft.check(row.slots, row.draft_len, text, owner)
        self.check_scores(row)
        if self.feeding is Feeding.TARGET_FEATURES and row.draft_ids:
            assert row.draft_len + len(row.draft_ids) <= row.context_len + 1, "fed before the target was there"

    def check_scores(self, row: Row) -> None:
        """Of a prompt that is scored every token is fed once and counted once."""
        if self.alive[row.request_id].sampling.num_prompt_logprobs is not None:
            reached = self.scored.get(row.request_id, 0)
            assert row.num_new_prompt_tokens == max(0, min(row.end, row.num_prompt_tokens) - reached)
            self.scored[row.request_id] = reached + row.num_new_prompt_tokens

    def commit(self, row: Row, result: RowResult, text: Text) -> None:
        request = self.alive[row.request_id]
        emission = self.scheduler.commit(row, result)
        candidates = [*(result.tree.token_ids[node] for node in result.path[1:]), result.extra_id]
        num_left = request.sampling.max_tokens - (len(text) - len(request.prompt_ids))
        upto_stop = candidates.index(STOP) + 1 if STOP in candidates else len(candidates)
        expected = candidates[: min(num_left, upto_stop)]
        assert list(emission.new_ids) == expected
        assert emission.num_accepted == min(len(expected), len(candidates) - 1)
        ends = FinishReason.STOP if expected[-1] == STOP else FinishReason.LENGTH if len(expected) == num_left else None
        assert emission.finish == ends
        if ends is not None:
            self.end(row.request_id, ends)

    def end(self, request_id: str, reason: FinishReason) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = reason
        del self.alive[request_id]

    def found(self) -> list[Block]:
        """Return the blocks that others can find."""
        return list(self.scheduler._prefix_cache._by_key.values())

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.has_work == bool(self.alive)
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)
            bad = [block for block in self.found() if not self.target.bad.isdisjoint(block.slots)]
            assert all(block.num_users for block in bad), "kept although it is bad"

    def teardown(self):
        """Every request ends, at no less than one token of the oldest a step."""
        if not hasattr(self, "scheduler") or self.is_mid_step:  # never started, or a step failed and raises by itself
            return
        num_tokens = sum(len(request.prompt_ids) + request.sampling.max_tokens for request in self.alive.values())
        for step in range(num_tokens + 1):
            if self.alive:
                self.step(random.Random(step), [Expansion(1, 2, 1)] * 4)
                self.books_balance()
        assert not self.alive
        assert sorted(map(int, self.ended)) == list(range(self.count))
        assert self.scheduler.num_used_slots == 0
        assert self.scheduler.num_free == self.config.num_slots
