"""What growing the trees of a step leaves: the trees, and all that is to be known of how they grew.

Shape key: V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.enums import DraftSource, Origin
from engine.core.step_plan import Row
from engine.core.tree import TokenTree
from engine.draft.drafter import ModelPasses
from engine.draft.trees.sampling import Offer
from engine.verify.forest import Forest

T = TypeVar("T")

_OF_MODEL = Origin(DraftSource.MODEL, False)
_NO_OFFERS: Mapping[int, Offer] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Worth:
    """What a noise-aware tree's nodes are worth, the root aside: chances that they are accepted.

    `given_parent` are the scale's own, uncorrected, that they are if their parents are; `is_cached` says which were corrected as
    rather cached text's.
    """

    chances: tuple[float, ...]
    given_parent: tuple[float, ...]
    is_cached: tuple[bool, ...]


@dataclass(frozen=True)
class Growth:
    """The step's trees, one for each decoding row, the nodes of each whose keys the drafter has cached, and kept offers.

    `sources[b][v - 1]` is where the token of node v of tree b comes from, the root aside; `draft_probs[b]` has its draft
    probability if the row is traced, `worth[b]` what the nodes are worth if the tree is noise-aware. Tree b took `rounds[b]`
    rounds to grow, all together `num_rounds`, in which the drafter ran `passes` of a model.
    """

    forest: Forest
    fed: tuple[frozenset[int], ...]
    offers: tuple[Mapping[int, Offer], ...]
    sources: tuple[tuple[DraftSource, ...], ...]
    draft_probs: tuple[tuple[float, ...], ...]
    rounds: tuple[int, ...]
    worth: tuple[Worth | None, ...]
    num_rounds: int = 0
    passes: ModelPasses = ModelPasses()


@cache
def no_distributions(vocab_size: int, device: torch.device) -> Float[Tensor, "0 V"]:
    """Return what a step leaves in which nothing was drawn from a draft's law."""
    return torch.empty((0, vocab_size), device=device)


def plain_growth(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Growth:
    """Return roots alone: the step of an engine without a drafter."""
    trees = tuple(TokenTree.single(row.certain_ids[-1]) for row in rows if row.is_decoding)
    num_trees = len(trees)
    return Growth(
        forest=Forest(trees, no_distributions(vocab_size, device), ((None,),) * num_trees),
        fed=(frozenset(),) * num_trees,
        offers=(_NO_OFFERS,) * num_trees,
        sources=((),) * num_trees,
        draft_probs=((),) * num_trees,
        rounds=(0,) * num_trees,
        worth=(None,) * num_trees,
    )


def origins_of(tree: TokenTree, origins: Mapping[tuple[int, ...], Mapping[int, Origin]]) -> tuple[Origin, ...]:
    """Return where each node's token comes from, the root aside."""
    return told_by_path(tree, origins, _OF_MODEL) if origins else (_OF_MODEL,) * (tree.num_nodes - 1)


def told_by_path(tree: TokenTree, told: Mapping[tuple[int, ...], Mapping[int, T]], otherwise: T) -> tuple[T, ...]:
    """Return what is told of each node's token after the drafted tokens before it, the root aside."""
    path_ids: list[tuple[int, ...]] = [()]
    values = []
    for parent, token_id in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
        values.append(told.get(path_ids[parent], {}).get(token_id, otherwise))
        path_ids.append((*path_ids[parent], token_id))
    return tuple(values)
