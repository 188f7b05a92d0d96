"""The coupled rule, computed by the library: it follows each tree by the tokens that target noise chooses.

It serves logits after all edits, and any truncation but typical-p.

Shape key: N rows of logits, V vocabulary.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree
from engine.native import library
from engine.native.distributions import KeptTokens


class WalkedPath(NamedTuple):
    """Nodes from the root on, and the token after the last node."""

    path: tuple[int, ...]
    extra_id: int


def walks(
    logits_NV: Float[Tensor, "N V"],
    trees: Sequence[TokenTree],
    rows: Sequence[int],
    temperatures: Sequence[float],
    keys: Sequence[Sequence[int]],
    truncations: Sequence[KeptTokens] | None = None,
) -> list[WalkedPath | None]:
    """Return the path that each tree's choices follow; None if a distribution on it is invalid.

    `rows` has the row of logits of each node, tree after tree. Each tree has one temperature,
    one truncation, and one noise key per depth.
    """
    logits_NV, num_trees = logits_NV.contiguous(), len(trees)
    firsts = [*accumulate((tree.num_nodes for tree in trees), initial=0)]
    num_nodes = firsts[-1]
    assert len(rows) == num_nodes
    assert len(temperatures) == len(keys) == num_trees
    # Python's own arrays: NumPy's take longer to make than the few numbers of plain decoding.
    numbers, keys_N = array("q", firsts), array("Q")
    numbers.extend(rows)
    numbers.extend(chain.from_iterable(tree.parents for tree in trees))
    numbers.extend(chain.from_iterable(tree.token_ids for tree in trees))
    for tree, of_tree in zip(trees, keys, strict=True):
        keys_N.extend(of_tree)
        keys_N.extend((0,) * (tree.num_nodes - len(of_tree)))
    inverse_temperatures = array("f", [1.0 / one for one in array("f", temperatures)])
    kept_B3 = array("d", chain.from_iterable([KeptTokens()] * num_trees if truncations is None else truncations))
    found = library.empty_array("q", num_nodes + 2 * num_trees)
    begin, written = library.address_of(numbers), library.address_of(found)
    walked = library.Walked(
        firsts=begin,
        rows=begin + 8 * (num_trees + 1),
        parents=begin + 8 * (num_trees + 1 + num_nodes),
        tokens=begin + 8 * (num_trees + 1 + 2 * num_nodes),
        keys=library.address_of(keys_N),
        inverse_temperatures=library.address_of(inverse_temperatures),
        truncations=library.address_of(kept_B3),
        path=written,
        lengths=written + 8 * num_nodes,
        extras=written + 8 * (num_nodes + num_trees),
    )
    library.library().latebranch_walk(
        logits_NV.data_ptr(), logits_NV.shape[1], ctypes.byref(walked), num_trees, library.num_threads()
    )
    ends = zip(firsts, found[num_nodes : num_nodes + num_trees], found[num_nodes + num_trees :], strict=False)
    return [WalkedPath(tuple(found[first : first + length]), extra) if length else None for first, length, extra in ends]
