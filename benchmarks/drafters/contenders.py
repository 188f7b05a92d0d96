"""The contenders: a drafter with a tree, each an engine over the one copy of the target's weights.

Knows configurations and engines; no clock, no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.config import EngineConfig
from engine.core.tree import PLAIN, Expansion
from engine.core.types import Speculation
from engine.core.verifier_table import verifier_for
from engine.engine import Engine
from engine.model.causal_lm import CausalModel
from server.adaptive_engine import tool_engine

# The setting that names what a drafter is made of.
_SETTING_OF = {"model": "draft_model", "early-exit": "lens", "head": "head"}
_WITH_TEXTS = "+ngram"  # after the name of a drafter that is a model: cached text is drafted from beside it


class MissingPart(ValueError):
    """A drafter is requested without the files that it is made of."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter and the tree it fills; `none` decodes plainly. Without a tree the engine's policy chooses."""

    drafter: str
    tree: Expansion | None

    @property
    def tree_name(self) -> str:
        """The tree as it is written."""
        if self.drafter == "none":
            return str(PLAIN)
        return "policy" if self.tree is None else str(self.tree)

    def speculation(self, verifier: str) -> Speculation:
        """Return the request's options: the verifier that is preferred, or one that is exact on the tree."""
        if self.drafter == "none":
            return Speculation(is_enabled=False)
        return Speculation(expansion=self.tree, verifier=verifier if self.tree is None else verifier_for(self.tree, verifier))


PLAINLY = Contender("none", PLAIN)


def contenders_of(drafters: Sequence[str], trees: Sequence[Expansion | None]) -> list[Contender]:
    """Return plain decoding and every drafter with every tree."""
    return [PLAINLY, *(Contender(drafter, tree) for drafter in drafters if drafter != "none" for tree in trees)]


def config_of(drafter: str, base: EngineConfig, parts: Mapping[str, str | None]) -> EngineConfig:
    """Return the configuration of one drafter. `parts` are draft model, lens and head by setting. Raises MissingPart."""
    name = drafter.removesuffix(_WITH_TEXTS)
    needed = _SETTING_OF.get(name)
    if needed is not None and parts[needed] is None:
        raise MissingPart(f"drafter {drafter} needs --{needed.replace('_', '-')}")
    own: dict[str, Any] = {setting: value if setting == needed else None for setting, value in parts.items()}
    return replace(base, drafter=name, stand_in=None, cached_text=name != drafter, **own)


@dataclass
class Stable:
    """The engines of a comparison, one a drafter. Models are loaded once for all of them: that is what it owns."""

    base: EngineConfig
    parts: Mapping[str, str | None]
    _models: dict[tuple[str, str], CausalModel] = field(default_factory=dict)
    _engines: dict[str, Engine] = field(default_factory=dict)

    def engine(self, drafter: str) -> Engine:
        """Return the drafter's engine, built the first time. Raises what tool_engine raises, and MissingPart."""
        if drafter not in self._engines:
            self._engines[drafter] = tool_engine(config_of(drafter, self.base, self.parts), self._models)
        return self._engines[drafter]
