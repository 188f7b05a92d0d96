"""Sends each tree to the rule that judges it: greedy rows by arg max, seeded rows by the coupled rule, others by their verifier.

Also reads the target's own log-probabilities of what was emitted. Shape key: N nodes of all trees, V vocabulary.
"""

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from engine.forest import Forest
from engine.plan import LawContext, Row
from engine.sampling import processed_laws
from engine.tree import TokenTree
from engine.types import TokenLogprobs
from engine.verify.coupled import judge_greedy
from engine.verify.errors import LawError
from engine.verify.rules import create_verifier
from engine.verify.verdict import Unjudged, Verdict, Verifier

_logger = logging.getLogger(__name__)


class Judge:
    """Verifiers by name, made when first needed."""

    def __init__(self) -> None:
        self._verifiers: dict[str, Verifier] = {}

    def judge(self, rows: Sequence[Row], forest: Forest, logits_NV: Float[Tensor, "N V"]) -> list[Verdict | Unjudged]:
        """Return what can be said of each row's tree, in order. A tree that is broken does not touch the others."""
        is_sound = self._sound(forest, logits_NV)
        judged: list[Verdict | Unjudged] = [_WAITING if sound else _BROKEN for sound in is_sound]
        for rule in dict.fromkeys(_rule(row) for row in rows):
            indices = [i for i, row in enumerate(rows) if _rule(row) == rule and is_sound[i]]
            for index, verdict in self._by_rule(rule, indices, rows, forest, logits_NV):
                judged[index] = verdict
        return judged

    def _sound(self, forest: Forest, logits_NV: Tensor) -> list[bool]:
        """Return for each tree whether no logit is NaN and no maximum infinite (-inf is a masked token and sound)."""
        is_sound_N = torch.isfinite(logits_NV.amax(-1)).tolist()
        return [all(is_sound_N[first:end]) for first, end in zip(forest.offsets, forest.offsets[1:])]

    def _by_rule(
        self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, logits_NV: Tensor
    ) -> list[tuple[int, Verdict | Unjudged]]:
        """Return (index, verdict) for each row of a rule; trees whose laws make no sense are set aside, the rest judged."""
        if not indices:
            return []
        try:
            return list(zip(indices, self._verdicts(rule, indices, rows, forest, logits_NV), strict=True))
        except LawError as error:
            refused = [indices[tree] for tree in error.trees]
            _logger.error("verifier %s: %s", rule, error)
            rest = [index for index in indices if index not in refused]
            judged = self._by_rule(rule, rest, rows, forest, logits_NV)
            return [*judged, *((index, Unjudged(f"verification failed: {error.reason}")) for index in refused)]

    def _verdicts(
        self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, logits_NV: Tensor
    ) -> list[Verdict]:
        part = forest.subset(indices)
        nodes = [node for i in indices for node in range(forest.offsets[i], forest.offsets[i + 1])]
        part_NV = logits_NV if len(nodes) == len(logits_NV) else logits_NV[torch.tensor(nodes, device=logits_NV.device)]
        if rule == _GREEDY:
            return judge_greedy(part.trees, part_NV.argmax(-1).tolist())
        contexts = [context for i, tree in zip(indices, part.trees, strict=True) for context in _contexts(rows[i], tree)]
        if rule not in self._verifiers:
            self._verifiers[rule] = create_verifier(rule)
        return self._verifiers[rule].judge(part, processed_laws(part_NV, contexts), [rows[i].key for i in indices])


_GREEDY = "greedy"
_WAITING = Unjudged("not judged yet")
_BROKEN = Unjudged("the target's logits are not finite")


def _contexts(row: Row, tree: TokenTree) -> list[LawContext]:
    """Return what the law after each node depends on."""
    return [row.law_context(tuple(tree.token_ids[v] for v in tree.path(node)[1:])) for node in range(tree.num_nodes)]


def _rule(row: Row) -> str:
    return _GREEDY if row.sampling.is_greedy else row.verifier


def logprobs_of(
    logits_NV: Float[Tensor, "N V"], nodes: Sequence[int], ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the raw log-probability of `ids[i]` after packed node `nodes[i]`, and at most the `num_top` likeliest there."""
    index = torch.tensor(list(nodes), device=logits_NV.device)
    logprobs = torch.log_softmax(logits_NV[index], dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(list(ids), device=logits_NV.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return tuple(
        TokenLogprobs(logprob, tuple(top_ids), tuple(values))
        for logprob, top_ids, values in zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    )
