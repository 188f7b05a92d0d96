"""Node plans one node at a time, and the two phases against the recursion and the papers' own formulas."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.core.tree import Expansion
from engine.verify.directions import BottomUp, TopDown
from engine.verify.node_plans import AcceptanceSplit, NodeFamilies, NodePlan, WithReplacement
from tests.enumeration import Distribution, DrawnTree, TinyModel, batch_of, delayed_trees
from tests.model.verify.given import given_by
from tests.model.verify.rules_under_test import BLOCK, EXACT, ON_DELAYED, RULES, TRAVERSAL, outcomes_of, rule_of

PLANS: list[NodePlan] = [rule.plan for name, rule in ON_DELAYED.items() if name not in ("rrsw", "block")]  # each plan once


class AcceptsAlways(WithReplacement):
    """A mutant that takes whatever was drafted."""

    def split(self, families: NodeFamilies) -> AcceptanceSplit:
        return AcceptanceSplit(families.is_try_MC.double(), super().split(families).final_M)


@pytest.mark.parametrize("mass", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("num_draws", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)
def test_plan_shares_the_mass_between_tokens(plan: NodePlan, num_draws: int, mass: float) -> None:
    for flavour in ("generic", "sparse", "equal"):
        model = TinyModel(4, seed=num_draws, flavour=flavour)
        trees = delayed_trees(model, Expansion(0, num_draws, 1))
        given = given_by(plan, model, trees, mass).to_tokens
        assert given == pytest.approx(mass * model.target(()), abs=EXACT)


def test_plan_accepting_all_drafts_gives_wrong_shares() -> None:
    model = TinyModel(4, seed=1)
    given = given_by(AcceptsAlways(), model, delayed_trees(model, Expansion(0, 1, 1)), 1.0).to_tokens
    assert np.abs(given - model.target(())).max() > 1e-2


# The recursion V(A, a) of the theorem with explicit loops, and the distribution of the node at which it ends.


class Shares(NamedTuple):
    """pi(x|X) of each child in order, and pi(none|X)."""

    children: list[float]
    none: float


Pi = Callable[[Distribution, Distribution, list[int], float], Shares]


def in_order(removes: bool) -> Pi:
    def shares(target: Distribution, draft: Distribution, tokens: list[int], mass: float) -> Shares:
        left, result = 1.0, []
        for token_id in tokens:
            odds = min(1.0, mass * target[token_id] / draft[token_id])
            result.append(left * odds)
            left *= 1.0 - odds
            rest = np.maximum(mass * target - draft, 0.0)
            if rest.sum() <= 0.0:
                return Shares(result + [0.0] * (len(tokens) - len(result)), left)
            target, mass = rest / rest.sum(), rest.sum() / (rest.sum() + 1.0 - mass)
            if removes:
                draft = np.where(np.arange(len(draft)) == token_id, 0.0, draft)
                draft = draft / max(draft.sum(), 1e-300)
        return Shares(result, left * (1.0 - mass))

    return shares


def own_share(target: Distribution, draft: Distribution, tokens: list[int], mass: float) -> Shares:
    return Shares([mass * target[token_id] for token_id in tokens], 1.0 - mass)


def first_or_rest(target: Distribution, draft: Distribution, tokens: list[int], mass: float) -> Shares:
    """NaiveTree: the first draw, or a token of (p - q)+, which may be another draw."""
    taken = min(1.0, target[tokens[0]] / draft[tokens[0]])
    rest = np.maximum(target - draft, 0.0)
    named = (1.0 - taken) * rest / max(rest.sum(), 1e-300)
    named[tokens[0]] += taken
    return Shares([0.0 if x in tokens[:i] else mass * named[x] for i, x in enumerate(tokens)], 1.0 - mass)


def set_or_last(target: Distribution, draft: Distribution, tokens: list[int], mass: float) -> Shares:
    """The last child is a sample of q off the others."""
    *fixed, sample = tokens
    off_set = draft.copy()
    off_set[fixed] = 0.0
    off_set /= off_set.sum()
    taken = min(1.0, mass * target[sample] / off_set[sample])
    spread = np.maximum(mass * target - off_set, 0.0).sum() + 1.0 - mass
    rate = (1.0 - taken) / spread if spread > 0.0 else 0.0
    return Shares([*(rate * mass * target[x] for x in fixed), taken], rate * (1.0 - mass))


def recursion(model: TinyModel, drawn: DrawnTree, pi: Pi, tries, node: int, mass: float, is_top_down: bool) -> dict[int, float]:
    """Return P(path ends at v) for V(node, mass). The remainder to 1 is the probability of rejection."""
    context, children = drawn.contexts[node], list(tries[node])
    tokens = [drawn.tree.token_ids[child] for child in children]
    shares = pi(model.target(context), model.draft(context), tokens, mass) if tokens else Shares([], 1.0 - mass)
    ends: dict[int, float] = {}
    left, reach = 1.0, 1.0
    for child, share in zip(children, shares.children):
        handed = 1.0 if is_top_down else share / max(left, 1e-300)
        below = recursion(model, drawn, pi, tries, child, handed, is_top_down)
        for end, probability in below.items():
            ends[end] = ends.get(end, 0.0) + (share if is_top_down else reach) * probability
        reach *= 1.0 - sum(below.values())
        left -= share
    ends[node] = left if is_top_down else reach * (1.0 - shares.none / max(left, shares.none, 1e-300))
    return ends


CASES: dict[str, Pi] = {
    "traversal": in_order(removes=True),
    "rrsw": in_order(removes=True),
    "block": in_order(removes=True),
    "naive": in_order(removes=True),
    "specinfer": in_order(removes=False),
    "naive_tree": first_or_rest,
    "nss": own_share,
    "hu": set_or_last,
    "univer": set_or_last,
}


@pytest.mark.parametrize("name", CASES)
def test_two_phases_end_where_the_recursion_ends(name: str) -> None:
    rule, pi = RULES[name], CASES[name]
    is_top_down = isinstance(rule.direction, TopDown)
    for seed, shape in itertools.product(range(2), [Expansion(1, 2, 2), Expansion(0, 3, 1), Expansion(3, 1, 0)]):
        model = TinyModel(3, seed)
        batch = batch_of(model, delayed_trees(model, shape))
        stop_N = outcomes_of(rule, batch).stop_N.tolist()
        for offset, drawn in zip(batch.forest.offsets, batch.trees):
            ends = recursion(model, drawn, pi, rule.plan.tries(drawn.tree), 0, 1.0, is_top_down)
            assert [stop_N[offset + v] for v in range(drawn.tree.num_nodes)] == pytest.approx(
                [ends.get(v, 0.0) for v in range(drawn.tree.num_nodes)], abs=EXACT
            )


def test_the_recursion_of_another_direction_ends_elsewhere() -> None:
    model = TinyModel(3, seed=0)
    batch = batch_of(model, delayed_trees(model, Expansion(3, 1, 0)))
    bottom_up, top_down = (outcomes_of(rule_of(TRAVERSAL.plan, way), batch).stop_N for way in (BottomUp(), TopDown()))
    assert (bottom_up - top_down).abs().max() > 1e-2


def test_one_path_equals_published_block_verification() -> None:
    """arXiv 2403.10444: h_i = S_i / (S_i + 1 - w_i), h_n = w_n; the largest i with u_i <= h_i is kept."""
    model = TinyModel(4, seed=9)
    batch = batch_of(model, delayed_trees(model, Expansion(3, 1, 0)))
    stop_N = outcomes_of(BLOCK, batch).stop_N
    assert torch.equal(stop_N, outcomes_of(TRAVERSAL, batch).stop_N)
    for offset, drawn in zip(batch.forest.offsets, batch.trees):
        weight, keeps = 1.0, []
        for depth, context in enumerate(drawn.contexts):
            if depth:
                before = drawn.contexts[depth - 1]
                weight = min(1.0, weight * model.target(before)[context[-1]] / model.draft(before)[context[-1]])
            rest = np.maximum(weight * model.target(context) - model.draft(context), 0.0).sum()
            keeps.append(weight if depth == 3 else rest / (rest + 1.0 - weight))
        expected = [keep * np.prod([1.0 - later for later in keeps[i + 1 :]]) for i, keep in enumerate(keeps)]
        assert stop_N[offset : offset + 4].tolist() == pytest.approx(expected, abs=EXACT)


def efficiencies(model: TinyModel, shape: Expansion) -> dict[str, float]:
    """Return E[tau + 1] of every rule over all trees."""
    batch = batch_of(model, delayed_trees(model, shape))
    depths = torch.tensor([depth for drawn in batch.trees for depth in drawn.tree.depths])
    weights = torch.tensor([drawn.probability for drawn in batch.trees for _ in drawn.contexts])
    return {name: float((outcomes_of(rule, batch).stop_N * weights * (depths + 1)).sum()) for name, rule in ON_DELAYED.items()}


def test_block_verification_is_best_on_one_path() -> None:
    for seed in range(5):
        efficiency = efficiencies(TinyModel(3, seed), Expansion(3, 1, 0))
        assert efficiency["block"] == pytest.approx(efficiency["traversal"], abs=EXACT)
        assert efficiency["block"] >= max(efficiency.values()) - EXACT
        assert efficiency["block"] > efficiency["naive"] + 1e-3


def test_passed_mass_commits_more_than_kept_mass() -> None:
    """For the same plan bottom-up beats top-down, on every model tried."""
    for seed, shape in itertools.product(range(3), [Expansion(1, 2, 2), Expansion(0, 2, 2)]):
        efficiency = efficiencies(TinyModel(3, seed), shape)
        for bottom_up, top_down in [("block", "naive"), ("traversal", "rrsw"), ("gbv", "tournament")]:
            assert efficiency[bottom_up] > efficiency[top_down]


def test_one_path_rules_ignore_branches() -> None:
    """Only drafts on the first path count: a trunk of 1 and branches of 2 are a path of 3."""
    model = TinyModel(3, seed=3)
    branched, path = efficiencies(model, Expansion(1, 2, 2)), efficiencies(model, Expansion(3, 1, 0))
    for name in ("naive", "block"):
        assert branched[name] == pytest.approx(path[name], abs=EXACT)
    for name in ("naive_tree", "traversal"):  # the mutants: these use the other branch
        assert branched[name] > path[name] + 1e-3
