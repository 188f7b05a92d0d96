"""Grows and judges many trees at one point of a sequence, with each model pass run once.

Both caches hold a fixed sequence. The engine's own growth grows all trees of a point together. A caching drafter feeds each path
once, and one pass of the target over the union of all trees gives the distribution after every node.
Shape key: U nodes of the union, N nodes of a tree, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional

from engine.core.policy import RootFacts
from engine.core.step_observer import Ending
from engine.core.step_plan import Feeding, Row, SamplingContext, StepPlan
from engine.core.tree import ROOT, Expansion, TokenTree
from engine.core.types import Request, SamplingParams, Speculation
from engine.draft.drafter import Drafter, FrontierNode, GrowingTree, Proposal
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grow import grow, grow_by, growers_of
from engine.draft.trees.grower import Growth
from engine.draft.trees.nested import Nested, Truncation
from engine.engine import Engine
from engine.sampling.distributions import processed_probs
from engine.verify.coupled import judge_greedy
from engine.verify.directions import AcceptanceProbs, TopDown
from engine.verify.forest import Forest
from engine.verify.two_phase import TwoPhase, expected_tokens
from engine.verify.verdict import Verifier

Path = tuple[int, ...]
_MAX_UNION = 1500  # nodes of all trees of a point; a shared path counts once
_CHUNK = 256
_NAME = "lab"


@dataclass(frozen=True)
class TreeSpec:
    """A tree to grow at a point."""

    expansion: Expansion
    verifier: str
    seed: int


class Counterfactual:
    """Both models over one sequence. The engine must be idle, and run nothing else meanwhile."""

    def __init__(self, engine: Engine) -> None:
        if engine.drafter is None:
            raise ValueError("counterfactual trees need a drafter")
        if engine.target.model.has_states:
            raise ValueError("counterfactual trees begin anywhere in a sequence; recurrent layers keep no state there")
        self._engine = engine
        self._target, self._drafter, self._roots = engine.target, engine.drafter, engine.roots
        self._text: tuple[int, ...] = ()

    def generate(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[tuple[int, ...]]:
        """Return each prompt with the target's own continuation, generated in one batch; the engine's policy chooses drafts."""
        texts = {f"text-{index}": list(prompt) for index, (prompt, _) in enumerate(prompts)}
        for name, (prompt, sampling) in zip(texts, prompts, strict=True):
            self._engine.add(Request(name, tuple(prompt), sampling, Speculation()))
        while self._engine.has_work:
            for event in self._engine.step().events:
                texts[event.request_id].extend(event.token_ids)
        return [tuple(text) for text in texts.values()]

    def load(self, text: Sequence[int]) -> None:
        """Fill both caches with a sequence: its token i is stored in slot i."""
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
                _NAME,
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

    def row(self, point: int, spec: TreeSpec, sampling: SamplingParams) -> Row:
        """Return the row of a decoding step whose root is the sequence's token at `point`."""
        end = len(self._text)
        slots = [*range(point + 1), *range(end, end + spec.expansion.num_draft_tokens)]
        root = self._text[point : point + 1]
        return self._row(point, root, spec.expansion, sampling, spec.verifier, spec.seed, slots, point)

    def point(self, point: int, specs: Sequence[TreeSpec], sampling: SamplingParams, calibrations: Calibrations) -> "Point":
        """Grow all trees after the sequence's token at `point`, and compute the target's distribution after every node."""
        union = GrowingTree(self.row(point, TreeSpec(Expansion(0, 1, 1, "beam", _MAX_UNION), "nss", 0), sampling))
        rows = [self.row(point, spec, sampling) for spec in specs]
        model = self._target.model
        growers = growers_of(_CachingDrafter(self._drafter, union), model.vocab_size, model.device)
        return self._judged([(rows, grow(growers, rows, calibrations))], union, sampling)[0]

    def nested(
        self,
        point: int,
        expansions: Sequence[Expansion],
        specs: Sequence[TreeSpec],
        sampling: SamplingParams,
        others: Sequence[TreeSpec] = (),
    ) -> "NestedPoint":
        """Grow one tree for each spec that contains the trees of all `expansions`; the spec sets the family and its branches.

        The trees of `others` are grown beside them, and share their passes.
        """
        union = GrowingTree(self.row(point, TreeSpec(Expansion(0, 1, 1, "beam", _MAX_UNION), "nss", 0), sampling))
        rows = [self.row(point, spec, sampling) for spec in specs]
        strategies = [Nested(GrowingTree(row), expansions) for row in rows]
        model, drafter = self._target.model, _CachingDrafter(self._drafter, union)
        grown = [(rows, grow_by(strategies, drafter, rows, model.vocab_size, model.device))]
        truncations = [strategy.truncations() for strategy in strategies]
        if others:
            of_others = [self.row(point, spec, sampling) for spec in others]
            growers = growers_of(drafter, model.vocab_size, model.device)
            grown.append((of_others, grow(growers, of_others, Calibrations())))
        whole, *beside = self._judged(grown, union, sampling)
        return NestedPoint(whole, truncations, beside[0] if beside else None)

    def _judged(self, grown: Sequence[tuple[list[Row], Growth]], union: GrowingTree, sampling: SamplingParams) -> "list[Point]":
        """Compute the target's distribution after every node of the trees in one pass."""
        nodes = [[_add(union, tree) for tree in growth.forest.trees] for _, growth in grown]
        logits_UV = self._target.forward(StepPlan(0, (union.row,)), [union.frozen()])
        found = _probs(union, logits_UV, sampling), logits_UV.argmax(-1).tolist()
        return [Point(rows, growth, of_trees, *found) for (rows, growth), of_trees in zip(grown, nodes, strict=True)]

    def facts(self, point: int, spec: TreeSpec, sampling: SamplingParams) -> RootFacts:
        """Return the features of the root at `point`, as if the step before had grown the spec's tree and accepted none of it."""
        self._roots.watch()
        row = self.row(point - 1, spec, sampling)
        model = self._target.model
        growth = grow(growers_of(self._drafter, model.vocab_size, model.device), [row])
        logits_NV = self._target.forward(StepPlan(0, (row,)), growth.forest.trees)
        probs_row, root_id = growth.forest.probs_rows[0][ROOT], self._text[point]
        ending = Ending(ROOT, probs_row, row.slots[row.root_position], root_id, sampling)
        self._roots.note({_NAME: ending}, logits_NV, growth.forest.draft_probs_RV)
        return self._roots.facts([_NAME])


@dataclass(frozen=True)
class Point:
    """All trees of a point, with the target's processed distribution (greedy: its arg max) after each node of their union."""

    rows: list[Row]
    growth: Growth
    nodes: list[list[int]]  # of each tree, as nodes of the union
    probs_UV: Tensor | None
    best_U: list[int]

    def target_probs_NV(self, index: int) -> Tensor:
        """Return the target's distribution after each node of a tree."""
        assert self.probs_UV is not None
        return self.probs_UV[torch.tensor(self.nodes[index])]

    def best_N(self, index: int) -> list[int]:
        """Return the target's arg max after each node of a tree."""
        return [self.best_U[node] for node in self.nodes[index]]


class TreeOutcome(NamedTuple):
    """A tree's expected tokens, or accepted tokens if the rule has no expectation, and the accepted depth of one judgement."""

    tokens: float
    accepted_depth: int


@dataclass(frozen=True)
class NestedPoint:
    """Whole trees of a point, and for each the trees of all expansions that it contains."""

    whole: Point
    truncations: list[list[Truncation]]
    others: Point | None = None
    _merged: dict[int, "_Merged"] = field(default_factory=dict)

    def forest(self, index: int) -> Forest:
        """Return the truncations of a tree with the distributions from which their nodes were drawn."""
        growth, trees = self.whole.growth, self.truncations[index]
        rows = growth.forest.probs_rows[index]
        probs_rows = tuple(
            tuple(rows[node] if draws else None for node, draws in zip(cut.nodes, cut.tree.draws, strict=True)) for cut in trees
        )
        return Forest(tuple(cut.tree for cut in trees), growth.forest.draft_probs_RV, probs_rows)

    def tokens(self, index: int, verifier: Verifier | None) -> list[TreeOutcome]:
        """Return the outcome of each truncation of a tree. No verifier: the row is greedy.

        Greedy and coupled verification draw nothing, so all truncations follow the same path, each as far as it contains it.
        """
        if verifier is None:
            path = judge_greedy([self.whole.growth.forest.trees[index]], self.whole.best_N(index))[0].path
        elif verifier.name == "coupled":
            forest, key = self.whole.growth.forest.subset([index]), self.whole.rows[index].key
            path = verifier.judge(forest, self.whole.target_probs_NV(index), [key])[0].path
        else:
            return self._expected(index, verifier)
        lengths = (sum(node in cut.nodes for node in path) for cut in self.truncations[index])
        return [TreeOutcome(float(length), length - 1) for length in lengths]

    def _expected(self, index: int, verifier: Verifier) -> list[TreeOutcome]:
        if not isinstance(verifier, TwoPhase):
            raise TypeError(f"{verifier.name} has no expectation")
        if index not in self._merged:
            self._merged[index] = _Merged.of(self, index)
        key = self.whole.rows[index].key
        if isinstance(verifier.direction, TopDown):
            stops = self._merged[index].stops_top_down(verifier)
            ends = [(distribution, verifier.end(distribution, key)) for distribution in stops]
        else:
            ends = verifier.ends(*self._merged[index].forest(), [key] * len(self.truncations[index]))
        trees = (cut.tree for cut in self.truncations[index])
        return [
            TreeOutcome(expected_tokens(tree, stops), tree.depths[node]) for tree, (stops, node) in zip(trees, ends, strict=True)
        ]


@dataclass(frozen=True)
class _Merged:
    """The truncations of a tree over merged tokens. `column_V` is the place of each drafted token. C merged tokens."""

    truncations: list[Truncation]
    column_V: list[int]
    draft_probs_RC: Tensor
    rows_M: tuple[int | None, ...]  # of the whole tree's nodes
    target_probs_MC: Tensor

    @classmethod
    def of(cls, point: NestedPoint, index: int) -> "_Merged":
        """Merge the tokens that no draft distribution of the tree contains."""
        growth = point.whole.growth
        rows_M = growth.forest.probs_rows[index]
        rows = sorted({row for row in rows_M if row is not None})
        places = {row: place for place, row in enumerate(rows)}
        merged = merge_undrafted(growth.forest.draft_probs_RV[rows], point.whole.target_probs_NV(index))
        return cls(
            *(point.truncations[index], merged.column_V, merged.draft_probs_RC),
            *(tuple(None if row is None else places[row] for row in rows_M), merged.target_probs_MC),
        )

    def forest(self) -> tuple[Forest, Tensor]:
        """Return all truncations, and the target's distribution after each of their nodes."""
        trees = tuple(self._tree(cut.tree) for cut in self.truncations)
        probs_rows = tuple(
            tuple(self.rows_M[node] if draws else None for node, draws in zip(cut.nodes, cut.tree.draws, strict=True))
            for cut in self.truncations
        )
        nodes = torch.tensor([node for cut in self.truncations for node in cut.nodes])
        return Forest(trees, self.draft_probs_RC, probs_rows), self.target_probs_MC[nodes]

    def stops_top_down(self, verifier: TwoPhase) -> list[list[float]]:
        """Return where the path ends in each truncation. Top-down, a node's tries depend on its own children alone.

        So each node with each number of draws is judged once, as the root of a tree of one level.
        """
        stars: dict[tuple[int, int], TokenTree] = {}
        for cut in self.truncations:
            tree = self._tree(cut.tree)
            stars |= {
                (node, len(draws)): _star(tree, own)
                for own, (node, draws) in enumerate(zip(cut.nodes, tree.draws, strict=True))
                if draws and (node, len(draws)) not in stars
            }
        probs_rows = tuple((self.rows_M[node], *[None] * (star.num_nodes - 1)) for (node, _), star in stars.items())
        nodes = torch.tensor([node for (node, _), star in stars.items() for _ in range(star.num_nodes)])  # leaves have no tries
        forest = Forest(tuple(stars.values()), self.draft_probs_RC, probs_rows)
        tried = dict(zip(stars, verifier.tried(forest, self.target_probs_MC[nodes]), strict=True))
        return [self._stops(cut, verifier, tried) for cut in self.truncations]

    def _stops(self, cut: Truncation, verifier: TwoPhase, tried: Mapping[tuple[int, int], Sequence[float]]) -> list[float]:
        tries = verifier.plan.tries(cut.tree)
        of_nodes = [
            tried[node, len(draws)] if own_tries else ()
            for node, draws, own_tries in zip(cut.nodes, cut.tree.draws, tries, strict=True)
        ]
        return verifier.direction.stop_distribution(cut.tree, AcceptanceProbs(tries, of_nodes, ()))

    def _tree(self, tree: TokenTree) -> TokenTree:
        return structs.replace(tree, token_ids=(0, *(self.column_V[token_id] for token_id in tree.token_ids[1:])))


def _star(tree: TokenTree, node: int) -> TokenTree:
    """Return a node with its children alone."""
    children = sorted(set(tree.draws[node]))
    number = {child: place for place, child in enumerate(children, 1)}
    draws = (tuple(number[child] for child in tree.draws[node]), *[()] * len(children))
    return TokenTree((-1, *[ROOT] * len(children)), (0, *(tree.token_ids[child] for child in children)), draws)


class MergedProbs(NamedTuple):
    """Distributions over the drafted tokens and, in the last column, all others."""

    column_V: list[int]
    draft_probs_RC: Tensor
    target_probs_MC: Tensor


def merge_undrafted(draft_probs_RV: Tensor, target_probs_MV: Tensor) -> MergedProbs:
    """Merge all tokens that no draft distribution contains into one.

    Rules treat undrafted tokens alike, each in proportion to its probability, so the results are the same.
    """
    is_known_V = draft_probs_RV.amax(0) > 0.0
    known_C = is_known_V.nonzero()[:, 0]
    column_V = (is_known_V.cumsum(0) - 1).tolist()
    drafted_RC = functional.pad(draft_probs_RV.index_select(1, known_C), (0, 1))
    known_MC = target_probs_MV.index_select(1, known_C)
    rest_M1 = target_probs_MV[:, ~is_known_V].sum(-1, keepdim=True)
    return MergedProbs(column_V, drafted_RC, torch.cat([known_MC, rest_M1], dim=-1))


def _probs(union: GrowingTree, logits_UV: Tensor, sampling: SamplingParams) -> Tensor | None:
    if sampling.is_greedy:
        return None
    contexts: list[SamplingContext] = [FrontierNode(union, node, 0).sampling_context for node in range(len(union.parents))]
    return processed_probs(logits_UV, contexts)


def _add(union: GrowingTree, tree: TokenTree) -> list[int]:
    """Add a tree's nodes to the union; return their numbers there."""
    numbers = [ROOT]
    for node in range(1, tree.num_nodes):
        numbers.append(_child(union, numbers[tree.parents[node]], tree.token_ids[node]))
    return numbers


def _child(union: GrowingTree, parent: int, token_id: int) -> int:
    known = next((child for child in union.draws[parent] if union.token_ids[child] == token_id), None)
    return union.add(parent, token_id) if known is None else known


class _CachingDrafter:
    """A drafter that feeds each path of the union once, even if several trees need it."""

    def __init__(self, drafter: Drafter, union: GrowingTree) -> None:
        self.name, self.feeding = drafter.name, drafter.feeding
        self._drafter, self._union = drafter, union
        self._logits: dict[int, Tensor | None] = {}  # by node of the union

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Feed the root once."""
        own = [self._union.row] if rows else []
        self._note([ROOT], self._drafter.feed(own, [FrontierNode(self._union, ROOT, 1)]))
        return self._cached([ROOT] * len(roots))

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Feed the nodes that are not cached."""
        nodes = [self._number(entry) for entry in frontier]
        fresh = sorted({node for node in nodes if node not in self._logits})
        if fresh:
            self._note(fresh, self._drafter.extend([FrontierNode(self._union, node, 1) for node in fresh]))
        return self._cached(nodes)

    def _number(self, entry: FrontierNode) -> int:
        node = ROOT
        for step in entry.tree.path(entry.node)[1:]:
            node = _child(self._union, node, entry.tree.token_ids[step])
        return node

    def _note(self, nodes: Sequence[int], proposal: Proposal) -> None:
        self._logits.update(dict.fromkeys(nodes))
        self._union.fed.update(nodes[index] for index in proposal.indices if index not in proposal.unfed)
        for index, logits_V in zip(proposal.indices, proposal.logits_PV, strict=True):
            self._logits[nodes[index]] = logits_V

    def _cached(self, nodes: Sequence[int]) -> Proposal:
        known = [(index, logits_V) for index, node in enumerate(nodes) if (logits_V := self._logits[node]) is not None]
        indices = tuple(index for index, _ in known)
        return Proposal(indices, torch.stack([logits_V for _, logits_V in known]) if known else torch.empty((0, 1)))
