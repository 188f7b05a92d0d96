"""Every tree that a growth can draw, with its probability, and a rule's distribution of sequences over them. Exact, float64.

This module knows how trees are grown and what a lossless rule must achieve. It does not know how verifiers work. It judges a
rule by the distribution of path ends and extra tokens.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.tree import Expansion, TokenTree
from engine.verify.forest import Forest

Context = tuple[int, ...]
Distribution = NDArray[np.float64]


class TinyModel:
    """A target and a drafter over a few tokens. Each context has its own distributions.

    `flavour`: `generic` distributions are positive everywhere; `sparse` ones have zeros in different places; `equal` makes the
    drafter the target, `peaked` puts almost all mass on one token.
    """

    def __init__(self, vocab_size: int, seed: int, flavour: str = "generic") -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._flavour = flavour
        self.target: Callable[[Context], Distribution] = cache(lambda context: self._probs("target", context))
        self.draft: Callable[[Context], Distribution] = (
            self.target if flavour == "equal" else cache(lambda context: self._probs("draft", context))
        )

    def _probs(self, role: str, context: Context) -> Distribution:
        rng = np.random.default_rng([self._seed, zlib.crc32(role.encode()), *context])
        distribution = rng.dirichlet(np.full(self.vocab_size, 0.2 if self._flavour == "peaked" else 1.0)) + 1e-9
        if self._flavour == "sparse":
            distribution[rng.integers(self.vocab_size)] = 0.0
        return np.asarray(distribution / distribution.sum())


@dataclass(frozen=True)
class DrawnTree:
    """One outcome of growing: the tree, the tokens below the root on the way to each node, and how likely it is."""

    tree: TokenTree
    contexts: tuple[Context, ...]
    probability: float


class TreeBuilder:
    """Collects draws: a child is named by its context, drawing it again adds multiplicity, not a node."""

    def __init__(self) -> None:
        self._nodes: dict[Context, int] = {(): 0}
        self._draws: dict[Context, list[int]] = {(): []}

    def draw(self, context: Context, token_id: int) -> None:
        """Record that `token_id` was drawn after `context`."""
        child = (*context, token_id)
        node = self._nodes.setdefault(child, len(self._nodes))
        self._draws.setdefault(child, [])
        self._draws[context].append(node)

    def drawn(self, probability: float) -> DrawnTree:
        """Return the finished tree."""
        contexts = tuple(self._nodes)
        parents = tuple(self._nodes[context[:-1]] if context else -1 for context in contexts)
        tokens = tuple(context[-1] if context else 0 for context in contexts)
        return DrawnTree(TokenTree(parents, tokens, tuple(tuple(self._draws[c]) for c in contexts)), contexts, probability)


def delayed_trees(model: TinyModel, expansion: Expansion) -> list[DrawnTree]:
    """Return every delayed tree: a drawn trunk, then i.i.d. paths from its end with duplicates merged."""
    num_tokens = expansion.num_draft_tokens
    outcomes = itertools.product(range(model.vocab_size), repeat=num_tokens)
    return [drawn for tokens in outcomes if (drawn := _delayed_tree(model, expansion, tokens)).probability > 0.0]


def _delayed_tree(model: TinyModel, expansion: Expansion, tokens: Sequence[int]) -> DrawnTree:
    trunk, rest = tuple(tokens[: expansion.trunk]), tokens[expansion.trunk :]
    paths = [trunk + tuple(rest[i : i + expansion.depth]) for i in range(0, len(rest), expansion.depth or 1)] or [trunk]
    builder, probability = TreeBuilder(), 1.0
    for depth in range(expansion.max_depth):
        for path in paths[:1] if depth < expansion.trunk else paths:
            builder.draw(path[:depth], path[depth])
            probability *= model.draft(path[:depth])[path[depth]]
    return builder.drawn(probability)


def distinct_trees(model: TinyModel, widths: Sequence[int]) -> list[DrawnTree]:
    """Return every static tree: widths[d] children below each node of depth d, without replacement, fewer once q is empty."""
    return _level_trees(model, widths, _orderings)


Shape = tuple["Shape", ...]  # of the subtree below a node: its children's, by rank


def shaped_trees(model: TinyModel, shape: Shape) -> list[DrawnTree]:
    """Return every tree of one fixed shape, drawn without replacement: what a node gets is decided by ranks, not by tokens."""
    return [_distinct_tree(draws, probability) for draws, probability in _shaped_draws(model, (), shape)]


def _shaped_draws(model: TinyModel, context: Context, shape: Shape) -> Iterator[tuple["_Draws", float]]:
    for token_ids, probability in _orderings(model.draft(context), len(shape)) if shape else [((), 1.0)]:
        below = [list(_shaped_draws(model, (*context, token_id), below)) for token_id, below in zip(token_ids, shape)]
        draws = tuple((context, token_id) for token_id in token_ids)
        for combination in itertools.product(*below):
            yield draws + tuple(itertools.chain(*(c[0] for c in combination))), probability * _product(c[1] for c in combination)


def set_and_sample_trees(model: TinyModel, set_sizes: Sequence[int]) -> list[DrawnTree]:
    """Return every tree with the set_sizes[d] likeliest children and one draw off them below each node of depth d."""
    return _level_trees(model, set_sizes, _set_and_sample)


_Draws = tuple[tuple[Context, int], ...]
_Siblings = Callable[[Distribution, int], Iterator[tuple[tuple[int, ...], float]]]


def _level_trees(model: TinyModel, sizes: Sequence[int], siblings: _Siblings) -> list[DrawnTree]:
    return [_distinct_tree(draws, probability) for draws, probability in _level_draws(model, (), sizes, siblings)]


def _distinct_tree(draws: _Draws, probability: float) -> DrawnTree:
    builder = TreeBuilder()
    for context, token_id in draws:
        builder.draw(context, token_id)
    return builder.drawn(probability)


def _level_draws(model: TinyModel, context: Context, sizes: Sequence[int], siblings: _Siblings) -> Iterator[tuple[_Draws, float]]:
    """Yield the draws of the subtree below a context, siblings before their children, with their probability."""
    if not sizes:
        yield (), 1.0
        return
    for token_ids, probability in siblings(model.draft(context), sizes[0]):
        below = [list(_level_draws(model, (*context, token_id), sizes[1:], siblings)) for token_id in token_ids]
        for combination in itertools.product(*below):
            draws = tuple((context, token_id) for token_id in token_ids)
            yield draws + tuple(itertools.chain(*(c[0] for c in combination))), probability * _product(c[1] for c in combination)


def _orderings(distribution: Distribution, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield ordered draws without replacement until `count` are drawn or no probability is left."""
    count = min(count, int((distribution > 0).sum()))
    for tokens in itertools.permutations(range(len(distribution)), count):
        probability, left = 1.0, distribution.copy()
        for token_id in tokens:
            probability *= left[token_id] / left.sum() if left[token_id] > 0 else 0.0
            left[token_id] = 0.0
        if probability > 0.0:
            yield tokens, probability


def _set_and_sample(distribution: Distribution, set_size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the likeliest tokens with each draw off them, alone if nothing is left to draw."""
    fixed = tuple(token_id for token_id in np.argsort(-distribution)[:set_size].tolist() if distribution[token_id] > 0.0)
    rest = distribution.copy()
    rest[list(fixed)] = 0.0
    for token_id in np.flatnonzero(rest).tolist():
        yield (*fixed, token_id), float(rest[token_id] / rest.sum())
    if not rest.any():
        yield fixed, 1.0


def heap_trees(model: TinyModel, budget: int) -> list[DrawnTree]:
    """Return every greedy DySpec tree (arXiv 2410.11744): the place of most value draws the next token, `budget` times."""
    return list(_heap_trees(model, ((1.0, (), model.draft(())),), (), 1.0, budget))


_Place = tuple[float, Context, Distribution]


def _heap_trees(
    model: TinyModel, places: tuple[_Place, ...], draws: _Draws, probability: float, budget: int
) -> Iterator[DrawnTree]:
    if not budget or not places:
        yield _distinct_tree(draws, probability)
        return
    value, context, distribution = best = max(places, key=lambda place: place[0])
    others = tuple(place for place in places if place is not best)
    for token_id in np.flatnonzero(distribution).tolist():
        rest = distribution.copy()
        rest[token_id] = 0.0
        sibling = ((value * (1.0 - distribution[token_id]), context, rest / rest.sum()),) if rest.sum() > 0 else ()
        child = (value * distribution[token_id], (*context, token_id), model.draft((*context, token_id)))
        drawn = (*draws, (context, token_id))
        yield from _heap_trees(model, (*others, child, *sibling), drawn, probability * distribution[token_id], budget - 1)


def beam_trees(model: TinyModel, width: int, depth: int) -> list[DrawnTree]:
    """Return the one deterministic tree of the `width` likeliest children of every node."""
    builder = TreeBuilder()
    frontier: list[Context] = [()]
    for _ in range(depth):
        children: list[Context] = []
        for context in frontier:
            for token_id in np.argsort(-model.draft(context))[:width].tolist():
                builder.draw(context, token_id)
                children.append((*context, token_id))
        frontier = children
    return [builder.drawn(1.0)]


@dataclass(frozen=True)
class Batch:
    """Drawn trees as a verifier sees them, in float64."""

    trees: tuple[DrawnTree, ...]
    forest: Forest
    target_probs_NV: Tensor


def batch_of(model: TinyModel, trees: Sequence[DrawnTree], dtype: torch.dtype = torch.float64) -> Batch:
    """Return the forest of the trees and the target's distribution after each node."""
    contexts = [context for drawn in trees for context in drawn.contexts]
    rows = itertools.count()
    probs_rows = tuple(tuple(row if drawn else None for drawn, row in zip(tree.tree.draws, rows)) for tree in trees)
    draft_probs = torch.tensor(np.stack([model.draft(context) for context in contexts])).to(dtype)
    target_probs = torch.tensor(np.stack([model.target(context) for context in contexts])).to(dtype)
    return Batch(tuple(trees), Forest(tuple(drawn.tree for drawn in trees), draft_probs, probs_rows), target_probs)


def emitted_probs(model: TinyModel, batch: Batch, stop_N: Tensor, extra_NV: Tensor) -> Distribution:
    """Return the distribution of sequences: path and extra token, completed by the target to one token beyond the deepest tree.

    `stop_N`: probability that a tree's path ends at each packed node; `extra_NV`: distribution of the extra token there.
    """
    length = 1 + max(max(drawn.tree.depths) for drawn in batch.trees)
    weight: dict[Context, float] = {}
    contexts = [(drawn.probability, context) for drawn in batch.trees for context in drawn.contexts]
    for (probability, context), stop, extra in zip(contexts, stop_N.tolist(), extra_NV.tolist(), strict=True):
        for token_id, share in enumerate(extra):
            text = (*context, token_id)
            weight[text] = weight.get(text, 0.0) + probability * stop * share
    return sum((share * completed(model, text, length) for text, share in weight.items()), start=np.zeros(1))


def completed(model: TinyModel, prefix: Context, length: int) -> Distribution:
    """Return the target's distribution of sequences of `length` tokens that begin with `prefix`, flattened."""
    probs = np.zeros((model.vocab_size,) * length)
    probs[prefix] = _continuations(model, prefix, length)
    return probs.reshape(-1)


def _continuations(model: TinyModel, prefix: Context, length: int) -> Distribution:
    if len(prefix) == length:
        return np.ones(())
    distribution = model.target(prefix)
    return np.stack([distribution[y] * _continuations(model, (*prefix, y), length) for y in range(model.vocab_size)])


def loss(model: TinyModel, distribution: Distribution) -> float:
    """Return the largest error of a distribution of sequences against the target's. It is 0 for a lossless rule."""
    length = round(np.log(distribution.size) / np.log(model.vocab_size))
    return float(np.abs(distribution - completed(model, (), length)).max())


def _product(factors: Iterable[float]) -> float:
    return float(np.prod(list(factors)))
