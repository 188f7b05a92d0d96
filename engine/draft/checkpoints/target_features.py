"""The common part of checkpoints' drafters: a feature of each token of the target, stored by slot (docs/decisions/0009).

Shape key: T tokens, D target width.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine.core.step_plan import Feeding
from engine.draft.models.feature_pool import FeaturePool
from engine.kv_cache.canary import Canary, NoCanary
from engine.kv_cache.kv_cache import KVCache
from engine.model.causal_lm import CausalModel
from engine.model.hidden_states import StateTap


class FusingNetwork(Protocol):
    """A network that makes one feature of the target's states."""

    dtype: torch.dtype

    def features(self, states: Sequence[Float[Tensor, "T D"]]) -> Float[Tensor, "T W"]:
        """Return the features of T tokens, from their states after some layers."""
        ...


class FeatureDrafter:
    """Base of the drafters. It must observe the target's passes (Target.report_to).

    The states after all layers are taken before the last norm, unless `is_last_normed`.
    """

    feeding = Feeding.TARGET_FEATURES

    def __init__(
        self,
        name: str,
        network: FusingNetwork,
        width: int,
        target: CausalModel,
        after: Sequence[int],
        num_slots: int,
        canary: Canary | None,
        is_last_normed: bool = False,
    ) -> None:
        self.name = name
        self._fusing = network
        self._target, self._after, self._is_last_normed = target, after, is_last_normed
        self._pool = FeaturePool(num_slots, width, network.dtype, target.device, canary or NoCanary())
        self._tap: StateTap | None = None

    def follow(self, cache: KVCache) -> bool:
        """Observe the target's passes; return False, because they do not store features themselves."""
        del cache
        assert self._tap is None, "the target is observed already"
        self._tap = StateTap(self._target, self._after, self._is_last_normed)
        return False

    def on_pass(self, write_slots_T: Int[Tensor, " T"]) -> None:
        """Store the features of a pass of the target."""
        assert self._tap is not None, "the target is not observed"
        with torch.inference_mode():
            self._pool.write(write_slots_T, self._fusing.features(self._tap.parts()))
