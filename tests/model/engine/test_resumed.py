"""A request resumed from another engine's progress gets the rest of the same sequence. Each token counts once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.step_observer import StepObserver
from engine.core.step_plan import StepPlan
from engine.core.tree import Expansion
from engine.core.types import FinishReason, Progress, Request, SamplingParams, Speculation, TokenEvent, TokenLogprobs
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.scheduler.slot_allocator import IntegrityError
from engine.testing import table_pair, tiny_engine, tiny_pair
from engine.worker.step_log import StepNote
from tests.chi_square import FAILS_ABOVE, PASSES_BELOW, z_of_counts
from tests.clients import end_of, tokens_of
from tests.model.driving import Session, run

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
    "unseeded": Request(
        "r", PROMPT, SamplingParams(max_tokens=16, ignore_eos=True), Speculation(verifier="coupled"), drawn_seed=9
    ),
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


def progress_of(events: list[TokenEvent]) -> Progress:
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
        before, progress = whole[:cut], progress_of(whole[:cut])
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


def with_a_noise_aware_tree() -> Engine:
    config = SchedulerConfig(num_slots=256, max_model_len=64, max_running=1, max_step_tokens=12)
    return tiny_engine(*PAIR, FixedExpansion(Expansion(0, 2, 3, "noise_aware", 4)), config=config)


def with_cached_text() -> Engine:
    target = PAIR[0]
    config = SchedulerConfig(num_slots=256, max_model_len=64, max_running=1, max_step_tokens=4)
    return tiny_engine(target, TextDrafter(target.vocab_size, target.device), config=config)


CASES = [
    *((with_a_model, name) for name in ("greedy", "seeded", "edited", "unseeded")),
    (with_a_noise_aware_tree, "unseeded"),
    *((with_cached_text, name) for name in ("predicted", "plain")),
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_resumed_sequence_continues_at_any_cut(make: Callable[[], Engine], name: str) -> None:
    check_each_cut_goes_on_as_one_text(make, REQUESTS[name])


def from_the_prompt(request: Request, progress: Progress) -> Request:
    """The mutant: the reported tokens are lost."""
    return replace(request, progress=Progress())


def as_a_prompt(request: Request, progress: Progress) -> Request:
    """The mutant: the reported tokens become the prompt of a shorter request, so penalties and prompt scores differ."""
    rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(progress.token_ids))
    return replace(request, prompt_ids=request.prompt_ids + progress.token_ids, sampling=rest)


def with_fresh_noise(request: Request, progress: Progress) -> Request:
    """The mutant: the next engine draws another seed."""
    return replace(request, progress=progress, drawn_seed=request.drawn_seed + 1_000_000)


def test_fresh_noise_at_a_cut_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_each_cut_goes_on_as_one_text(with_a_noise_aware_tree, REQUESTS["unseeded"], with_fresh_noise)


@pytest.mark.parametrize("mutant", [from_the_prompt, as_a_prompt])
def test_mutants_are_noticed(mutant: Resume) -> None:
    with pytest.raises(AssertionError):
        check_each_cut_goes_on_as_one_text(with_a_model, REQUESTS["edited"], mutant)


@pytest.mark.parametrize("num_reported", [1, 5, len(PROMPT) - 1])
def test_prompt_scores_go_on_where_they_were(num_reported: int) -> None:
    """Also at positions where no engine splits, because a worker may die within a prompt."""
    request = REQUESTS["greedy"]
    whole, _ = events_of(with_cached_text(), request)
    rest, num_counted = events_of(with_cached_text(), resumed(request, Progress((), num_reported)))
    assert [one.logprob for one in scores_of(rest)] == pytest.approx(
        [one.logprob for one in scores_of(whole)[num_reported:]], abs=1e-4
    )
    assert tokens_of(rest) == tokens_of(whole)
    assert num_counted == len(PROMPT) - num_reported


def test_finished_request_has_nothing_to_resume() -> None:
    engine = with_cached_text()
    request = Request("r", PROMPT, SamplingParams(max_tokens=2))
    for progress, error in [(Progress((5, 6)), "2 of 2 tokens"), (Progress((61,)), "must be in")]:
        with pytest.raises(ValueError, match=error):
            engine.add(resumed(request, progress))
    events, _ = events_of(engine, resumed(request, Progress((5,))))
    assert (len(tokens_of(events)), end_of(events).finish) == (1, FinishReason.LENGTH)


def test_a_step_is_noted_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report after the pass would not name the request that kills the worker."""
    engine = with_a_model()
    notes: list[StepNote] = []
    engine.add_step_listener(notes.append)
    engine.add(REQUESTS["greedy"])

    def kill(*_: object) -> None:
        raise RuntimeError("an evil forward")

    monkeypatch.setattr(engine.target, "forward", kill)
    with pytest.raises(RuntimeError, match="evil"):
        engine.step()
    (note,) = notes
    assert note.request_ids == {"r"}
    assert (note.rows[0].context_len, note.rows[0].num_certain) == (0, len(PROMPT))


def test_a_step_is_noted_before_observers() -> None:
    """The bug to avoid: an observer that was added earlier fails the step, and the step log still holds the step before."""

    class Failing(StepObserver):
        def before_step(self, plan: StepPlan) -> None:
            raise IntegrityError("a slot is wrong")

    engine = with_a_model()
    engine.add_observer(Failing())
    notes: list[StepNote] = []
    engine.add_step_listener(notes.append)
    engine.add(REQUESTS["greedy"])
    with pytest.raises(IntegrityError, match="a slot is wrong"):
        engine.step()
    assert [note.request_ids for note in notes] == [{"r"}]


# After 6 the drafter expects 3 and the target takes 4. Whether the tree has 4 too depends on what is drafted after 3, and so on
# the noise there; the target's next token depends on that noise as well.
TABLE = {6: (0.1, 0.8, 0.1), 3: (0.6, 0.2, 0.2), 4: (0.34, 0.33, 0.33), 5: (0.34, 0.33, 0.33)}
MANY = SchedulerConfig(max_running=256, max_step_tokens=4096, num_slots=8192, max_model_len=16)
NUM_TEXTS = 6144


def after(token_id: int) -> tuple[float, ...]:
    return TABLE.get(token_id, (0.4, 0.3, 0.3))


def drafted_after(token_id: int) -> tuple[float, ...]:
    return (0.7, 0.25, 0.05) if token_id == 6 else after(token_id)


def probs_of_triples() -> dict[tuple[int, ...], float]:
    triples = product((3, 4, 5), repeat=3)
    return {(a, b, c): after(6)[a - 3] * after(a)[b - 3] * after(b)[c - 3] for a, b, c in triples}


def triples_cut_after_a_step(expansion: Expansion, resume: Resume) -> Counter[tuple[int, ...]]:
    """Return how often each first three tokens came of unseeded requests whose engine died after their first step."""
    models = table_pair(after, drafted_after)
    sampling, speculation = SamplingParams(max_tokens=4, ignore_eos=True), Speculation(verifier="coupled")
    texts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, NUM_TEXTS, MANY.max_running):
        requests = [
            Request(str(index), (6,), sampling, speculation, drawn_seed=index) for index in range(first, first + MANY.max_running)
        ]
        engines = [tiny_engine(*models, FixedExpansion(expansion), config=MANY) for _ in range(2)]
        before = Session()
        for request in requests:
            engines[0].add(request)
        before.take(engines[0].step())
        ids = {request: before.outcomes[request.request_id].ids for request in requests}
        after_death = run(engines[1], [resume(request, Progress(tuple(one))) for request, one in ids.items() if len(one) < 4])
        rest = after_death.texts()
        texts.update(tuple([*one, *rest.get(request.request_id, [])][:3]) for request, one in ids.items())
    return texts


BY_VALUE = [Expansion(0, 2, 2, "heap", 3), Expansion(0, 2, 2, "calibrated", 3)]


@pytest.mark.parametrize("expansion", BY_VALUE, ids=str)
def test_unseeded_requests_keep_their_distribution_when_resumed(expansion: Expansion) -> None:
    """A tree that shares a budget by value ends depending on later noise.

    The bug: a fresh seed behind it changed the distribution.
    """
    assert z_of_counts(triples_cut_after_a_step(expansion, resumed), probs_of_triples()) < PASSES_BELOW
    assert z_of_counts(triples_cut_after_a_step(expansion, with_fresh_noise), probs_of_triples()) > FAILS_ABOVE


def test_requests_without_a_seed_draw_unlike_ones() -> None:
    """Choices of one answer also draw differently. A copy of a request keeps its seed, and a requested seed is used."""
    requests = [Request(str(index), PROMPT) for index in range(8)]
    assert len({request.seed for request in requests}) == 8
    assert replace(requests[0], progress=Progress((5,))).seed == requests[0].seed
    assert Request("r", PROMPT, SamplingParams(seed=0)).seed == 0
