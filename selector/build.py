"""Puts the adaptive policy together for one engine: its menu, what is counted of acceptance, and this machine's costs."""

import logging

from engine.config import EngineConfig
from engine.policy import ExpansionPolicy
from engine.weights import WeightsCache, default_root
from selector.cost import CostModel
from selector.estimators import CountedAcceptance
from selector.guard import GuardedPolicy
from selector.menu import menu_of
from selector.policy import AdaptiveExpansion
from selector.profile import Bench, cached_profile

_logger = logging.getLogger(__name__)


def adaptive_policy(config: EngineConfig, bench: Bench) -> ExpansionPolicy:
    """Return the policy of this configuration, with costs measured on `bench` unless this machine's are known."""
    menu = menu_of(config.expansion, config.verifier, config.largest_expansion)
    policy = AdaptiveExpansion(menu, CountedAcceptance(menu), profiled_costs(bench), config.expansion)
    return GuardedPolicy(policy, config.expansion)


def profiled_costs(bench: Bench) -> CostModel:
    """Return a cost model that begins with this machine's prices, or with generic ones if they cannot be measured."""
    try:
        return cached_profile(bench, WeightsCache(default_root())).costs()
    except Exception:
        _logger.exception("this machine cannot be profiled: the policy begins with generic costs and learns from each step")
        return CostModel()
