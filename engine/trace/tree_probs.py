"""Probabilities of the tokens of one tree, for traces. Computed for traced rows only.

Shape key: N nodes of one tree, R of them with a token after them, V vocabulary.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from engine.core.row_trace import TreeProbs
from engine.core.step_plan import Row
from engine.core.tree import TokenTree
from engine.draft.trees.grower import Growth
from engine.sampling.distributions import ranking_params, warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import integers
from engine.verify.verdict import Verdict, VerificationFailure


def traced_probs(
    rows: Sequence[Row],
    growth: Growth,
    verdicts: Sequence[Verdict | VerificationFailure],
    logits_NV: Float[Tensor, "N V"],
    grammars: GrammarMasks | None = None,
) -> dict[str, TreeProbs]:
    """Return the probabilities in the verified trees of traced decoding rows, by request id.

    Must be called before the step is committed, since logit edits depend on the row's text at the time its tree grew. `logits_NV`
    are the target's raw logits after all trees' nodes. Rows with a grammar need `grammars`.
    """
    probs: dict[str, TreeProbs] = {}
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if row.is_traced and isinstance(verdict, Verdict):
            first, end = growth.forest.offsets[index : index + 2]
            tree = growth.forest.trees[index]
            paths = [tuple(tree.token_ids[v] for v in tree.path(node)[1:]) for node in range(tree.num_nodes)]
            edited_NV = edited_logits(logits_NV[first:end], [row.sampling_context(path_ids) for path_ids in paths], grammars)
            probs[row.request_id] = _tree_probs(row, tree, verdict, growth.draft_probs[index], edited_NV)
    return probs


def _tree_probs(
    row: Row, tree: TokenTree, verdict: Verdict, draft_probs: Sequence[float], logits_NV: Float[Tensor, "N V"]
) -> TreeProbs:
    """Return the probabilities of one tree; `logits_NV` are the edited logits after its nodes.

    The distributions are computed again in the same way as for verification. If the edits leave no token, they are all 0.
    """
    after = [*tree.parents[1:], verdict.path[-1]]
    rows = sorted(set(after))  # most leaves have no token after them
    probs_RV = warped_probs(logits_NV, [ranking_params(row.sampling)] * len(rows), rows)
    place = {node: index for index, node in enumerate(rows)}
    token_ids = integers([*tree.token_ids[1:], verdict.extra_id], probs_RV.device)
    probs = probs_RV[integers([place[node] for node in after], probs_RV.device), token_ids]
    *target, extra = probs.nan_to_num(0.0).tolist()
    return TreeProbs(tuple(draft_probs), tuple(target), extra)
