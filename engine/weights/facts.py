"""Facts of a model from its folder's configuration, without reading weights: sizes, positions, end tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.utils.one_line import one_line
from engine.weights.errors import WeightsError
from engine.weights.stored_config import read_config


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model. `vocab_size` counts rows of the output head, which may be padded beyond the tokens.

    `max_positions` is None if the configuration has no limit.
    """

    vocab_size: int
    width: int
    num_layers: int
    max_positions: int | None
    eos_token_ids: tuple[int, ...]


def read_facts(folder: Path) -> ModelFacts:
    """Return the facts of a model folder. Raises the errors of `read_config`."""
    text = read_config(folder).get_text_config()
    try:
        return ModelFacts(
            vocab_size=int(text.vocab_size),
            width=int(text.hidden_size),
            num_layers=int(text.num_hidden_layers),
            max_positions=getattr(text, "max_position_embeddings", None) or None,
            eos_token_ids=_eos_token_ids(folder, text),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"the configuration of {folder} cannot be read: {one_line(error)}") from error


def _eos_token_ids(folder: Path, text_config: Any) -> tuple[int, ...]:
    """Return the end tokens of the generation settings, else of the configuration."""
    path = folder / "generation_config.json"
    of_settings = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    return end_tokens(of_settings, text_config.eos_token_id)


def end_tokens(of_settings: int | list[int] | None, of_configuration: int | list[int] | None) -> tuple[int, ...]:
    """Return the end tokens of the generation settings, else the end tokens of the configuration; there may be none."""
    ids = of_configuration if of_settings is None else of_settings
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
