"""The vocabulary of a model folder: the string of each token id, and the special tokens.

It parses the tokenizer's files, because a comparison needs no working tokenizer.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.errors import WeightsError
from engine.weights.pretrained import load_tokenizer

# Parts of `tokenizer.json` that decide how text is split, besides the vocabulary.
_SPLITTING = ("normalizer", "pre_tokenizer")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Strings by token id, and the ids of special tokens. `splitting` is a digest of the rules that split text into tokens.

    Strings that only pad a vocabulary to a round size, such as `[PAD151700]` in GGUF files, are left out.
    """

    tokens: Mapping[int, str]
    special_ids: frozenset[int]
    splitting: str

    @property
    def tokens_digest(self) -> str:
        """Sixteen characters that change when a token or its id does."""
        return digest_of(f"{token_id}:{token!r}\n".encode() for token_id, token in sorted(self.tokens.items()))

    @property
    def special_digest(self) -> str:
        """Sixteen characters that change with the set of special tokens."""
        return digest_of(f"{token_id}\n".encode() for token_id in sorted(self.special_ids))


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of a model folder; raise WeightsError if its tokenizer cannot be read."""
    try:
        content = _tokenizer_json(folder)
        model = content["model"]
        added = {token["id"]: token for token in content.get("added_tokens", ())} | _added_by_configuration(folder)
        tokens = _tokens(model["vocab"]) | {token_id: token["content"] for token_id, token in added.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"the tokenizer of {folder} cannot be read: {type(error).__name__}: {error}") from error
    return Vocabulary(
        tokens={token_id: token for token_id, token in tokens.items() if token != f"[PAD{token_id}]"},
        special_ids=frozenset(token_id for token_id, token in added.items() if token.get("special", False)),
        splitting=digest_of(json.dumps(part, sort_keys=True).encode() for part in _splitting(content)),
    )


def digest_of(parts: Iterable[bytes]) -> str:
    """Return sixteen hexadecimal characters of the parts' SHA-256."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()[:16]


def _tokenizer_json(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if path.is_file():
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    return json.loads(load_tokenizer(folder).backend_tokenizer.to_str())  # type: ignore[no-any-return]


def _tokens(vocab: Any) -> dict[int, str]:
    """Return strings by id. Most models map strings to ids; Unigram lists strings with scores."""
    if isinstance(vocab, list):
        return {token_id: token for token_id, (token, _) in enumerate(vocab)}
    return {token_id: token for token, token_id in vocab.items()}


def _added_by_configuration(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the tokens of tokenizer_config.json, which transformers adds to the tokens of tokenizer.json."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    return {int(token_id): token for token_id, token in json.loads(path.read_bytes()).get("added_tokens_decoder", {}).items()}


def _splitting(content: Mapping[str, Any]) -> list[Any]:
    """Return the rules that split text. Merges are pairs in new files, `first second` in old files; Unigram splits by scores."""
    model = content["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    scores = model["vocab"] if isinstance(model["vocab"], list) else None
    return [merges, scores, *(content.get(name) for name in _SPLITTING)]
