"""From draft logits to candidate children: i.i.d. samples, samples without replacement, a set plus one sample, top scores.

Implements the sampling rules and records the distribution that the verifier needs. The number of children of each node is decided
by the growth strategies. Sampled tokens are never dropped or reordered here: the candidates are a prefix of the samples, in
sampling order. With a trimmed vocabulary everything is computed over its columns; columns become token ids, and rows become full
distributions, at the end. Shape key: P nodes, V vocabulary, M the drafter's tokens, K of these with positive probability at some
node, C children of a node, R recorded distributions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.tree import TreeKind
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, TrimmedVocabulary
from engine.native import noise as native
from engine.sampling.distributions import is_typical, ranking_params, ranking_temperature, truncation, warped_probs
from engine.sampling.noise import gumbels
from engine.utils.host_transfer import floats, integers, rows_to_host


@dataclass(frozen=True, slots=True)
class ChildCandidates:
    """Candidate children of one node in sampling order; i.i.d. samples can repeat.

    `probs[i]` is the draft probability of `token_ids[i]`. `noise[i]` is its Gumbel noise if the tokens were chosen with noise.
    `collision` is the sum of squares of the full draft distribution: the expected probability of a sample from it.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]
    noise: tuple[float, ...] = ()
    collision: float = 0.0

    def index_of(self, token_id: int) -> int | None:
        """Return the place of a token, None if it is not a candidate."""
        return self.token_ids.index(token_id) if token_id in self.token_ids else None

    def first(self, count: int) -> "ChildCandidates":
        """Return the best `count` of ranked candidates."""
        if count >= len(self.token_ids):
            return self
        return replace(self, token_ids=self.token_ids[:count], probs=self.probs[:count], noise=self.noise[:count])


def candidates_of(
    nodes: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    probs: list[Tensor],
    vocab: TrimmedVocabulary | None = None,
) -> list[ChildCandidates | None]:
    """Return the candidate children of each node, None where the logits do not define a distribution.

    If children are sampled, their distributions [P, V] are appended to `probs` and their rows are recorded in the tree.
    `logits_PM` are the tokens of `vocab`, or all tokens, after the logits processors (engine.sampling.logits_processors).
    The result for one tree does not depend on the other trees.
    """
    kinds = [node.tree.row.draw_kind for node in nodes]
    if len(set(kinds)) == 1:
        return _candidates_of_kind(kinds[0], nodes, logits_PM, probs, vocab)
    candidates: dict[int, ChildCandidates | None] = {}
    for kind in dict.fromkeys(kinds):
        indices = [i for i, one in enumerate(kinds) if one is kind]
        part = [nodes[i] for i in indices]
        part_PM = logits_PM[integers(indices, logits_PM.device)]
        candidates.update(zip(indices, _candidates_of_kind(kind, part, part_PM, probs, vocab), strict=True))
    return [candidates[i] for i in range(len(nodes))]


def _candidates_of_kind(
    kind: TreeKind,
    nodes: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    probs: list[Tensor],
    vocab: TrimmedVocabulary | None,
) -> list[ChildCandidates | None]:
    if kind in _TOP_RULES and native.can_choose(logits_PM.device):
        sampling = [node.tree.row.sampling for node in nodes]
        if not any(is_typical(ranking_params(params)) for params in sampling):
            return _top_by_native(nodes, logits_PM, sampling, kind is TreeKind.SHARED_NOISE, vocab)
    if kind in _TOP_RULES:
        return _TOP_RULES[kind](nodes, logits_PM, vocab)
    sound = [row for row, is_sound in enumerate(torch.isfinite(logits_PM.amax(-1)).tolist()) if is_sound]
    if len(sound) == len(nodes):
        return [*_SAMPLING_RULES[kind](nodes, logits_PM, probs, vocab)]
    found: list[ChildCandidates | None] = [None] * len(nodes)
    if sound:
        part_PM = logits_PM[integers(sound, logits_PM.device)]
        of_sound = _SAMPLING_RULES[kind]([nodes[row] for row in sound], part_PM, probs, vocab)
        for row, candidates in zip(sound, of_sound, strict=True):
            found[row] = candidates
    return found


def _sample_iid(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[ChildCandidates]:
    """Sample from each node's warped distribution by inverse transform in float64."""
    probs_PM = _recorded_probs(nodes, logits_PM, probs, vocab)
    sampler = _ResidualSampler(probs_PM)
    columns_PC = torch.stack([sampler.at(uniforms_P) for uniforms_P in _uniforms_by_draw(nodes, probs_PM.device)], dim=-1)
    return _to_candidates(_to_host(nodes, columns_PC, probs_PM, vocab))


def _sample_distinct(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[ChildCandidates]:
    """Sample without replacement until a node has its children or no probability is left."""
    probs_PM = _recorded_probs(nodes, logits_PM, probs, vocab)
    sampler = _ResidualSampler(probs_PM)
    sampled, num_possible_P = [], torch.zeros_like(sampler.num_taken_P)
    for uniforms_P in _uniforms_by_draw(nodes, probs_PM.device):
        num_possible_P += ~sampler.is_empty_P
        sampled.append(sampler.at(uniforms_P))
        sampler.take(sampled[-1])
    return _to_candidates(_to_host(nodes, torch.stack(sampled, dim=-1), probs_PM, vocab, num_possible_P))


def _sample_set_plus_one(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[ChildCandidates]:
    """Fix the most likely tokens, `num_draws` - 1 at most and none below the node's floor; sample one more from the others, last.

    A fixed token gains q(x) (1 - q(x)): it is accepted and the sample would have missed it. The gain is compared with the floor.
    The set depends on the distribution alone, never on the sample. If it has all tokens, its least likely one is the sample.
    """
    probs_PM = _recorded_probs(nodes, logits_PM, probs, vocab)
    width = min(max(node.num_draws for node in nodes), probs_PM.shape[-1])
    top = probs_PM.topk(width, dim=-1)
    most_P1 = torch.tensor([[node.num_draws - 1] for node in nodes], device=probs_PM.device)
    floor_P1 = torch.tensor([[node.floor] for node in nodes], dtype=probs_PM.dtype, device=probs_PM.device)
    rank_C = torch.arange(width, device=probs_PM.device)
    num_possible_P1 = (probs_PM > 0.0).sum(-1, keepdim=True)
    gain_PC = top.values * (1.0 - top.values)  # never increases with the rank: q(x_2) <= 1 - q(x_1)
    is_fixed_PC = (rank_C < most_P1) & (rank_C < num_possible_P1 - 1) & (gain_PC > floor_P1)
    sampler = _ResidualSampler(probs_PM)
    goes_on_P = torch.ones_like(sampler.is_empty_P)
    for rank in range(width):
        goes_on_P &= is_fixed_PC[:, rank] & ~sampler.would_be_empty(top.indices[:, rank])
        sampler.take(top.indices[:, rank], goes_on_P)
    uniforms_P = _node_uniforms(nodes, 1, probs_PM.device)[:, 0]
    columns_PC = torch.cat([top.indices, top.indices[:, :1]], dim=-1)
    columns_PC.scatter_(1, sampler.num_taken_P[:, None], sampler.at(uniforms_P)[:, None])
    return _to_candidates(_to_host(nodes, columns_PC, probs_PM, vocab, sampler.num_taken_P + 1))


def _top_by_prob(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], vocab: TrimmedVocabulary | None
) -> list[ChildCandidates | None]:
    """Return the most likely tokens."""
    probs_PM = warped_probs(logits_PM, [ranking_params(node.tree.row.sampling) for node in nodes])
    possible_K = _possible_tokens(probs_PM)
    scores_PK = probs_PM.index_select(-1, possible_K)
    rows = _top_tokens(nodes, possible_K, scores_PK, None, probs_PM, vocab)
    return _only_valid(_to_candidates(rows), rows)


def _top_by_noisy_score(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], vocab: TrimmedVocabulary | None
) -> list[ChildCandidates | None]:
    """Return the best tokens by log q plus the position's Gumbel noise, which also selects the target's token."""
    probs_PM = warped_probs(logits_PM, [node.tree.row.sampling for node in nodes])
    possible_K = _possible_tokens(probs_PM)
    ids_K, vocab_size = (possible_K, probs_PM.shape[-1]) if vocab is None else (vocab.ids_M[possible_K], vocab.size)
    noise_PK = gumbels(_noise_keys(nodes), vocab_size, probs_PM.device, ids_K)
    sharpness_P1 = floats([node.tree.sharpness for node in nodes], probs_PM.device)[:, None]
    scores_PK = sharpness_P1 * probs_PM.index_select(-1, possible_K).double().log() + noise_PK
    rows = _top_tokens(nodes, possible_K, scores_PK, noise_PK, probs_PM, vocab)
    return _only_valid(_to_candidates(rows), rows)


def _noise_keys(nodes: Sequence[FrontierNode]) -> list[int]:
    """Return the noise key of the position after each node."""
    return [stream_key(node.tree.row.seed, node.position + 1, Stream.TOKEN) for node in nodes]


def _top_by_native(
    nodes: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    sampling: Sequence[SamplingParams],
    is_noisy: bool,
    vocab: TrimmedVocabulary | None,
) -> list[ChildCandidates | None]:
    """Return the best tokens as the native library ranks them, for rows without typical-p."""
    most = max(node.num_draws for node in nodes)
    temperatures = [*map(ranking_temperature, sampling)]
    ids_M = None if vocab is None else vocab.ids_M
    sharpness = [node.tree.sharpness for node in nodes]
    truncations = [truncation(ranking_params(params)) for params in sampling]
    keys = _noise_keys(nodes) if is_noisy else None
    rankings = native.rankings(logits_PM, temperatures, sharpness, most, keys, ids_M, truncations)
    return [_from_native(best, node.num_draws) for node, best in zip(nodes, rankings, strict=True)]


def _from_native(best: native.BestTokens, num_draws: int) -> ChildCandidates | None:
    if not best.token_ids:
        return None
    ids, probs, noise = best.token_ids, best.odds, best.noise
    if num_draws < len(ids):
        ids, probs, noise = ids[:num_draws], probs[:num_draws], noise[:num_draws]
    return ChildCandidates(ids, probs, noise, best.collision)


_SamplingRule = Callable[[Sequence[FrontierNode], Tensor, list[Tensor], TrimmedVocabulary | None], list[ChildCandidates]]
_SAMPLING_RULES: dict[TreeKind, _SamplingRule] = {
    TreeKind.PATH: _sample_iid,
    TreeKind.IID: _sample_iid,
    TreeKind.WITHOUT_REPLACEMENT: _sample_distinct,
    TreeKind.FIXED_DISTINCT: _sample_distinct,
    TreeKind.SET_PLUS_SAMPLE: _sample_set_plus_one,
}
_TOP_RULES = {TreeKind.DETERMINISTIC: _top_by_prob, TreeKind.SHARED_NOISE: _top_by_noisy_score}
RANKED_KINDS = frozenset(_TOP_RULES)


class _HostRow(NamedTuple):
    """A node's tokens in order, copied to the host; only the first `num_children` count."""

    num_children: int
    ids: tuple[int, ...]
    probs: tuple[float, ...]
    collision: float
    noise: tuple[float, ...]


def _possible_tokens(probs_PM: Float[Tensor, "P M"]) -> Int[Tensor, " K"]:
    """Return the tokens with positive probability at some node. Fewer tokens make ranking cheaper.

    On a GPU all tokens are returned: the count would need a synchronisation.
    """
    if probs_PM.device.type == "cuda":
        return torch.arange(probs_PM.shape[-1], device=probs_PM.device)
    return probs_PM.amax(0).nonzero()[:, 0]


def _top_tokens(
    nodes: Sequence[FrontierNode],
    possible_K: Int[Tensor, " K"],
    scores_PK: Float[Tensor, "P K"],
    noise_PK: Float[Tensor, "P K"] | None,
    probs_PM: Float[Tensor, "P M"],
    vocab: TrimmedVocabulary | None,
) -> list[_HostRow]:
    """Return each node's best tokens of positive probability by score, with their noise if there is any."""
    best_PC = scores_PK.topk(min(max(node.num_draws for node in nodes), len(possible_K)), dim=-1).indices
    columns_PC = possible_K[best_PC]
    num_possible_P = (probs_PM.gather(-1, columns_PC) > 0.0).sum(-1)
    noise_PC = None if noise_PK is None else noise_PK.gather(-1, best_PC)
    return _to_host(nodes, columns_PC, probs_PM, vocab, num_possible_P, noise_PC)


def _to_host(
    nodes: Sequence[FrontierNode],
    columns_PC: Int[Tensor, "P C"],
    probs_PM: Float[Tensor, "P M"],
    vocab: TrimmedVocabulary | None,
    num_possible_P: Int[Tensor, " P"] | None = None,
    noise_PC: Float[Tensor, "P C"] | None = None,
) -> list[_HostRow]:
    """Copy all that a round needs to the host in one transfer. A node has at most `num_draws` and `num_possible_P` children."""
    ids_PC = columns_PC if vocab is None else vocab.ids_M[columns_PC]
    collision_P1 = probs_PM.square().sum(-1, keepdim=True)
    possible_P1 = torch.full_like(collision_P1, math.inf) if num_possible_P is None else num_possible_P[:, None]
    noise = probs_PM[:, :0] if noise_PC is None else noise_PC
    rows = rows_to_host([possible_P1, collision_P1, ids_PC, probs_PM.gather(-1, columns_PC), noise])
    return [
        _HostRow(int(min(node.num_draws, *possible)), tuple(map(int, ids)), tuple(probs), collision, tuple(noise))
        for node, (possible, (collision,), ids, probs, noise) in zip(nodes, rows, strict=True)
    ]


def _to_candidates(rows: Sequence[_HostRow]) -> list[ChildCandidates]:
    found = []
    for row in rows:
        kept = slice(row.num_children)
        found.append(ChildCandidates(row.ids[kept], row.probs[kept], row.noise[kept], row.collision))
    return found


def _only_valid(candidates: Sequence[ChildCandidates], rows: Sequence[_HostRow]) -> list[ChildCandidates | None]:
    """Replace candidates from invalid distributions by None. The sum of squares of those is not finite."""
    return [one if math.isfinite(row.collision) else None for one, row in zip(candidates, rows, strict=True)]


def _node_uniforms(nodes: Sequence[FrontierNode], count: int, device: torch.device) -> Float[Tensor, "P count"]:
    """Return `count` uniform random numbers for each node, float64."""
    return floats([number for node in nodes for number in _uniforms(node, count)], device).view(len(nodes), count)


def _uniforms_by_draw(nodes: Sequence[FrontierNode], device: torch.device) -> Sequence[Float[Tensor, " P"]]:
    """Return a uniform random number of each node for each of the draws that a node needs at most."""
    return _node_uniforms(nodes, max(node.num_draws for node in nodes), device).unbind(-1)


def _recorded_probs(
    nodes: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> Float[Tensor, "P M"]:
    """Return the warped distributions, and append them to `probs` over the full vocabulary for the verifier."""
    first_row = sum(len(recorded) for recorded in probs)
    probs_PM = warped_probs(logits_PM, [node.tree.row.sampling for node in nodes])
    probs.append(probs_PM if vocab is None else vocab.widened(probs_PM, 0.0))
    for offset, node in enumerate(nodes):
        node.tree.probs_rows[node.node] = first_row + offset
    return probs_PM


def _uniforms(node: FrontierNode, count: int) -> list[float]:
    """Return a node's uniform random numbers: its own part of its tree's stream, independent of the rest of the batch."""
    key = stream_key(node.tree.row.seed, node.tree.row.root_position, Stream.DRAFT)
    first = node.node * node.tree.row.expansion.branches
    return [uniform(key, first + index) for index in range(count)]


_LEAST_MASS = 1e-7  # share of a distribution; a smaller remainder is largely rounding error, and is not sampled


class _ResidualSampler:
    """Samples from distributions without the tokens already taken.

    A token is an interval of the cumulative distribution, float64. Its width is the difference of neighbouring sums, so that a
    removed interval is exactly the set of points that select the token.
    """

    def __init__(self, probs_PM: Float[Tensor, "P M"]) -> None:
        self._cumulative_PM = probs_PM.cumsum(-1, dtype=torch.float64)
        self._left_P = self._cumulative_PM[:, -1].clone()
        self._starts: list[Tensor] = []  # of the taken intervals, each [P], infinite where nothing was taken
        self._widths: list[Tensor] = []
        self.num_taken_P = torch.zeros_like(self._left_P, dtype=torch.int64)

    @property
    def is_empty_P(self) -> Tensor:
        """Whether the remainder is so small that it may be rounding error."""
        return self._is_nothing(self._left_P)

    def would_be_empty(self, ids_P: Int[Tensor, " P"]) -> Tensor:
        """Return whether nothing would be left after taking these tokens."""
        return self._is_nothing(self._left_P - self._interval(ids_P)[1])

    def _is_nothing(self, left_P: Tensor) -> Tensor:
        return left_P <= _LEAST_MASS * self._cumulative_PM[:, -1]

    def at(self, uniforms_P: Float[Tensor, " P"]) -> Int[Tensor, " P"]:
        """Return the tokens at these quantiles of the remainder."""
        point_P = uniforms_P * self._left_P
        if self._starts:
            starts_PT, order = torch.stack(self._starts, dim=-1).sort(dim=-1)
            widths_PT = torch.stack(self._widths, dim=-1).gather(-1, order)
            for rank in range(starts_PT.shape[-1]):
                point_P = point_P + torch.where(point_P >= starts_PT[:, rank], widths_PT[:, rank], 0.0)
        # A point that rounds up to the total would be past the last token.
        total_P = self._cumulative_PM[:, -1]
        point_P = torch.minimum(point_P, torch.nextafter(total_P, torch.zeros_like(total_P)))
        return torch.searchsorted(self._cumulative_PM, point_P[:, None], right=True)[:, 0]

    def take(self, ids_P: Int[Tensor, " P"], is_taken_P: Tensor | None = None) -> None:
        """Remove one token from each distribution, or only from the distributions where `is_taken_P`."""
        start_P, width_P = self._interval(ids_P)
        if is_taken_P is not None:
            start_P = torch.where(is_taken_P, start_P, torch.inf)
            width_P = torch.where(is_taken_P, width_P, 0.0)
        self._starts.append(start_P)
        self._widths.append(width_P)
        self._left_P = self._left_P - width_P
        self.num_taken_P += 1 if is_taken_P is None else is_taken_P

    def _interval(self, ids_P: Int[Tensor, " P"]) -> tuple[Tensor, Tensor]:
        end_P1 = self._cumulative_PM.gather(-1, ids_P[:, None])
        before_P1 = self._cumulative_PM.gather(-1, (ids_P[:, None] - 1).clamp_(min=0))
        start_P1 = torch.where(ids_P[:, None] > 0, before_P1, 0.0)
        return start_P1[:, 0], (end_P1 - start_P1)[:, 0]
