"""Finite menus of expansions for a policy: plain decoding, then trees of the server's family by depth and size.

Knows shapes, and on which of them a verifier is exact. Shape key: M entries of a menu, B sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, inf

from engine.core.policy import SequenceView
from engine.core.tree import DELAYED_TREES, PLAIN, Expansion, TreeName
from engine.core.verifier_table import default_tree, is_exact

_LENGTHS = (1, 2, 3, 4, 6)  # of trunks and branches
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of trees that find their own shape
_LARGEST_DELAYED = (8, 4, 8)  # trunk, branches, depth: the menu of Dynamic Delayed Tree Expansion
_MAX_LEVELS = 10
_DETERMINISTIC: TreeName = "noise_aware"  # for deterministic rows: it has the likeliest nodes, wherever they are
_LEAST_CHANCES = (0.9, 0.75, 0.6, 0.48, 0.38, 0.3, 0.23, 0.17, 0.12, 0.08, 0.05, 0.03)  # of its nodes


class Menu:
    """Distinct expansions: plain decoding first, then by depth and size. Menus with the same entries are equal."""

    def __init__(self, entries: tuple[Expansion, ...]) -> None:
        if not entries or entries[0] != PLAIN or len(set(entries)) < len(entries):
            raise ValueError("a menu begins with plain decoding and has no entry twice")
        self.entries = entries
        self.index = {entry: place for place, entry in enumerate(entries)}
        self.depths = [entry.max_depth for entry in entries]  # levels, [M]
        if self.depths != sorted(self.depths):
            raise ValueError("the entries of a menu are ordered by depth")
        self.deepest = self.depths[-1]
        self.num_nodes = [entry.num_draft_tokens for entry in entries]  # drafted tokens at most, [M]
        self.most_nodes = max(self.num_nodes)
        self.least_chances = [entry.least_chance for entry in entries]  # of a node, 0 without a bound, [M]
        self.least_chance = min(filter(None, self.least_chances), default=0.0)
        # Drafted tokens and levels that each entry needs room for, [M]. Trees with a least chance fit in any room.
        self.least_room = [(1, 1) if one.least_chance else (one.num_draft_tokens, one.max_depth) for one in entries]
        self.room_for_all = tuple(max(room) for room in zip(*self.least_room, strict=True))
        self.fed_share = [fed_share(entry) for entry in entries]  # share of the nodes fed to the drafter, [M]
        self.drafting = tuple(place for place, entry in enumerate(entries) if not entry.is_plain)
        # Trees whose outcome shows the acceptance at every depth: chains and trees that find their own shape.
        self.informative = tuple(
            place for place in self.drafting if entries[place].branches == 1 or not entries[place].is_delayed
        )
        self._hash = hash(entries)
        self._menus: dict[str, Menu] = {}  # by verifier
        self._exact: dict[str, list[bool]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Menu) and self.entries == other.entries

    def __hash__(self) -> int:
        return self._hash

    def allowed_for(self, views: Sequence[SequenceView]) -> tuple["Menu", list[list[bool]] | None]:
        """Return the menu for these sequences, and which entries each may have, [B][M]. None means all of them.

        A sequence may have trees on which its verifier is exact, within its bound on nodes and the rest of its text. It may have
        none while its prompt is fed. All deterministic rows, also greedy rows, use the menu of the coupled rule.
        """
        verifiers = ["coupled" if one.sampling.is_greedy else one.verifier for one in views]
        are_alike = len(set(verifiers)) == 1
        menu = self._menu_for(verifiers[0]) if are_alike else self
        bounds = [0 if one.num_uncached > 1 else one.speculation.max_nodes for one in views]
        most_nodes_B = [inf if bound is None else bound for bound in bounds]
        remaining_B = [max(1, one.num_remaining) for one in views]
        if are_alike and min(most_nodes_B) >= menu.room_for_all[0] and min(remaining_B) > menu.room_for_all[1]:
            return menu, None
        exact_BM = [[True] * len(menu) if are_alike else self._exact_for(verifier) for verifier in verifiers]
        return menu, [
            [is_exact and nodes <= most and levels < left for is_exact, (nodes, levels) in zip(exact_M, menu.least_room)]
            for exact_M, most, left in zip(exact_BM, most_nodes_B, remaining_B, strict=True)
        ]

    def _menu_for(self, verifier: str) -> "Menu":
        """Return the part of the menu that sequences with this verifier may have."""
        if verifier not in self._menus:
            rows = zip(self.entries, self._exact_for(verifier), strict=True)
            self._menus[verifier] = Menu(tuple(entry for entry, is_open in rows if is_open))
        return self._menus[verifier]

    def _exact_for(self, verifier: str) -> list[bool]:
        """Return on which entries a verifier is exact, [M]. Delayed trees are left out if there are trees of their own shape."""
        if verifier not in self._exact:
            exact_M = [one.is_plain or is_exact(one.kind, verifier) for one in self.entries]
            own_M = [exact and (one.is_plain or not one.is_delayed) for exact, one in zip(exact_M, self.entries)]
            self._exact[verifier] = own_M if sum(own_M) > 1 else exact_M
        return self._exact[verifier]


def fed_share(expansion: Expansion) -> float:
    """Return the share of a tree's nodes that have children. A tree of its own shape is taken to have levels of equal size."""
    if expansion.is_plain:
        return 0.0
    if not expansion.is_delayed:
        return 1.0 - 1.0 / expansion.max_depth
    return 1.0 - (expansion.branches if expansion.depth else 1) / expansion.num_draft_tokens


def menu_of(expansion: Expansion, verifier: str, largest: Expansion | None = None) -> Menu:
    """Return the menu of the family of `expansion`: trees on which the verifier is exact, none larger than `largest`.

    Delayed trees: chains of up to 8, and trunks of up to 8 with 2 to 4 branches of up to 8, unless `largest` has other bounds.
    Branches start with different tokens if the verifier's own tree has such branches. Noise-aware trees: by least chance. Other
    trees: sizes up to 64 at several depths up to the expansion's.
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
    """Return the family's menu with trees for other verifiers, no larger than `largest`.

    Beside delayed trees there are noise-aware trees, for deterministic rows. Beside trees that find their own shape there are
    chains, on which every verifier is exact.
    """
    family = menu_of(expansion, verifier, largest)
    if len(family) == 1:
        return family
    if not expansion.is_delayed:
        return menu_with([*family.entries, *_chains(family.entries[-1])])
    depth, size = (largest.max_depth, largest.num_draft_tokens) if largest else (_LARGEST_DELAYED[0], _SIZES[-1])
    branches = largest.branches if largest else _LARGEST_DELAYED[1]
    return menu_with([*family.entries, *_own_shaped(Expansion(0, branches, depth, _DETERMINISTIC, size))])


def menu_with(entries: Iterable[Expansion]) -> Menu:
    """Return a menu of plain decoding and these trees."""
    drafting = {entry for entry in entries if not entry.is_plain}
    return Menu((PLAIN, *sorted(drafting, key=lambda one: (one.max_depth, one.num_draft_tokens, -one.least_chance, one))))


def _chains(bound: Expansion) -> list[Expansion]:
    return [Expansion(length, 1, 0) for length in range(1, min(bound.max_depth, _LARGEST_DELAYED[0]) + 1)]


def _own_shaped(bound: Expansion) -> list[Expansion]:
    """Return the family of a tree that finds its own shape, within the bound."""
    return _by_chance(bound) if bound.tree == _DETERMINISTIC else _sized(bound)


def _by_chance(bound: Expansion) -> list[Expansion]:
    """Return trees by least chance, down to the bound's. Their sizes allow for 1/p nodes of probability p in a level, twice."""
    own = [bound.least_chance] if bound.least_chance else []
    chances = [*(chance for chance in _LEAST_CHANCES if chance > bound.least_chance), *own]
    most = [min(bound.max_nodes, max(bound.max_depth, ceil(2.0 / chance))) for chance in chances]
    return [replace(bound, max_nodes=size, least_chance=chance) for size, chance in zip(most, chances, strict=True)]


def _sized(bound: Expansion) -> list[Expansion]:
    """Return trees of each depth and size within the bound, the bound itself included."""
    return [
        replace(bound, max_nodes=size, depth=depth)
        for depth in _up_to(_LENGTHS, bound.max_depth)
        for size in _up_to(_SIZES, min(bound.max_nodes, sum(bound.branches**level for level in range(1, depth + 1))))
        if depth <= size
    ]


def _family(expansion: Expansion, verifier: str) -> TreeName:
    """Return the kind of delayed trees: the configured one if it branches, else the verifier's own."""
    own = default_tree(verifier)
    return expansion.tree if expansion.branches > 1 or own not in DELAYED_TREES else own


def _up_to(values: tuple[int, ...], bound: int) -> list[int]:
    return sorted({*(value for value in values if value <= bound), bound})
