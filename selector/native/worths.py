"""What noise-aware trees bring, added up by the library, where there is one: selector.worth says what is learnt, and why.

Shape key: B sequences, M entries of a menu, W of them noise-aware.
"""

from array import array
from collections.abc import Sequence

from engine.native.library import address
from engine.policy import DraftOutcome
from engine.tree import Expansion
from selector import worth
from selector.native import library
from selector.worth import Array, Places, WorthOfNodes


def worth_of_nodes(entries: Sequence[Expansion], num_seats: int) -> WorthOfNodes:
    """Return what expects a menu's noise-aware trees, compiled if it can be."""
    return WorthOfNodes(entries, num_seats) if library.library() is None else CompiledWorth(entries, num_seats)


class CompiledWorth(WorthOfNodes):
    """What noise-aware trees bring, added up by the library."""

    def make_room(self, num_seats: int) -> None:
        """Have so many seats."""
        super().make_room(num_seats)
        self._lay_out()

    def _new_kind(self, name: str) -> int:
        kind = super()._new_kind(name)
        self._lay_out()
        return kind

    def _lay_out(self) -> None:
        """Say where everything lies, until an array is replaced."""
        self._library = library.required()
        assert len(worth.FEATURES) == library.NUM_SUMS
        self._compiled = library.Worth(
            num_chances=len(self._least_K),
            least=address(self._least_K),
            depth=address(self._depth_K),
            most_nodes=address(self._most_nodes_K),
            start=address(self._start_FK),
            sums=address(self._sums),
            trees=address(self._trees),
            came=address(self._came),
            kind_sums=address(self._kind_sums),
            kind_trees=address(self._kind_trees),
            kind_begun=address(self._kind_begun),
            kind_came=address(self._kind_came),
            start_trees=worth.START_TREES,
            kind_trees_weight=worth.KIND_TREES,
            edge=worth.EDGE,
            kind_memory=worth.KIND_MEMORY,
            own_memory=worth.OWN_MEMORY,
            came_tokens=worth.CAME_TOKENS,
            came_memory=worth.CAME_MEMORY,
        )

    def tell(self, seats: Sequence[int], kinds: Sequence[str], told_4BM: Array, columns_W: Places, places_W: Places) -> None:
        """Write what is expected."""
        rows, num_rows = array("q", (*seats, *(self._kind(name) for name in kinds))), len(seats)
        begin = rows.buffer_info()[0]
        self._library.selector_expect(
            *(self._compiled, begin, begin + 8 * num_rows, num_rows, address(columns_W), address(places_W)),
            *(len(places_W), address(told_4BM), told_4BM.shape[2]),
        )

    def observe(self, outcomes: Sequence[DraftOutcome], seats: Sequence[int], kinds: Sequence[str]) -> None:
        """Learn from trees."""
        place_of = {name: self._kind(name) for name in dict.fromkeys(kinds)}
        trees: list[int] = []
        chances: list[float] = []
        least: list[float] = []
        depths: list[int] = []
        accepted: list[int] = []
        for one, seat, kind in zip(outcomes, seats, kinds, strict=True):
            nodes = one.nodes
            assert nodes is not None, "a tree that does not know its nodes"
            sizes = (len(chances), len(nodes.chances), len(accepted), len(nodes.accepted))
            trees += (seat, place_of[kind], *sizes, one.drafted_depth)
            least += (nodes.least, self._least_whole(one))
            chances += nodes.chances
            depths += nodes.depths
            accepted += nodes.accepted
        arrays = array("q", trees), array("d", least), array("d", chances), array("q", depths), array("q", accepted)
        begins = [numbers.buffer_info()[0] for numbers in arrays]
        told = library.Trees(begins[0], len(outcomes), *begins[1:])
        self._library.selector_learn_worth(self._compiled, told)
