"""The estimator with a network: the network's tokens for roots with known features, counts for everything else.

Counting continues beside it. The network starts from counted tokens, and nodes and rounds are always counted. If the network
fails or returns a number that is not finite, counts are used.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from engine.core.policy import DraftOutcome, RootFacts, RootSource, SequenceView
from engine.weights.fingerprint import tensors_digest
from selector.acceptance import Array, CountedAcceptance, Estimates
from selector.menu import Menu, menu_with
from selector.network.features import features_of, rule_of
from selector.network.net import Inputs, SelectorNet

_logger = logging.getLogger(__name__)

_MOST_NAMED = 4  # trees in a message
_DETERMINISTIC = ("greedy", "coupled")  # rules whose rows take noise-aware trees if the menu has some
_MOST_READ = 8  # sequences in a choice, the oldest; each adds to the network's time


class UnusableSelector(ValueError):
    """The configured network cannot be read, or it was trained for other models or trees."""


def mismatches(net: SelectorNet, menu: Menu, target_width: int, draft_width: int) -> list[str]:
    """Return the differences between a network and a server: objective, menu and widths of its inputs."""
    found = []
    if net.shape.objective != "tokens":
        found.append("this selector was trained to choose, not to expect tokens")
    if unknown := [str(entry) for entry in menu.entries if entry.is_delayed and entry not in net.menu.index]:
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        found.append(f"the selector was not trained for {', '.join(unknown[:_MOST_NAMED])}{more}")
    trained, here = (net.shape.target_width, net.shape.draft_width), (target_width, draft_width)
    if trained != here:
        found.append(f"the selector reads states of widths {trained[0]} and {trained[1]}, not {here}")
    return found


class NetEstimator:
    """Expectations of a network for a part of its menu; raise ValueError if it was made for other trees or models."""

    def __init__(self, menu: Menu, net: SelectorNet, roots: RootSource) -> None:
        nothing = roots.facts([])
        if found := mismatches(net, menu, nothing.target_BD.shape[1], nothing.draft_BW.shape[1]):
            raise ValueError("; ".join(found))
        self._net = net
        both = menu_with([*net.menu.entries, *menu.entries])
        self._menu, self._both = menu, both
        self._places: dict[Menu, NDArray[np.int64]] = {}  # of a menu's entries in both
        self._net_places = np.array([both.index[entry] for entry in net.menu.entries])
        self._counting = CountedAcceptance(both)
        self._rules = {rule: place for place, rule in enumerate(net.shape.rules)}
        self._roots = roots
        self._has_failed = False
        roots.watch()

    def estimate(self, views: Sequence[SequenceView], menu: Menu | None = None) -> Estimates:
        """Return the network's tokens for sequences with known roots and a rule of the network, else counted tokens."""
        menu = menu or self._menu
        if not any(entry.is_delayed and not entry.is_plain for entry in menu.entries):
            return self._counting.estimate(views, menu)
        if menu not in self._places:
            self._places[menu] = np.array([self._both.index[entry] for entry in menu.entries])
        counted_3BM, places = np.array(self._counting.estimate(views)), self._places[menu]
        rows = [row for row, view in enumerate(views) if self._covers(rule_of(view), menu)][:_MOST_READ]
        facts = self._roots.facts([views[row].request_id for row in rows])
        if facts.is_known_B.any():
            counted_3BM[0] = self._with_network(views, rows, facts, counted_3BM[0])
        return Estimates(*counted_3BM[..., places].tolist())

    def _covers(self, rule: str, menu: Menu) -> bool:
        """Return whether the network was trained for a rule's trees. There is none for noise-aware trees (deterministic rows)."""
        return rule in self._rules and not (rule in _DETERMINISTIC and any(menu.least_chances))

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Count the outcomes."""
        self._counting.observe(outcomes)

    def _with_network(self, views: Sequence[SequenceView], rows: Sequence[int], facts: RootFacts, counted_BM: Array) -> Array:
        """Return the counted tokens, with the network's in the rows whose roots are known."""
        counted = counted_BM[rows][:, self._net_places]
        features = features_of([views[row] for row in rows], facts, counted, self._net.menu).at(facts.is_known_B)
        known = [row for row, is_known in zip(rows, facts.is_known_B.tolist(), strict=True) if is_known]
        try:
            with torch.inference_mode():
                predicted = self._net(Inputs.of(features, [self._rules[rule_of(views[row])] for row in known])).double().numpy()
        except RuntimeError as error:
            self._log_once(str(error))
            return counted_BM
        if not np.isfinite(predicted).all():
            self._log_once("numbers that are not finite")
            return counted_BM
        tokens_BM = counted_BM.copy()
        tokens_BM[np.array(known)[:, None], self._net_places] = predicted
        return tokens_BM

    def _log_once(self, reason: str) -> None:
        """Log the first failure."""
        if not self._has_failed:
            self._has_failed = True
            _logger.error("the selector's network failed (%s); counted acceptance is used instead", reason)


def loaded_estimator(file: str, head: str | None, menu: Menu, roots: RootSource) -> NetEstimator:
    """Return the estimator with the network of a file; raise UnusableSelector.

    A file that names the head with which it was trained is for no other. Old files name none.
    """
    try:
        net, recipe = SelectorNet.load(Path(file))
        if (trained := recipe.get("head")) is not None and (head is None or tensors_digest(Path(head)) != trained):
            raise ValueError(f"it was trained with another head ({trained}) than {Path(head or 'none').name}")
        return NetEstimator(menu, net, roots)
    except (OSError, SafetensorError, ValueError) as error:
        raise UnusableSelector(f"the selector {Path(file).name} cannot be used: {error}") from error
