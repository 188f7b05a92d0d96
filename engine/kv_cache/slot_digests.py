"""Checks that slots of the target's cache belong to the right sequence, by a digest of all tokens up to the slot's own.

Before a step every row's slots must have the digests of its own sequence, and new slots must be free. So a wrong slot table is
detected before the pass.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.step_observer import StepObserver
from engine.core.step_plan import Row, StepPlan
from engine.core.tree import TokenTree
from engine.scheduler.slot_allocator import IntegrityError

_NOTHING = 0  # the digest of a slot that is free, or has not been written


class SlotDigests(StepObserver):
    """Owns a digest for each slot. The owner of the slots calls `on_free`."""

    def __init__(self, num_slots: int) -> None:
        self._digests_S = np.full(num_slots, _NOTHING, dtype=np.int64)
        self._histories: dict[str, _HistoryDigests] = {}  # of the latest plan

    def on_free(self, slots: Sequence[int]) -> None:
        """Clear the digests of freed slots."""
        self._digests_S[list(slots)] = _NOTHING

    def before_step(self, plan: StepPlan) -> None:
        """Raise IntegrityError unless each row's slots hold its context and its new slots are empty."""
        known, self._histories = self._histories, {}
        for row in plan.rows:
            history = known.get(row.request_id)
            if history is None or history.history is not row.history:
                history = _HistoryDigests(row.history)
            self._histories[row.request_id] = history
            expected_L = np.full(len(row.slots), _NOTHING, dtype=np.int64)
            expected_L[: row.context_len] = history.digests(row.context_len)
            self._compare(row, expected_L)
        new = [slot for row in plan.rows for slot in row.slots[row.context_len :]]
        if len(set(new)) < len(new):
            raise IntegrityError("a slot is given to two tokens of one step")

    def _compare(self, row: Row, expected_L: NDArray[np.int64]) -> None:
        found_L = self._digests_S[list(row.slots)]
        wrong = np.flatnonzero(found_L != expected_L)
        if len(wrong):
            place = int(wrong[0])
            found = "nothing" if found_L[place] == _NOTHING else "another text"
            expected = "nothing" if expected_L[place] == _NOTHING else "its own text"
            where = f"request {row.request_id}: slot {row.slots[place]} at position {place} of {row.context_len} cached ones"
            raise IntegrityError(f"{where} holds {found} instead of {expected}")

    def after_forward(self, plan: StepPlan, trees: Sequence[TokenTree]) -> None:
        """Record the digests of the texts that the pass has written."""
        remaining = iter(trees)
        for row in plan.rows:
            digests = self._histories[row.request_id].digests(row.end)
            self._digests_S[list(row.slots[row.context_len : row.end])] = digests[row.context_len :]
            if row.is_decoding:
                tree = next(remaining)
                nodes = list(row.slots[row.end : row.root_position + tree.num_nodes])
                self._digests_S[nodes] = _of_nodes(tree, int(digests[-1]))[1:]


class _HistoryDigests:
    """Digests of a growing history, one up to each of its tokens."""

    def __init__(self, history: Sequence[int]) -> None:
        self.history = history
        self._digests_L = np.empty(0, dtype=np.int64)

    def digests(self, count: int) -> NDArray[np.int64]:
        """Return the digests of the first `count` tokens."""
        if count > len(self._digests_L):
            last = int(self._digests_L[-1]) if len(self._digests_L) else _NOTHING
            new = _chained(last, self.history[len(self._digests_L) : count])
            self._digests_L = np.concatenate([self._digests_L, new])
        return self._digests_L[:count]


def _chained(digest: int, token_ids: Iterable[int]) -> NDArray[np.int64]:
    digests = []
    for token_id in token_ids:
        digest = _after(digest, token_id)
        digests.append(digest)
    return np.array(digests, dtype=np.int64)


def _of_nodes(tree: TokenTree, root: int) -> list[int]:
    digests = [root]
    for parent, token_id in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
        digests.append(_after(digests[parent], token_id))
    return digests


def _after(digest: int, token_id: int) -> int:
    return hash((digest, token_id)) or 1
