"""What is told of one row of one step: its tree, the probabilities in it and what became of it. Records, free of torch.

They lie below the events that carry them to who asked for a request's steps; engine.trace.records writes them to files.
"""

import msgspec

from engine.core.enums import DraftSource, FinishReason
from engine.core.tree import TokenTree


class TracedSampling(msgspec.Struct, frozen=True):
    """How a row's law was made of logits, as SamplingParams names it."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    is_seeded: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    typical_p: float = 1.0
    grammar: str | None = None  # its kind; its text stays untold


class TreeProbs(msgspec.Struct, frozen=True):
    """Probabilities of a tree's tokens by the laws after their parents, as they are processed for the request.

    `draft[v - 1]` and `target[v - 1]` are those of node v, the root having none; `extra` is the target's of the extra token. At
    temperature 0 they are those at temperature 1: of a point mass there is nothing to tell.
    """

    draft: tuple[float, ...] = ()
    target: tuple[float, ...] = ()
    extra: float | None = None


class TracedRow(msgspec.Struct, frozen=True, tag="row", tag_field="type", kw_only=True):
    """A decoding row of a step: its tree and what became of it.

    `path` holds the accepted nodes, the root first, `extra_id` the token after them; `emitted_ids` is what of them left the
    engine, cut at stop tokens and limits, so that those of a request, row after row, are its text. A tree that could not be
    judged has an `error` and neither path nor probabilities. `expansion` is what was asked for, the tree what was grown;
    `sources[v - 1]` is what proposed the token of node v.
    """

    step: int
    request_id: str
    root_position: int
    verifier: str
    expansion: str
    sampling: TracedSampling
    tree: TokenTree
    path: tuple[int, ...] = ()
    extra_id: int | None = None
    expected_tokens: float | None = None
    emitted_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    sources: tuple[DraftSource, ...] = ()
    probs: TreeProbs = TreeProbs()


class StepTrace(msgspec.Struct, frozen=True):
    """A row and, of the step that it was part of, why the policy chose as it did and the seconds by stage."""

    row: TracedRow
    reason: str
    step_s: float
    stage_s: dict[str, float]
