"""Pieces of text add up to decoding everything at once, for any ids; four plausible mistakes do not survive."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from server.text import TextCodec, Tokenizer
from tests.api.harness import completion, in_process
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import byte_fallback, byte_level

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
    return [i for part in draw(st.lists(text | anything | first_ids, max_size=5)) for i in part]


def _property(name: str, make: Callable[[TextCodec], Detokenizer]) -> Callable[[], None]:
    codec = CODECS[name]

    @given(_ids(codec))
    def pieces_add_up(ids: list[int]) -> None:
        assert "".join(_streamed(make(codec), ids)) == codec.decode(ids)

    return pieces_add_up


@pytest.mark.parametrize("name", CODECS)
def test_pieces_add_up_to_the_whole_text(name: str):
    _property(name, TextCodec.detokenizer)()


class _EmitsHalfCharacters(Detokenizer):
    def push(self, token_id: int) -> str:
        return super().push(token_id) + super().close()


class _ForgetsContext(Detokenizer):
    def _advance(self) -> None:
        super()._advance()
        self._context, self._num_context_chars = [], 0


class _KeepsSpecialTokens(Detokenizer):
    def __init__(self, decode, text_ids, byte_ids) -> None:
        super().__init__(decode, frozenset(range(_NUM_IDS)), byte_ids)


class _TrustsByteRuns(Detokenizer):
    def __init__(self, decode, text_ids, byte_ids) -> None:
        super().__init__(decode, text_ids, frozenset())


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
        return mutant(codec._decode, codec._text_ids, codec._byte_ids.keys())

    with pytest.raises(AssertionError):
        _property(name, make)()


@given(st.text(max_size=30))
@example("😀日本")
def test_valid_text_has_no_replacement_characters_and_is_never_late(text: str):
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
def test_the_text_of_a_token_is_its_part_of_a_text(name: str):
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


def test_the_test_tokenizers_are_what_the_codec_takes():
    tokenizers: list[Tokenizer] = [byte_level(), byte_fallback()]
    assert all(tokenizer.get_vocab() for tokenizer in tokenizers)
