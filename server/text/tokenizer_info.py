"""The description of a tokenizer for clients that tokenize themselves: its class, special tokens and chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class DescribedTokenizer(Protocol):
    """The part of a transformers tokenizer that is described."""

    @property
    def chat_template(self) -> Any:
        """The template, several by name, or none."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Role (`eos_token`) -> token."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Answer to GET /tokenizer_info, under the names of a tokenizer_config.json. `special_tokens`: token -> id."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    special_tokens: dict[str, int]
    chat_template: str | dict[str, str] | None


def tokenizer_info(tokenizer: DescribedTokenizer, vocab_size: int, special_tokens: Mapping[str, int]) -> TokenizerInfo:
    """Return the description of a tokenizer with `vocab_size` tokens, of which `special_tokens` are special."""
    roles = tokenizer.special_tokens_map
    return TokenizerInfo(
        tokenizer_class=getattr(tokenizer, "class_name", type(tokenizer).__name__),  # of a stored one: transformers' class
        vocab_size=vocab_size,
        bos_token=roles.get("bos_token"),
        eos_token=roles.get("eos_token"),
        unk_token=roles.get("unk_token"),
        pad_token=roles.get("pad_token"),
        special_tokens=dict(special_tokens),
        chat_template=tokenizer.chat_template,
    )
