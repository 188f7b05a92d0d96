"""From draft logits to the children of nodes: i.i.d. draws, draws without replacement, a set and one sample, rankings.

Knows how tokens are drawn and which law the verifier must be shown; does not know which node should have how many children
(strategies) nor models. A drawn token is never dropped or ranked by its value here: an offer is a prefix of what sampling
gives, in sampling order. Where a drafter knows only some tokens, all is done over those alone, and columns of its rows become
token ids and whole laws at the end. Shape key: P proposals, V vocabulary, M the tokens of it that the drafter knows, K those of
them known to some law, C children of a node, R kept laws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.rng_keys import Stream, stream_key, uniform
from engine.core.tree import TreeKind
from engine.core.types import SamplingParams
from engine.draft.drafter import FrontierNode, TrimmedVocabulary
from engine.native import noise as native
from engine.sampling.distributions import ranking_params, ranking_temperature, truncates, warped_probs
from engine.sampling.noise import gumbels
from engine.utils.host_transfer import floats, integers, rows_to_host


@dataclass(frozen=True, slots=True)
class Offer:
    """Children for one node in the order in which they were drawn; i.i.d. draws can repeat.

    `odds[i]` is the draft probability of `token_ids[i]`, of the whole law; `noise[i]`, of a ranking with noise, the token's.
    `collision` is the sum of squares of the whole law: how probable a draw from it is in the mean.
    """

    token_ids: tuple[int, ...]
    odds: tuple[float, ...]
    noise: tuple[float, ...] = ()
    collision: float = 0.0


def offers_of(
    asked: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    probs: list[Tensor],
    vocab: TrimmedVocabulary | None = None,
) -> list[Offer | None]:
    """Return an offer for each node; where children are draws, their laws [P, V] are appended to `laws` and noted in the tree.

    The logits, of the tokens of `vocab` or of all, are edited already (engine.sampling.logits_processors).
    None: they make no law.
    A tree's offers do not depend on the trees beside it.
    """
    kinds = [node.tree.row.draw_kind for node in asked]
    if len(set(kinds)) == 1:
        return _offered(kinds[0], asked, logits_PM, probs, vocab)
    offers: dict[int, Offer | None] = {}
    for kind in dict.fromkeys(kinds):
        indices = [i for i, one in enumerate(kinds) if one is kind]
        part = [asked[i] for i in indices]
        part_PM = logits_PM[integers(indices, logits_PM.device)]
        offers.update(zip(indices, _offered(kind, part, part_PM, probs, vocab), strict=True))
    return [offers[i] for i in range(len(asked))]


def _offered(
    kind: TreeKind,
    asked: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    probs: list[Tensor],
    vocab: TrimmedVocabulary | None,
) -> list[Offer | None]:
    """Return what nodes of one kind are offered."""
    if kind in _RANKED and native.can_choose(logits_PM.device):
        sampling = [node.tree.row.sampling for node in asked]
        if not any(truncates(ranking_params(params)) for params in sampling):  # laws of a temperature alone
            return _ranked_at_once(asked, logits_PM, sampling, kind is TreeKind.SHARED_NOISE, vocab)
    if kind in _RANKED:
        return _RANKED[kind](asked, logits_PM, vocab)
    sound = [row for row, is_sound in enumerate(torch.isfinite(logits_PM.amax(-1)).tolist()) if is_sound]
    if len(sound) == len(asked):
        return [*_RULES[kind](asked, logits_PM, probs, vocab)]
    offers: list[Offer | None] = [None] * len(asked)
    if sound:
        part_PM = logits_PM[integers(sound, logits_PM.device)]
        for row, offer in zip(sound, _RULES[kind]([asked[row] for row in sound], part_PM, probs, vocab), strict=True):
            offers[row] = offer
    return offers


def _drawn_iid(
    asked: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[Offer]:
    """Draw from each node's processed law by inverse distribution functions in float64."""
    probs_PM = _kept_probs(asked, logits_PM, probs, vocab)
    urn = _Urn(probs_PM)
    width = max(node.num_draws for node in asked)
    draws_PC = _draws(asked, width, probs_PM.device)
    columns_PC = torch.stack([urn.at(draws_PC[:, i]) for i in range(width)], dim=-1)
    return _offers(_told(asked, columns_PC, probs_PM, vocab))


def _drawn_distinct(
    asked: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[Offer]:
    """Draw without replacement until a node has its children or its law is used up."""
    probs_PM = _kept_probs(asked, logits_PM, probs, vocab)
    urn = _Urn(probs_PM)
    width = max(node.num_draws for node in asked)
    draws_PC = _draws(asked, width, probs_PM.device)
    drawn, num_possible_P = [], torch.zeros_like(urn.num_taken_P)
    for rank in range(width):
        num_possible_P += ~urn.is_empty_P
        drawn.append(urn.at(draws_PC[:, rank]))
        urn.take(drawn[-1])
    return _offers(_told(asked, torch.stack(drawn, dim=-1), probs_PM, vocab, num_possible_P))


def _set_and_sample(
    asked: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> list[Offer]:
    """Fix the likeliest tokens, all but one of what is asked for and none below the node's floor; draw one off them, last.

    A fixed token pays where it comes and the sample would have missed it, q(x) (1 - q(x)): that is compared with the floor. Which
    tokens are fixed is decided by the law alone. Where they are the whole law, the least likely of them is the sample.
    """
    probs_PM = _kept_probs(asked, logits_PM, probs, vocab)
    width = min(max(node.num_draws for node in asked), probs_PM.shape[-1])
    top = probs_PM.topk(width, dim=-1)
    most_P1 = torch.tensor([[node.num_draws - 1] for node in asked], device=probs_PM.device)
    floor_P1 = torch.tensor([[node.floor] for node in asked], dtype=probs_PM.dtype, device=probs_PM.device)
    rank_C = torch.arange(width, device=probs_PM.device)
    num_possible_P1 = (probs_PM > 0.0).sum(-1, keepdim=True)
    gain_PC = top.values * (1.0 - top.values)  # falls with the rank: no token is likelier than what the first one leaves
    is_fixed_PC = (rank_C < most_P1) & (rank_C < num_possible_P1 - 1) & (gain_PC > floor_P1)
    urn = _Urn(probs_PM)
    goes_on_P = torch.ones_like(urn.is_empty_P)
    for rank in range(width):
        goes_on_P &= is_fixed_PC[:, rank] & ~urn.would_be_empty(top.indices[:, rank])
        urn.take(top.indices[:, rank], goes_on_P)
    draws_P = _draws(asked, 1, probs_PM.device)[:, 0]
    columns_PC = torch.cat([top.indices, top.indices[:, :1]], dim=-1)
    columns_PC.scatter_(1, urn.num_taken_P[:, None], urn.at(draws_P)[:, None])
    return _offers(_told(asked, columns_PC, probs_PM, vocab, urn.num_taken_P + 1))


def _ranked(
    asked: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], vocab: TrimmedVocabulary | None
) -> list[Offer | None]:
    """Return the likeliest tokens: nothing is drawn."""
    probs_PM = warped_probs(logits_PM, [ranking_params(node.tree.row.sampling) for node in asked])
    known_K = _known(probs_PM)
    known_PK = probs_PM.index_select(-1, known_K)
    told = _best(asked, known_K, known_PK, None, probs_PM, vocab)
    return _where_sound(_offers(told), told)


def _ranked_with_noise(
    asked: Sequence[FrontierNode], logits_PM: Float[Tensor, "P M"], vocab: TrimmedVocabulary | None
) -> list[Offer | None]:
    """Return the best tokens by log q and the Gumbel noise of the position itself: the noise that will decide the token."""
    probs_PM = warped_probs(logits_PM, [node.tree.row.sampling for node in asked])
    known_K = _known(probs_PM)
    known_ids_K, vocab_size = (known_K, probs_PM.shape[-1]) if vocab is None else (vocab.ids_M[known_K], vocab.size)
    noise_PK = gumbels(_noise_keys(asked), vocab_size, probs_PM.device, known_ids_K)
    sharpness_P1 = floats([node.tree.sharpness for node in asked], probs_PM.device)[:, None]
    scores_PK = sharpness_P1 * probs_PM.index_select(-1, known_K).double().log() + noise_PK
    told = _best(asked, known_K, scores_PK, noise_PK, probs_PM, vocab)
    return _where_sound(_offers(told), told)


def _noise_keys(asked: Sequence[FrontierNode]) -> list[int]:
    """Return what names the noise of the position after each node."""
    return [stream_key(node.tree.row.seed, node.position + 1, Stream.TOKEN) for node in asked]


def _ranked_at_once(
    asked: Sequence[FrontierNode],
    logits_PM: Float[Tensor, "P M"],
    sampling: Sequence[SamplingParams],
    is_noisy: bool,
    vocab: TrimmedVocabulary | None,
) -> list[Offer | None]:
    """Return what the library ranks best."""
    most = max(node.num_draws for node in asked)
    temperatures = [*map(ranking_temperature, sampling)]
    ids_M = None if vocab is None else vocab.ids_M
    sharpness = [node.tree.sharpness for node in asked]
    ranked = native.rankings(logits_PM, temperatures, sharpness, most, _noise_keys(asked) if is_noisy else None, ids_M)
    return [_of_best(best, node.num_draws) for node, best in zip(asked, ranked, strict=True)]


def _of_best(best: native.BestTokens, num_draws: int) -> Offer | None:
    if not best.token_ids:
        return None
    ids, odds, noise = best.token_ids, best.odds, best.noise
    if num_draws < len(ids):
        ids, odds, noise = ids[:num_draws], odds[:num_draws], noise[:num_draws]
    return Offer(ids, odds, noise, best.collision)


_RULES: dict[TreeKind, Callable[[Sequence[FrontierNode], Tensor, list[Tensor], TrimmedVocabulary | None], list[Offer]]] = {
    TreeKind.PATH: _drawn_iid,
    TreeKind.IID: _drawn_iid,
    TreeKind.WITHOUT_REPLACEMENT: _drawn_distinct,
    TreeKind.FIXED_DISTINCT: _drawn_distinct,
    TreeKind.SET_PLUS_SAMPLE: _set_and_sample,
}
_RANKED = {TreeKind.DETERMINISTIC: _ranked, TreeKind.SHARED_NOISE: _ranked_with_noise}


class _Told(NamedTuple):
    """What the host is told of a node's tokens, in their order: ids, odds, a ranking's noise, and the law's sum of squares."""

    num_children: int  # of the tokens
    ids: tuple[int, ...]
    odds: tuple[float, ...]
    collision: float
    noise: tuple[float, ...]


def _known(probs_PM: Float[Tensor, "P M"]) -> Int[Tensor, " K"]:
    """Return the tokens that some law allows: no other can be ranked, and where they are few most of the work is saved.

    On a GPU those are all tokens: how many it were would have to be waited for.
    """
    if probs_PM.device.type == "cuda":
        return torch.arange(probs_PM.shape[-1], device=probs_PM.device)
    return probs_PM.amax(0).nonzero()[:, 0]


def _best(
    asked: Sequence[FrontierNode],
    known_K: Int[Tensor, " K"],
    scores_PK: Float[Tensor, "P K"],
    noise_PK: Float[Tensor, "P K"] | None,
    probs_PM: Float[Tensor, "P M"],
    vocab: TrimmedVocabulary | None,
) -> list[_Told]:
    """Return each node's best tokens of positive probability by score, and their noise if there is any."""
    best_PC = scores_PK.topk(min(max(node.num_draws for node in asked), len(known_K)), dim=-1).indices
    columns_PC = known_K[best_PC]
    num_possible_P = (probs_PM.gather(-1, columns_PC) > 0.0).sum(-1)
    noise_PC = None if noise_PK is None else noise_PK.gather(-1, best_PC)
    return _told(asked, columns_PC, probs_PM, vocab, num_possible_P, noise_PC)


def _told(
    asked: Sequence[FrontierNode],
    columns_PC: Int[Tensor, "P C"],
    probs_PM: Float[Tensor, "P M"],
    vocab: TrimmedVocabulary | None,
    num_possible_P: Int[Tensor, " P"] | None = None,
    noise_PC: Float[Tensor, "P C"] | None = None,
) -> list[_Told]:
    """Bring all that a round decides by to the host, in one transfer. A node has no more children than it may, or can."""
    ids_PC = columns_PC if vocab is None else vocab.ids_M[columns_PC]
    collision_P1 = probs_PM.square().sum(-1, keepdim=True)
    possible_P1 = torch.full_like(collision_P1, math.inf) if num_possible_P is None else num_possible_P[:, None]
    noise = probs_PM[:, :0] if noise_PC is None else noise_PC
    rows = rows_to_host([possible_P1, collision_P1, ids_PC, probs_PM.gather(-1, columns_PC), noise])
    return [
        _Told(int(min(node.num_draws, *possible)), tuple(map(int, ids)), tuple(odds), collision, tuple(noise))
        for node, (possible, (collision,), ids, odds, noise) in zip(asked, rows, strict=True)
    ]


def _offers(told: Sequence[_Told]) -> list[Offer]:
    firsts = [slice(one.num_children) for one in told]
    return [Offer(one.ids[of], one.odds[of], one.noise[of], one.collision) for of, one in zip(firsts, told, strict=True)]


def _where_sound(offers: Sequence[Offer], told: Sequence[_Told]) -> list[Offer | None]:
    """Return the offers of laws; what is made of logits that make none has no sum of squares."""
    return [offer if math.isfinite(one.collision) else None for offer, one in zip(offers, told, strict=True)]


def _draws(asked: Sequence[FrontierNode], count: int, device: torch.device) -> Float[Tensor, "P count"]:
    """Return the draws of each node, float64."""
    return floats([draw for node in asked for draw in _uniforms(node, count)], device).view(len(asked), count)


def _kept_probs(
    asked: Sequence[FrontierNode], logits_PM: Tensor, probs: list[Tensor], vocab: TrimmedVocabulary | None
) -> Float[Tensor, "P M"]:
    """Return the processed laws, and keep them for the verifier, over the whole vocabulary."""
    first_row = sum(len(kept) for kept in probs)
    probs_PM = warped_probs(logits_PM, [node.tree.row.sampling for node in asked])
    probs.append(probs_PM if vocab is None else vocab.widened(probs_PM, 0.0))
    for offset, node in enumerate(asked):
        node.tree.probs_rows[node.node] = first_row + offset
    return probs_PM


def _uniforms(asked: FrontierNode, count: int) -> list[float]:
    """Return the draws of a node: its own part of the tree's stream, whatever else grows beside it."""
    row = asked.tree.row
    key = stream_key(row.seed, row.root_position, Stream.DRAFT)
    first = asked.node * row.expansion.branches
    return [uniform(key, first + draw) for draw in range(count)]


_LEAST_LEFT = 1e-7  # of a law: what is left below it is largely rounding, and nothing is drawn from it


class _Urn:
    """Laws to draw from with tokens taken out: intervals of the cumulated law, float64, a taken token's cut out exactly.

    A token's width is the difference of neighbouring sums, so that what is cut out is just what could have been drawn.
    """

    def __init__(self, probs_PM: Float[Tensor, "P M"]) -> None:
        self._cumulative_PM = probs_PM.cumsum(-1, dtype=torch.float64)
        self._left_P = self._cumulative_PM[:, -1].clone()
        self._starts: list[Tensor] = []  # of the taken intervals, each [P], infinite where nothing was taken
        self._widths: list[Tensor] = []
        self.num_taken_P = torch.zeros_like(self._left_P, dtype=torch.int64)

    @property
    def is_empty_P(self) -> Tensor:
        """Whether so little is left that it may be rounding."""
        return self._is_nothing(self._left_P)

    def would_be_empty(self, ids_P: Int[Tensor, " P"]) -> Tensor:
        """Return whether nothing would be left after taking these tokens."""
        return self._is_nothing(self._left_P - self._interval(ids_P)[1])

    def _is_nothing(self, left_P: Tensor) -> Tensor:
        return left_P <= _LEAST_LEFT * self._cumulative_PM[:, -1]

    def at(self, uniforms_P: Float[Tensor, " P"]) -> Int[Tensor, " P"]:
        """Return the tokens at these points of what is left."""
        point_P = uniforms_P * self._left_P
        if self._starts:
            starts_PT, order = torch.stack(self._starts, dim=-1).sort(dim=-1)
            widths_PT = torch.stack(self._widths, dim=-1).gather(-1, order)
            for rank in range(starts_PT.shape[-1]):
                point_P = point_P + torch.where(point_P >= starts_PT[:, rank], widths_PT[:, rank], 0.0)
        # What rounds up to the total would fall past the last token.
        total_P = self._cumulative_PM[:, -1]
        point_P = torch.minimum(point_P, torch.nextafter(total_P, torch.zeros_like(total_P)))
        return torch.searchsorted(self._cumulative_PM, point_P[:, None], right=True)[:, 0]

    def take(self, ids_P: Int[Tensor, " P"], is_taken_P: Tensor | None = None) -> None:
        """Take a token out of each law, or of some of them."""
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
