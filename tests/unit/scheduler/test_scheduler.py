"""The scheduler under random work: slots, budgets, what each cache holds, and that every request ends exactly once."""

from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.core.config import SchedulerConfig
from engine.core.step_plan import Feeding
from engine.core.tree import FREE_GROWTH, PLAIN, ROOT, GrowthCosts, TokenTree, parse_expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.core.verifier_table import fitted
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.token_budget import TokenShare
from tests.unit.scheduler.scheduler_machine import SchedulerMachine


class AbortKeepsSlots(Scheduler):
    def remove(self, request_id):
        if request_id in self._by_id:
            del self._by_id[request_id].slots[:]
        return super().remove(request_id)


class KeepsTheFirstNodes(Scheduler):
    def _keep(self, sequence, num_kept, path_slots):
        super()._keep(sequence, num_kept, sequence.slots[num_kept : num_kept + len(path_slots)])


class FreesThePathToo(Scheduler):
    def _keep(self, sequence, num_kept, path_slots):
        self.pool.free(sequence.slots[num_kept:])
        sequence.slots[num_kept:] = path_slots


class PublishesDrafts(Scheduler):
    def commit(self, row, result):
        sequence = self._by_id[row.request_id]
        sequence.token_ids.extend(result.tree.token_ids[1:])
        self._prefix_cache.publish(sequence)
        del sequence.token_ids[row.end :]
        return super().commit(row, result)


class ForgetsTheParent(PrefixCache):
    def _next_key(self, sequence):
        return sequence.salt, super()._next_key(sequence)[1]


class ForgetsTheSalt(PrefixCache):
    def _next_key(self, sequence):
        parent, tokens = super()._next_key(sequence)
        return (parent[0], "") if isinstance(parent, tuple) else parent, tokens


class ForgetsTheAdapter(PrefixCache):
    def _next_key(self, sequence):
        parent, tokens = super()._next_key(sequence)
        return (None, parent[1]) if isinstance(parent, tuple) else parent, tokens


class TakesTheRootForCached(PrefixCache):
    def lookup_key(self, sequence):
        return self._next_key(sequence) if sequence.reads_prefixes else None


class AdoptsInTheMiddle(PrefixCache):
    def adopt(self, sequence):
        key = self.lookup_key(sequence)
        if sequence.own_slots and key and (block := self._by_key.get(key)):
            self._unused.pop(block, None)
            block.num_users += 1
            sequence.blocks.append(block)
        else:
            super().adopt(sequence)


class FreesWhatOthersUse(PrefixCache):
    def release(self, sequence):
        for block in sequence.blocks:
            block.num_users = 1
        return super().release(sequence)


class KeepsUnprovedPrefixes(PrefixCache):
    def release(self, sequence):
        unproven = [block for block in sequence.blocks if not block.is_finite]
        self.mark_finite(sequence)
        freed = super().release(sequence)
        for block in unproven:
            block.is_finite = False
        return freed


class ProvesWhatIsFed(PrefixCache):
    def publish(self, sequence):
        super().publish(sequence)
        self.mark_finite(sequence)


class ForgetsNothing(PrefixCache):
    def invalidate(self, sequence):
        pass


class BelievesThatAllIsDrafted(PrefixCache):
    def publish(self, sequence):
        super().publish(sequence)
        for block in sequence.blocks:
            block.is_drafted = True


class SkipsWhatIsScored(PrefixCache):
    def lookup_key(self, sequence):
        scored, sequence.request = sequence.request, replace(sequence.request, sampling=SamplingParams())
        key = super().lookup_key(sequence)
        sequence.request = scored
        return key


class AcceptedLeafNeverFed(Scheduler):
    def _draft_len_after(self, row, result):
        return min(super()._draft_len_after(row, result) + 1, row.root_position + len(result.path))


class IgnoresTheBudget(Scheduler):
    def _fitted(self, sequence, wish, share, draft_feed):
        return super()._fitted(sequence, wish, TokenShare(share.num_certain, 99), draft_feed)


class PreemptionRemembersTheDraft(Scheduler):
    def _preempt(self, sequence):
        draft_len = sequence.draft_len
        super()._preempt(sequence)
        sequence.draft_len = draft_len


class AdmitsTheNewestFirst(Scheduler):
    def add(self, sequence):
        sequence.request = replace(sequence.request, priority=-2 * len(self._by_id))
        super().add(sequence)


class RequestsNoTurn(Scheduler):
    def add(self, sequence):
        sequence.request = replace(sequence.request, priority=0)
        super().add(sequence)


class RunsTheNewestFirst(Scheduler):
    def admit(self):
        self._running.reverse()
        super().admit()
        self._running.reverse()


class FeedsTheDrafterTooLittle(Scheduler):
    def _draft_feed(self, sequence, *args):
        return super()._draft_feed(sequence, *args)[:1]


class FeedsTheDrafterAhead(Scheduler):
    def _num_draftable(self, sequence, tree):
        return tree.num_draft_tokens


class KeepsStandIns(Scheduler):
    def _draft_len_after(self, row, result):
        return row.root_position + result.drafted_len if not row.expansion.is_plain else super()._draft_len_after(row, result)


class FinishedSequencesStay(Scheduler):
    def commit(self, row, result):
        sequence = self._by_id[row.request_id]
        emission = super().commit(row, result)
        if emission.finish is not None:
            self._by_id[row.request_id] = sequence
            self._running.append(sequence)
        return emission


class ForgetsFinished(Scheduler):
    def _stop_running(self, sequence):
        self._running.remove(sequence)


class NumbersEachStepAnew(Scheduler):
    def _note_new_batch(self):
        self._decoding_batch = None


def with_cache(cache_class: type[PrefixCache]) -> type[Scheduler]:
    """Return a scheduler with a mutant of the prefix cache."""

    class WithCache(Scheduler):
        def __init__(self, config, feeding):
            super().__init__(config, feeding)
            self._prefix_cache = cache_class(config.prefix_block_tokens)

    return WithCache


def run(scheduler_class: type[Scheduler], max_examples: int, *phases: Phase) -> None:
    machine = type("Machine", (SchedulerMachine,), {"scheduler_class": scheduler_class})
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=25, phases=phases))


def test_scheduler():
    run(Scheduler, 150, Phase.generate, Phase.shrink)


@pytest.mark.parametrize(
    "mutant",
    [
        AbortKeepsSlots,
        KeepsTheFirstNodes,
        FreesThePathToo,
        AcceptedLeafNeverFed,
        IgnoresTheBudget,
        PreemptionRemembersTheDraft,
        AdmitsTheNewestFirst,
        RequestsNoTurn,
        RunsTheNewestFirst,
        FeedsTheDrafterTooLittle,
        FeedsTheDrafterAhead,
        KeepsStandIns,
        FinishedSequencesStay,
        PublishesDrafts,
        ForgetsFinished,
        NumbersEachStepAnew,
    ],
)
def test_scheduler_kills(mutant):
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)):
        run(mutant, 100, Phase.generate)


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsTheParent,
        ForgetsTheSalt,
        ForgetsTheAdapter,
        TakesTheRootForCached,
        AdoptsInTheMiddle,
        FreesWhatOthersUse,
        KeepsUnprovedPrefixes,
        ProvesWhatIsFed,
        ForgetsNothing,
        BelievesThatAllIsDrafted,
        SkipsWhatIsScored,
    ],
)
def test_scheduler_kills_a_prefix_cache_that(mutant):
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)):
        run(with_cache(mutant), 600, Phase.generate)


def test_sampled_row_gets_exact_tree_greedy_any():
    scheduler, wanted = Scheduler(SchedulerConfig(), Feeding.TARGET_CACHE), parse_expansion("noise_aware.8")
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        scheduler.add(Sequence(Request(name, (5,), SamplingParams(temperature, max_tokens=64)), 0, "traversal"))
    scheduler.admit()
    greedy, drawn = (row.expansion for row in scheduler.plan([wanted, wanted]).rows)
    assert greedy == wanted
    assert drawn == fitted(wanted, "traversal") != wanted


def test_request_trees_ignore_growth_costs():
    scheduler = Scheduler(SchedulerConfig(), Feeding.TARGET_CACHE)
    wanted, growth_costs = parse_expansion("noise_aware.8"), GrowthCosts(0.1)
    for name, own in (("policy's", None), ("own", wanted)):
        request = Request(name, (5,), SamplingParams(0.0, max_tokens=64), Speculation(expansion=own))
        scheduler.add(Sequence(request, 0, "coupled"))
    scheduler.admit()
    assert [row.growth_costs for row in scheduler.plan([wanted, wanted], growth_costs=growth_costs).rows] == [
        growth_costs,
        FREE_GROWTH,
    ]


def test_preempted_sequence_resumes_before_younger_ones():
    scheduler = Scheduler(SchedulerConfig(num_slots=12, max_step_tokens=32), Feeding.TARGET_CACHE)
    for name in "ab":
        scheduler.add(Sequence(Request(name, (5, 6, 7, 8), SamplingParams(max_tokens=8)), 0, "traversal"))
    preempted_at = None
    for step in range(40):
        scheduler.admit()
        plan = scheduler.plan([PLAIN] * scheduler.num_running)
        if plan.num_preempted and preempted_at is None:
            preempted_at = step
            scheduler.add(Sequence(Request("c", (5,), SamplingParams(max_tokens=2)), 0, "traversal"))
        for row in plan.rows:
            scheduler.commit(row, RowResult(TokenTree.single(row.certain_ids[-1]), (ROOT,), 9, 0))
        waiting = [sequence.request_id for sequence in scheduler._waiting]
        assert waiting in ([], ["b"], ["c"], ["b", "c"])
        if not scheduler.has_work:
            break
    assert preempted_at is not None
    assert not scheduler.has_work


def test_priority_limits_how_many_requests_pass():
    """A request runs in bounded time, however urgent and many the others are."""
    scheduler = Scheduler(SchedulerConfig(max_running=1), Feeding.OWN_CACHE)
    for number in range(100):
        priority = {0: 0, 10: 7, 20: -1000}.get(number, -5)
        scheduler.add(Sequence(Request(str(number), (5,), priority=priority), 0, "traversal"))
    order = [sequence.request_id for sequence in scheduler._waiting]
    assert [order.index(name) for name in ("20", "0", "10")] == [0, 5, 21]
    rest = [int(name) for name in order if name not in ("0", "10", "20")]
    assert rest == sorted(rest)
