"""Selects the rule that verifies each tree: arg max for greedy rows, the coupled rule for seeded rows, else the row's verifier.

For a root without drafts every rule draws one token from its distribution, independent of any draft. So such a root uses the
coupled rule of the native library where that is available, which needs one pass over the logits.
Every rule uses the target's logits after the request's edits, which depend on each node's own text. Log-probabilities of emitted
tokens are computed here too, from the target's logits before any edit. Shape key: N nodes of all trees, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.step_plan import Row, SamplingContext
from engine.core.tree import TokenTree
from engine.core.types import ErrorCode, TokenLogprobs
from engine.native import distributions as native
from engine.native.distributions import KeptTokens
from engine.native.walks import Steps, Walks
from engine.sampling import device_choice
from engine.sampling.argmax import RowArgMax, argmax_rows
from engine.sampling.device_choice import NodeChoice, NodeDraws
from engine.sampling.distributions import is_typical, truncates, truncation, walk_temperature, warped_probs
from engine.sampling.logits_processors import edited_logits
from engine.structured_output.masks import GrammarMasks
from engine.utils.host_transfer import integers, rows_to_host
from engine.verify.coupled import Coupled, depth_keys, follow_all, judge_coupled_natively, judge_greedy, noise_keys
from engine.verify.errors import InvalidDistributionError
from engine.verify.forest import Forest
from engine.verify.registry import create_verifier
from engine.verify.verdict import Verdict, VerificationFailure, Verifier

_logger = logging.getLogger(__name__)

Best = Sequence[RowArgMax] | Sequence[NodeChoice] | None


class Judge:
    """Verifies the trees of a step. Verifiers are created on first use. Rows with a grammar need `grammars`."""

    def __init__(self, grammars: GrammarMasks | None = None) -> None:
        self._grammars = grammars
        self._verifiers: dict[str, Verifier] = {}

    def judge(
        self,
        rows: Sequence[Row],
        forest: Forest,
        logits_NV: Float[Tensor, "N V"],
        best: Best | Callable[[], Best] = None,
        walks: "PassWalks | None" = None,
    ) -> list[Verdict | VerificationFailure]:
        """Return a result for each row's tree, in order. An invalid tree does not affect the others.

        `best` are the rows' arg maxes, or the choices by `node_draws`, if they are known already; a function that returns them is
        called only if they are needed. A pass that made the logits has followed the trees of `walks`.
        """
        known = [None] * len(rows) if walks is None else walks.verdicts(rows)
        if None not in known:
            return known  # type: ignore[return-value]
        one_by_one = _coupled_rule(logits_NV)
        rules = [_rule(row, tree, one_by_one) for row, tree in zip(rows, forest.trees, strict=True)]
        given = best() if callable(best) else best
        best, choices = _split(_chosen(one_by_one, rows, forest, logits_NV) if given is None else given)
        is_valid = has_distribution = [one.is_valid for one in best]
        edited_NV = logits_NV
        if any(row.sampling.edits_logits for row in rows):
            contexts = [context for row, tree in zip(rows, forest.trees, strict=True) for context in _contexts(row, tree)]
            edited_NV = edited_logits(logits_NV, contexts, self._grammars)
            edited, choices = _split(_chosen(one_by_one, rows, forest, edited_NV))
            has_distribution = [one.is_valid for one in edited]
            best = [new if new.is_valid else old for new, old in zip(edited, best, strict=True)]
            if not all(has_distribution):
                has_probs_N1 = torch.tensor(has_distribution, device=logits_NV.device)[:, None]
                edited_NV = torch.where(has_probs_N1, edited_NV, logits_NV)
        target = _TargetLogits(edited_NV, best, choices)
        judged: list[Verdict | VerificationFailure] = [
            verdict or (_PENDING if valid else NOT_FINITE)
            for verdict, valid in zip(known, self._valid_trees(forest, is_valid), strict=True)
        ]
        for rule in dict.fromkeys(rules):
            indices = [i for i, one in enumerate(rules) if one == rule and judged[i] is _PENDING]
            for index, verdict in self._verdicts_of_rule(rule, indices, rows, forest, target):
                judged[index] = verdict
        return judged if all(has_distribution) else _without_impossible(judged, forest, has_distribution)

    def _valid_trees(self, forest: Forest, is_valid: Sequence[bool]) -> list[bool]:
        """Return for each tree whether the logits of all its nodes are valid."""
        if all(is_valid):
            return [True] * len(forest.trees)
        return [all(is_valid[first:end]) for first, end in zip(forest.offsets, forest.offsets[1:])]

    def _verdicts_of_rule(
        self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, target: "_TargetLogits"
    ) -> list[tuple[int, Verdict | VerificationFailure]]:
        """Return (index, verdict) for each row of a rule; trees with invalid distributions fail, the others are verified."""
        if not indices:
            return []
        try:
            return list(zip(indices, self._verdicts(rule, indices, rows, forest, target), strict=True))
        except InvalidDistributionError as error:
            refused = [indices[tree] for tree in error.trees]
            _logger.error("verifier %s: %s", rule, error)
            rest = [index for index in indices if index not in refused]
            judged = self._verdicts_of_rule(rule, rest, rows, forest, target)
            failed = VerificationFailure(f"verification failed: {error.reason}", ErrorCode.VERIFICATION_FAILED)
            return [*judged, *((index, failed) for index in refused)]

    def _verdicts(
        self, rule: str, indices: Sequence[int], rows: Sequence[Row], forest: Forest, target: "_TargetLogits"
    ) -> list[Verdict]:
        part = forest if len(indices) == len(rows) else forest.subset(indices)
        offsets = forest.offsets
        nodes = [node for i in indices for node in range(offsets[i], offsets[i + 1])]
        if rule == _GREEDY:
            return judge_greedy(part.trees, [target.best[node].token_id for node in nodes])
        if rule == _DEVICE_COUPLED:
            verdicts = follow_all(part.trees, [target.choices[node] for node in nodes])
            return [_with_own_expectation(verdict, rows[i]) for i, verdict in zip(indices, verdicts, strict=True)]
        if rule == _NATIVE_COUPLED:
            temperatures = [walk_temperature(rows[i].sampling) for i in indices]
            truncations = [truncation(rows[i].sampling) for i in indices]
            keys = [rows[i].key for i in indices]
            verdicts = judge_coupled_natively(part.trees, target.logits_NV, nodes, temperatures, truncations, keys)
            return [_with_own_expectation(verdict, rows[i]) for i, verdict in zip(indices, verdicts, strict=True)]
        some = None if len(nodes) == len(target.logits_NV) else nodes
        sampling = [rows[i].sampling for i, tree in zip(indices, part.trees, strict=True) for _ in range(tree.num_nodes)]
        if rule not in self._verifiers:
            self._verifiers[rule] = create_verifier(rule)
        return self._verifiers[rule].judge(part, warped_probs(target.logits_NV, sampling, some), [rows[i].key for i in indices])


@dataclass(frozen=True)
class _TargetLogits:
    """The target's logits at every node after the requests' edits, the arg max of each, and on a GPU the coupled rule's token."""

    logits_NV: Tensor
    best: Sequence[RowArgMax]
    choices: Sequence[int]


_GREEDY = "greedy"
_NATIVE_COUPLED = "native coupled"  # coupled rows, and single roots of any rule, without typical-p
_DEVICE_COUPLED = "device coupled"  # the same rows, without any truncation, on a GPU
_PENDING = VerificationFailure("not verified yet", ErrorCode.VERIFICATION_FAILED)
NOT_FINITE = VerificationFailure("the target's logits are not finite", ErrorCode.LOGITS_NOT_FINITE)
_NO_TOKEN = VerificationFailure(
    "bias, penalties, allowed tokens, bad words and grammar leave no possible token", ErrorCode.NO_POSSIBLE_TOKEN
)


def _without_impossible(
    judged: Sequence[Verdict | VerificationFailure], forest: Forest, has_distribution: Sequence[bool]
) -> list[Verdict | VerificationFailure]:
    """Return the verdicts, with a failure for each path that reaches a node without a distribution.

    Such nodes were verified with the distribution of unedited logits. That does not change how often a path reaches them.
    """
    return [
        _NO_TOKEN
        if isinstance(verdict, Verdict) and not all(has_distribution[offset + node] for node in verdict.path)
        else verdict
        for verdict, offset in zip(judged, forest.offsets[:-1], strict=True)
    ]


def _contexts(row: Row, tree: TokenTree) -> list[SamplingContext]:
    """Return the context of the distribution after each node; without logit edits it is the sampling parameters alone."""
    if not row.sampling.edits_logits:
        return [row.sampling_context(())] * tree.num_nodes
    return [row.sampling_context(tuple(tree.token_ids[v] for v in tree.path(node)[1:])) for node in range(tree.num_nodes)]


def _coupled_rule(logits_NV: Tensor) -> str | None:
    """Return the faster form of the coupled rule for these logits, if there is one."""
    if native.can_read(logits_NV):
        return _NATIVE_COUPLED
    return _DEVICE_COUPLED if device_choice.can_choose(logits_NV) else None


def _rule(row: Row, tree: TokenTree, faster: str | None) -> str:
    """Return the rule that verifies a tree; `faster` is a form of the coupled rule. Independent of the batch."""
    if row.sampling.is_greedy:
        return _GREEDY
    is_coupled = row.verifier == Coupled.name or tree.num_nodes == 1
    is_excluded = is_typical(row.sampling) if faster == _NATIVE_COUPLED else truncates(row.sampling)
    return faster if faster is not None and is_coupled and not is_excluded else row.verifier


def _chosen(
    one_by_one: str | None, rows: Sequence[Row], forest: Forest, logits_NV: Float[Tensor, "N V"]
) -> Sequence[RowArgMax] | Sequence[NodeChoice]:
    """Return each node's arg max, on a GPU with the coupled rule's token: one wait for all."""
    if one_by_one == _DEVICE_COUPLED:
        return device_choice.choices(logits_NV, *node_draws(rows, forest.trees))
    return argmax_rows(logits_NV)


def _split(found: Sequence[RowArgMax] | Sequence[NodeChoice]) -> tuple[Sequence[RowArgMax], Sequence[int]]:
    """Return arg maxes, and the coupled rule's tokens if they are known."""
    if not (found and isinstance(found[0], NodeChoice)):
        return found, ()  # type: ignore[return-value]
    choices = [one for one in found if isinstance(one, NodeChoice)]
    return [one.best for one in choices], [one.token_id for one in choices]


def node_draws(rows: Sequence[Row], trees: Sequence[TokenTree]) -> NodeDraws:
    """Return what a device chooses each node's token by: the coupled rule's draw, and the arg max for rows of other rules."""
    temperatures: list[float] = []
    keys: list[int] = []
    for row, tree in zip(rows, trees, strict=True):
        is_coupled = _rule(row, tree, _DEVICE_COUPLED) == _DEVICE_COUPLED
        temperatures.extend([row.sampling.temperature if is_coupled else 0.0] * tree.num_nodes)
        keys.extend(noise_keys(tree, row.key))
    return NodeDraws(temperatures, keys)


class PassWalks(msgspec.Struct, frozen=True):
    """The trees of a step that a pass of the native library follows itself: greedy and coupled ones, without logit edits."""

    indices: Sequence[int]  # of their rows
    walks: Walks

    @property
    def num_steps(self) -> int:
        """The number of complete steps in a row; 0 if the pass was to run no further steps."""
        return self.walks.steps.num_complete if self.walks.steps else 0

    def verdicts(self, rows: Sequence[Row]) -> list[Verdict | None]:
        """Return the verdict of each row that the pass has reached. Other rows, and invalid trees, have none."""
        found: list[Verdict | None] = [None] * len(rows)
        for index, walked in zip(self.indices, self.walks.paths(), strict=True):
            if walked is not None:
                found[index] = verdict_of(rows[index], walked.path, walked.extra_id)
        return found

    def chains(self, rows: Sequence[Row], roots: Forest) -> tuple[Forest, list[Verdict | VerificationFailure]]:
        """Return steps in a row as chains of the tokens that they chose, and the verdicts that accept them."""
        assert self.walks.steps is not None
        tokens, path = self.walks.steps.tokens(), tuple(range(self.num_steps))
        trees = tuple(TokenTree.chain((*row.certain_ids, *ids[:-1])) for row, ids in zip(rows, tokens, strict=True))
        verdicts = [verdict_of(row, path, ids[-1]) for row, ids in zip(rows, tokens, strict=True)]
        return Forest(trees, roots.draft_probs_RV, ((None,) * len(path),) * len(trees)), [*verdicts]


def verdict_of(row: Row, path: tuple[int, ...], extra_id: int) -> Verdict:
    """Return the verdict of a tree that the library has followed."""
    is_coupled = row.verifier == Coupled.name and not row.sampling.is_greedy
    return Verdict(path, extra_id, None if is_coupled else float(len(path)))


def pass_walks(rows: Sequence[Row], forest: Forest, num_steps: int = 1) -> PassWalks:
    """Return the trees that a pass of the native library can follow; its logits are those of the forest's nodes.

    With more than one step the trees are roots, and the library can follow all of them.
    """
    indices: list[int] = []
    trees: list[TokenTree] = []
    nodes: list[int] = []
    temperatures: list[float] = []
    keys: list[Sequence[int]] = []
    truncations: list[KeptTokens] = []
    end = 0
    for index, (row, tree) in enumerate(zip(rows, forest.trees, strict=True)):
        first, end, sampling = end, end + len(tree.parents), row.sampling
        rule = _rule(row, tree, _NATIVE_COUPLED)
        if (rule != _GREEDY and rule != _NATIVE_COUPLED) or sampling.edits_logits:
            continue
        indices.append(index)
        trees.append(tree)
        nodes.extend(range(first, end))
        temperatures.append(walk_temperature(sampling))
        keys.append(() if rule == _GREEDY else depth_keys(tree, row.key))
        truncations.append(truncation(sampling))
    steps = None if num_steps == 1 else _steps(rows, num_steps)
    return PassWalks(indices, Walks(trees, nodes, temperatures, keys, truncations, steps))


def _steps(rows: Sequence[Row], num_steps: int) -> Steps:
    slots = [row.slots[row.end : row.end + num_steps - 1] for row in rows]
    return Steps(num_steps, slots, [row.seed for row in rows], [row.sampling.stop_token_ids for row in rows])


def _with_own_expectation(verdict: Verdict, row: Row) -> Verdict:
    """Return a verdict with the `expected_tokens` of the row's own rule: 1 for a single root."""
    return verdict if row.verifier == Coupled.name else Verdict(verdict.path, verdict.extra_id, 1.0)


def logprobs_of(
    logits_NV: Float[Tensor, "N V"], nodes: Sequence[int], ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of `ids[i]` after packed node `nodes[i]`, and of up to `num_top` likeliest tokens there.

    They are of the given logits: raw logits give the target's own, without the request's bias, penalties and temperature.
    """
    logprobs = torch.log_softmax(logits_NV[integers(nodes, logits_NV.device)], dim=-1)
    chosen_N1 = logprobs.gather(-1, integers(ids, logits_NV.device)[:, None])
    ranks_N1 = (logprobs > chosen_N1).sum(-1, keepdim=True) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return tuple(
        TokenLogprobs(logprob, tuple(map(int, top_ids)), tuple(values), int(rank))
        for (logprob,), (rank,), top_ids, values in rows_to_host([chosen_N1, ranks_N1, top.indices, top.values])
    )
