"""When to draft otherwise than looks best: what was learnt grows old, and only drafting renews it.

A probe is a tree in a step, for one sequence or for all that are due, who share its passes: some tree where plain decoding looks
best, a long chain where something else does (of many branches the best is accepted so often that they say little of a single one,
and nothing of what is deeper). It is paid from an account into which every step puts a small share of its own seconds, or of
fewer where there is little to win, so that probing costs no more than that share whatever the drafter; and a sequence whose
probes bring nothing is asked less often, a new one as often as the others lately.

What a probe will lose is a belief, and the belief may be what is wrong. So a full account buys any probe, on credit, and the
account is charged with what the step really took: a price that was measured badly is found out by one probe, a drafter that is
truly dear is not asked again until its share is saved. What no probe of those who are due could be paid for is not priced anew
before that. Deterministic: no clock, no chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from engine.policy import DraftOutcome, SequenceView

_SHARE = 0.005  # of all seconds, spent on probes at most
_FIRST_INTERVAL, _LONGEST_INTERVAL = 8, 64  # tokens of a sequence between its probes while it is plain
_PACE = 64  # the same while it drafts
_MOST_SAVED_STEPS = 2.0  # more is not saved up: a long quiet time does not buy a burst of probes


@dataclass
class _Patience:
    """How long a sequence waits between probes, counted from which of its tokens; and at which it last drafted."""

    interval: float
    probed: int
    drafted: int


class Probes:
    """Owns the account, which begins full, and each sequence's patience."""

    def __init__(self) -> None:
        self._saved_s = self._most_s = self._most_overrun_s = float("inf")  # until the first step is known
        self._stake = 1.0
        self._income_s = 0.0  # of a step
        self._paid_s = 0.0
        self._price_s, self._due_in = 0.0, 0.0  # of the cheapest probe that was thought of last, and the steps until one is due
        self._who: dict[str, bool] = {}  # were returned as due last, and whether they were plain
        self._is_put_off = False  # whether no probe of theirs could be paid
        self._interval = float(_FIRST_INTERVAL)  # that a new sequence begins with
        self._patience: dict[str, _Patience] = {}
        self._asked: set[str] = set()

    def save(self, step_s: float, stake: float = 1.0, num_steps: int = 1) -> None:
        """Put the share of some steps into the account, which holds the less the less is at stake.

        As full as it was it stays when the stake changes; what is owed are seconds that were spent, and stays as it is.
        """
        if self._saved_s > 0.0:
            self._saved_s *= stake / self._stake
        self._stake, self._income_s = stake, stake * _SHARE * step_s
        self._most_overrun_s = _MOST_SAVED_STEPS * step_s
        self._most_s = stake * self._most_overrun_s
        self._saved_s = min(self._saved_s + num_steps * self._income_s, self._most_s)

    def due(self, views: Sequence[SequenceView], is_plain: Sequence[bool], can_probe: Sequence[bool]) -> list[int]:
        """Return the sequences that are due, the most overdue first, and only such as that one: all plain, or none.

        Those that are to draft are asked at an even pace; those that have no other choice are not asked.
        """
        found: list[tuple[float, int]] = []
        patience = {}
        self._due_in = inf
        for index, (view, plain) in enumerate(zip(views, is_plain, strict=True)):
            now = view.num_generated
            one = self._patience.get(view.request_id) or _Patience(self._interval, now, now)
            patience[view.request_id] = one
            if not plain or now < one.drafted:
                one.drafted = now
            overdue = (now - max(one.probed, one.drafted)) / one.interval if plain else (now - one.probed) / _PACE
            if overdue >= 1.0 and can_probe[index]:
                found.append((-overdue, index))
            if can_probe[index]:
                self._due_in = min(self._due_in, (1.0 - overdue) * (one.interval if plain else _PACE))
        self._patience = patience
        order = [index for _, index in sorted(found)]
        if not found:
            self._price_s = 0.0
        alike = [index for index in order if is_plain[index] == is_plain[order[0]]]
        who = {views[index].request_id: is_plain[index] for index in alike}
        if who != self._who:
            self._who, self._is_put_off = who, False
        return alike

    @property
    def wait(self) -> float:
        """Steps until a probe is due and can be paid, as it looked when last asked who is due: infinite if nobody ever is.

        Of what is not due yet the price is not known: nothing can be paid out of debts.
        """
        missing_s = min(self._price_s, self._most_s) - self._saved_s
        return max(self._due_in, missing_s / self._income_s if missing_s > 0.0 else 0.0)

    def put_off(self, price_s: float) -> None:
        """Note that the cheapest probe of those who are due cannot be paid yet."""
        self._price_s, self._is_put_off = price_s, True

    @property
    def is_asking(self) -> bool:
        """Whether a probe is under way."""
        return bool(self._asked)

    def has_asked(self, request_id: str) -> bool:
        """Return whether the probe under way is a sequence's."""
        return request_id in self._asked

    @property
    def saved_s(self) -> float:
        """Seconds that a probe may lose."""
        return self._saved_s

    @property
    def is_full(self) -> bool:
        """Whether no more is saved, so that a probe that looks dearer than that is made all the same."""
        return self._saved_s >= self._most_s

    @property
    def is_short(self) -> bool:
        """Whether no probe of those who are due could be paid, and what the cheapest cost then is not saved yet."""
        return self._is_put_off and self._saved_s < min(self._price_s, self._most_s)

    def pay(self, views: Sequence[SequenceView], loss_s: float) -> None:
        """Pay a probe of these sequences, of that expected loss, which may be a gain."""
        self._paid_s = self._price_s = loss_s
        self._is_put_off = False
        self._saved_s -= loss_s
        for view in views:
            self._patience[view.request_id].probed = view.num_generated
            self._asked.add(view.request_id)

    def settle(self, overrun_s: float, hoped_s: float | None) -> None:
        """Correct what the last probe paid by its seconds beyond those foretold, and by what was hoped for and did not come.

        Either may be negative. `hoped_s` is None where what came is not known: then no more is given back than was paid. A step
        during which another program ran takes no more than an account can hold where all is at stake; luck, either way, no more
        than this one does.
        """
        charged_s = min(overrun_s, self._most_overrun_s)
        if hoped_s is None:
            charged_s = max(charged_s, -self._paid_s)
        else:
            charged_s += min(max(hoped_s, -self._most_s), self._most_s)
        self._saved_s -= charged_s

    def cancel(self) -> None:
        """Give back what the last probe paid: it was not made."""
        self._saved_s += self._paid_s

    def keep(self) -> None:
        """Leave the last probe at what it paid, as what it took is not known: no gain, and no more than an account holds."""
        self._saved_s += self._paid_s - min(max(self._paid_s, 0.0), self._most_s)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Be patient with a sequence whose probe brought nothing, and with those that come."""
        for outcome in outcomes:
            if outcome.request_id not in self._asked or outcome.expansion.is_plain:  # a probe that found no room says nothing
                continue
            patience = self._patience.get(outcome.request_id)
            if outcome.accepted_depth:
                interval, self._interval = float(_FIRST_INTERVAL), float(_FIRST_INTERVAL)
            else:
                interval = min(_LONGEST_INTERVAL, 2.0 * (patience.interval if patience else self._interval))
                self._interval = min(_LONGEST_INTERVAL, 1.25 * self._interval)
            if patience:
                patience.interval = interval
        self._asked.clear()
