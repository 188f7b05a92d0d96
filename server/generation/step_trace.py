"""Converts the engine's record of a step to the trace of the API: ids become text, nodes get their parts.

Knows records and spellings. Does not know requests, streams or pages.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.core.enums import DraftSource
from engine.core.row_trace import RowTrace, TracedRow
from engine.core.tree import ROOT, TokenTree
from server.schemas import trace
from server.text.codec import TokenText

Spell = Callable[[int], TokenText]

_OF_TEXT: dict[DraftSource, trace.Part] = {DraftSource.CACHE: "cached", DraftSource.PREDICTION: "prediction"}


def step_trace_of(record: RowTrace, spell: Spell) -> trace.StepTrace:
    """Return the trace of the step."""
    row = record.row
    extra = None if row.extra_id is None else trace.TracedToken(**_spelt(row.extra_id, spell), target_prob=row.probs.extra)
    return trace.StepTrace(
        step=row.step,
        position=row.root_position,
        verifier=row.verifier,
        expansion=row.expansion,
        reason=record.reason,
        nodes=list(_nodes(row, spell)),
        extra=extra,
        num_emitted=len(row.emitted_ids),
        finish=row.finish,
        expected_tokens=row.expected_tokens,
        step_s=record.step_s,
        stage_s=record.stage_s,
        read_bytes=record.num_read_bytes,
        operations=record.num_operations,
        bandwidth_share=record.bandwidth_share,
        compute_share=record.compute_share,
    )


def _nodes(row: TracedRow, spell: Spell) -> Iterator[trace.TracedNode]:
    tree, parts = row.tree, parts_of(row)
    for node, parent in enumerate(tree.parents):
        probs: dict[str, Any] = {}
        if node != ROOT and row.probs.target:
            probs = {"draft_prob": row.probs.draft[node - 1], "target_prob": row.probs.target[node - 1]}
        yield trace.TracedNode(
            **_spelt(tree.token_ids[node], spell),
            parent=None if node == ROOT else parent,
            depth=tree.depths[node],
            part=parts[node],
            num_draws=1 if node == ROOT else tree.draws[parent].count(node),
            accepted=node in row.path,
            **probs,
        )


def parts_of(row: TracedRow) -> list[trace.Part]:
    """Return each node's part. A model's tokens are the trunk as long as neither they nor their ancestors have siblings."""
    parts: list[trace.Part] = ["root"]
    forks = _is_behind_fork(row.tree)
    for node, source in enumerate(row.sources or (DraftSource.MODEL,) * (row.tree.num_nodes - 1), start=1):
        parts.append(_OF_TEXT.get(source) or ("branch" if forks[node] else "trunk"))
    return parts


def _is_behind_fork(tree: TokenTree) -> list[bool]:
    """Return for each node whether it or an ancestor has siblings."""
    forks = [False]
    for parent in tree.parents[1:]:
        forks.append(forks[parent] or len(tree.children[parent]) > 1)
    return forks


def _spelt(token_id: int, spell: Spell) -> dict[str, Any]:
    token = spell(token_id)
    odd = {} if token.text.encode("utf-8", "replace") == token.raw else {"bytes": list(token.raw)}
    return {"token_id": token_id, "text": token.text, **odd}
