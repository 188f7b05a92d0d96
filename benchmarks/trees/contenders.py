"""The trees and verifiers that are compared at one node budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.tree import Expansion, TreeName
from engine.core.verifier_table import VERIFIER_NAMES, is_exact

DEPTHS = {8: 8, 16: 16, 32: 16}
_SHAPES = {  # trunk, branches, depth
    8: [(8, 1, 0), (2, 2, 3), (4, 2, 2), (0, 2, 4)],
    16: [(16, 1, 0), (4, 2, 6), (8, 2, 4), (4, 3, 4)],
    32: [(32, 1, 0), (16, 2, 8), (8, 3, 8), (4, 4, 7)],
}
_OWN_SHAPE: tuple[TreeName, ...] = ("static", "heap", "threshold", "calibrated", "greedy_sample", "beam", "noise_aware")


@dataclass(frozen=True, slots=True)
class Contender:
    """One tree of a budget and the verifiers that judge it. A row judged by the coupled rule grows a tree of its own."""

    budget: int
    expansion: Expansion
    verifiers: tuple[str, ...]

    @property
    def row_verifier(self) -> str:
        """The verifier whose row is grown: it determines how children are chosen."""
        return self.verifiers[0]


def contenders_of(budget: int, is_greedy: bool) -> list[Contender]:
    """Return what is compared at a budget. Greedy rows rank and walk the arg max: one verifier represents all, on fewer trees."""
    expansions = _expansions(budget)
    if is_greedy:
        ranking = [one for one in expansions if one.tree in ("delayed_distinct", "static", "beam") or one.branches == 1]
        return [Contender(budget, one, ("nss",)) for one in ranking]
    drawn = [Contender(budget, one, _drawing(one)) for one in expansions if one.tree != "noise_aware"]
    coupled = [Contender(budget, one, ("coupled",)) for one in expansions if one.tree not in ("delayed", "greedy_sample")]
    chains = [Contender(budget, one, ("coupled",)) for one in expansions if one.tree == "delayed" and one.branches == 1]
    return [*drawn, *chains, *coupled]


def _expansions(budget: int) -> list[Expansion]:
    delayed = [Expansion(*shape) for shape in _SHAPES[budget]]
    distinct = [Expansion(*shape, "delayed_distinct") for shape in _SHAPES[budget] if shape[1] > 1]
    return [*delayed, *distinct, *(Expansion(0, 4, DEPTHS[budget], tree, budget) for tree in _OWN_SHAPE)]


def _drawing(expansion: Expansion) -> tuple[str, ...]:
    """Return the verifiers that are exact on such a tree; rules of one path get a chain, where all others do as they do."""
    names: Sequence[str] = [name for name in VERIFIER_NAMES if name != "coupled" and is_exact(expansion.kind, name)]
    if expansion.is_delayed and expansion.branches == 1:
        return tuple(name for name in names if name in ("naive", "block"))
    branching = [name for name in names if name not in ("naive", "block")]
    return tuple(sorted(branching, key=lambda name: name not in _TEACHERS))


_TEACHERS = ("traversal", "univer")  # the rules that trees of draws learn from, where they learn: they come first
