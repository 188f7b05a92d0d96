"""Stop strings: found at the first place, whatever the pieces; a finder that holds nothing back does not survive."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.stop_strings import StopFinder

_LETTERS = "ab"
_TEXT = st.text(_LETTERS, max_size=20)
_STOPS = st.lists(st.text(_LETTERS, min_size=1, max_size=5), max_size=4)


def _cut(text: str, stops: Sequence[str], keeps_stop: bool) -> str:
    """Cut one character at a time: the first prefix that ends in a stop string, with it or without the longest it ends in."""
    for end in range(len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end if keeps_stop else end - max(map(len, endings))]
    return text


def _check(finder_type: type[StopFinder]) -> None:
    @settings(max_examples=500, report_multiple_bugs=False)
    @given(_TEXT, _STOPS, st.lists(st.integers(0, 20), max_size=6), st.booleans())
    def cuts_at_the_first(text: str, stops: list[str], cuts: list[int], keeps_stop: bool) -> None:
        finder = finder_type(stops, keeps_stop)
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        out = "".join(finder.feed(text[a:b]) for a, b in pairwise(edges))
        assert out + finder.close() == _cut(text, stops, keeps_stop)
        assert finder.is_hit == any(stop in text for stop in stops)

    cuts_at_the_first()


def test_text_is_cut_at_first_stop():
    _check(StopFinder)


class _HoldsNothingBack(StopFinder):
    def _num_held(self, text: str) -> int:
        return 0


class _TakesTheFirstListed(StopFinder):
    def feed(self, text: str, num_barred: int = 0) -> str:
        for stop in self._stops:
            if stop in self._held + text and not self.is_hit:
                self._stops = (stop,)
        return super().feed(text, num_barred)


class _KeepsNothing(StopFinder):
    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        super().__init__(stops)


class _KeepsWhatFollows(StopFinder):
    """Lets the rest of the piece out too: the text of a stream depends on how it was cut."""

    def feed(self, text: str, num_barred: int = 0) -> str:
        before = super().feed(text, num_barred)
        at = text.find(before)
        return text[at:] if self._keeps_stop and before and self.is_hit and at >= 0 else before


@pytest.mark.parametrize("mutant", [_HoldsNothingBack, _TakesTheFirstListed, _KeepsNothing, _KeepsWhatFollows])
def test_mutants_die(mutant: type[StopFinder]):
    with pytest.raises(AssertionError):
        _check(mutant)


def _cut_behind(text: str, stops: Sequence[str], first: int) -> str:
    """Cut before the first stop string that ends behind the first characters, the longest that ends there."""
    for end in range(first + 1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end - max(map(len, endings))]
    return text


def _check_late(finder_type: type[StopFinder]) -> None:
    @settings(max_examples=500, report_multiple_bugs=False)
    @given(_TEXT, _STOPS, st.lists(st.integers(0, 20), max_size=6), st.integers(0, 20))
    def cuts_behind_the_first(text: str, stops: list[str], cuts: list[int], first: int) -> None:
        finder, first = finder_type(stops), min(first, len(text))
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        out = "".join(finder.feed(text[a:b], min(max(first - a, 0), b - a)) for a, b in pairwise(edges))
        assert out + finder.close() == _cut_behind(text, stops, first)

    cuts_behind_the_first()


def test_stop_strings_ignore_text_before_minimum():
    """One that begins there may end later, and none is found again in what was held back."""
    _check_late(StopFinder)


class _EndsAnywhere(StopFinder):
    def feed(self, text: str, num_barred: int = 0) -> str:
        return super().feed(text)


class _ForgetsWhatWentBefore(StopFinder):
    def feed(self, text: str, num_barred: int = 0) -> str:
        return text[:num_barred] + super().feed(text[num_barred:])


@pytest.mark.parametrize("mutant", [_EndsAnywhere, _ForgetsWhatWentBefore])
def test_check_kills_early_and_late_finders(mutant: type[StopFinder]):
    with pytest.raises(AssertionError):
        _check_late(mutant)


def test_text_outside_stop_strings_is_released():
    finder = StopFinder(["end", "stop"])
    assert [finder.feed(piece) for piece in ("the e", "n", "x s", "o st")] == ["the ", "", "enx ", "so "]
    assert finder.close() == "st"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopFinder([""])
