"""Sends each tree to the rule that judges it: greedy rows by arg max, seeded rows by the coupled rule, others by their verifier.

After a root alone any rule draws a token from its law, and no draft has seen the coupled rule's noise but by that rule: where our
library draws so in one pass over the logits, such a root's token is drawn so whatever the row's rule is.
Every rule sees the target's logits as the request edits them, at each node by the node's own text. The log-probabilities of what
was emitted are read here too: the target's own, before any edit. Shape key: N nodes of all trees, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.sampling_limits import MIN_TEMPERATURE
from engine.core.step_plan import Row, SamplingContext
from engine.core.tree import TokenTree
from engine.core.types import ErrorCode, TokenLogprobs
from engine.native import distributions as native
from engine.sampling.argmax import Likeliest, likeliest
from engine.sampling.distributions import truncates, warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import integers, rows_to_host
from engine.verify.coupled import Coupled, judge_by_library, judge_greedy
from engine.verify.errors import LawError
from engine.verify.forest import Forest
from engine.verify.rules import create_verifier
from engine.verify.verdict import Unjudged, Verdict, Verifier

_logger = logging.getLogger(__name__)


class Judge:
    """Verifiers by name, made when first needed. Rows that have a grammar need `grammars`."""

    def __init__(self, grammars: GrammarMasks | None = None) -> None:
        self._grammars = grammars
        self._verifiers: dict[str, Verifier] = {}

    def judge(
        self, rows: Sequence[Row], forest: Forest, logits_NV: Float[Tensor, "N V"], best: Sequence[Likeliest] | None = None
    ) -> list[Verdict | Unjudged]:
        """Return what can be said of each row's tree, in order. A tree that is broken does not touch the others.

        `best` are the rows' likeliest tokens, for whoever knows them.
        """
        is_read = native.can_read(logits_NV)
        rules = [_rule(row, tree, is_read) for row, tree in zip(rows, forest.trees, strict=True)]
        best = likeliest(logits_NV) if best is None else best
        is_sound = has_distribution = [one.is_sound for one in best]
        edited_NV = logits_NV
        if any(row.sampling.edits_logits for row in rows):
            contexts = [context for row, tree in zip(rows, forest.trees, strict=True) for context in _contexts(row, tree)]
            edited_NV = edited_logits(logits_NV, contexts, self._grammars)
            edited = likeliest(edited_NV)
            has_distribution = [one.is_sound for one in edited]
            best = [new if new.is_sound else old for new, old in zip(edited, best, strict=True)]
            if not all(has_distribution):
                has_probs_N1 = torch.tensor(has_distribution, device=logits_NV.device)[:, None]
                edited_NV = torch.where(has_probs_N1, edited_NV, logits_NV)
        seen = _Seen(edited_NV, best)
        judged: list[Verdict | Unjudged] = [_WAITING if sound else NOT_FINITE for sound in self._sound(forest, is_sound)]
        for rule in dict.fromkeys(rules):
            indices = [i for i, one in enumerate(rules) if one == rule and judged[i] is _WAITING]
            for index, verdict in self._by_rule(rule, indices, rows, forest, seen):
                judged[index] = verdict
        return judged if all(has_distribution) else _unless_invalid(judged, forest, has_distribution)

    def _sound(self, forest: Forest, is_sound: Sequence[bool]) -> list[bool]:
        """Return for each tree whether all its nodes' logits are."""
        if all(is_sound):
            return [True] * len(forest.trees)
        return [all(is_sound[first:end]) for first, end in zip(forest.offsets, forest.offsets[1:])]

    def _by_rule(
        self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, seen: "_Seen"
    ) -> list[tuple[int, Verdict | Unjudged]]:
        """Return (index, verdict) for each row of a rule; trees whose laws make no sense are set aside, the rest judged."""
        if not indices:
            return []
        try:
            return list(zip(indices, self._verdicts(rule, indices, rows, forest, seen), strict=True))
        except LawError as error:
            refused = [indices[tree] for tree in error.trees]
            _logger.error("verifier %s: %s", rule, error)
            rest = [index for index in indices if index not in refused]
            judged = self._by_rule(rule, rest, rows, forest, seen)
            failed = Unjudged(f"verification failed: {error.reason}", ErrorCode.VERIFICATION_FAILED)
            return [*judged, *((index, failed) for index in refused)]

    def _verdicts(self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, seen: "_Seen") -> list[Verdict]:
        part = forest if len(indices) == len(rows) else forest.subset(indices)
        nodes = [node for i in indices for node in range(forest.offsets[i], forest.offsets[i + 1])]
        if rule == _GREEDY:
            return judge_greedy(part.trees, [seen.best[node].token_id for node in nodes])
        if rule == _BY_LIBRARY:
            temperatures = [max(rows[i].sampling.temperature, MIN_TEMPERATURE) for i in indices]
            verdicts = judge_by_library(part.trees, seen.logits_NV, nodes, temperatures, [rows[i].key for i in indices])
            return [_as_told(verdict, rows[i]) for i, verdict in zip(indices, verdicts, strict=True)]
        some = None if len(nodes) == len(seen.logits_NV) else nodes
        sampling = [rows[i].sampling for i, tree in zip(indices, part.trees, strict=True) for _ in range(tree.num_nodes)]
        if rule not in self._verifiers:
            self._verifiers[rule] = create_verifier(rule)
        return self._verifiers[rule].judge(part, warped_probs(seen.logits_NV, sampling, some), [rows[i].key for i in indices])


@dataclass(frozen=True)
class _Seen:
    """The target's logits at every node, as requests edit them, and the likeliest token of each."""

    logits_NV: Tensor
    best: Sequence[Likeliest]


_GREEDY = "greedy"
_BY_LIBRARY = "coupled, by the library"  # and after lone roots of any rule, over logits that no request truncates
_WAITING = Unjudged("not judged yet", ErrorCode.VERIFICATION_FAILED)
NOT_FINITE = Unjudged("the target's logits are not finite", ErrorCode.LOGITS_NOT_FINITE)
_LAWLESS = Unjudged(
    "bias, penalties, allowed tokens, bad words and grammar leave no token that could come", ErrorCode.NO_POSSIBLE_TOKEN
)


def _unless_invalid(
    judged: Sequence[Verdict | Unjudged], forest: Forest, has_distribution: Sequence[bool]
) -> list[Verdict | Unjudged]:
    """Return the verdicts, but for those whose text comes to a node without a law: a text fails there and nowhere else.

    Such nodes were judged by the law of the bare model. Whatever it is, a text comes there as often as the laws before it say.
    """
    return [
        _LAWLESS
        if isinstance(verdict, Verdict) and not all(has_distribution[offset + node] for node in verdict.path)
        else verdict
        for verdict, offset in zip(judged, forest.offsets[:-1], strict=True)
    ]


def _contexts(row: Row, tree: TokenTree) -> list[SamplingContext]:
    """Return what the law after each node depends on; where logits are not edited, that is the parameters alone."""
    if not row.sampling.edits_logits:
        return [row.sampling_context(())] * tree.num_nodes
    return [row.sampling_context(tuple(tree.token_ids[v] for v in tree.path(node)[1:])) for node in range(tree.num_nodes)]


def _rule(row: Row, tree: TokenTree, is_read: bool) -> str:
    """Return what judges a tree, whose logits our library reads or does not: the same whatever is beside it."""
    if row.sampling.is_greedy:
        return _GREEDY
    is_coupled = row.verifier == Coupled.name or tree.num_nodes == 1
    return _BY_LIBRARY if is_read and is_coupled and not truncates(row.sampling) else row.verifier


def _as_told(verdict: Verdict, row: Row) -> Verdict:
    """Return a verdict with what the row's own rule tells of a root alone: one token comes."""
    return verdict if row.verifier == Coupled.name else Verdict(verdict.path, verdict.extra_id, 1.0)


def logprobs_of(
    logits_NV: Float[Tensor, "N V"], nodes: Sequence[int], ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of `ids[i]` after packed node `nodes[i]`, and at most the `num_top` likeliest there.

    They are what is handed in: raw logits give the target's own, whatever bias, penalties and temperature a request asks for.
    """
    logprobs = torch.log_softmax(logits_NV[integers(nodes, logits_NV.device)], dim=-1)
    chosen_N1 = logprobs.gather(-1, integers(ids, logits_NV.device)[:, None])
    ranks_N1 = (logprobs > chosen_N1).sum(-1, keepdim=True) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return tuple(
        TokenLogprobs(logprob, tuple(map(int, top_ids)), tuple(values), int(rank))
        for (logprob,), (rank,), top_ids, values in rows_to_host([chosen_N1, ranks_N1, top.indices, top.values])
    )
