"""Finds the step with the most expected tokens a second over the batch.

The batch shares a step's seconds: rounds of growth are paid once. A node is only worthwhile if it adds more tokens a second than
the batch has. Each entry of the menu is tried for all sequences that may have it, then for the best half, quarter and so on. From
the best step, sequences are left out one by one, the smallest gain per node first. The cost model evaluates whole steps.

Shape key: B sequences, M entries by depth, C candidate steps, H halvings, N nodes, Z sizes of the other trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.policy import StepWork
from engine.core.tree import GrowthCosts
from selector.acceptance import Array, Estimates
from selector.cost import KEYS, CostModel
from selector.menu import Menu

Places = NDArray[np.int64]
_Evaluated = tuple[Places, Array, Array]  # candidates [C, B], expected tokens and seconds [C]

_SPREAD = (-1.28, -0.52, 0.0, 0.52, 1.28)  # equally likely numbers of standard deviations


@dataclass(frozen=True)
class BatchLoad:
    """The part of a step that no choice changes, and the cost of a node for each sequence.

    `base` is the work of plain decoding with the trees that requests configure themselves. `base_tokens` are the tokens of
    sequences without a choice. `context` are the cached tokens of the others, `draws` is 1 for a sampled sequence and 0 for a
    deterministic one, [B]. `model_share` is the share of rounds that run the draft model.
    """

    base: StepWork
    base_tokens: float
    context: Sequence[float]
    draws: Sequence[float]
    model_share: float


@dataclass(frozen=True)
class Step:
    """The place of each sequence's entry in the menu, with the expected tokens and seconds of the step."""

    places: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def loss_s(self, of: "Step") -> float:
        """Return the additional seconds of this step over `of`, less its additional tokens at the rate of `of`."""
        return self.seconds - of.seconds - (self.tokens - of.tokens) / of.rate


class Search:
    """Evaluates steps of one batch and finds the best. `is_allowed_BM` is None if every entry is allowed."""

    def __init__(
        self, menu: Menu, estimates: Estimates, is_allowed_BM: NDArray[np.bool_] | None, load: BatchLoad, costs: CostModel
    ) -> None:
        self._menu, self.estimates, self._is_allowed_BM = menu, estimates, is_allowed_BM
        self._load, self._costs, each_s = load, costs, costs.coefficients
        self._rows_B = np.arange(len(load.context)) * len(menu)
        self._round_s = each_s["round"] + load.model_share * costs.pass_s(load.base.num_keys)
        self._fed_s = load.model_share * each_s["draft_token"]
        score_s = each_s["score"] / KEYS
        self._node_s_B = np.array([each_s["drawn"] * draw + score_s * keys for draw, keys in zip(load.draws, load.context)])
        # Without T(N) and rounds. The root is fed too.
        nodes_s_BM = estimates.nodes * (self._node_s_B[:, None] + self._fed_s * menu.fed_share)
        self._own_s_BM = nodes_s_BM + self._fed_s * (menu.depths > 0)
        self._base_s = costs.step_s(load.base._replace(num_tokens=1)) - load.base.num_rounds * self._round_s
        self._first = self._evaluated(self._alike((0,) * len(load.context)))  # plain decoding comes first
        self.plain = self._step(self._first, 0)

    def best(self) -> Step:
        """Return the best step found. Plain decoding is one of the candidates."""
        best = self._best_of(self._first)
        if len(self._rows_B) == 1 or best == self.plain:
            return best
        if self._is_allowed_BM is not None:
            best = self._best_of(self._evaluated(self._alike(best.places)))
        return self._best_of(self._evaluated(self._fewer(best)))

    def with_tree(self, chosen: Step, rows: Sequence[int], entries: Sequence[int]) -> list[Step]:
        """Return the chosen step once for each of the entries, with that entry for the given sequences."""
        places_CB = np.repeat(np.array([chosen.places]), len(entries), axis=0)
        places_CB[:, rows] = np.array(entries, dtype=np.int64)[:, None]
        evaluated = self._evaluated(places_CB)
        return [self._step(evaluated, candidate) for candidate in range(len(entries))]

    def growth_costs(self, chosen: Step, num_sharing: int) -> GrowthCosts:
        """Return the cost of a further node and of a further level in a chosen step, in tokens at its rate.

        A level costs a round, shared by `num_sharing` sequences, and a token fed to the drafter. A tree's nodes are added to
        those of the other trees. Their number varies, so the cost of each node is a mean over equally likely numbers. No node
        may be less likely than the menu's least chance.
        """
        drafting, num_tokens = [place for place in chosen.places if place] or [0], self._load.base.num_tokens
        num_nodes = float(self.estimates.nodes.take(self._rows_B + chosen.places).sum())
        own_nodes, num_others = num_nodes / len(drafting), len(drafting) - 1
        others = [num_nodes, *(max(0.0, own_nodes * (num_others + spread * num_others**0.5)) for spread in _SPREAD)]
        most_nodes = max(1, *(self._menu.entries[place].num_draft_tokens for place in drafting))
        tokens_s_ZN = self._costs.tokens_s(np.add.outer(others, np.arange(num_tokens, num_tokens + 1.0 + most_nodes)))
        nodes_ZN = (float(self._node_s_B.mean()) + tokens_s_ZN[:, 1:] - tokens_s_ZN[:, :-1]) * chosen.rate
        nodes_N = np.maximum(nodes_ZN[1:].mean(0), self._menu.least_chance).round(9)
        level = (self._round_s / max(1, num_sharing) + self._fed_s) * chosen.rate
        return GrowthCosts(float(nodes_ZN[0, 0]), level, tuple(never_less(nodes_N.tolist())) if any(drafting) else ())

    def _alike(self, kept: Sequence[int]) -> Places:
        """Return candidates for each entry, [C, B]: all sequences that may have it do, then the best half, quarter and so on.

        The best sequences have the most expected tokens. The other sequences keep their entries.
        """
        num_rows, tokens_BM, entries_M1 = len(self._rows_B), self.estimates.tokens, np.arange(len(self._menu))[:, None]
        is_allowed_BM = np.ones_like(tokens_BM, dtype=np.bool_) if self._is_allowed_BM is None else self._is_allowed_BM
        if num_rows == 1:
            return np.where(is_allowed_BM.T, entries_M1, kept)
        rank_MB = np.where(is_allowed_BM, -tokens_BM, 0.0).argsort(0, kind="stable").argsort(0).T
        halves_H1 = np.arange(1 + (num_rows - 1).bit_length())[:, None]  # to the best one alone
        most_HM1 = -(-np.count_nonzero(is_allowed_BM, axis=0) >> halves_H1)[..., None]
        return np.where(rank_MB < most_HM1, entries_M1, kept).reshape(-1, num_rows)

    def _fewer(self, best: Step) -> Places:
        """Return candidates in which fewer and fewer sequences draft, the largest gain per node, [C, B]."""
        places_B = np.array(best.places)
        index_B = places_B + self._rows_B
        gain_B = (self.estimates.tokens.take(index_B) - 1.0) / np.maximum(self.estimates.nodes.take(index_B), 1e-9)
        order = np.argsort(np.where(places_B > 0, -gain_B, np.inf), kind="stable")[: np.count_nonzero(places_B)]
        places_CB = np.zeros((len(order) + 1, len(places_B)), dtype=np.int64)
        places_CB[:, order] = np.tri(len(order) + 1, len(order), -1, dtype=np.int64) * places_B[order]
        return places_CB

    def _best_of(self, evaluated: _Evaluated) -> Step:
        return self._step(evaluated, int((evaluated[1] / evaluated[2]).argmax()))

    @staticmethod
    def _step(evaluated: _Evaluated, candidate: int) -> Step:
        places_CB, tokens_C, seconds_C = evaluated
        return Step((*places_CB[candidate].tolist(),), float(tokens_C[candidate]), float(seconds_C[candidate]))

    def _evaluated(self, places_CB: Places) -> _Evaluated:
        """Return the candidates with the expected tokens and seconds of each."""
        base, index_CB = self._load.base, places_CB + self._rows_B
        tokens_s_C = self._costs.tokens_s(base.num_tokens + self.estimates.nodes.take(index_CB).sum(1))
        rounds_C = np.maximum(base.num_rounds, self._rounds(places_CB, self.estimates.rounds.take(index_CB)))
        seconds_C = self._base_s + tokens_s_C + rounds_C * self._round_s + self._own_s_BM.take(index_CB).sum(1)
        return places_CB, self._load.base_tokens + self.estimates.tokens.take(index_CB).sum(1), seconds_C

    def _rounds(self, places_CB: Places, rounds_CB: Array) -> Array:
        """Return the expected rounds of each candidate: the rounds of its longest tree.

        A tree either has all levels or ends after the first, with the probability that gives its own expected rounds.
        """
        if rounds_CB.shape[1] == 1:
            return rounds_CB[:, 0]
        more_C = np.maximum(self._menu.depths[places_CB].max(1) - 1.0, 0.0)
        continues_CB = np.clip((rounds_CB - 1.0) / np.maximum(more_C, 1.0)[:, None], 0.0, 1.0)
        return np.asarray(np.minimum(rounds_CB.max(1), 1.0) + more_C * (1.0 - (1.0 - continues_CB).prod(1)))


def never_less(costs: list[float]) -> list[float]:
    """Return the nearest non-decreasing costs by least squares.

    A node that costs more than the next nodes is only taken together with them. Each gets their mean cost.
    """
    if costs == sorted(costs):
        return costs
    blocks: list[tuple[float, int]] = []
    for cost in costs:
        mean, count = cost, 1
        while blocks and blocks[-1][0] >= mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
