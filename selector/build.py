"""Builds the adaptive policy of an engine: its menu, its estimator of acceptance and the costs of this machine."""

import logging
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from engine.core.config import EngineConfig
from engine.core.policy import ExpansionPolicy, RootSource
from engine.weights import WeightsCache, default_root
from engine.weights.fingerprint import tensors_digest
from selector.acceptance import CountedAcceptance, Estimator
from selector.cost import CostModel
from selector.guard import GuardedPolicy
from selector.menu import Menu, menu_for_all
from selector.network.net import SelectorNet
from selector.network.net_estimator import NetEstimator
from selector.policy import AdaptiveExpansion
from selector.profile import Bench, cached_profile

_logger = logging.getLogger(__name__)


class UnusableSelector(ValueError):
    """The configured network cannot be read, or it was trained for other models or trees."""


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
    if config.selector is None:
        return CountedAcceptance(menu)
    path = Path(config.selector)
    try:
        net, recipe = SelectorNet.load(path)
        _require_head(recipe, config)
        return NetEstimator(menu, net, roots)
    except (OSError, SafetensorError, ValueError) as error:
        raise UnusableSelector(f"the selector {path.name} cannot be used: {error}") from error


def _require_head(recipe: Mapping[str, object], config: EngineConfig) -> None:
    """Raise ValueError if a network was trained with another head. Old files do not name their head and are accepted."""
    if (head := recipe.get("head")) is not None and (config.head is None or tensors_digest(Path(config.head)) != head):
        raise ValueError(f"it was trained with another head ({head}) than {Path(config.head or 'none').name}")


def profiled_costs(bench: Bench, is_hurried: bool = False) -> CostModel:
    """Return a cost model with the profile of this machine, or with generic costs if profiling fails.

    If `is_hurried`, a cached profile of a disturbed measurement is used.
    """
    try:
        return cached_profile(bench, WeightsCache(default_root()), is_hurried).costs()
    except Exception:
        _logger.exception("this machine cannot be profiled: the policy begins with generic costs and learns from each step")
        return CostModel()
