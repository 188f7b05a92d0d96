"""The estimator that a network is: its expectations where it knows a root, the counting estimator's everywhere else.

Counting goes on beside it: the network starts from what was counted, nodes and passes are counted ones, and what the network
cannot tell, or tells wrongly (a number that is not finite), is counting's.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.policy import DraftOutcome, RootFacts, RootSource, SequenceView
from selector.acceptance import Array, CountedAcceptance, Estimates
from selector.menu import Menu, menu_with
from selector.network.features import features_of, rule_of
from selector.network.net import Inputs, SelectorNet

_logger = logging.getLogger(__name__)

_NAMED = 4  # trees in a message
_RANKING = ("greedy", "coupled")  # rules whose rows take noise-aware trees where a menu has some
_MOST_READ = 8  # sequences of a choice whose roots are read, the oldest: reading a law costs time for each, on a processor


def misfits(net: SelectorNet, menu: Menu, target_width: int, draft_width: int) -> list[str]:
    """Return what differs between a network and what it would serve: a menu, and the widths of what it would read."""
    found = []
    if net.shape.objective != "tokens":
        found.append("this selector was trained to choose, not to expect tokens")
    if unknown := [str(entry) for entry in menu.entries if entry.is_delayed and entry not in net.menu.index]:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        found.append(f"the selector was not trained for {', '.join(unknown[:_NAMED])}{more}")
    trained, here = (net.shape.target_width, net.shape.draft_width), (target_width, draft_width)
    if trained != here:
        found.append(f"the selector reads states of widths {trained[0]} and {trained[1]}, not {here}")
    return found


class NetEstimator:
    """Expectations by a network over a part of its menu; raise ValueError if it was made for other trees or other models."""

    def __init__(self, menu: Menu, net: SelectorNet, roots: RootSource) -> None:
        nothing = roots.facts([])
        if found := misfits(net, menu, nothing.target_BD.shape[1], nothing.draft_BW.shape[1]):
            raise ValueError("; ".join(found))
        self._net = net
        both = menu_with([*net.menu.entries, *menu.entries])
        self._menu, self._both = menu, both
        self._places: dict[Menu, NDArray[np.int64]] = {}
        self._known = np.array([both.index[entry] for entry in net.menu.entries])
        self._counting = CountedAcceptance(both)
        self._rules = {rule: place for place, rule in enumerate(net.shape.rules)}
        self._roots = roots
        self._has_failed = False
        roots.watch()

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the network's expectations for sequences whose roots are known and whose rule it has seen, else counted ones."""
        menu = menu or self._menu
        if not any(entry.is_delayed and not entry.is_plain for entry in menu.entries):
            return self._counting.estimate(views, menu)
        if menu not in self._places:
            self._places[menu] = np.array([self._both.index[entry] for entry in menu.entries])
        counted, places = self._counting.estimate(views), self._places[menu]
        asked = [row for row, view in enumerate(views) if self._tells_of(rule_of(view), menu)][:_MOST_READ]
        facts = self._roots.facts([views[row].request_id for row in asked])
        told_BM = self._told(views, asked, facts, counted.tokens) if facts.is_known_B.any() else counted.tokens
        tokens_BM = counted.tokens if told_BM is None else told_BM
        return Estimates(tokens_BM[:, places], counted.nodes[:, places], counted.rounds[:, places])

    def _tells_of(self, rule: str, menu: Menu) -> bool:
        """Return whether the network tells of trees that rows under a rule may have: those that rank take noise-aware ones."""
        return rule in self._rules and not (rule in _RANKING and menu.least_chances.any())

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Count."""
        self._counting.observe(outcomes)

    def _told(self, views: Sequence[SequenceView], asked: Sequence[int], facts: RootFacts, counted_BM: Array) -> Array | None:
        """Return the counted tokens with the network's in the rows asked about whose roots are known; None if it failed."""
        counted = counted_BM[asked][:, self._known]
        features = features_of([views[row] for row in asked], facts, counted, self._net.menu).at(facts.is_known_B)
        rows = [row for row, is_known in zip(asked, facts.is_known_B.tolist(), strict=True) if is_known]
        try:
            with torch.inference_mode():
                told = self._net(Inputs.of(features, [self._rules[rule_of(views[row])] for row in rows])).double().numpy()
        except RuntimeError as error:
            self._say_once(str(error))
            return None
        if not np.isfinite(told).all():
            self._say_once("numbers that are not finite")
            return None
        tokens_BM = counted_BM.copy()
        tokens_BM[np.array(rows)[:, None], self._known] = told
        return tokens_BM

    def _say_once(self, reason: str) -> None:
        """Say once that what was counted is used in the network's place."""
        if not self._has_failed:
            self._has_failed = True
            _logger.error("the selector's network failed (%s); what was counted is used in its place", reason)
