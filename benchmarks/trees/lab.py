"""A place to grow and judge many trees at one point of a text, each model pass paid once.

Knows an engine's models, a fixed text in both caches and one point in it. All trees of a point are grown side by side by the
engine's own growth; a drafter that remembers feeds each path once, and one pass of the target over the union of all trees gives
the law after every node. Shape key: U nodes of the union, N nodes of a tree, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.draft.calibration import Calibrations
from engine.draft.drafter import Drafter, FrontierNode, GrowingTree, Proposal
from engine.draft.growth import Growth, grow
from engine.engine import Engine
from engine.plan import Feeding, LawContext, Row, StepPlan
from engine.sampling import processed_laws
from engine.tree import ROOT, Expansion, TokenTree
from engine.types import SamplingParams

Path = tuple[int, ...]
_MAX_UNION = 1500  # nodes of all trees of a point, shared paths counted once
_CHUNK = 256


@dataclass(frozen=True)
class Planting:
    """A tree to grow at the point."""

    expansion: Expansion
    verifier: str
    seed: int


class Lab:
    """Both models over one text; the engine must be idle and stay so."""

    def __init__(self, engine: Engine) -> None:
        if engine.drafter is None:
            raise ValueError("a lab of trees needs a drafter")
        self._target, self._drafter = engine.target, engine.drafter
        self._text: tuple[int, ...] = ()

    def load(self, text: Sequence[int]) -> None:
        """Fill both caches with the text: its token i lies in slot i."""
        self._text = tuple(text)
        slots = range(len(text))
        for begin in range(0, len(text), _CHUNK):
            ids = self._text[begin : begin + _CHUNK]
            row = self._row(begin, ids, Expansion(0, 1, 0), SamplingParams(), "nss", 0, slots, begin)
            self._target.forward(StepPlan(0, (row,)), [TokenTree.single(ids[-1])])
            if self._drafter.feeding is not Feeding.TARGET_CACHE:
                self._drafter.feed([row], [])

    def _row(
        self,
        begin: int,
        ids: Sequence[int],
        expansion: Expansion,
        sampling: SamplingParams,
        verifier: str,
        seed: int,
        slots: Sequence[int],
        draft_len: int,
    ) -> Row:
        history = self._text[: begin + len(ids)]
        return Row(
            *(
                "lab",
                begin,
                tuple(ids),
                0,
                True,
                draft_len,
                tuple(ids),
                expansion,
                tuple(slots),
                sampling,
                verifier,
                seed,
                history,
                0,
            )
        )

    def row(self, point: int, planting: Planting, sampling: SamplingParams) -> Row:
        """Return the row of a decoding step whose root is the text's token at `point`."""
        behind = len(self._text)
        slots = [*range(point + 1), *range(behind, behind + planting.expansion.num_draft_tokens)]
        root = self._text[point : point + 1]
        return self._row(point, root, planting.expansion, sampling, planting.verifier, planting.seed, slots, point)

    def point(self, point: int, plantings: Sequence[Planting], sampling: SamplingParams, calibrations: Calibrations) -> "Point":
        """Grow all trees after the text's token at `point` and ask the target for the law after every node."""
        union = GrowingTree(self.row(point, Planting(Expansion(0, 1, 1, "beam", _MAX_UNION), "nss", 0), sampling))
        rows = [self.row(point, planting, sampling) for planting in plantings]
        model = self._target.model
        growth = grow(_Remembering(self._drafter, union), rows, model.vocab_size, model.device, calibrations)
        nodes = [_add(union, tree) for tree in growth.forest.trees]
        logits_UV = self._target.forward(StepPlan(0, (union.row,)), [union.frozen()])
        return Point(rows, growth, nodes, _laws(union, logits_UV, sampling), logits_UV.argmax(-1).tolist())


@dataclass(frozen=True)
class Point:
    """All trees of a point, with the target's processed law (greedy: only its arg max) after each node of their union."""

    rows: list[Row]
    growth: Growth
    nodes: list[list[int]]  # of each tree, as nodes of the union
    laws_UV: Tensor | None
    best_U: list[int]

    def target_laws_NV(self, index: int) -> Tensor:
        """Return the law after each node of a tree."""
        assert self.laws_UV is not None
        return self.laws_UV[torch.tensor(self.nodes[index])]

    def best_N(self, index: int) -> list[int]:
        """Return the target's arg max after each node of a tree."""
        return [self.best_U[node] for node in self.nodes[index]]


def _laws(union: GrowingTree, logits_UV: Tensor, sampling: SamplingParams) -> Tensor | None:
    if sampling.is_greedy:
        return None
    contexts: list[LawContext] = [FrontierNode(union, node, 0).law_context for node in range(len(union.parents))]
    return processed_laws(logits_UV, contexts)


def _add(union: GrowingTree, tree: TokenTree) -> list[int]:
    """Add a tree's nodes to the union; return their numbers there."""
    numbers = [ROOT]
    for node in range(1, tree.num_nodes):
        numbers.append(_child(union, numbers[tree.parents[node]], tree.token_ids[node]))
    return numbers


def _child(union: GrowingTree, parent: int, token_id: int) -> int:
    known = next((child for child in union.draws[parent] if union.token_ids[child] == token_id), None)
    return union.add(parent, token_id) if known is None else known


class _Remembering:
    """A drafter that is fed each path of the union once, whichever tree asks for it."""

    def __init__(self, drafter: Drafter, union: GrowingTree) -> None:
        self.name, self.feeding = drafter.name, drafter.feeding
        self._drafter, self._union = drafter, union
        self._logits: dict[int, Tensor | None] = {}  # by node of the union

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the root once."""
        own = [self._union.row] if rows else []
        self._note([ROOT], self._drafter.feed(own, [FrontierNode(self._union, ROOT, 1)]))
        return self._recalled([ROOT] * len(roots))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed what no tree has asked for before."""
        nodes = [self._number(asked) for asked in frontier]
        fresh = sorted({node for node in nodes if node not in self._logits})
        if fresh:
            self._note(fresh, self._drafter.extend([FrontierNode(self._union, node, 1) for node in fresh]))
        return self._recalled(nodes)

    def _number(self, asked: FrontierNode) -> int:
        node = ROOT
        for step in asked.tree.path(asked.node)[1:]:
            node = _child(self._union, node, asked.tree.token_ids[step])
        return node

    def _note(self, nodes: Sequence[int], proposal: Proposal) -> None:
        self._logits.update(dict.fromkeys(nodes))
        self._union.fed.update(nodes)
        for index, logits_V in zip(proposal.indices, proposal.logits_PV, strict=True):
            self._logits[nodes[index]] = logits_V

    def _recalled(self, nodes: Sequence[int]) -> Proposal:
        known = [(index, logits_V) for index, node in enumerate(nodes) if (logits_V := self._logits[node]) is not None]
        indices = tuple(index for index, _ in known)
        return Proposal(indices, torch.stack([logits_V for _, logits_V in known]) if known else torch.empty((0, 1)))
