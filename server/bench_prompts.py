"""The prompts of `latebranch bench`: a YAML file of user messages by kind. Knows text only."""

from collections.abc import Sequence
from pathlib import Path

import yaml


class BenchError(Exception):
    """A mistake in what the benchmark was asked for; the message is one line."""


def read_prompts(path: Path, kinds: Sequence[str], limit: int) -> dict[str, tuple[str, ...]]:
    """Return up to `limit` messages of each of the kinds (of all, if none is named). Raises BenchError."""
    texts = _texts(path)
    unknown = [kind for kind in kinds if kind not in texts]
    if unknown:
        raise BenchError(f"{path} has no prompts of kind {', '.join(unknown)}; it has {', '.join(texts)}")
    return {kind: tuple(texts[kind][:limit]) for kind in kinds or texts}


def _texts(path: Path) -> dict[str, list[str]]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    is_kinds = isinstance(value, dict) and all(isinstance(texts, list) and texts for texts in value.values())
    if not value or not is_kinds or not all(isinstance(text, str) for texts in value.values() for text in texts):
        raise BenchError(f"{path} is no file of prompts: it must map each kind to a list of texts")
    return {str(kind): texts for kind, texts in value.items()}
