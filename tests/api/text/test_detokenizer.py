"""Pieces of text add up to decoding everything at once, for any ids; four plausible mistakes do not survive."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.text.codec import TextCodec, Tokenizer
from server.text.detokenizer import Detokenizer
from tests.api.harness import completion, in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import SPECIAL, byte_fallback, byte_level

CODECS = {"byte-level": TextCodec(byte_level()), "byte-fallback": TextCodec(byte_fallback())}
_NUM_IDS = 420  # a few more than either tokenizer knows: models have padded vocabularies


def _streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces = [detokenizer.settle(i) + detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.close()]


@st.composite
def _ids(draw: st.DrawFn, codec: TextCodec) -> list[int]:
    """Draw random ids, more often than not those of text with long characters, of single bytes and special tokens."""
    text = st.text(st.sampled_from("ah e日😀é\n\ufffd"), max_size=8).map(lambda text: list(codec.encode(text)))
    anything = st.lists(st.integers(0, _NUM_IDS), max_size=6)
    first_ids = st.lists(st.integers(0, 260), max_size=6)
    emoji_bytes = st.lists(st.sampled_from(_bytes_of(codec, "😀日é")), max_size=40)
    return [i for part in draw(st.lists(text | anything | first_ids | emoji_bytes, max_size=5)) for i in part]


def _bytes_of(codec: TextCodec, text: str) -> list[int]:
    """Return the ids of the single bytes of a text."""
    by_byte = {codec.token_text(i).raw: i for i in range(_NUM_IDS) if len(codec.token_text(i).raw) == 1}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def _runs(codec: TextCodec) -> st.SearchStrategy[list[int]]:
    """Draw long runs of bytes of which few are text: whole characters cut at any byte, and bytes that belong to none."""
    smile, sun, e = (_bytes_of(codec, character) for character in "😀日é")
    parts = st.sampled_from([smile, smile[:1], smile[:3], smile[1:], smile[2:], sun, sun[:2], sun[1:], e, e[:1], e[1:]])
    return st.lists(parts, min_size=4, max_size=40).map(lambda runs: [i for run in runs for i in run])


def _property(name: str, make: Callable[[TextCodec], Detokenizer], skips_special: bool = True) -> Callable[[], None]:
    codec = CODECS[name]

    @example([0, *codec.encode_more("a the")])
    @given(_ids(codec))
    def pieces_add_up(ids: list[int]) -> None:
        assert "".join(_streamed(make(codec), ids)) == codec.decode(ids, skips_special)

    return pieces_add_up


@pytest.mark.parametrize("name", CODECS)
def test_pieces_add_up_to_the_whole_text(name: str):
    _property(name, TextCodec.detokenizer)()


@pytest.mark.parametrize("name", CODECS)
def test_pieces_with_special_tokens_add_up(name: str):
    _property(name, lambda codec: codec.detokenizer(skips_special=False), skips_special=False)()


@pytest.mark.parametrize("name", CODECS)
def test_pieces_after_a_text_add_up(name: str):
    """A text that follows another keeps the space at its beginning, which sentencepiece's decoder strips."""
    codec = CODECS[name]
    before = codec.encode_more("a")

    @given(_ids(codec))
    def pieces_add_up(ids: list[int]) -> None:
        text = "".join(_streamed(codec.detokenizer(begins=False), ids))
        assert text == codec.decode([*before, *ids]).removeprefix(codec.decode(before))

    pieces_add_up()
    assert "".join(_streamed(codec.detokenizer(begins=False), list(codec.encode_more("a the")[len(before) :]))) == " the"


@given(st.lists(st.integers(0, 330), max_size=12))
def test_special_tokens_are_spelled_like_transformers(ids: list[int]):
    assert CODECS["byte-level"].decode(ids, skips_special=False) == byte_level().decode(ids, skip_special_tokens=False)


class _SpellsBesideTheText(Detokenizer):
    """Special tokens are spelled out, but the text after them is decoded without them as context."""

    def push(self, token_id: int) -> str:
        return SPECIAL[token_id] if token_id < len(SPECIAL) else super().push(token_id)


def test_special_tokens_without_context_are_detected():
    def make(codec: TextCodec) -> Detokenizer:
        return _SpellsBesideTheText(codec._decode, codec._ids, codec._byte_ids)

    with pytest.raises(AssertionError):
        _property("byte-fallback", make, skips_special=False)()


class _EmitsHalfCharacters(Detokenizer):
    def push(self, token_id: int) -> str:
        return super().push(token_id) + super().close()


class _ForgetsContext(Detokenizer):
    def _advance(self, num_undecided: int) -> None:
        super()._advance(num_undecided)
        self._context, self._num_context_chars = [], 0


class _TakesHalfCharactersForDecided(Detokenizer):
    """The mutant of the bound: what is given up waiting for is never completed."""

    def _advance(self, num_undecided: int) -> None:
        super()._advance(0)


class _KeepsSpecialTokens(Detokenizer):
    def __init__(self, decode, text_ids, byte_ids) -> None:
        super().__init__(decode, frozenset(range(_NUM_IDS)), byte_ids)


class _TrustsByteRuns(Detokenizer):
    def __init__(self, decode, text_ids, byte_ids) -> None:
        super().__init__(decode, text_ids, {})


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (_EmitsHalfCharacters, "byte-level"),
        (_ForgetsContext, "byte-fallback"),
        (_KeepsSpecialTokens, "byte-level"),
        (_TrustsByteRuns, "byte-fallback"),
    ],
)
def test_mutants_die(mutant: type[Detokenizer], name: str):
    def make(codec: TextCodec) -> Detokenizer:
        return mutant(codec._decode, codec._text_ids, codec._byte_ids)

    with pytest.raises(AssertionError):
        _property(name, make)()


def _runs_property(name: str, make: Callable[[TextCodec], Detokenizer]) -> Callable[[], None]:
    codec = CODECS[name]

    @given(_runs(codec))
    def runs_add_up(ids: list[int]) -> None:
        assert "".join(_streamed(make(codec), ids)) == codec.decode(ids)

    return runs_add_up


@pytest.mark.parametrize("name", CODECS)
def test_invalid_byte_runs_add_up_too(name: str):
    _runs_property(name, TextCodec.detokenizer)()


def test_giving_up_on_half_characters_is_detected():
    def make(codec: TextCodec) -> Detokenizer:
        return _TakesHalfCharactersForDecided(codec._decode, codec._text_ids, codec._byte_ids)

    with pytest.raises(AssertionError):
        _runs_property("byte-level", make)()


def test_invalid_bytes_are_decoded_in_small_groups():
    """The bug: 4000 lone bytes were all pending and all decoded again at each of them, for 2.5 s on the event loop."""
    codec = CODECS["byte-level"]
    lengths: list[int] = []

    def decode(ids) -> str:
        lengths.append(len(ids))
        return codec._decode(ids)

    detokenizer = Detokenizer(decode, codec._text_ids, {})
    ids = _bytes_of(codec, "😀")[:1] * 4000
    assert "".join(_streamed(detokenizer, ids)) == codec.decode(ids) == "\ufffd" * 4000
    assert max(lengths) <= 40


@given(st.text(max_size=30))
@example("😀日本")
def test_valid_text_is_complete_and_never_late(text: str):
    """Every character is out as soon as its last byte has come."""
    codec = CODECS["byte-level"]
    detokenizer, out = codec.detokenizer(), ""
    ids = list(codec.encode(text))
    raw = b"".join(codec.token_text(i).raw for i in ids)
    assert raw.decode() == text
    so_far = b""
    for token_id in ids:
        out += detokenizer.push(token_id)
        so_far += codec.token_text(token_id).raw
        assert out.rstrip("\ufffd") == so_far.decode(errors="ignore").rstrip("\ufffd")
    assert out + detokenizer.close() == text


@pytest.mark.parametrize("name", CODECS)
def test_token_texts_join_to_the_whole(name: str):
    codec = CODECS[name]
    ids = codec.encode("hello the café 😀")
    raw = b"".join(codec.token_text(i).raw for i in ids)
    assert raw.decode().strip() == "hello the café 😀"
    assert codec.token_text(0).text == "<|end|>"


async def test_prompts_are_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []
    encode = TextCodec.encode

    def watched(codec: TextCodec, text: str) -> tuple[int, ...]:
        threads.append(threading.current_thread().name)
        return encode(codec, text)

    monkeypatch.setattr(TextCodec, "encode", watched)
    async with in_process(FakeEngine()) as client:
        await client.post("/v1/completions", json=completion(prompt=["hello", "there"]))
    assert threads == ["tokenizer_0", "tokenizer_0"]


def test_tokenizers_of_tests_satisfy_the_protocol():
    tokenizers: list[Tokenizer] = [byte_level(), byte_fallback()]
    assert all(tokenizer.get_vocab() for tokenizer in tokenizers)
