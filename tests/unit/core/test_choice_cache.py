"""A choice is reused for its steps while the batch is the same; plain decoding for any batch that is no smaller."""

import pytest

from engine.choice_cache import CachedChoice
from engine.core.policy import BatchViews, ExpansionChoice, Reason
from engine.core.tree import PLAIN, Expansion

TREE = Expansion(2, 1, 0)


class Counts:
    """A policy whose choices hold for some steps."""

    name = "counts"

    def __init__(self, expansion, reason, num_steps=3):
        self.num_calls, self._expansion, self._reason, self._num_steps = 0, expansion, reason, num_steps

    def choose(self, views):
        self.num_calls += 1
        return ExpansionChoice((self._expansion,) * len(views), self._reason, num_steps=self._num_steps)

    def observe(self, feedback):
        pass


def choosing_steps(batches, expansion=TREE, reason=Reason.SPECULATION_PAYS, kind=CachedChoice, num_steps=3):
    """Return in which steps, of (rows, composition) each, the policy chooses anew; every choice fits its batch."""
    policy, found = Counts(expansion, reason, num_steps), []
    cache = kind(policy)
    for step, (num_rows, composition) in enumerate(batches):
        before = policy.num_calls
        choice = cache.choose(BatchViews(lambda: [], num_rows, composition))
        assert len(choice.expansions) == num_rows
        if policy.num_calls > before:
            found.append(step)
    return found


def check_reuse(kind=CachedChoice):
    assert choosing_steps([(1, 7)] * 7, kind=kind) == [0, 3, 6]


def test_choice_is_reused_for_its_steps():
    check_reuse()


class NeverReuses(CachedChoice):
    def choose(self, views):
        self._num_left = 0
        return super().choose(views)


def test_never_reusing_is_detected():
    with pytest.raises(AssertionError):
        check_reuse(NeverReuses)


def test_another_batch_gets_a_new_choice():
    assert choosing_steps([(1, 7), (1, 8), (1, 8), (2, None), (2, None)]) == [0, 1, 3, 4]


def test_plain_decoding_is_reused_for_other_batches():
    assert choosing_steps([(2, 7), (2, 8), (3, None), (3, 9)], PLAIN, Reason.PLAIN_IS_BEST) == [0, 3]
    assert choosing_steps([(2, 7), (1, 8)], PLAIN, Reason.PLAIN_IS_BEST) == [0, 1]


def test_plain_decoding_is_reused_briefly_for_others():
    batches = [(1, 7)] * 5 + [(1, 8)] * 20
    assert choosing_steps(batches, PLAIN, Reason.PLAIN_IS_BEST, num_steps=64) == [0, 13]
    assert choosing_steps([(1, 7)] * 25, PLAIN, Reason.PLAIN_IS_BEST, num_steps=64) == [0], "the same batch"
