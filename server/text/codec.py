"""Between text and token ids: prompts, chat templates, and the strings of single tokens.

Knows the tokenizer of the served model. Does not know requests, engines or HTTP. A client's mistake is a TextError.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol, cast

from engine.weights import stored_tokenizer
from server.text.chat_text import ControlMask, strings_of, unused_mark
from server.text.control_tokens import ControlFinder, TextSegment
from server.text.detokenizer import Detokenizer
from server.text.infill import FAMILIES, infill_of
from server.text.template_variables import template_variables
from server.text.tokenizer_info import tokenizer_info
from server.text.tokenizer_thread import TokenizerThread

log = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\ufffd"
_SMILE = "\u263a"  # merges with no text after it: Code Llama's way to encode a text without a space before it
_INFILL_TOKENS = {token for family in FAMILIES for token in (*family.markers, *family.ends)}

Messages = Sequence[Mapping[str, Any]]  # as a chat template reads them
Tools = Sequence[Mapping[str, Any]]  # functions with their JSON schemas, as it reads them


class TextError(Exception):
    """The client's text cannot become a prompt."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any
    added_tokens_decoder: Mapping[int, Any]
    special_tokens_map: Mapping[str, Any]

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; with `split_special_tokens`, special tokens that it spells out are encoded as text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the tokenizer's own spelling of a token."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation, with the tools that the template shows. It reads `variables` too."""
        ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a conversation becomes a prompt: it ends where the assistant's text begins, after the last message, or inside it.

    `adds_special_tokens` adds the special tokens that the model expects around a bare text. Most templates write them themselves.
    `variables` are the client's own variables of the template, by name.
    """

    opens_answer: bool = True
    continues_last: bool = False
    adds_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token on its own: its text (U+FFFD where its bytes are no UTF-8) and its bytes.

    `name` replaces the text in log-probabilities if the client wants distinct names for tokens of the same spelling.
    """

    text: str
    raw: bytes
    name: str | None = None


class TextCodec:
    """Owns a tokenizer and the thread that must run `encode` and `encode_chat`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        vocab = tokenizer.get_vocab()
        self._byte_ids = {i: int(m[1], 16) for token, i in vocab.items() if (m := _BYTE_TOKEN.fullmatch(token))}
        specials = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._controls = {content: i for i, content in specials.items()}
        added_tokens = tokenizer.added_tokens_decoder.values()
        self._strips_before = {token.content for token in added_tokens if token.lstrip}
        self._strips_behind = {token.content for token in added_tokens if token.rstrip}
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        self.added_tokens = frozenset(added)
        self._finder = ControlFinder(self._controls)
        self._ids = set(vocab.values())
        self._text_ids = self._ids - specials.keys()
        bare = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = bare[-1:]
        self._around = _around(bare, tokenizer.encode("a", add_special_tokens=True))
        unmarked = _INFILL_TOKENS.intersection(added).difference(self._controls)  # not special, so not split by the tokenizer
        self._unmarked = re.compile(f"(?={'|'.join(map(re.escape, unmarked))})") if unmarked else None
        smile = tokenizer.encode(_SMILE, add_special_tokens=False)
        is_known = vocab.get(tokenizer.special_tokens_map.get("unk_token", "")) not in smile  # unknown characters merge
        starts = bool(smile) and (tokenizer.convert_ids_to_tokens(smile[0]) or "").startswith("▁")
        self._smile = smile if starts and is_known else None
        kinds = {token.content: (token.normalized, token.lstrip, token.rstrip) for token in added_tokens if token.special}
        examples = {kind: control for control, kind in kinds.items()}
        has_space = {
            kind: tokenizer.encode(control + "a", add_special_tokens=False)[-len(bare) :] == bare
            for kind, control in examples.items()
        }
        # The control tokens behind which the tokenizer puts its own space too.
        self._begins_behind = {control for control, kind in kinds.items() if has_space[kind]}
        self.infill = infill_of(added, self.encode_plain, self._around[0])
        self._token_texts: dict[int, TokenText] = {}
        self.longest_token_bytes = _longest_bytes(vocab)
        self.info = tokenizer_info(tokenizer, len(vocab), self._controls)
        self.template_variables = template_variables(tokenizer.chat_template)
        self.thread = TokenizerThread()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a bare prompt, with the special tokens that the model expects around it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def encode_more(self, text: str, begins: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, without special tokens around it. The tokenizer's own space is before it if it `begins`."""
        return tuple(self._ids_of(text, begins))

    def encode_plain(self, text: str, begins: bool) -> tuple[int, ...]:
        """Return the ids of a text. Spellings of control tokens in it stay text. The tokenizer's own space comes before it if it
        `begins` a text.
        """
        cuts = [match.start() + 1 for match in self._unmarked.finditer(text)] if self._unmarked else []
        pieces = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        ids = [self._plain_ids(piece, begins and not at) for at, piece in enumerate(pieces)]
        return tuple(chain.from_iterable(ids))

    def _plain_ids(self, text: str, begins: bool) -> list[int]:
        return self._ids_of(text, begins, split_special_tokens=True)

    def _ids_of(self, text: str, begins: bool, split_special_tokens: bool = False) -> list[int]:
        encode = partial(self._tokenizer.encode, add_special_tokens=False, split_special_tokens=split_special_tokens)
        if begins or self._smile is None:
            return encode(text)
        return encode(_SMILE + text)[len(self._smile) :]

    def encode_chat(self, messages: Messages, form: ChatForm = ChatForm(), tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation. Raises TextError with the template's reason."""
        mask = ControlMask([*messages, *tools, form.variables], self._finder)
        masked = replace(form, variables=mask.masked(form.variables))
        prompt = self._rendered([mask.masked(message) for message in messages], masked, [mask.masked(tool) for tool in tools])
        if mask.is_needed:
            ids, begins = [], True
            for part in self._stripped(mask.parts(prompt)):
                ids += self._part_ids(part, begins)
                begins = part.text in self._begins_behind
        else:
            ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        before, after = self._around if form.adds_special_tokens else ((), ())
        return (*before, *ids, *after)

    def rendered(self, messages: Messages, tools: Tools = ()) -> str:
        """Return a conversation rendered by the chat template, with no prompt for an answer. Raises TextError with its reason."""
        return self._from_template(list(map(dict, messages)), list(map(dict, tools)), False, {})

    def _rendered(self, conversation: list[dict[str, Any]], form: ChatForm, tools: list[dict[str, Any]]) -> str:
        if not form.continues_last:
            return self._from_template(conversation, tools, form.opens_answer, form.variables)
        # The template may write any text after the last message, even the message again: a mark shows where it ends.
        mark = unused_mark(strings_of([*conversation, *tools, form.variables]))
        *earlier, last = conversation
        if "content" not in last or "tool_calls" in last:
            raise TextError("the last message ends in calls of tools, so it cannot be continued")
        text = self._from_template([*earlier, {**last, "content": last["content"] + mark}], tools, False, form.variables)
        if text.count(mark) != 1:
            raise TextError("the model's chat template does not write the last message once, so it cannot be continued")
        return text.partition(mark)[0]

    def _from_template(
        self, conversation: list[dict[str, Any]], tools: list[dict[str, Any]], opens_answer: bool, variables: Mapping[str, Any]
    ) -> str:
        if not self._tokenizer.chat_template:
            raise TextError("this model has no chat template; use /v1/completions")
        if taken := variables.keys() & self._tokenizer.special_tokens_map.keys():
            raise TextError(f"chat_template_kwargs: {min(taken)} is a special token of this model")
        try:
            return self._tokenizer.apply_chat_template(
                conversation, tools or None, add_generation_prompt=opens_answer, tokenize=False, **variables
            )
        except Exception as error:  # an operation in a template may raise any error
            raise TextError(f"the model's chat template refuses these messages: {error}") from error

    def _stripped(self, parts: Sequence[TextSegment]) -> list[TextSegment]:
        """Return the parts without the space beside control tokens that belongs to them."""
        texts = [part.text for part in parts]
        for at, part in enumerate(parts):
            if part.is_control and at and part.text in self._strips_before:
                texts[at - 1] = texts[at - 1].rstrip()
            if part.is_control and at + 1 < len(parts) and part.text in self._strips_behind:
                texts[at + 1] = texts[at + 1].lstrip()
        return [TextSegment(text, part.is_control) for text, part in zip(texts, parts, strict=True) if text]

    def _part_ids(self, part: TextSegment, begins: bool) -> list[int]:
        return [self._controls[part.text]] if part.is_control else self._plain_ids(part.text, begins)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's own spelling of each token; an id that is no token has an empty one."""
        return [self._tokenizer.convert_ids_to_tokens(i) or "" for i in token_ids]

    def decode(self, token_ids: Sequence[int], skips_special: bool = True) -> str:
        """Return the text of all ids at once. Special tokens are left out or spelled out. Ids that are no tokens have no text."""
        kept = self._kept_ids(skips_special)
        return self._decode([i for i in token_ids if i in kept])

    def has_text(self, token_ids: Sequence[int], skips_special: bool = True) -> bool:
        """Return whether any id is not left out of the text of `decode`."""
        return not self._kept_ids(skips_special).isdisjoint(token_ids)

    def _kept_ids(self, skips_special: bool) -> set[int]:
        return self._text_ids if skips_special else self._ids

    def detokenizer(self, skips_special: bool = True, kept: Iterable[str] = (), begins: bool = True) -> Detokenizer:
        """Return a new detokenizer. Its pieces add up to the result of `decode`, plus the special tokens that are `kept`.

        Without `begins` its text follows another: a space at its beginning is not stripped.
        """
        text_ids = self._kept_ids(skips_special)
        kept_ids = {self._controls[token] for token in kept if token in self._controls}
        context = () if begins else self._anchor
        return Detokenizer(self._decode, text_ids | kept_ids if kept_ids else text_ids, self._byte_ids, context)

    def token_text(self, token_id: int) -> TokenText:
        """Return the text and bytes of one token inside a text; special tokens are spelled out."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._find_token_text(token_id)
        return self._token_texts[token_id]

    def named_token_text(self, token_id: int) -> TokenText:
        """Return the text and bytes of one token, with a name that no other token has."""
        return replace(self.token_text(token_id), name=f"token_id:{token_id}")

    def _find_token_text(self, token_id: int) -> TokenText:
        if token_id in self._byte_ids:
            raw = bytes([self._byte_ids[token_id]])
            return TokenText(raw.decode("utf-8", "replace"), raw)
        # Some decoders strip a leading space from their input. After the anchor token, the token keeps its own space.
        text = self._decode([*self._anchor, token_id])[len(self._decode(self._anchor)) :]
        if _REPLACEMENT in text:
            return TokenText(text, _byte_level_bytes(self._tokenizer.convert_ids_to_tokens(token_id) or "") or text.encode())
        return TokenText(text, text.encode("utf-8", "replace"))


def _byte_level_table() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte, inverted (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes | None:
    """Return the bytes that a byte-level token encodes; None if it is not spelled that way."""
    if all(char in _BYTE_LEVEL for char in token):
        return bytes(_BYTE_LEVEL[char] for char in token)
    return None


def _longest_bytes(vocab: Iterable[str]) -> int:
    """Return the bytes of text that the longest token can represent, at most."""
    byte_level = [_byte_level_bytes(token) for token in vocab]
    num_odd = sum(raw is None for raw in byte_level)  # added tokens may be spelled as they are
    if num_odd * 2 < len(byte_level):
        return max(len(raw or token.encode()) for raw, token in zip(byte_level, vocab, strict=True))
    return max(len(token.encode()) for token in vocab)


def _around(bare: list[int], whole: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer adds before and after a text whose ids are `bare`."""
    at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return tuple(whole[:at]), tuple(whole[at + len(bare) :])


def load_tokenizer(folder: str) -> Tokenizer:
    """Return the tokenizer of a weights folder. Slow the first time, when it is stored in the cache."""
    return cast(Tokenizer, stored_tokenizer.load_tokenizer(Path(folder)))
