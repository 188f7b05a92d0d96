"""The text of `latebranch trace view`: steps, rows and token trees.

Knows records and lines of text. Does not know files, arguments or tokenizers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.core.row_trace import TracedRow, TracedSampling
from engine.core.tree import ROOT, TokenTree
from engine.core.types import STAGES, StepStats
from engine.trace.records import TracedStep, TraceHeader, TraceRecord

Spell = Callable[[Sequence[int]], str]  # from token ids to their shown text


def spelt_as_ids(token_ids: Sequence[int]) -> str:
    """Return the ids themselves."""
    return " ".join(map(str, token_ids))


@dataclass
class ShownStep:
    """A step and its selected rows, filled while its records are read. `header` describes the engine that ran it."""

    header: TraceHeader
    step: TracedStep
    rows: list[TracedRow] = field(default_factory=list)


def shown_steps(records: Iterable[TraceRecord], request_id: str | None) -> Iterator[ShownStep]:
    """Yield the steps of a trace. With a request id, yield only steps with rows of that request, and only those rows."""
    current: ShownStep | None = None
    header: TraceHeader | None = None
    for record in records:
        match record:
            case TraceHeader():
                header = record
            case TracedStep():
                if current is not None and _is_wanted(current, request_id):
                    yield current
                assert header is not None  # the reader refuses a trace that begins otherwise
                current = ShownStep(header, record)
            case TracedRow() if current is not None and request_id in (None, record.request_id):
                current.rows.append(record)
    if current is not None and _is_wanted(current, request_id):
        yield current


def _is_wanted(shown: ShownStep, request_id: str | None) -> bool:
    return request_id is None or bool(shown.rows)


def lines_of(steps: Iterable[ShownStep], spell: Spell) -> Iterator[str]:
    """Yield the lines that show the steps. A line with the engine precedes its first step."""
    header: TraceHeader | None = None
    for shown in steps:
        if shown.header is not header:
            header = shown.header
            yield header_line(header)
        yield _step_line(shown)
        for row in shown.rows:
            yield from _row_lines(row, spell)


def header_line(header: TraceHeader) -> str:
    """Return the line that describes an engine."""
    return (
        f"engine: {header.model}, drafter {header.drafter}, verifier {header.verifier}, policy {header.policy}, "
        f"{header.dtype} on {header.device}"
    )


def _step_line(shown: ShownStep) -> str:
    stats = shown.step.stats
    spent = ", ".join(f"{name} {1000 * getattr(stats, f'{name}_s'):.1f}" for name in STAGES)
    counts = f"{stats.num_decoding_rows} decoding rows, {stats.num_target_tokens} target tokens"
    return f"step {stats.step}: {counts}, {1000 * stats.step_s:.1f} ms ({spent}){_policy_words(stats)}"


def _policy_words(stats: StepStats) -> str:
    """Return the policy's reason and prediction, empty for a step without a prediction."""
    if stats.predicted_s is None:
        return ""
    reason = stats.policy_reason.replace("_", " ")
    return f"; {reason}: {1000 * stats.predicted_s:.1f} ms expected, x{stats.predicted_speedup:.2f} of plain"


def _row_lines(row: TracedRow, spell: Spell) -> Iterator[str]:
    yield f"  {row.request_id} at {row.root_position}: {row.verifier} on {row.expansion}, {_sampling_words(row.sampling)}"
    for line in drawn_tree(row.tree, row.path, spell):
        yield f"    {line}"
    yield f"    {row.error or _outcome_words(row, spell)}"


def _sampling_words(sampling: TracedSampling) -> str:
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0}
    limits = [(name, getattr(sampling, name)) for name, none in off.items() if getattr(sampling, name) != none]
    words = [f"temperature {sampling.temperature:g}", *(f"{name} {value:g}" for name, value in limits)]
    return ", ".join([*words, *(["seeded"] if sampling.is_seeded else [])])


def _outcome_words(row: TracedRow, spell: Spell) -> str:
    accepted = f"accepted {len(row.path) - 1} of {row.tree.num_nodes - 1}"
    expected = "" if row.expected_tokens is None else f", {row.expected_tokens:.2f} tokens expected"
    finish = "" if row.finish is None else f", then ended ({row.finish})"
    return f"{accepted}{expected}; emitted {spell(row.emitted_ids)}{finish}"


def drawn_tree(tree: TokenTree, path: Sequence[int], spell: Spell) -> list[str]:
    """Return the lines of a drawing: the root on the left, accepted nodes in brackets, `x2` after a node that was drawn twice.

    [5] -+- [17] -+- 33 - 4
         |        +- 8 x2
         +- 9
    """
    blocks: list[list[str]] = [[] for _ in range(tree.num_nodes)]
    for node in reversed(range(tree.num_nodes)):  # children before their parents
        blocks[node] = _joined(_label(tree, node, path, spell), [blocks[child] for child in tree.children[node]])
    return blocks[ROOT]


def _label(tree: TokenTree, node: int, path: Sequence[int], spell: Spell) -> str:
    text = spell([tree.token_ids[node]])
    num_draws = tree.draws[tree.parents[node]].count(node) if node != ROOT else 1
    return (f"[{text}]" if node in path else text) + (f" x{num_draws}" if num_draws > 1 else "")


def _joined(label: str, branches: Sequence[list[str]]) -> list[str]:
    """Return a node's lines: its label, and to the right its branches, one below the other."""
    if not branches:
        return [label]
    lines = []
    for index, (first, *others) in enumerate(branches):
        margin = label if index == 0 else " " * len(label)
        head, below = _joint(index, len(branches))
        lines.append(margin + head + first)
        lines.extend(" " * len(label) + below + other for other in others)
    return lines


def _joint(index: int, num_branches: int) -> tuple[str, str]:
    """Return the connector of a branch's first line to its parent, and the indent of its other lines."""
    if num_branches == 1:
        return " - ", "   "
    return " -+- " if index == 0 else "  +- ", "     " if index == num_branches - 1 else "  |  "
