"""The coupled rule, computed by the library: it follows each tree by the tokens that target noise chooses.

It serves logits after all edits, and any truncation but typical-p.

Shape key: N rows of logits, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from engine.core.tree import TokenTree
from engine.native import library
from engine.native.distributions import KeptTokens, truncations_array


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
    parents, tokens = (
        chain.from_iterable(column) for column in zip(*((tree.parents, tree.token_ids) for tree in trees), strict=True)
    )
    numbers = np.array([*firsts, *rows, *parents, *tokens], dtype=np.int64)
    keys_N = np.zeros(num_nodes, dtype=np.uint64)
    for first, of_tree in zip(firsts, keys, strict=False):
        keys_N[first : first + len(of_tree)] = of_tree
    inverse_temperatures = 1.0 / np.array(temperatures, dtype=np.float32)
    kept_B3 = truncations_array(truncations, num_trees)
    found = np.empty(num_nodes + 2 * num_trees, dtype=np.int64)
    begin, written = library.address(numbers), library.address(found)
    walked = library.Walked(
        firsts=begin,
        rows=begin + 8 * (num_trees + 1),
        parents=begin + 8 * (num_trees + 1 + num_nodes),
        tokens=begin + 8 * (num_trees + 1 + 2 * num_nodes),
        keys=library.address(keys_N),
        inverse_temperatures=library.address(inverse_temperatures),
        truncations=library.address(kept_B3),
        path=written,
        lengths=written + 8 * num_nodes,
        extras=written + 8 * (num_nodes + num_trees),
    )
    library.library().latebranch_walk(
        logits_NV.data_ptr(), logits_NV.shape[1], ctypes.byref(walked), num_trees, library.num_threads()
    )
    path, ends = found.tolist(), zip(firsts, found[num_nodes:].reshape(2, -1).T.tolist(), strict=False)
    return [WalkedPath(tuple(path[first : first + length]), extra_id) if length else None for first, (length, extra_id) in ends]
