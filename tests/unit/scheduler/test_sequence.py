"""One request's state: where its output ends, and what it holds."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.types import FinishReason, Request, SamplingParams
from engine.scheduler.sequence import Sequence


def sequence(max_tokens: int = 5, stops: tuple[int, ...] = (), prompt: tuple[int, ...] = (4, 5, 6)) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
    return Sequence(Request("r", prompt, sampling), seed=1, verifier="traversal")


@pytest.mark.parametrize(
    ("new_ids", "kept", "finish"),
    [
        ([7, 8], [7, 8], None),
        ([7, 2, 8], [7, 2], FinishReason.STOP),
        ([2], [2], FinishReason.STOP),
        ([7, 8, 9, 7, 8], [7, 8, 9, 7, 8], FinishReason.LENGTH),
        ([7, 8, 9, 7, 8, 9, 9], [7, 8, 9, 7, 8], FinishReason.LENGTH),
        ([7, 8, 9, 7, 2, 9], [7, 8, 9, 7, 2], FinishReason.STOP),
        ([7, 8, 9, 7, 8, 2], [7, 8, 9, 7, 8], FinishReason.LENGTH),
        ([7, 3, 2], [7, 3], FinishReason.STOP),
    ],
)
def test_accept_ends_at_stop_or_limit(new_ids, kept, finish):
    assert sequence(max_tokens=5, stops=(2, 3)).accept(new_ids) == (kept, finish)


def token_by_token(max_tokens: int, stops: tuple[int, ...], ids: list[int]) -> list[int]:
    """Return what plain decoding would emit of the ids."""
    one = sequence(max_tokens, stops)
    for token_id in ids:
        kept, finish = one.accept([token_id])
        one.token_ids.extend(kept)
        if finish is not None:
            break
    return one.token_ids[3:]


def in_paths(accept, max_tokens: int, stops: tuple[int, ...], paths: list[list[int]]) -> list[int]:
    """Return what decoding path by path emits."""
    one = sequence(max_tokens, stops)
    for path in paths:
        kept, finish = accept(one, path)
        one.token_ids.extend(kept)
        if finish is not None:
            break
    return one.token_ids[3:]


paths_of_ids = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=6)


@given(st.integers(0, 12), st.sampled_from([(), (2,), (2, 7)]), paths_of_ids)
def test_paths_end_where_single_tokens_would(max_tokens, stops, paths):
    flat = [token_id for path in paths for token_id in path]
    assert in_paths(Sequence.accept, max_tokens, stops, paths) == token_by_token(max_tokens, stops, flat)


def _only_the_last_is_checked(one: Sequence, ids: list[int]) -> tuple[list[int], FinishReason | None]:
    return ids, one.accept(ids[-1:])[1]


def _stop_is_cut_off_too(one: Sequence, ids: list[int]) -> tuple[list[int], FinishReason | None]:
    kept, finish = one.accept(ids)
    return (kept[:-1], finish) if finish is FinishReason.STOP else (kept, finish)


def _limit_is_one_late(one: Sequence, ids: list[int]) -> tuple[list[int], FinishReason | None]:
    return (ids, None) if len(ids) == one.num_remaining else one.accept(ids)


@pytest.mark.parametrize("mutant", [_only_the_last_is_checked, _stop_is_cut_off_too, _limit_is_one_late])
def test_path_ends_kill(mutant):
    cases = [(5, (2,), [[7, 2, 8], [9]]), (4, (), [[7, 8], [9, 9], [1]]), (3, (), [[7, 8, 9, 9]])]
    flats = [[token_id for path in paths for token_id in path] for _, _, paths in cases]
    assert any(in_paths(mutant, *case) != token_by_token(*case[:2], flat) for case, flat in zip(cases, flats, strict=True))


def test_counts_and_caches():
    one = sequence(max_tokens=5)
    assert (one.num_tokens, one.num_generated, one.num_remaining, one.target_len, one.num_uncached) == (3, 0, 5, 0, 3)
    one.token_ids.extend([7, 8])
    one.slots, one.draft_len = array("q", [10, 11, 12, 13]), 2
    assert (one.num_tokens, one.num_generated, one.num_remaining, one.target_len, one.num_uncached) == (5, 2, 3, 4, 1)
    assert [*one.own_slots] == [10, 11, 12, 13]
    one.reset_caches()
    assert (one.target_len, one.draft_len, one.num_uncached, one.num_generated) == (0, 0, 5, 2)


def test_view_exposes_policy_features():
    one = sequence(max_tokens=5)
    one.token_ids.extend([7, 8])
    one.slots, one.draft_len = array("q", [10, 11, 12, 13]), 2
    view = one.view()
    assert (view.request_id, view.num_committed, view.num_generated, view.num_remaining) == ("r", 5, 2, 3)
    assert (view.num_uncached, view.verifier) == (1, "traversal")
