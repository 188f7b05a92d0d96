"""Tokenizers without transformers, whose import takes seconds and hundreds of megabytes.

transformers builds a folder's tokenizer from several files, by rules of its own for many models. So transformers builds it once,
in a process of its own, and the result is stored in the cache. The result is the JSON of the tokenizers library, with the
additions of transformers. A stored tokenizer must give the ids and texts of transformers for sample texts. A tokenizer that works
otherwise, for example in Python, is loaded by transformers as before.

    {"version": ..., "digest": ..., "class_name": ..., "special_tokens_map": ..., ...}     one line
    {"version":"1.0","truncation":null, ... }                                              the tokenizers library's

Run as a program, this module stores the tokenizer of a folder.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.utils.one_line import one_line
from engine.utils.progress_bar import long_work
from engine.weights import pretrained
from engine.weights.cache import WeightsCache, default_root
from engine.weights.chat_template import rendered
from engine.weights.separate_process import reported, run_apart

_logger = logging.getLogger(__name__)

_VERSION = 1  # of the file's form
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".merges")  # files that tokenizers are made of
# Methods that a class of transformers may replace. With its own, only transformers can run it.
_METHODS = (
    *("encode", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "get_vocab", "__len__"),
    *("apply_chat_template", "get_chat_template", "added_tokens_decoder", "special_tokens_map", "set_truncation_and_padding"),
    "_get_padding_truncation_strategies",
)
_SAMPLES = (
    "",
    "Hello, world! It's 12345.67 — naïve café,\n\n\ttabs  and   spaces ",
    " leading <s>special</s><|im_end|>\r\n<unk>",
    "def f(x):\n    return x ** 2  # 日本語 текст 😀 ﷺ \u200d e\u0301",
)
_CHAT = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "1 + 1?"})


@dataclass(frozen=True, slots=True)
class _Facts:
    """The additions of transformers to the tokenizers library's JSON. `reason`: why only transformers can run the tokenizer."""

    class_name: str
    special_tokens_map: Mapping[str, str]
    chat_template: Any
    split_special_tokens: bool
    reason: str | None = None


class StoredTokenizer:
    """A tokenizer with the methods of transformers' that the server calls, and with their results."""

    def __init__(self, backend: Tokenizer, facts: _Facts) -> None:
        self.backend_tokenizer, self._facts = backend, facts
        backend.no_truncation()
        backend.no_padding()

    @property
    def class_name(self) -> str:
        """The name of transformers' class."""
        return self._facts.class_name

    @property
    def chat_template(self) -> Any:
        """The template, several by name, or None."""
        return self._facts.chat_template

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Role (`eos_token`) -> token."""
        return self._facts.special_tokens_map

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> added token."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        """Return the number of tokens, added tokens included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of `text`; with `split_special_tokens`, special tokens that it spells out are encoded as text."""
        backend = self.backend_tokenizer
        splits = self._facts.split_special_tokens if split_special_tokens is None else split_special_tokens
        if backend.encode_special_tokens != splits:
            backend.encode_special_tokens = splits
        ids: list[int] = backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of ids."""
        if clean_up_tokenization_spaces:
            raise ValueError("spaces are decoded as they are")
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the tokenizer's own spelling of a token."""
        return self.backend_tokenizer.id_to_token(ids)

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the template, of several the one for tools or the default; raise ValueError if there is none."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template}
        if chat_template is not None:
            return str(named.get(chat_template, chat_template))
        wanted = "tool_use" if tools is not None and "tool_use" in named else "default"
        if named.get(wanted) is None:
            raise ValueError(f"of the chat templates {sorted(named)} none is the default")
        return str(named[wanted])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation. Raises jinja2's TemplateError, TypeError and ValueError."""
        if tokenize:
            raise ValueError("a conversation is rendered first, and encoded by parts")
        return rendered(
            self.get_chat_template(chat_template, tools),
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )

    def as_bytes(self) -> bytes:
        """Return the stored form."""
        return _as_bytes(self._facts, self.backend_tokenizer.to_str().encode())

    @classmethod
    def from_bytes(cls, stored: bytes) -> "StoredTokenizer | None":
        """Return the tokenizer of a stored form, None if only transformers can run it; raise ValueError for another file."""
        first, _, backend = stored.partition(b"\n")
        found = json.loads(first)
        if not isinstance(found, dict) or found.pop("version", None) != _VERSION:
            raise ValueError(f"no stored tokenizer of version {_VERSION}")
        if found.pop("digest", None) != _digest(json.dumps(found, sort_keys=True).encode(), backend):
            raise ValueError("its digest differs")
        facts = _Facts(**found)
        return None if facts.reason is not None else cls(Tokenizer.from_str(backend.decode()), facts)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


def _as_bytes(facts: _Facts, backend: bytes) -> bytes:
    found = asdict(facts)
    digest = _digest(json.dumps(found, sort_keys=True).encode(), backend)
    return json.dumps({"version": _VERSION, "digest": digest, **found}, sort_keys=True).encode() + b"\n" + backend


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder: the stored one, made first if it is missing, or transformers' own.

    Raises WeightsError if it cannot be read, UnsupportedModel if it needs code of the folder.
    """
    try:
        found = _stored(folder, WeightsCache(default_root()))
    except OSError as error:
        _logger.warning("the tokenizer of %s cannot be stored: %s", folder, one_line(error))
        found = None
    return pretrained.load_tokenizer(folder) if found is None else found


def _stored(folder: Path, cache: WeightsCache) -> StoredTokenizer | None:
    """Return the stored tokenizer; None if only transformers can run it. A damaged file is made again."""
    entry = cache.tokenizer(_key(folder))
    for _ in range(2):
        cache.obtain(entry, lambda target, _: _store(folder, target))
        try:
            return StoredTokenizer.from_bytes(entry.read_bytes())
        except (ValueError, TypeError) as error:
            _logger.warning("%s is damaged (%s) and is made again", entry, one_line(error))
            entry.unlink(missing_ok=True)
    return None


def _key(folder: Path) -> str:
    """Return a digest of the folder's files that a tokenizer is made of, and of the libraries."""
    found = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    files = sorted(path for path in found if path.suffix in _READ and path.is_file())
    parts = [f"{_VERSION} {version('transformers')} {version('tokenizers')}".encode()]
    for path in files:
        content = path.read_bytes()
        parts.append(f"{path.relative_to(folder)} {len(content)}".encode() + hashlib.sha256(content).digest())
    return _digest(*parts)[:24]


def _store(folder: Path, target: Path) -> None:
    """Let a process of its own build and store the tokenizer, so that this one does not import transformers."""
    with long_work(f"reading the tokenizer of {folder.name}, once for all starts"):
        run_apart(__spec__.name, str(folder), str(target))


def stored_form(tokenizer: Any) -> bytes:
    """Return the stored form of transformers' tokenizer, or the reason why only transformers can run it."""
    facts = _facts(tokenizer)
    if facts.reason is None:
        form = _as_bytes(facts, tokenizer.backend_tokenizer.to_str().encode())
        copy = StoredTokenizer.from_bytes(form)
        assert copy is not None
        difference = next(_differences(copy, tokenizer), None)
        if difference is None:
            return form
        facts = _Facts(facts.class_name, {}, None, False, reason=difference)
    return _as_bytes(facts, b"")


def _facts(tokenizer: Any) -> _Facts:
    """Return the facts of transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    kind, reason = type(tokenizer), None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        reason = "it is not run by the tokenizers library"
    elif own := [name for name in _METHODS if getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None)]:
        reason = f"it has its own {', '.join(own)}"
    facts = _Facts(
        class_name=kind.__name__,
        special_tokens_map=dict(tokenizer.special_tokens_map),
        chat_template=tokenizer.chat_template,
        split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        reason=reason,
    )
    json.dumps(asdict(facts))  # raises TypeError for a value that JSON cannot hold
    return facts


def _differences(copy: StoredTokenizer, tokenizer: Any) -> Iterator[str]:
    """Yield the differences between a stored tokenizer and transformers' for sample texts."""
    texts = [*_SAMPLES, " ".join(token.content for token in copy.added_tokens_decoder.values())]
    for text in texts:
        for adds, splits in ((True, False), (False, False), (False, True)):
            options = {"add_special_tokens": adds, "split_special_tokens": splits}
            ids = copy.encode(text, **options)
            if ids != tokenizer.encode(text, **options):
                yield f"it encodes {text!r} differently"
            if copy.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
                yield f"it decodes the ids of {text!r} differently"
    if copy.get_vocab() != tokenizer.get_vocab() or len(copy) != len(tokenizer):
        yield "it has other tokens"
    if copy.chat_template and _rendered(copy) != _rendered(tokenizer):
        yield "it renders messages differently"


def _rendered(tokenizer: Any) -> str:
    """Return a rendered sample, or the template's reason for refusing it."""
    try:
        text: str = tokenizer.apply_chat_template(list(_CHAT), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001 (of any template)
        return f"{type(error).__name__}: {error}"
    return text


def main(folder: str, target: str) -> int:
    """Store the tokenizer of a folder for `_store`."""

    def work() -> str:
        Path(target).write_bytes(stored_form(pretrained.load_tokenizer(Path(folder))))
        return ""

    return reported(work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
