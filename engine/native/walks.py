"""Trees followed by the tokens that the library chooses after their nodes: by the coupled rule, or the likeliest.

A pass of the library follows them while it has the logits; other logits, such as those after edits, are followed afterwards.
Any truncation but typical-p is possible.

Shape key: N rows of logits, V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import msgspec
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree
from engine.native import library
from engine.native.distributions import KeptTokens


class WalkedPath(msgspec.Struct, frozen=True):
    """Nodes from the root on, and the token after the last node."""

    path: tuple[int, ...]
    extra_id: int


class Steps:
    """Steps of plain decoding in a row: each row's chosen token is fed in the next step. Owns the memory behind `structure`.

    The first step feeds each row's root. `slots` are for the `most` - 1 tokens after it. No step follows one in which a row has
    one of its stop tokens. `num_complete` is the number of steps in which every row has a token, once the library has run them.
    """

    def __init__(
        self, most: int, slots: Sequence[Sequence[int]], seeds: Sequence[int], stop_ids: Sequence[Sequence[int]]
    ) -> None:
        self.most, self.num_rows, self.num_complete = most, len(seeds), 0
        slots_B = array("q", chain.from_iterable(slots))
        assert len(slots_B) == self.num_rows * (most - 1)
        seeds_B = array("Q", [seed & (1 << 64) - 1 for seed in seeds])
        firsts = array("q", accumulate(map(len, stop_ids), initial=0))
        stops = array("q", chain.from_iterable(stop_ids))
        self._tokens = library.empty_array("q", most * self.num_rows)
        self._memory = slots_B, seeds_B, firsts, stops
        addresses = map(library.address_of, (*self._memory, self._tokens))
        self.structure = library.StepsStructure(most, *addresses)

    def tokens(self) -> list[tuple[int, ...]]:
        """Return each row's tokens of the complete steps."""
        return [tuple(self._tokens[row : self.num_complete * self.num_rows : self.num_rows]) for row in range(self.num_rows)]


class Walks:
    """Trees to follow, each with one temperature (0: the likeliest tokens), one truncation, and one noise key per depth.

    `rows` has the row of logits of each node, tree after tree. Owns the memory behind `structure`, and the paths once the library
    has written them. With `steps` all trees are roots, and the pass is the first of several.
    """

    def __init__(
        self,
        trees: Sequence[TokenTree],
        rows: Sequence[int],
        temperatures: Sequence[float],
        keys: Sequence[Sequence[int]],
        truncations: Sequence[KeptTokens] | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.steps = steps
        self.num_trees = num_trees = len(trees)
        assert len(temperatures) == len(keys) == num_trees
        # Python's own arrays: NumPy's take longer to make than the few numbers of plain decoding.
        firsts, parents, token_ids, keys_N = array("q", (0,)), array("q"), array("q"), array("Q")
        for tree, of_tree in zip(trees, keys, strict=True):
            parents.extend(tree.parents)
            token_ids.extend(tree.token_ids)
            firsts.append(len(parents))
            keys_N.extend(of_tree)
            keys_N.extend((0,) * (len(parents) - len(keys_N)))
        self._firsts, num_nodes = firsts, len(parents)
        assert len(rows) == num_nodes
        numbers = firsts + array("q", rows) + parents + token_ids
        inverse_temperatures = array("f", [1.0 / one if one else 0.0 for one in array("f", temperatures)])
        kept_B3 = array("d", chain.from_iterable([KeptTokens()] * num_trees if truncations is None else truncations))
        self._found = library.empty_array("q", num_nodes + 2 * num_trees)
        self._memory = numbers, keys_N, inverse_temperatures, kept_B3
        begin, written, row = numbers.buffer_info()[0], self._found.buffer_info()[0], 8 * num_nodes
        of_rows = begin + 8 * len(firsts)
        self.structure = library.Walked(  # in the order of its fields
            *(begin, of_rows, of_rows + row, of_rows + 2 * row),
            *(inverse_temperatures.buffer_info()[0], kept_B3.buffer_info()[0], keys_N.buffer_info()[0]),
            *(written, written + row, written + row + 8 * num_trees),
        )

    def paths(self) -> list[WalkedPath | None]:
        """Return the path that each tree's choices follow; None if a distribution on it is invalid.

        In a pass a tree has no path either if any of its nodes has logits that are not finite.
        """
        found, firsts, num_nodes = self._found, self._firsts, self._firsts[-1]
        ends = zip(firsts, found[num_nodes : num_nodes + self.num_trees], found[num_nodes + self.num_trees :], strict=False)
        return [WalkedPath(tuple(found[first : first + length]), extra) if length else None for first, length, extra in ends]


def walks(
    logits_NV: Float[Tensor, "N V"],
    trees: Sequence[TokenTree],
    rows: Sequence[int],
    temperatures: Sequence[float],
    keys: Sequence[Sequence[int]],
    truncations: Sequence[KeptTokens] | None = None,
) -> list[WalkedPath | None]:
    """Return the paths of trees by these logits. The arguments are those of Walks."""
    walked, logits_NV = Walks(trees, rows, temperatures, keys, truncations), logits_NV.contiguous()
    library.library().latebranch_walk(
        logits_NV.data_ptr(), logits_NV.shape[1], ctypes.byref(walked.structure), walked.num_trees, library.num_threads()
    )
    return walked.paths()
