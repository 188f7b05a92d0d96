"""A drafter without errors and without passes: it proposes a recorded answer, so that a tool can measure the ceiling of drafting.

The record is the request's prediction. It is proposed as one chain, for greedy and coupled rows: both accept exactly the tokens
that plain decoding with the same seed generates.
"""

from collections.abc import Iterable, Sequence

import torch

from engine.core.enums import DraftSource
from engine.core.step_plan import Feeding, Row
from engine.core.tree import TokenTree, TreeKind
from engine.core.types import Request
from engine.draft.drafter import FrontierNode, Proposal
from engine.draft.trees.calibration import Calibrations
from engine.draft.trees.grower import Growth, no_distributions
from engine.structured_output.masks import GrammarMasks
from engine.verify.forest import Forest


class RecordedText:
    """Proposes the rest of each request's prediction as long as the output equals its beginning."""

    name = "recorded text"
    feeding = Feeding.TARGET_CACHE

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._recorded: dict[str, tuple[int, ...]] = {}

    def begin(self, request: Request, history: Sequence[int]) -> None:
        """Remember the request's prediction."""
        del history
        self._recorded[request.request_id] = request.prediction_ids

    def advance(self, running: Iterable[str]) -> bool:
        """Return that no chain of cached text may start."""
        del running
        return False

    def end(self, request_id: str) -> None:
        """Forget the request's prediction."""
        self._recorded.pop(request_id, None)

    def feed(self, rows: Sequence[Row], roots: Sequence[FrontierNode]) -> Proposal:
        """Propose nothing: a tree other than a chain stays a root."""
        del rows
        return self.extend(roots)

    def extend(self, frontier: Sequence[FrontierNode]) -> Proposal:
        """Propose nothing."""
        del frontier
        return Proposal((), torch.empty((0, self._vocab_size), device=self._device))

    def can_grow(self, rows: Sequence[Row]) -> bool:
        """Return whether all trees are plain or chains of rows that need no draft distribution."""
        return all(row.expansion.is_plain or _is_ranked_chain(row) for row in rows if row.is_decoding)

    def grow(self, rows: Sequence[Row], calibrations: Calibrations, grammars: GrammarMasks | None) -> Growth:
        """Return the chains."""
        del calibrations, grammars
        decoding = [row for row in rows if row.is_decoding]
        trees = tuple(_chain((row.certain_ids[-1], *self._next(row))) for row in decoding)
        lengths = [tree.num_nodes - 1 for tree in trees]
        no_probs = tuple((None,) * tree.num_nodes for tree in trees)
        return Growth(
            forest=Forest(trees, no_distributions(self._vocab_size, self._device), no_probs),
            fed=(frozenset(),) * len(trees),
            candidates=({},) * len(trees),
            sources=tuple((DraftSource.PREDICTION,) * length for length in lengths),
            draft_probs=tuple((1.0,) * length if row.is_traced else () for row, length in zip(decoding, lengths, strict=True)),
            rounds=tuple(int(length > 0) for length in lengths),
            node_values=(None,) * len(trees),
            num_rounds=int(any(lengths)),
        )

    def _next(self, row: Row) -> tuple[int, ...]:
        """Return the recorded tokens after a row's history, up to the depth of its tree."""
        recorded, output = self._recorded.get(row.request_id, ()), row.history[row.num_prompt_tokens :]
        is_same = tuple(output) == recorded[: len(output)]
        return recorded[len(output) :][: row.expansion.max_depth] if is_same else ()


def _is_ranked_chain(row: Row) -> bool:
    is_chain = row.expansion.is_delayed and row.expansion.branches == 1
    return is_chain and row.draw_kind in (TreeKind.DETERMINISTIC, TreeKind.SHARED_NOISE)


def _chain(token_ids: Sequence[int]) -> TokenTree:
    last = len(token_ids) - 1
    children = tuple((node + 1,) if node < last else () for node in range(last + 1))
    return TokenTree(tuple(range(-1, last)), tuple(token_ids), children)
