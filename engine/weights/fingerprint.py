"""The fingerprint of a model: what a drafter that was made for it must find again; and of one file of weights.

Small enough for the metadata of a drafter's file, under `target_fingerprint` of its recipe. Knows files, no tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import WeightsError
from engine.weights.facts import read_facts
from engine.weights.vocabulary import digest_of, read_vocabulary

RECIPE_KEY = "target_fingerprint"
_SAMPLE_BYTES = 1024  # of every tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Sizes of a model and digests of its vocabulary and of its weights.

    `tokenizer` covers every token's string and id, `special_tokens` which of them are special; `num_tokens` counts them all,
    `vocab_size` the rows of the output. `weights` changes with any training: it covers names, types and shapes of all tensors
    and a kilobyte of each.
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
        """Read what `as_text` wrote; raise ValueError if it is something else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"{text!r} is no fingerprint of a model") from error


def fingerprint(folder: Path) -> Fingerprint:
    """Return the fingerprint of a model folder, in seconds. Raises WeightsError."""
    facts, vocabulary = read_facts(folder), read_vocabulary(folder)
    return Fingerprint(
        tokenizer=vocabulary.tokens_digest,
        num_tokens=len(vocabulary.tokens),
        vocab_size=facts.vocab_size,
        special_tokens=vocabulary.special_digest,
        width=facts.width,
        num_layers=facts.num_layers,
        weights=_weights_digest(folder),
    )


def _weights_digest(folder: Path) -> str:
    """Return a digest that does not depend on how the tensors lie in files."""
    try:
        parts = sorted(part for path in folder.glob("*.safetensors") for part in _tensor_parts(path))
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"the weights of {folder} cannot be read: {error}") from error
    return digest_of(parts)


def tensors_digest(path: Path) -> str:
    """Return a digest of one safetensors file's tensors; raise OSError, ValueError or KeyError if it is none."""
    return digest_of(sorted(_tensor_parts(path)))


def _tensor_parts(path: Path) -> Iterator[bytes]:
    """Yield a description and a sample, from the middle, of each tensor of a safetensors file.

    The file is an 8-byte length (little-endian), that many bytes of JSON, and the tensors, whose offsets count from there.
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
