"""Puts the adaptive policy together for one engine: its menu, what is counted of acceptance, and this machine's costs."""

import numpy as np

from engine.config import EngineConfig
from engine.weights import WeightsCache, default_root
from selector.cost import CostModel, Works
from selector.estimators import CountedAcceptance
from selector.menu import Menu, menu_of
from selector.policy import AdaptiveExpansion
from selector.profile import Bench, cached_profile

_DOUBT = 3.0  # a tree is left out only if it would not pay although the machine were that much kinder than its profile


def adaptive_policy(config: EngineConfig, bench: Bench) -> AdaptiveExpansion:
    """Return the policy of this configuration, with costs measured on `bench` unless this machine's are known."""
    costs = cached_profile(bench, WeightsCache(default_root())).costs()
    menu = within_reach(menu_of(config.expansion, config.verifier, config.largest_expansion), costs)
    return AdaptiveExpansion(menu, CountedAcceptance(menu), costs, config.expansion)


def within_reach(menu: Menu, costs: CostModel) -> Menu:
    """Return the menu without what could never pay: not for one sequence alone, and though every level were accepted."""
    nodes_M, depths_M = menu.num_nodes.astype(np.float64), menu.depths.astype(np.float64)
    works = Works(
        num_rows=1.0,
        num_tokens=1.0 + nodes_M,
        num_drawn=0.0,
        num_keys=1.0,
        num_scores=1.0,
        num_passes=depths_M,
        num_draft_tokens=nodes_M * (depths_M > 0),
    )
    seconds_M = costs.step_s(works)
    return menu.kept((depths_M + 1.0) * _DOUBT >= seconds_M / seconds_M[0])
