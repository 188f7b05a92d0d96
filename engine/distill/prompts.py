"""Draws prompts from a grammar of templates and fillers, deterministically by seed."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from engine.distill.corpus import TEMPERATURES

_SLOT = re.compile(r"\{(\w+)\}")
_Texts = Annotated[list[str], msgspec.Meta(min_length=1)]


class _File(msgspec.Struct):
    templates: dict[str, _Texts]
    fillers: dict[str, _Texts]
    weights: dict[str, int]


def draw_in_turn(grammars: Sequence["PromptGrammar"], count: int, seed: int) -> list[str]:
    """Return `count` prompts, taken from the grammars in turn; raise ValueError if a grammar has too few.

    A turn has as many prompts as there are temperatures, so that each grammar's texts have all temperatures.
    """
    turns = [index // len(TEMPERATURES) % len(grammars) for index in range(count)]
    drawn = [iter(grammar.draw(turns.count(number), seed)) for number, grammar in enumerate(grammars)]
    return [next(drawn[number]) for number in turns]


class PromptGrammar:
    """Templates by kind, the kinds' weights, and fillers for the {names} in templates."""

    def __init__(self, templates: Mapping[str, Sequence[str]], fillers: Mapping[str, Sequence[str]], weights: Mapping[str, int]):
        self._templates, self._fillers, self._weights = templates, fillers, weights
        unknown = {name for group in templates.values() for text in group for name in _SLOT.findall(text)}
        unknown -= set(fillers) | {"number", "small"}
        if unknown or set(weights) != set(templates):
            raise ValueError(f"the grammar lacks fillers {sorted(unknown)} or has kinds without templates and weights")

    @classmethod
    def load(cls, path: Path, weights: Mapping[str, int] | None = None) -> "PromptGrammar":
        """Read a YAML file with `templates`, `fillers` and `weights`; raise ValueError for another file.

        The argument's weights replace the file's, for kinds in the file.
        """
        try:
            parts = msgspec.convert(yaml.safe_load(path.read_text()), _File)
        except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is no grammar: {str(error).splitlines()[0]}") from error
        given = {kind: weight for kind, weight in (weights or {}).items() if kind in parts.templates}
        return cls(parts.templates, parts.fillers, {**parts.weights, **given})

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of prompts."""
        return frozenset(self._weights)

    def draw(self, count: int, seed: int) -> list[str]:
        """Return `count` different prompts; raise ValueError if the grammar has too few."""
        rng = random.Random(seed)
        kinds, weights = list(self._weights), list(self._weights.values())
        drawn: dict[str, None] = {}
        for _ in range(100 * count):
            if len(drawn) == count:
                break
            template = rng.choice(self._templates[rng.choices(kinds, weights)[0]])
            drawn[_SLOT.sub(lambda slot: self._filled(slot[1], rng), template)] = None
        if len(drawn) < count:
            raise ValueError(f"the grammar has fewer than {count} prompts")
        return list(drawn)

    def _filled(self, name: str, rng: random.Random) -> str:
        if name == "number":
            return str(rng.randint(11, 960))
        if name == "small":
            return str(rng.randint(2, 12))
        return rng.choice(self._fillers[name])
