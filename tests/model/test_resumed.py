"""A request that is resumed with what an engine before told of it: the rest is what that one would have said, counted once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.black_box import StepNote
from engine.config import SchedulerConfig
from engine.draft.cached import CachedDrafter
from engine.engine import Engine
from engine.testing import tiny_engine, tiny_pair
from engine.types import FinishReason, Progress, Request, SamplingParams, Speculation, TokenEvent, TokenLogprobs
from tests.clients import end_of, tokens_of

PAIR = tiny_pair()
PROMPT = (5, 6, 7, 5, 6, 8, 5, 6)
PENALISED = SamplingParams(
    seed=3,
    max_tokens=16,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    bad_words=((9,), (10, 11)),
    min_tokens=12,
    num_logprobs=2,
    num_prompt_logprobs=1,
)
REQUESTS = {
    "greedy": Request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, num_prompt_logprobs=0)),
    "seeded": Request("r", PROMPT, SamplingParams(seed=7, max_tokens=16, ignore_eos=True, num_logprobs=1)),
    "edited": Request("r", PROMPT, PENALISED),
    "predicted": Request("r", PROMPT, SamplingParams(seed=5, max_tokens=16, ignore_eos=True), prediction_ids=PROMPT),
    "plain": Request("r", PROMPT, SamplingParams(seed=7, max_tokens=6, ignore_eos=True), Speculation(is_enabled=False)),
}


def events_of(engine: Engine, request: Request) -> tuple[list[TokenEvent], int]:
    """Return a request's events and the prompt tokens that the steps counted."""
    engine.add(request)
    events: list[TokenEvent] = []
    num_prompt_tokens = 0
    while engine.has_work:
        output = engine.step()
        events += output.events
        num_prompt_tokens += output.stats.num_prompt_tokens
    engine.check_integrity()
    return events, num_prompt_tokens


def scores_of(events: list[TokenEvent]) -> list[TokenLogprobs]:
    return [one for event in events for one in event.prompt_logprobs]


def logprobs_of(events: list[TokenEvent]) -> list[float]:
    return [one.logprob for event in events for one in event.logprobs]


def told(events: list[TokenEvent]) -> Progress:
    return Progress(tuple(tokens_of(events)), len(scores_of(events)))


Resume = Callable[[Request, Progress], Request]


def resumed(request: Request, progress: Progress) -> Request:
    return replace(request, progress=progress)


def check_each_cut_goes_on_as_one_text(make: Callable[[], Engine], request: Request, resume: Resume = resumed) -> None:
    """Cut the request's events after each, as a death would, and have another engine go on."""
    whole, num_prompt_tokens = events_of(make(), request)
    assert num_prompt_tokens == len(PROMPT)
    assert len(whole) > 3
    for cut in range(1, len(whole)):
        before, progress = whole[:cut], told(whole[:cut])
        after, num_again = events_of(make(), resume(request, progress))
        assert tokens_of(before + after) == tokens_of(whole)
        assert end_of(after).finish is end_of(whole).finish
        assert logprobs_of(before + after) == pytest.approx(logprobs_of(whole), abs=1e-4)
        assert [one.top_ids for one in scores_of(before + after)] == [one.top_ids for one in scores_of(whole)]
        assert num_again == (0 if progress.token_ids else len(PROMPT) - progress.num_prompt_logprobs)
        if progress.token_ids:
            assert all(event.queued_s is None for event in after), "it has waited in its first life"


def with_a_model() -> Engine:
    return tiny_engine(*PAIR, config=SchedulerConfig(num_slots=256, max_model_len=64, max_running=1, max_step_tokens=12))


def with_cached_text() -> Engine:
    target = PAIR[0]
    config = SchedulerConfig(num_slots=256, max_model_len=64, max_running=1, max_step_tokens=4)
    return tiny_engine(target, CachedDrafter(target.vocab_size, target.device), config=config)


CASES = [
    *((with_a_model, name) for name in ("greedy", "seeded", "edited")),
    *((with_cached_text, name) for name in ("predicted", "plain")),
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_each_cut_goes_on_as_one_text(make: Callable[[], Engine], name: str) -> None:
    check_each_cut_goes_on_as_one_text(make, REQUESTS[name])


def from_the_prompt(request: Request, progress: Progress) -> Request:
    """The mutant: what was told is forgotten."""
    return replace(request, progress=Progress())


def as_a_prompt(request: Request, progress: Progress) -> Request:
    """The mutant: what was told becomes the prompt of a shorter request; penalties and prompt scores are then others."""
    rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(progress.token_ids))
    return replace(request, prompt_ids=request.prompt_ids + progress.token_ids, sampling=rest)


@pytest.mark.parametrize("mutant", [from_the_prompt, as_a_prompt])
def test_mutants_are_noticed(mutant: Resume) -> None:
    with pytest.raises(AssertionError):
        check_each_cut_goes_on_as_one_text(with_a_model, REQUESTS["edited"], mutant)


@pytest.mark.parametrize("num_told", [1, 5, len(PROMPT) - 1])
def test_prompt_scores_go_on_where_they_were(num_told: int) -> None:
    """Also where no engine cuts: the death may come in the middle of a prompt."""
    request = REQUESTS["greedy"]
    whole, _ = events_of(with_cached_text(), request)
    rest, num_counted = events_of(with_cached_text(), resumed(request, Progress((), num_told)))
    assert [one.logprob for one in scores_of(rest)] == pytest.approx(
        [one.logprob for one in scores_of(whole)[num_told:]], abs=1e-4
    )
    assert tokens_of(rest) == tokens_of(whole)
    assert num_counted == len(PROMPT) - num_told


def test_nothing_is_left_to_resume_of_a_finished_request() -> None:
    engine = with_cached_text()
    request = Request("r", PROMPT, SamplingParams(max_tokens=2))
    for progress, error in [(Progress((5, 6)), "2 of 2 tokens"), (Progress((61,)), "must lie in")]:
        with pytest.raises(ValueError, match=error):
            engine.add(resumed(request, progress))
    events, _ = events_of(engine, resumed(request, Progress((5,))))
    assert (len(tokens_of(events)), end_of(events).finish) == (1, FinishReason.LENGTH)


def test_a_step_is_announced_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told after the forward would say nothing of the one that kills."""
    engine = with_a_model()
    notes: list[StepNote] = []
    engine.announce(notes.append)
    engine.add(REQUESTS["greedy"])

    def kill(*_: object) -> None:
        raise RuntimeError("an evil forward")

    monkeypatch.setattr(engine.target, "forward", kill)
    with pytest.raises(RuntimeError, match="evil"):
        engine.step()
    (note,) = notes
    assert note.request_ids == {"r"}
    assert (note.rows[0].context_len, note.rows[0].num_certain) == (0, len(PROMPT))
