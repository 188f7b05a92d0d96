"""Local plans one node at a time, and the two phases against the recursion and the papers' own formulas."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.tree import Expansion
from engine.verify.directions import BottomUp, TopDown, in_turn
from engine.verify.masses import Case
from engine.verify.plans import Families, LocalPlan, Naive, Split, WithoutReplacement, WithReplacement
from tests.enumeration import DrawnTree, Law, TinyModel, batch_of, delayed_trees
from tests.model.verify.rules_under_test import EXACT, NSS, SPECINFER, TRAVERSAL, outcomes_of, rule_of

PLANS: list[LocalPlan] = [WithoutReplacement(), WithReplacement(), Naive()]


class AcceptsAlways(WithReplacement):
    """A mutant that takes whatever was drafted."""

    def split(self, families: Families) -> Split:
        return Split(families.is_try_MC.double(), super().split(families).final_M)


def given_to_tokens(plan: LocalPlan, model: TinyModel, trees: list[DrawnTree], mass: float) -> tuple[Law, float]:
    """Return sum_X Q(X) pi(y|X) for every token y, and the part of it that goes to drafted children."""
    batch = batch_of(model, trees)
    case = Case.of(batch.forest, batch.target_laws_NV, plan)
    roots = case.layout.level(batch.forest.offsets[:-1])
    masses_P = torch.full((case.layout.dummy + 1,), mass, dtype=torch.float64)
    families = case.families(roots, masses_P)
    split = plan.split(families)
    shares_MC, extra_MV = in_turn(split.tried_MC), case.extra_weights(roots, masses_P)
    refused_M = (1.0 - split.tried_MC).prod(-1) * split.final_M
    given_MV = refused_M[:, None] * extra_MV / extra_MV.sum(-1, keepdim=True)
    given_MV.scatter_add_(1, families.tokens_MC, shares_MC)
    first = {batch.forest.offsets[b]: drawn.probability for b, drawn in enumerate(trees)}
    probability_M = torch.tensor([first[node] for node in roots.nodes_M.tolist()], dtype=torch.float64)
    return (probability_M @ given_MV).numpy(), float(probability_M @ shares_MC.sum(-1))


@pytest.mark.parametrize("mass", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("num_draws", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)
def test_a_plan_gives_each_token_its_share_of_the_mass(plan: LocalPlan, num_draws: int, mass: float) -> None:
    for flavour in ("generic", "sparse", "equal"):
        model = TinyModel(4, seed=num_draws, flavour=flavour)
        trees = delayed_trees(model, Expansion(0, num_draws, 1))
        given, _ = given_to_tokens(plan, model, trees, mass)
        assert given == pytest.approx(mass * model.target(()), abs=EXACT)


def test_a_plan_that_takes_every_draft_gives_wrong_shares() -> None:
    model = TinyModel(4, seed=1)
    given, _ = given_to_tokens(AcceptsAlways(), model, delayed_trees(model, Expansion(0, 1, 1)), 1.0)
    assert np.abs(given - model.target(())).max() > 1e-2


def optimum(model: TinyModel, num_draws: int, mass: float) -> float:
    """Return alpha*(a) = min over H of a p(H) + 1 - q(H)^k, H a prefix of the tokens in falling q / p (arXiv 2502.18779)."""
    target, draft = model.target(()), model.draft(())
    order = np.argsort(-draft / target)
    prefixes = [order[:size] for size in range(len(order) + 1)]
    return float(min(mass * target[prefix].sum() + 1.0 - draft[prefix].sum() ** num_draws for prefix in prefixes))


@pytest.mark.parametrize("mass", [1.0, 0.7, 0.2])
@pytest.mark.parametrize("num_draws", [1, 2, 3])
def test_no_plan_accepts_more_than_the_optimum_and_one_draw_reaches_it(num_draws: int, mass: float) -> None:
    for seed in range(10):
        model = TinyModel(4, seed)
        trees = delayed_trees(model, Expansion(0, num_draws, 1))
        best = optimum(model, num_draws, mass)
        accepted = [given_to_tokens(plan, model, trees, mass)[1] for plan in PLANS]
        assert max(accepted) <= best + EXACT
        assert given_to_tokens(AcceptsAlways(), model, trees, mass)[1] > best or best == 1.0
        if num_draws == 1:
            assert accepted[0] == pytest.approx(best, abs=EXACT)
            assert accepted[1] == pytest.approx(best, abs=EXACT)


# The recursion V(A, a) of the theorem with explicit loops, and the law of the node at which it ends.


class Shares(NamedTuple):
    """pi(x|X) of each child in order, and pi(none|X)."""

    children: list[float]
    none: float


Pi = Callable[[Law, Law, list[int], float], Shares]


def in_order(removes: bool) -> Pi:
    def shares(target: Law, draft: Law, tokens: list[int], mass: float) -> Shares:
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


def own_share(target: Law, draft: Law, tokens: list[int], mass: float) -> Shares:
    return Shares([mass * target[token_id] for token_id in tokens], 1.0 - mass)


def recursion(model: TinyModel, drawn: DrawnTree, pi: Pi, tries, node: int, mass: float, is_top_down: bool) -> dict[int, float]:
    """Return P(path ends at v) for V(node, mass); what is missing to 1 is the probability of rejection."""
    context, children = drawn.contexts[node], list(tries[node])
    tokens = [drawn.tree.token_ids[child] for child in children]
    shares = pi(model.target(context), model.draft(context), tokens, mass)
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


CASES = {
    "traversal": (TRAVERSAL, in_order(removes=True), False),
    "rrsw": (rule_of(WithoutReplacement(), TopDown()), in_order(removes=True), True),
    "specinfer": (SPECINFER, in_order(removes=False), True),
    "nss": (NSS, own_share, True),
}


@pytest.mark.parametrize("name", CASES)
def test_two_phases_end_where_the_recursion_ends(name: str) -> None:
    rule, pi, is_top_down = CASES[name]
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
    bottom_up, top_down = (outcomes_of(rule_of(WithoutReplacement(), way), batch).stop_N for way in (BottomUp(), TopDown()))
    assert (bottom_up - top_down).abs().max() > 1e-2


def test_one_path_is_block_verification_as_its_paper_writes_it() -> None:
    """arXiv 2403.10444: h_i = S_i / (S_i + 1 - w_i), h_n = w_n; the largest i with u_i <= h_i is kept."""
    model = TinyModel(4, seed=9)
    batch = batch_of(model, delayed_trees(model, Expansion(3, 1, 0)))
    stop_N = outcomes_of(TRAVERSAL, batch).stop_N
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


def test_traversal_commits_more_than_any_other_rule_on_delayed_trees() -> None:
    """On one path nothing beats it, being Block Verification; on trees it led for every model tried."""
    for seed, shape in itertools.product(range(5), [Expansion(3, 1, 0), Expansion(1, 2, 2)]):
        model = TinyModel(3, seed)
        batch = batch_of(model, delayed_trees(model, shape))
        depths = torch.tensor([depth for drawn in batch.trees for depth in drawn.tree.depths])
        weights = torch.tensor([drawn.probability for drawn in batch.trees for _ in drawn.contexts])
        tokens_N = weights * (depths + 1)
        efficiency = {name: float((outcomes_of(rule, batch).stop_N * tokens_N).sum()) for name, (rule, _, _) in CASES.items()}
        assert max(efficiency, key=lambda name: efficiency[name]) == "traversal", efficiency
