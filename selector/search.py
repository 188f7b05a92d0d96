"""Finds the step with the most expected tokens a second over the batch.

The batch shares a step's seconds: rounds of growth are paid once. A node is only worthwhile if it adds more tokens a second than
the batch has. Each entry of the menu is tried for all sequences that may have it, then for the best half, quarter and so on. From
the best step, sequences are left out one by one, the smallest gain per node first. The cost model evaluates whole steps. Entries
are not chosen for each sequence alone, since the maximum of many uncertain estimates is rarely as good as it looks.
Plain Python: most batches are small, and numpy's code is not in the processor's caches after a pass of a model.

Shape key: B sequences, M entries by depth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from engine.core.policy import StepWork
from engine.core.tree import GrowthCosts
from selector.acceptance import Estimates
from selector.cost import KEYS, CostModel
from selector.menu import Menu

_Cell = tuple[float, float, float, float, int]  # of an entry: tokens, nodes, seconds without T(N) and rounds, rounds, levels
_SPREAD = (-1.28, -0.52, 0.0, 0.52, 1.28)  # equally likely numbers of standard deviations


@dataclass(frozen=True)
class BatchLoad:
    """The part of a step that no choice changes, and the cost of a node for each sequence.

    `base` is the work of plain decoding with the trees that requests configure themselves. `base_tokens` are the tokens of
    sequences without a choice. `context` are the cached tokens of the others, `draws` is 1 for a sampled sequence and 0 for a
    deterministic one, [B]. `model_share` is the share of rounds that run the draft model. Plain decoding `runs_in_a_row` if
    no sequence needs the host or has a tree of its own. Steps with drafts do so if `drafts_run`.
    """

    base: StepWork
    base_tokens: float
    context: Sequence[float]
    draws: Sequence[float]
    model_share: float
    runs_in_a_row: bool = True
    drafts_run: bool = False


class Step(NamedTuple):
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
    """Evaluates steps of one batch and finds the best. `is_allowed` is [B][M], or None if every entry is allowed."""

    def __init__(
        self, menu: Menu, estimates: Estimates, is_allowed: Sequence[Sequence[bool]] | None, load: BatchLoad, costs: CostModel
    ) -> None:
        self._menu, self.estimates, self._are_unlike = menu, estimates, is_allowed is not None
        self._is_allowed = is_allowed or [[True] * len(menu)] * len(load.context)
        self._load, self._costs, each_s = load, costs, costs.coefficients
        self._round_s = each_s["round"] + load.model_share * costs.pass_s(load.base.num_keys)
        self._fed_s = load.model_share * each_s["draft_token"]
        score_s = each_s["score"] / KEYS
        self._node_s_B = [each_s["drawn"] * draw + score_s * keys for draw, keys in zip(load.draws, load.context, strict=True)]
        fed_s_M = [(self._fed_s * share, self._fed_s * (depth > 0)) for share, depth in zip(menu.fed_share, menu.depths)]
        self._cells: list[list[_Cell]] = []  # [B][M]; the root is fed too
        for tokens, nodes, rounds, node_s in zip(*estimates, self._node_s_B, strict=True):
            own_s = [count * (node_s + fed_s) + root_s for count, (fed_s, root_s) in zip(nodes, fed_s_M)]
            self._cells.append([*zip(tokens, nodes, own_s, rounds, menu.depths)])
        self._base_s = costs.step_s(load.base) - costs.tokens_s(load.base.num_tokens) - load.base.num_rounds * self._round_s
        self.plain = self._step((0,) * len(load.context))

    def best(self) -> Step:
        """Return the best step found. Plain decoding is one of the candidates."""
        best = self._best_alike(self.plain)
        if len(best.places) == 1 or best is self.plain:
            return best
        return self._best_of_fewer(self._best_alike(best) if self._are_unlike else best)

    def with_tree(self, step: Step, rows: Iterable[int], entry: int) -> Step:
        """Return a step with that entry for the given sequences."""
        places = [*step.places]
        for row in rows:
            places[row] = entry
        return self._step(places)

    def growth_costs(self, chosen: Step, num_sharing: int) -> GrowthCosts:
        """Return the cost of a further node and of a further level in a chosen step, in tokens at its rate.

        A level costs a round, shared by `num_sharing` sequences, and a token fed to the drafter. A tree's nodes are added to
        those of the other trees. Their number varies, so the cost of each node is a mean over equally likely numbers. No node
        may be less likely than the menu's least chance.
        """
        rate, rises_s, num_tokens = chosen.rate, self._costs.rises_s, self._load.base.num_tokens
        drafting, least = [place for place in chosen.places if place], self._menu.least_chance
        num_nodes = sum([cells[place][1] for cells, place in zip(self._cells, chosen.places)])
        own_s, level_s = sum(self._node_s_B) / len(self._node_s_B), self._round_s / max(1, num_sharing) + self._fed_s
        node_s = own_s + rises_s(num_tokens + num_nodes, 1)[0]
        if not drafting:
            return GrowthCosts(node_s * rate, level_s * rate)
        own_nodes, num_others = num_nodes / len(drafting), len(drafting) - 1
        others = [num_tokens + own_nodes * size for size in {max(0.0, num_others + one * num_others**0.5) for one in _SPREAD}]
        rises, *more = [rises_s(other, max([self._menu.num_nodes[place] for place in drafting])) for other in others]
        rises = [sum(each) / len(each) for each in zip(rises, *more)] if more else rises
        cost_of = {rise: round(max(least, (own_s + rise) * rate), 9) for rise in {*rises}}  # few differ in a small batch
        return GrowthCosts(node_s * rate, level_s * rate, tuple(never_less([cost_of[rise] for rise in rises])))

    def _best_alike(self, start: Step) -> Step:
        """Return the best of `start` and of each entry for all that may have it, for the half with the most tokens, and so on."""
        found, best_rate = None, start.rate
        for entry in self._menu.drafting:
            ranks = [-cells[entry][0] * allowed[entry] for cells, allowed in zip(self._cells, self._is_allowed)]
            rows, count = sorted(range(len(ranks)), key=ranks.__getitem__), len(ranks) - ranks.count(0.0)
            new, kept = [self._cells[row][entry] for row in rows], [self._cells[row][start.places[row]] for row in rows]
            while count:
                tokens, seconds = self._evaluated([*new[:count], *kept[count:]])
                if tokens > best_rate * seconds:
                    found, best_rate = (rows[:count], entry), tokens / seconds
                count = (count + 1) // 2 if count > 1 else 0
        return self.with_tree(start, *found) if found else start

    def _best_of_fewer(self, start: Step) -> Step:
        """Return the best of steps in which fewer and fewer sequences draft: the smallest gain per node is left out first."""
        best = step = start
        drafting = [(*self._cells[row][place][:2], -row) for row, place in enumerate(start.places) if place]
        for _, row in sorted([((tokens - 1.0) / max(1e-9, nodes), row) for tokens, nodes, row in drafting]):
            step = self.with_tree(step, [-row], 0)
            best = step if step.rate > best.rate else best
        return best

    def _step(self, places: Sequence[int]) -> Step:
        return Step((*places,), *self._evaluated([cells[place] for cells, place in zip(self._cells, places)]))

    def _evaluated(self, cells: Sequence[_Cell]) -> tuple[float, float]:
        """Return the expected tokens and seconds of a step with an entry for each sequence.

        The step has the rounds of its longest tree, at least those of requests' own trees. A tree either has all levels or ends
        after the first, with the probability that gives its own expected rounds.
        """
        tokens, nodes, own_s, rounds, depths = zip(*cells)
        base, more = self._load.base, max(depths) - 1.0
        ends = prod([1.0 - (one - 1.0) / more for one in rounds if one > 1.0])
        num_rounds = max(base.num_rounds, min(1.0, max(rounds)) + more * (1.0 - ends))
        tokens_s = self._costs.tokens_s(base.num_tokens + sum(nodes))
        seconds = self._base_s + tokens_s + num_rounds * self._round_s + sum(own_s)
        if self._load.runs_in_a_row and (self._load.drafts_run or not any(depths)):
            seconds -= self._costs.saved_s(seconds, any(depths))
        return self._load.base_tokens + sum(tokens), seconds


def never_less(costs: list[float]) -> list[float]:
    """Return the nearest non-decreasing costs by least squares.

    A node that costs more than the next nodes is only taken together with them. Each gets their mean cost.
    """
    if costs == sorted(costs):
        return costs
    blocks: list[tuple[float, int]] = []
    for mean, same in groupby(costs):
        count = len([*same])
        while blocks and blocks[-1][0] >= mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
