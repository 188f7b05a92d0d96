"""Finds the step with the most expected tokens a second over the batch.

The batch shares a step's seconds: rounds of growth are paid once. A node is only worthwhile if it adds more tokens a second than
the batch has. Each entry of the menu is tried for all sequences that may have it, then for the best half, quarter and so on. From
the best step, sequences are left out one by one, the smallest gain per node first. The cost model evaluates whole steps. Entries
are not chosen for each sequence alone, since the maximum of many uncertain estimates is rarely as good as it looks.

Shape key: B sequences, M entries by depth, C candidate steps, N nodes, Z sizes of the other trees.
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

_SPREAD = np.array([-1.28, -0.52, 0.0, 0.52, 1.28])  # equally likely numbers of standard deviations


@dataclass(frozen=True)
class BatchLoad:
    """The part of a step that no choice changes, and the cost of a node for each sequence.

    `base` is the work of plain decoding with the trees that requests configure themselves. `base_tokens` are the tokens of
    sequences without a choice. `context` are the cached tokens of the others, `draws` is 1 for a sampled sequence and 0 for a
    deterministic one, [B]. `model_share` is the share of rounds that run the draft model. Plain decoding `runs_in_a_row` if
    no sequence needs the host or has a tree of its own. Steps with drafts do so if the `drafts_run`.
    """

    base: StepWork
    base_tokens: float
    context: Sequence[float]
    draws: Sequence[float]
    model_share: float
    runs_in_a_row: bool = True
    drafts_run: bool = False


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
        fed_BM = estimates.nodes * menu.fed_share + (menu.depths > 0)  # the root too
        self._own_s_BM = estimates.nodes * self._node_s_B[:, None] + self._fed_s * fed_BM  # without T(N) and rounds
        tokens_s = float(costs.tokens_s(np.array(load.base.num_tokens)))
        self._base_s = costs.step_s(load.base) - tokens_s - load.base.num_rounds * self._round_s
        self._first_CB = self._alike((0,) * len(load.context))  # plain decoding comes first
        self._first_tokens_C, self._first_seconds_C = self._evaluate(self._first_CB)
        self.plain = self._step(self._first_CB, self._first_tokens_C, self._first_seconds_C, 0)

    def best(self) -> Step:
        """Return the best step found. Plain decoding is one of the candidates."""
        first = int((self._first_tokens_C / self._first_seconds_C).argmax())
        best = self._step(self._first_CB, self._first_tokens_C, self._first_seconds_C, first)
        if len(self._rows_B) == 1 or first == 0:
            return best
        if self._is_allowed_BM is not None:
            best = self._best_of(self._alike(best.places))
        return self._best_of(self._fewer(best))

    def with_tree(self, chosen: Step, rows: Sequence[int], entries: Sequence[int]) -> list[Step]:
        """Return the chosen step once for each of the entries, with that entry for the given sequences."""
        places_CB = np.repeat(np.array([chosen.places]), len(entries), axis=0)
        places_CB[:, rows] = np.array(entries, dtype=np.int64)[:, None]
        evaluated = self._evaluate(places_CB)
        return [self._step(places_CB, *evaluated, candidate) for candidate in range(len(entries))]

    def growth_costs(self, chosen: Step, num_sharing: int) -> GrowthCosts:
        """Return the cost of a further node and of a further level in a chosen step, in tokens at its rate.

        A level costs a round, shared by `num_sharing` sequences, and a token fed to the drafter. A tree's nodes are added to
        those of the other trees. Their number varies, so the cost of each node is a mean over equally likely numbers. No node
        may be less likely than the menu's least chance.
        """
        rate, places_B = chosen.rate, np.array(chosen.places)
        num_nodes = float(self.estimates.nodes.take(places_B + self._rows_B).sum())
        num_tokens, num_drafting = float(self._load.base.num_tokens), int(np.count_nonzero(places_B))
        own_s, level_s = float(self._node_s_B.mean()), self._round_s / max(1, num_sharing) + self._fed_s
        node_s = own_s + float(np.diff(self._costs.tokens_s(num_tokens + num_nodes + np.arange(2.0)))[0])
        if not num_drafting:
            return GrowthCosts(node_s * rate, level_s * rate)
        own_nodes, num_others = num_nodes / num_drafting, num_drafting - 1
        others_Z = np.maximum(0.0, own_nodes * (num_others + _SPREAD * num_others**0.5))
        sizes_N = num_tokens + np.arange(1.0 + float(self._menu.num_nodes[places_B].max()))
        tokens_s_N = self._costs.tokens_s(sizes_N + others_Z[:, None]).mean(0)
        nodes_N = np.maximum((own_s + np.diff(tokens_s_N)) * rate, self._menu.least_chance)
        return GrowthCosts(node_s * rate, level_s * rate, tuple(never_less(nodes_N.round(9).tolist())))

    def _alike(self, kept: Sequence[int]) -> Places:
        """Return candidates for each entry, [C, B]: all sequences that may have it do, then the best half, quarter and so on.

        The best sequences have the most expected tokens. The other sequences keep their entries.
        """
        num_rows, tokens_BM, entries_M1 = len(self._rows_B), self.estimates.tokens, np.arange(len(self._menu))[:, None]
        is_allowed_BM = np.ones_like(tokens_BM, dtype=np.bool_) if self._is_allowed_BM is None else self._is_allowed_BM
        candidates = [np.where(is_allowed_BM.T, entries_M1, kept)]
        if num_rows > 1:
            rank_MB = np.where(is_allowed_BM, -tokens_BM, 0.0).argsort(0, kind="stable").argsort(0).T
            num_allowed_M1 = np.count_nonzero(is_allowed_BM, axis=0)[:, None]
            halves = range(1, (num_rows - 1).bit_length() + 1)  # to the best one alone
            candidates += [np.where(rank_MB < -(-num_allowed_M1 >> half), entries_M1, kept) for half in halves]
        return np.concatenate(candidates)

    def _fewer(self, best: Step) -> Places:
        """Return candidates in which fewer and fewer sequences draft, the largest gain per node, [C, B]."""
        places_B = np.array(best.places)
        index_B = places_B + self._rows_B
        gain_B = (self.estimates.tokens.take(index_B) - 1.0) / np.maximum(self.estimates.nodes.take(index_B), 1e-9)
        order = np.argsort(np.where(places_B > 0, -gain_B, np.inf), kind="stable")[: np.count_nonzero(places_B)]
        places_CB = np.zeros((len(order) + 1, len(places_B)), dtype=np.int64)
        places_CB[:, order] = np.tri(len(order) + 1, len(order), -1, dtype=np.int64) * places_B[order]
        return places_CB

    def _best_of(self, places_CB: Places) -> Step:
        tokens_C, seconds_C = self._evaluate(places_CB)
        return self._step(places_CB, tokens_C, seconds_C, int((tokens_C / seconds_C).argmax()))

    @staticmethod
    def _step(places_CB: Places, tokens_C: Array, seconds_C: Array, candidate: int) -> Step:
        return Step((*places_CB[candidate].tolist(),), float(tokens_C[candidate]), float(seconds_C[candidate]))

    def _evaluate(self, places_CB: Places) -> tuple[Array, Array]:
        """Return the expected tokens and seconds of each candidate."""
        base, index_CB = self._load.base, places_CB + self._rows_B
        tokens_s_C = self._costs.tokens_s(base.num_tokens + self.estimates.nodes.take(index_CB).sum(1))
        rounds_C = np.maximum(base.num_rounds, self._rounds(places_CB, self.estimates.rounds.take(index_CB)))
        seconds_C = self._base_s + tokens_s_C + rounds_C * self._round_s + self._own_s_BM.take(index_CB).sum(1)
        if self._load.runs_in_a_row:
            seconds_C -= self._costs.saved_s(seconds_C) * (True if self._load.drafts_run else ~places_CB.any(1))
        return self._load.base_tokens + self.estimates.tokens.take(index_CB).sum(1), seconds_C

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
