"""One sample's text, entries and counts do not depend on how its tokens are spread over events."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core.types import FinishReason, TokenEvent, TokenLogprobs
from server.generation.sample import AcceptanceCounts, Choice, Piece
from server.text.codec import TextCodec
from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopFinder
from tests.tokenizers_for_tests import byte_fallback, byte_level

CODECS = [TextCodec(byte_level()), TextCodec(byte_fallback())]


@dataclass(frozen=True)
class _Wishes:
    keeps_stop: bool = False
    skips_special: bool = True


def _choice(codec: TextCodec, stops: list[str], choice_type: type[Choice] = Choice, wishes: _Wishes = _Wishes()) -> Choice:
    return choice_type(0, codec.detokenizer(wishes.skips_special), stops, codec.token_text, 1, wishes.keeps_stop)


def _events(ids: list[int], edges: list[int], finish: FinishReason = FinishReason.LENGTH) -> list[TokenEvent]:
    """Return events whose tokens are cut at `edges`; the last carries the end."""
    bounds = [0, *sorted(min(edge, len(ids)) for edge in edges), len(ids)]
    parts = [tuple(ids[a:b]) for a, b in pairwise(bounds)]
    logprobs = [tuple(TokenLogprobs(-float(i), (i,), (-float(i),)) for i in part) for part in parts]
    last = len(parts) - 1
    return [TokenEvent("r", part, logprobs[k], finish if k == last else None) for k, part in enumerate(parts)]


def _taken(choice: Choice, events: list[TokenEvent]) -> list[Piece]:
    pieces = []
    for event in events:
        if choice.finish is None:
            pieces.append(choice.take(event))
    return pieces


def _summary(
    choice: Choice, events: list[TokenEvent]
) -> tuple[str, list[tuple[bytes, float | None, int]], int, FinishReason | None]:
    pieces = _taken(choice, events)
    entries = [(entry.token.raw, entry.logprob, entry.offset) for piece in pieces for entry in piece.entries]
    return "".join(piece.text for piece in pieces), entries, choice.num_tokens, choice.finish


def _check(choice_type: type[Choice]) -> None:
    texts = st.text("lo e日😀\n", min_size=3, max_size=12).map(lambda text: list(CODECS[0].encode(text)))
    ids = texts | st.lists(st.integers(0, 340), max_size=12)
    stops = st.lists(st.sampled_from(["l", "ll", "o", "日", "\n", "e h", "\ufffd", "<|"]), max_size=3)
    wishes = st.builds(_Wishes, st.booleans(), st.booleans())

    @settings(max_examples=200, report_multiple_bugs=False)
    @given(st.sampled_from(CODECS), ids, stops, st.lists(st.integers(0, 12), max_size=5), wishes)
    def any_events_give_the_same(codec: TextCodec, ids: list[int], stops: list[str], edges: list[int], wishes: _Wishes) -> None:
        one_each = _summary(_choice(codec, stops, choice_type, wishes), _events(ids, list(range(len(ids)))))
        others = _summary(_choice(codec, stops, choice_type, wishes), _events(ids, edges))
        assert others == one_each
        text, entries, num_tokens, _ = others
        assert len(entries) == num_tokens
        whole = codec.decode(ids, wishes.skips_special)
        assert whole.startswith(text)
        hits = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
        if not hits:
            assert text == whole
            assert num_tokens == len(ids)
        elif wishes.keeps_stop:
            assert text == whole[: min(hits)]

    any_events_give_the_same()


def test_any_events_give_the_same():
    _check(Choice)


class _LooksAtWholeEvents(Choice):
    """Searches for stop strings only when an event's tokens are all in: counts the tokens behind one."""

    def take(self, event: TokenEvent) -> Piece:
        piece = super().take(event)
        if self.is_cut:
            self.num_tokens = max(self.num_tokens, len(event.token_ids))
        return piece


class _CountsWhatIsHeldBack(Choice):
    """Offsets of entries count the characters that left in earlier events, not those that are decided."""

    def take(self, event: TokenEvent) -> Piece:
        self._num_chars = getattr(self, "num_left", 0)
        piece = super().take(event)
        self.num_left = self._num_chars - len(piece.text)
        return piece


class _ForgetsTheStop(Choice):
    """Keeps the text of a stop token, but no stop string."""

    def __init__(self, index, detokenizer, stops, token_text, num_top_logprobs, keeps_stop) -> None:
        super().__init__(index, detokenizer, stops, token_text, num_top_logprobs, keeps_stop)
        self._stops = StopFinder(stops)


@pytest.mark.parametrize("mutant", [_LooksAtWholeEvents, _CountsWhatIsHeldBack, _ForgetsTheStop])
def test_mutants_die(mutant: type[Choice]):
    with pytest.raises(AssertionError):
        _check(mutant)


def test_stop_string_over_two_events_is_cut():
    codec = CODECS[0]
    ids = [codec.encode(text)[0] for text in ("h", "e", "l", "l", "o", "x")]
    choice = _choice(codec, ["lo"])
    pieces = _taken(choice, _events(ids, [3, 4]))
    assert "".join(piece.text for piece in pieces) == "hel"
    assert (choice.num_tokens, choice.finish, choice.is_cut) == (5, FinishReason.STOP, True)


def test_completed_byte_run_stops_before_next_token():
    """A fallback newline is certain only when the next token comes; that token is not returned."""
    codec = CODECS[1]
    newline = codec.encode("a\n")[-1]
    ids = [*codec.encode("he"), newline, *codec.encode("the")]
    choice = _choice(codec, ["\n"])
    assert "".join(piece.text for piece in _taken(choice, _events(ids, []))) == codec.decode(codec.encode("he"))
    assert choice.num_tokens == len(codec.encode("he")) + 1


@pytest.mark.parametrize(
    ("text", "cut"), [("\n\n\n", None), ("\n\n日", None), ("\n\n\n\n", "\n\n\n"), ("\n\n日\n", "\n\n日")], ids=repr
)
def test_minimum_ends_inside_a_byte_run(text: str, cut: str | None):
    """The bug: the text of a run is certain at once, and a stop string was found in that of its first tokens too."""
    codec = CODECS[1]
    ids = [codec.encode("a\n")[-1] + byte - ord("\n") for byte in text.encode()]
    for end in ("", "he"):
        choice = Choice(0, codec.detokenizer(), ["\n"], codec.token_text, min_tokens=3)
        pieces = _taken(choice, _events([*ids, *codec.encode(end)[1:]], []))
        assert "".join(piece.text for piece in pieces) == (text + end if cut is None else cut)
        assert (choice.finish is FinishReason.STOP) == (cut is not None)


def test_offsets_count_held_characters():
    """The bug: those of a byte run were all that of its beginning."""
    codec = CODECS[1]
    ids = [codec.encode("a\n")[-1] + byte - ord("\n") for byte in "\n\n日\n".encode()]
    _, entries, _, _ = _summary(_choice(codec, []), _events([*ids, *codec.encode("he")[-1:]], []))
    assert [offset for _, _, offset in entries] == [0, 1, 2, 2, 2, 3, 4]


def test_held_characters_are_counted_without_decoding():
    """The bug: each token of a byte run decoded the whole run, so a text of rare characters took minutes."""
    codec, calls = CODECS[1], []

    def decode(ids):
        calls.append(len(ids))
        return codec.decode(ids, skips_special=False)

    newline = codec.encode("a\n")[-1]
    ids = {newline - 10 + byte: byte for byte in range(256)}
    detokenizer = Detokenizer(decode, ids.keys(), ids)
    held = []
    for byte in "𓀀é\n".encode() * 20:
        detokenizer.push(newline - 10 + byte)
        held.append(detokenizer.num_held)
    assert held[:7] == [0, 0, 0, 1, 1, 2, 3]
    assert held[-1] == len(detokenizer.close()) == 60
    assert len(calls) == 1


def test_stop_token_counts_but_adds_no_text():
    codec = CODECS[0]
    hello, there = codec.encode("hello there")[:2]
    choice = _choice(codec, [])
    event = TokenEvent("r", (hello, there), (), FinishReason.STOP, stop_token_id=there)
    assert choice.take(event).text == "hello"
    assert (choice.num_tokens, choice.finish) == (2, FinishReason.STOP)


@pytest.mark.parametrize(
    ("keeps_stop", "skips_special", "word", "special"),
    [(False, True, "", ""), (False, False, "", ""), (True, True, " there", ""), (True, False, " there", "<|end|>")],
)
def test_kept_stop_token_is_text(keeps_stop: bool, skips_special: bool, word: str, special: str):
    codec = CODECS[0]
    hello, there = codec.encode("hello there")[:2]
    (end,) = codec.encode("<|end|>")
    for stop_id, text in ((there, word), (end, special)):
        choice = _choice(codec, [], wishes=_Wishes(keeps_stop, skips_special))
        events = _events([hello, stop_id], [1], FinishReason.STOP)
        pieces = _taken(choice, [*events[:-1], structs.replace(events[-1], stop_token_id=stop_id)])
        assert "".join(piece.text for piece in pieces) == "hello" + text
        assert (choice.num_tokens, choice.finish) == (2, FinishReason.STOP)


def test_offsets_locate_tokens_in_text():
    codec = CODECS[0]
    text = "hello 日本語 😀, the quick fox"
    choice = _choice(codec, [])
    entries = [entry for piece in _taken(choice, _events(list(codec.encode(text)), [2, 5])) for entry in piece.entries]
    for entry, following in pairwise(entries):
        if "\ufffd" not in entry.token.text:
            assert text[entry.offset : following.offset] == entry.token.text


def test_drafts_are_counted_as_returned():
    """A stop string inside an accepted path: tokens behind it were accepted but are not returned."""
    codec = CODECS[0]
    ids = tuple(codec.encode(text)[0] for text in "hello")
    choice = _choice(codec, ["l"])
    choice.take(TokenEvent("r", ids, num_draft_tokens=9, num_accepted_tokens=4))
    assert choice.acceptance.histogram == [0, 0, 0, 1]
    assert (choice.acceptance.num_accepted_tokens, choice.acceptance.num_draft_tokens) == (3, 9)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8), st.integers(1, 10))
def test_the_histogram_adds_up(steps: list[tuple[int, int]], num_kept: int):
    """Of each step `num_kept` tokens are returned; every other accepted token was predicted."""
    one, two = AcceptanceCounts(), AcceptanceCounts()
    for number, (drafted, accepted) in enumerate(steps):
        places = tuple(range(0, accepted, 2))
        event = TokenEvent(
            "r", num_draft_tokens=drafted, num_accepted_tokens=accepted, num_predicted_tokens=drafted, predicted_places=places
        )
        (one if number % 2 else two).add_step(event, num_kept)
    one.add(two)
    assert one.num_steps == len(steps)
    assert one.num_accepted_tokens == sum(min(accepted, num_kept) for _, accepted in steps)
    assert one.num_draft_tokens == one.num_predicted == sum(drafted for drafted, _ in steps)
    assert one.num_accepted_predicted == sum((min(accepted, num_kept) + 1) // 2 for _, accepted in steps)
