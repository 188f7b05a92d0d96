"""Roots on paper: their features determine, by a rule of its own, how every tree fares there."""

from collections.abc import Sequence

import numpy as np

from engine.core.policy import ROOT_SCALARS, RootFacts, SequenceView
from engine.core.tree import Expansion
from selector.acceptance import CountedAcceptance
from selector.menu import Menu, menu_of
from selector.network.examples import Examples
from selector.network.features import features_of, rule_of
from tests.selector.machine import Text, flat

MENU = menu_of(Expansion(4, 1, 0), "traversal", Expansion(4, 3, 4, "delayed_distinct"))
WIDTHS = (6, 5)  # of the target's states and of what the drafter reads


def facts_of(acceptance: Sequence[float | None], seed: int = 0) -> RootFacts:
    """Return facts from whose first state the acceptance can be read; None is a root of which nothing is known."""
    rng, count = np.random.default_rng(seed), len(acceptance)
    is_known_B = np.array([one is not None for one in acceptance], dtype=np.bool_)
    chances_B = np.array([one or 0.5 for one in acceptance])
    target_BD = rng.normal(size=(count, WIDTHS[0])).astype(np.float32)
    target_BD[:, 0] = np.log(chances_B / (1.0 - chances_B))
    scalars_BS = rng.uniform(0.0, 1.0, (count, len(ROOT_SCALARS))).astype(np.float32)
    scalars_BS[:, 0] = 5.0 * (1.0 - chances_B) + rng.normal(0.0, 1.0, count)  # the entropy shows it roughly
    draft_BW = rng.normal(size=(count, WIDTHS[1])).astype(np.float32)
    for part in (target_BD, draft_BW, scalars_BS):
        part[~is_known_B] = 0.0
    return RootFacts(is_known_B, target_BD, draft_BW, scalars_BS)


class PaperRoots:
    """A source of such facts, by request."""

    def __init__(self, acceptance: dict[str, float | None]) -> None:
        self.acceptance = acceptance
        self.is_watched = False

    def watch(self) -> None:
        self.is_watched = True

    def facts(self, request_ids: Sequence[str]) -> RootFacts:
        return facts_of([self.acceptance[request_id] for request_id in request_ids])


def view(name: str, temperature: float = 1.0) -> SequenceView:
    return Text(flat(0.5), temperature=temperature).view(name)


def examples(num_prompts: int = 30, roots: int = 8, seed: int = 0, menu: Menu = MENU, temperature: float = 1.0) -> Examples:
    """Return examples of prompts of two kinds whose roots differ a lot, for a counting that has only seen their mean."""
    rng = np.random.default_rng(seed)
    parts = []
    for prompt in range(num_prompts):
        acceptance = rng.choice([0.15, 0.5, 0.9], roots)
        counting = CountedAcceptance(menu)
        views = [view(f"{prompt}-{root}", temperature) for root in range(roots)]
        counted = np.array(counting.estimate(views).tokens)
        features = features_of(views, facts_of(list(acceptance), seed + prompt), counted, menu)
        tokens = [[Text(flat(float(one))).expected_tokens(entry) for entry in menu.entries] for one in acceptance]
        parts.append(
            Examples(
                menu,
                tuple(rule_of(one) for one in views),
                ("even" if prompt % 2 else "odd",) * roots,
                (f"p-{prompt}",) * roots,
                features.target_BD.astype(np.float16),
                features.draft_BW.astype(np.float16),
                features.scalars_BS,
                features.counted_BM,
                np.array(tokens, dtype=np.float32),
                np.tile(np.array(menu.num_nodes, dtype=np.float32), (roots, 1)),
                np.full(roots, temperature, dtype=np.float32),
                np.full(roots, 200.0, dtype=np.float32),
            )
        )
    return Examples.joined(parts)
