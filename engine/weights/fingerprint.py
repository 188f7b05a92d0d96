"""Fingerprints of a model and of a file of weights. A drafter is valid for a target with the fingerprint it was made for.

A fingerprint is small enough for the metadata of a drafter's file: `target_fingerprint` of its recipe.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.weights.cache import WeightsCache, default_root
from engine.weights.errors import WeightsError
from engine.weights.facts import read_facts
from engine.weights.vocabulary import digest_of, read_vocabulary

_VERSION = 1  # of the meaning of a fingerprint
RECIPE_KEY = "target_fingerprint"
_SAMPLE_BYTES = 1024  # of every tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sizes of a model, and digests of its vocabulary and weights.

    `tokenizer` covers every token's string and id, `special_tokens` the ids of special tokens. `num_tokens` counts all tokens,
    `vocab_size` the rows of the output head. `weights` changes with any training: it covers names, types and shapes of all
    tensors, and a kilobyte of each.
    """

    tokenizer: str
    num_tokens: int
    vocab_size: int
    special_tokens: str
    width: int
    num_layers: int
    weights: str

    def as_text(self) -> str:
        """Return one line of JSON, for a recipe."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Fingerprint":
        """Return the fingerprint of a text by `as_text`; raise ValueError for another text."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"{text!r} is no fingerprint of a model") from error


def fingerprint(folder: Path) -> Fingerprint:
    """Return the fingerprint of a model folder, in seconds; from the cache if no file has changed. Raises WeightsError."""
    cache = WeightsCache(default_root())
    files = [path for path in sorted(folder.glob("*")) if path.is_file()]
    parts = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode() for path in files]
    entry = cache.fingerprint(digest_of([f"{_VERSION} {version('transformers')}\n".encode(), *parts]))
    return Fingerprint.from_text(cache.text(entry, lambda: _fingerprint(folder).as_text()))


def _fingerprint(folder: Path) -> Fingerprint:
    facts, vocabulary = read_facts(folder), read_vocabulary(folder)
    return Fingerprint(
        tokenizer=vocabulary.tokens_digest,
        num_tokens=len(vocabulary.tokens),
        vocab_size=facts.vocab_size,
        special_tokens=vocabulary.special_digest,
        width=facts.width,
        num_layers=facts.num_layers,
        weights=weights_digest(folder),
    )


def weights_digest(folder: Path) -> str:
    """Return a digest that does not depend on how tensors are distributed over files."""
    try:
        parts = sorted(part for path in folder.glob("*.safetensors") for part in _tensor_parts(path))
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"the weights of {folder} cannot be read: {error}") from error
    return digest_of(parts)


def tensors_digest(path: Path) -> str:
    """Return a digest of one safetensors file's tensors; raise OSError, ValueError or KeyError for another file."""
    return digest_of(sorted(_tensor_parts(path)))


def _tensor_parts(path: Path) -> Iterator[bytes]:
    """Yield a description of each tensor of a safetensors file, with a sample from its middle.

    The file is an 8-byte length (little-endian), that many bytes of JSON, then the tensors; offsets begin at the tensors.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, dict[str, Any]] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + header_bytes + max(begin, (begin + end - _SAMPLE_BYTES) // 2))
            sample = file.read(min(_SAMPLE_BYTES, end - begin))
            yield f"{name} {entry['dtype']} {entry['shape']} ".encode() + sample
