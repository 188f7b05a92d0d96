"""The finite menus of expansions a policy chooses from: plain decoding first, then ever deeper trees of the server's family.

Knows shapes, and which of them a verifier is exact on. Shape key: M entries of a menu.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import SequenceView
from engine.core.tree import DELAYED_TREES, PLAIN, Expansion, TreeName
from engine.core.verifier_table import default_tree, is_exact

_LENGTHS = (1, 2, 3, 4, 6)  # of trunks and branches
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of trees that find their own shape
_LARGEST_DELAYED = (8, 4, 8)  # trunk, branches, depth: the menu of Dynamic Delayed Tree Expansion
_MAX_LEVELS = 10
_RANKED: TreeName = "noise_aware"  # of rows that rank: its nodes are the best, wherever they are
_LEAST_CHANCES = (0.9, 0.75, 0.6, 0.48, 0.38, 0.3, 0.23, 0.17, 0.12, 0.08, 0.05, 0.03)  # of its nodes


@dataclass(frozen=True)
class Menu:
    """Expansions without repetition, plain decoding first, then by depth and size."""

    entries: tuple[Expansion, ...]

    def __post_init__(self) -> None:
        if not self.entries or self.entries[0] != PLAIN or len(set(self.entries)) < len(self.entries):
            raise ValueError("a menu begins with plain decoding and says nothing twice")
        if list(self.depths) != sorted(self.depths):
            raise ValueError("the entries of a menu are ordered by depth")

    def __len__(self) -> int:
        return len(self.entries)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Levels of each entry, int64 [M]: draft passes of the whole batch."""
        return np.array([entry.max_depth for entry in self.entries])

    @cached_property
    def num_nodes(self) -> NDArray[np.int64]:
        """Drafted tokens of each entry at most, int64 [M]."""
        return np.array([entry.num_draft_tokens for entry in self.entries])

    @cached_property
    def most_nodes(self) -> int:
        """Drafted tokens of the largest entry."""
        return int(self.num_nodes.max())

    @cached_property
    def deepest(self) -> int:
        """Levels of the deepest entry."""
        return int(self.depths[-1])

    @cached_property
    def least_chances(self) -> NDArray[np.float64]:
        """The chance that a node of each entry must have, float64 [M]; 0 where none is asked for."""
        return np.array([entry.least_chance for entry in self.entries])

    @cached_property
    def least_chance(self) -> float:
        """The least of the entries that end by their nodes' chances."""
        chances = self.least_chances[self.least_chances > 0.0]
        return float(chances.min()) if len(chances) else 0.0

    @cached_property
    def least_room(self) -> NDArray[np.int64]:
        """Drafted tokens and levels that each entry needs room for, int64 [2, M]: what ends by its nodes' chances fits in any."""
        return np.where(self.least_chances > 0.0, np.minimum(self.num_nodes, 1), np.stack([self.num_nodes, self.depths]))

    @cached_property
    def room_for_all(self) -> tuple[int, int]:
        """Drafted tokens and levels with room for which any entry may be had."""
        most_nodes, deepest = self.least_room.max(1).tolist()
        return most_nodes, deepest

    @cached_property
    def fed_share(self) -> NDArray[np.float64]:
        """Share of each entry's nodes that are fed to the drafter, float64 [M]: all but those of the last level."""
        return np.array([fed_share(entry) for entry in self.entries])

    @cached_property
    def drafting(self) -> tuple[int, ...]:
        """Places of all entries but plain decoding."""
        return tuple(place for place, one in enumerate(self.entries) if not one.is_plain)

    @cached_property
    def telling(self) -> tuple[int, ...]:
        """Places of those that say most of acceptance: chains, a trial at each depth; trees of their own shape all do."""
        return tuple(place for place in self.drafting if (one := self.entries[place]).branches == 1 or not one.is_delayed)

    @cached_property
    def index(self) -> dict[Expansion, int]:
        """Each entry's place."""
        return {entry: place for place, entry in enumerate(self.entries)}

    def allowed_for(self, views: Sequence[SequenceView]) -> tuple["Menu", NDArray[np.bool_] | None]:
        """Return the menu that is open to the sequences, and which of it each may have, [B, M]; None if that is all of it.

        That is what its verifier is exact on, within its bound on nodes, no longer than what remains of its text; none while its
        prompt is fed. The coupled rule stands for all rows that rank their tokens, greedy ones too.
        """
        verifiers = ["coupled" if one.sampling.is_greedy else one.verifier for one in views]
        are_alike = len(set(verifiers)) == 1
        menu = self._menu_for(verifiers[0]) if are_alike else self
        bounds = [0 if one.num_uncached > 1 else one.speculation.max_nodes for one in views]
        most_nodes_B = [inf if bound is None else bound for bound in bounds]
        remaining_B = [max(1, one.num_remaining) for one in views]
        least_nodes_M, least_depths_M = menu.least_room
        if are_alike and min(most_nodes_B) >= menu.room_for_all[0] and min(remaining_B) > menu.room_for_all[1]:
            return menu, None
        allowed_BM = least_nodes_M <= np.array(most_nodes_B)[:, None]
        allowed_BM &= least_depths_M < np.array(remaining_B)[:, None]
        if not are_alike:
            allowed_BM &= np.stack([self._exact_for(verifier) for verifier in verifiers])
        return menu, allowed_BM

    @cached_property
    def _menus(self) -> dict[str, "Menu"]:
        return {}

    @cached_property
    def _exact(self) -> dict[str, NDArray[np.bool_]]:
        return {}

    def _menu_for(self, verifier: str) -> "Menu":
        """Return that part of the menu which a verifier's sequences may have."""
        if verifier not in self._menus:
            rows = zip(self.entries, self._exact_for(verifier).tolist(), strict=True)
            self._menus[verifier] = Menu(tuple(entry for entry, is_open in rows if is_open))
        return self._menus[verifier]

    def _exact_for(self, verifier: str) -> NDArray[np.bool_]:
        """Return what of the menu a verifier is exact on, [M]: if there are trees that find their own shape, those alone."""
        if verifier not in self._exact:
            is_exact_M = np.array([one.is_plain or is_exact(one.kind, verifier) for one in self.entries])
            own_M = is_exact_M & np.array([one.is_plain or not one.is_delayed for one in self.entries])
            self._exact[verifier] = own_M if own_M.sum() > 1 else is_exact_M
        return self._exact[verifier]


def fed_share(expansion: Expansion) -> float:
    """Return the share of a tree's nodes that have children; of a tree that finds its own shape, all but those of one level."""
    if expansion.is_plain:
        return 0.0
    if not expansion.is_delayed:
        return 1.0 - 1.0 / expansion.max_depth
    return 1.0 - (expansion.branches if expansion.depth else 1) / expansion.num_draft_tokens


def menu_of(expansion: Expansion, verifier: str, largest: Expansion | None = None) -> Menu:
    """Return the menu of the family of `expansion`, of what the verifier is exact on and no larger than `largest`.

    Delayed trees: chains of up to 8, and trunks of up to 8 with 2 to 4 branches of up to 8, unless `largest` says otherwise, the
    lengths ever farther apart; branches start differently where the verifier's own tree does. Noise-aware trees: ever smaller
    chances that a node must have. Other trees: sizes up to 64 at each of some depths up to the expansion's.
    """
    if not expansion.is_delayed:
        return menu_with(_own_shaped(largest or replace(expansion, max_nodes=max(expansion.max_nodes, _SIZES[-1]))))
    family = _family(expansion, verifier)
    bound = largest or Expansion(*_LARGEST_DELAYED, family)
    trees = [
        Expansion(trunk, branches, depth, family)
        for trunk in _up_to((0, *_LENGTHS), bound.trunk)
        for branches in range(2, bound.branches + 1)
        for depth in _up_to(_LENGTHS, bound.depth)
        if trunk + depth <= max(_MAX_LEVELS, bound.max_depth if largest else 0)
    ]
    return menu_with(entry for entry in [*_chains(bound), *trees] if is_exact(entry.kind, verifier))


def menu_for_all(expansion: Expansion, verifier: str, largest: Expansion | None = None) -> Menu:
    """Return the family's menu with trees for rows that it does not suit, no larger either.

    Beside delayed trees: noise-aware ones, for greedy rows and those of the coupled rule. Beside trees that find their own shape:
    chains, on which every verifier is exact.
    """
    family = menu_of(expansion, verifier, largest)
    if len(family) == 1:
        return family
    if not expansion.is_delayed:
        return menu_with([*family.entries, *_chains(family.entries[-1])])
    depth, size = (largest.max_depth, largest.num_draft_tokens) if largest else (_LARGEST_DELAYED[0], _SIZES[-1])
    branches = largest.branches if largest else _LARGEST_DELAYED[1]
    return menu_with([*family.entries, *_own_shaped(Expansion(0, branches, depth, _RANKED, size))])


def menu_with(entries: Iterable[Expansion]) -> Menu:
    """Return a menu of plain decoding and these trees."""
    drafting = {entry for entry in entries if not entry.is_plain}
    return Menu((PLAIN, *sorted(drafting, key=lambda one: (one.max_depth, one.num_draft_tokens, -one.least_chance, one))))


def _chains(bound: Expansion) -> list[Expansion]:
    return [Expansion(length, 1, 0) for length in range(1, min(bound.max_depth, _LARGEST_DELAYED[0]) + 1)]


def _own_shaped(bound: Expansion) -> list[Expansion]:
    """Return the family of a tree that finds its own shape, none larger."""
    return _by_chance(bound) if bound.tree == _RANKED else _sized(bound)


def _by_chance(bound: Expansion) -> list[Expansion]:
    """Return trees by the least chance of a node, which is the bound's or more; of chance p there are about 1/p a level."""
    own = [bound.least_chance] if bound.least_chance else []
    chances = [*(chance for chance in _LEAST_CHANCES if chance > bound.least_chance), *own]
    most = [min(bound.max_nodes, max(bound.max_depth, ceil(2.0 / chance))) for chance in chances]
    return [replace(bound, max_nodes=size, least_chance=chance) for size, chance in zip(most, chances, strict=True)]


def _sized(bound: Expansion) -> list[Expansion]:
    """Return trees of each depth in the sizes that are deep enough and fit, the bound's own too."""
    return [
        replace(bound, max_nodes=size, depth=depth)
        for depth in _up_to(_LENGTHS, bound.max_depth)
        for size in _up_to(_SIZES, min(bound.max_nodes, _most_nodes(depth, bound.branches)))
        if depth <= size
    ]


def _most_nodes(depth: int, branches: int) -> int:
    """Return how many nodes fit into a tree of so many levels, if each node has so many children at most."""
    return sum(branches**level for level in range(1, depth + 1))


def _family(expansion: Expansion, verifier: str) -> TreeName:
    """Return which delayed tree branches: the configured one if it does, else the verifier's own."""
    own = default_tree(verifier)
    return expansion.tree if expansion.branches > 1 or own not in DELAYED_TREES else own


def _up_to(values: tuple[int, ...], bound: int) -> list[int]:
    return sorted({*(value for value in values if value <= bound), bound})
