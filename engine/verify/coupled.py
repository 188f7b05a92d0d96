"""Verification by one token per node: the coupled rule and greedy decoding.

It needs no draft distribution and is exact on any tree, because the output is plain decoding's with the same seed.

Shape key: B trees, N packed nodes, M visited nodes of one depth, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.rng_keys import StepKey, Stream, stream_key
from engine.core.tree import ROOT, TokenTree
from engine.native import noise as native
from engine.native.distributions import KeptTokens
from engine.native.walks import walks as native_walks
from engine.sampling.noise import gumbels
from engine.utils.host_transfer import integers, rows_to_host
from engine.verify.errors import NonFiniteDistributionError
from engine.verify.forest import Forest
from engine.verify.layout import chunks, rows_at_once
from engine.verify.verdict import Verdict


class Walk:
    """The path through one tree that follows chosen tokens. Mutable."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._path = [ROOT]
        self._extra_id: int | None = None

    @property
    def node(self) -> int:
        """The last node of the path."""
        return self._path[-1]

    @property
    def depth(self) -> int:
        """The depth of that node."""
        return len(self._path) - 1

    @property
    def is_over(self) -> bool:
        """Whether a chosen token has left the tree."""
        return self._extra_id is not None

    def choose(self, token_id: int) -> None:
        """Descend into the child that carries the token, or end with it as the extra token."""
        tree = self._tree
        child = next((child for child in tree.children[self.node] if tree.token_ids[child] == token_id), None)
        if child is None:
            self._extra_id = token_id
        else:
            self._path.append(child)

    def verdict(self) -> Verdict:
        """Return the finished path and its extra token."""
        if self._extra_id is None:
            raise ValueError("the walk is not over")
        return Verdict(tuple(self._path), self._extra_id)


def follow(tree: TokenTree, choice_by_node: Sequence[int]) -> Verdict:
    """Return the longest path on which every token is its parent's choice; the last node's choice is the extra token."""
    if tree.num_nodes == 1:  # the most frequent tree under load
        return Verdict((ROOT,), choice_by_node[ROOT])
    walk = Walk(tree)
    while not walk.is_over:
        walk.choose(choice_by_node[walk.node])
    return walk.verdict()


def noise_keys(tree: TokenTree, key: StepKey) -> list[int]:
    """Return the key of the noise for the token after each node."""
    return [_noise_key(key, depth) for depth in tree.depths]


def depth_keys(tree: TokenTree, key: StepKey) -> list[int]:
    """Return the key of the noise for the token after the nodes of each depth."""
    return [_noise_key(key, depth) for depth in range(1 if tree.num_nodes == 1 else max(tree.depths) + 1)]


def follow_all(trees: Sequence[TokenTree], choice_ids_N: Sequence[int]) -> list[Verdict]:
    """Return the verdicts of trees whose chosen token is known after each packed node, tree after tree."""
    verdicts = []
    offset = 0
    for tree in trees:
        verdicts.append(follow(tree, choice_ids_N[offset : offset + tree.num_nodes]))
        offset += tree.num_nodes
    return verdicts


def judge_greedy(trees: Sequence[TokenTree], choice_ids_N: Sequence[int]) -> list[Verdict]:
    """Verify at temperature 0: `choice_ids_N` is the target's arg max after each packed node, tree after tree.

    Nothing is random, so `expected_tokens` is the exact number.
    """
    return [Verdict(verdict.path, verdict.extra_id, float(len(verdict.path))) for verdict in follow_all(trees, choice_ids_N)]


class Coupled:
    """The token after a node of depth d is arg max (log p + g), where g is the noise of its position. So one seed has one text.

    Drafts ranked by s log q + g with the same g are accepted often; any other drafts are exact as well.
    """

    name = "coupled"

    def judge(self, forest: Forest, target_probs_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]) -> list[Verdict]:
        """Return one verdict a tree, independent of the other trees in the forest.

        Walks all trees one depth at a time and computes noise and choices for the visited nodes only. Each depth costs one
        transfer to the host. Raises NonFiniteDistributionError if a visited distribution has no arg max.
        """
        walks = [Walk(tree) for tree in forest.trees]
        max_rows = rows_at_once(target_probs_NV.shape[-1], target_probs_NV.device)
        while walking := [b for b, walk in enumerate(walks) if not walk.is_over]:
            for trees in chunks(walking, max_rows):
                rows = [forest.offsets[b] + walks[b].node for b in trees]
                choices = _choices(target_probs_NV, rows, [_noise_key(keys[b], walks[b].depth) for b in trees])
                if faulty := [b for b, choice in zip(trees, choices) if not math.isfinite(choice.score)]:
                    raise NonFiniteDistributionError(faulty)
                for b, choice in zip(trees, choices):
                    walks[b].choose(choice.token_id)
        return [walk.verdict() for walk in walks]


def judge_coupled_natively(
    trees: Sequence[TokenTree],
    logits_NV: Float[Tensor, "N V"],
    rows: Sequence[int],
    temperatures: Sequence[float],
    truncations: Sequence[KeptTokens],
    keys: Sequence[StepKey],
) -> list[Verdict]:
    """Return Coupled's verdicts, computed by the native library from the `rows` of logits of the trees' nodes.

    Requires distributions without typical-p. Only visited nodes are computed. Raises
    NonFiniteDistributionError as Coupled does.
    """
    keys_of_trees = [depth_keys(tree, key) for tree, key in zip(trees, keys, strict=True)]
    walks = native_walks(logits_NV, trees, rows, temperatures, keys_of_trees, truncations)
    if faulty := [b for b, walk in enumerate(walks) if walk is None]:
        raise NonFiniteDistributionError(faulty)
    return [Verdict(walk.path, walk.extra_id) for walk in walks if walk is not None]


class _Choice(NamedTuple):
    score: float
    token_id: int


def _choices(target_probs_NV: Tensor, rows: Sequence[int], noise_keys: Sequence[int]) -> list[_Choice]:
    """Return each row's token of best perturbed log-probability; its score is not finite if the distribution is invalid."""
    device = target_probs_NV.device
    if native.can_choose(device) and target_probs_NV.dtype == torch.float32:
        return [_Choice(score, token_id) for score, token_id in native.choices(target_probs_NV, rows, noise_keys)]
    probs_MV = target_probs_NV.index_select(0, integers(rows, device))
    best = (probs_MV.log() + gumbels(noise_keys, probs_MV.shape[-1], device)).max(-1, keepdim=True)
    return [_Choice(score, int(token_id)) for (score,), (token_id,) in rows_to_host([best.values, best.indices])]


def _noise_key(key: StepKey, depth: int) -> int:
    """Return the key of the noise for the token after a node of this depth: that of the token's own position."""
    return stream_key(key.seed, key.root_position + depth + 1, Stream.TOKEN)
