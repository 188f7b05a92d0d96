"""Records of one row of one step: its tree, the probabilities in it and the outcome. Free of torch.

Events carry them to clients that trace a request. engine.trace.records writes them to files.
"""

import msgspec

from engine.core.enums import DraftSource, FinishReason
from engine.core.tree import TokenTree


class TracedSampling(msgspec.Struct, frozen=True):
    """How a row's distribution was computed from logits, with the field names of SamplingParams."""

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
    grammar: str | None = None  # its kind, without its text


class TreeProbs(msgspec.Struct, frozen=True):
    """Probabilities of a tree's tokens after their parents, from logits processed for the request.

    `draft[v - 1]` and `target[v - 1]` are those of node v; the root has none. `extra` is the target's probability of the extra
    token. At temperature 0 the values are those at temperature 1, since a point mass carries no information.
    """

    draft: tuple[float, ...] = ()
    target: tuple[float, ...] = ()
    extra: float | None = None


class TracedRow(msgspec.Struct, frozen=True, tag="row", tag_field="type", kw_only=True):
    """A decoding row of a step: its tree and the outcome.

    `path` holds the accepted nodes, the root first. `extra_id` is the token after them. `emitted_ids` are the tokens returned to
    the client, cut at stop tokens and limits; concatenated over a request's rows they are its text. A tree whose verification
    failed has an `error` and neither path nor probabilities. `expansion` is the requested shape, `tree` the grown one.
    `sources[v - 1]` is the source of node v's token.
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


class RowTrace(msgspec.Struct, frozen=True):
    """A traced row with the policy's reason of its step, the seconds by stage, and what the target's pass read and multiplied.

    `bandwidth_share` and `compute_share` compare these amounts over `step_s` with the machine's peaks.
    """

    row: TracedRow
    reason: str
    step_s: float
    stage_s: dict[str, float]
    num_read_bytes: int = 0
    num_operations: int = 0
    bandwidth_share: float | None = None
    compute_share: float | None = None
