"""What the drawings of docs/how-it-works.md show, as JSON: one recorded step, and the menu weighed after the recorded answer.

Run as `python docs/drawings/facts.py | node docs/drawings/draw.mjs docs/drawings`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.policy import DraftOutcome, SequenceView
from engine.core.row_trace import TracedRow
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import SamplingParams, Speculation
from engine.trace.records import read_trace
from selector.acceptance import CountedAcceptance
from selector.menu import menu_of
from selector.network.replay import step_s
from selector.profile import Profile

HERE = Path(__file__).parent
DOCS = HERE.parent
CONTEXT = 94.0  # tokens before the next step


def facts() -> dict[str, Any]:
    """Return the step that the playground shows first, and tokens and seconds of each tree for the next one."""
    step = json.loads((DOCS.parent / "server" / "playground" / "example.json").read_text())
    return {"step": step, "weighed": weighed()}


def weighed() -> list[dict[str, Any]]:
    """Return every tree of the menu: the tokens counted for it in the recorded answer, its milliseconds by a recorded profile."""
    menu = menu_of(Expansion(2, 3, 3), "traversal", parse_expansion("8.4.8"))
    counting, view = CountedAcceptance(menu), _view()
    counting.estimate([view])
    for record in read_trace(DOCS / "example.trace"):
        if isinstance(record, TracedRow):
            counting.observe([_outcome(record)])
    found = counting.estimate([view])
    costs = Profile.from_text((HERE / "profile.json").read_text()).costs()
    passes_M, nodes_M = np.array(menu.depths, dtype=np.float64), np.array(found.nodes[0])
    seconds_M = step_s(costs, CONTEXT, True, nodes_M, passes_M, nodes_M * np.array(menu.fed_share))
    weights = zip(menu.entries, found.tokens[0], (1000 * seconds_M).tolist(), strict=True)
    return [
        {"tree": str(entry), "nodes": entry.num_draft_tokens, "tokens": round(tokens, 3), "ms": round(ms, 1)}
        for entry, tokens, ms in weights
    ]


def _view() -> SequenceView:
    return SequenceView("answer", 95, 48, 100, 1, SamplingParams(temperature=0.7), Speculation(), "traversal")


def _outcome(row: TracedRow) -> DraftOutcome:
    depths = row.tree.depths
    return DraftOutcome("answer", parse_expansion(row.expansion), row.tree.num_nodes - 1, max(depths), len(row.path) - 1)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts(), ensure_ascii=False) + "\n")
