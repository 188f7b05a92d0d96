"""Builds the adaptive policy of an engine: its menu, its estimator of acceptance and the costs of this machine."""

import logging

from engine.core.config import EngineConfig
from engine.core.policy import ExpansionPolicy, RootSource
from engine.weights import WeightsCache, default_root
from selector.acceptance import CountedAcceptance, Estimator
from selector.cost import CostModel
from selector.guard import GuardedPolicy
from selector.menu import Menu, menu_for_all
from selector.network.net_estimator import loaded_estimator
from selector.policy import AdaptiveExpansion
from selector.profile import Bench, cached_profile

_logger = logging.getLogger(__name__)


def adaptive_policy(config: EngineConfig, bench: Bench, roots: RootSource) -> ExpansionPolicy:
    """Return the policy of this configuration, with cached costs or costs measured on `bench`.

    Raises UnusableSelector, or ValueError for the name of another policy.
    """
    if config.policy != "adaptive":
        raise ValueError(f"unknown policy {config.policy!r}; known: plain, fixed, adaptive")
    menu = menu_for_all(config.expansion, config.verifier, config.largest_expansion)
    estimator, costs = estimator_of(config, menu, roots), profiled_costs(bench, config.is_restart)
    return GuardedPolicy(AdaptiveExpansion(menu, estimator, costs), config.expansion)


def estimator_of(config: EngineConfig, menu: Menu, roots: RootSource) -> Estimator:
    """Return the estimator: the configured network, or counts; raise UnusableSelector."""
    return CountedAcceptance(menu) if config.selector is None else loaded_estimator(config.selector, config.head, menu, roots)


def profiled_costs(bench: Bench, is_hurried: bool = False) -> CostModel:
    """Return a cost model with the profile of this machine, or with generic costs if profiling fails.

    If `is_hurried`, a cached profile of a disturbed measurement is used.
    """
    try:
        costs = cached_profile(bench, WeightsCache(default_root()), is_hurried).costs()
    except Exception:
        _logger.exception("this machine cannot be profiled: the policy begins with generic costs and learns from each step")
        costs = CostModel()
    costs.longest_runs_s = bench.longest_runs_s
    return costs
