"""Edited logits are what transformers' own processors make of them, and OpenAI's formula by hand, for each node of a tree."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.core.sampling_limits import NoDistribution, require_probs
from engine.core.step_plan import SamplingContext
from engine.core.types import SamplingParams
from engine.sampling.distributions import processed_probs
from engine.sampling.logits_processors import edited_logits
from tests.model.edits import processors_of

V = 13
NOTHING = SamplingParams()
tokens = st.integers(0, V - 1)
penalties = st.just(0.0) | st.floats(-2, 2)


def makes_a_probs(sampling: SamplingParams) -> bool:
    """Whether the engine takes it: transformers frees the allowed tokens again where all of them are masked, we refuse."""
    try:
        require_probs(sampling, V, ())
    except NoDistribution:
        return False
    return True


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.just(1.0) | st.floats(0.25, 4),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=5).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 3) | tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    max_tokens=st.just(8),
    stop_token_ids=st.lists(st.integers(0, V + 2), max_size=3).map(tuple),
).filter(makes_a_probs)


@st.composite
def requests(draw: st.DrawFn) -> list[SamplingContext]:
    """The nodes of one tree: a request, its text, and paths of drafted tokens after it."""
    sampling, history = draw(samplings), tuple(draw(st.lists(tokens, min_size=1, max_size=9)))
    num_prompt = draw(st.integers(1, len(history)))
    paths = draw(st.lists(st.lists(tokens, max_size=4).map(tuple), min_size=1, max_size=4))
    return [SamplingContext(sampling, history, num_prompt, path) for path in paths]


batches = st.lists(requests(), min_size=1, max_size=3).map(lambda groups: [context for group in groups for context in group])


def random_logits(seed: int, num_rows: int) -> Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def expected(logits_V: Tensor, context: SamplingContext) -> Tensor:
    """Return the row as transformers' processors leave it."""
    text = torch.tensor([[*context.history, *context.path_ids]])
    scores = logits_V[None].clone()
    for processor in processors_of(context.sampling, context.num_prompt_tokens):
        scores = processor(text, scores)
    return scores[0]


def check(edit, contexts: Sequence[SamplingContext], seed: int = 0) -> None:
    logits_NV = random_logits(seed, len(contexts))
    wanted = torch.stack([expected(logits_V, context) for logits_V, context in zip(logits_NV, contexts, strict=True)])
    assert torch.allclose(edit(logits_NV, contexts), wanted, atol=1e-5)


def check_distributions(probs_of, contexts: Sequence[SamplingContext], seed: int = 0) -> None:
    """Check distributions after edits and temperature."""
    logits_NV = random_logits(seed, len(contexts))
    for probs_V, logits_V, context in zip(probs_of(logits_NV, contexts), logits_NV, contexts, strict=True):
        wanted = torch.softmax(expected(logits_V, context).double() / context.sampling.temperature, -1)
        assert torch.allclose(probs_V.double(), wanted, atol=1e-5, equal_nan=True)  # NaN where no token is left to come


@given(batches, st.integers(0, 2**31))
def test_edits_are_transformers_processors(contexts, seed):
    check(edited_logits, contexts, seed)


@given(batches, st.integers(0, 2**31))
def test_distributions_are_edited_before_temperature(contexts, seed):
    contexts = [replace(one, sampling=replace(one.sampling, temperature=one.sampling.temperature or 0.7)) for one in contexts]
    check_distributions(processed_probs, contexts, seed)


@given(batches, st.integers(0, 2**31))
def test_row_is_independent_of_batch_mates(contexts, seed):
    logits_NV = random_logits(seed, len(contexts))
    together = edited_logits(logits_NV, contexts)
    alone = [edited_logits(logits_NV[row : row + 1], [context]) for row, context in enumerate(contexts)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(edited_logits(logits_NV.flip(0), contexts[::-1]), together.flip(0))


@given(batches)
def test_raw_logits_stay_raw(contexts):
    logits_NV = random_logits(1, len(contexts))
    edited_logits(logits_NV, contexts)
    assert torch.equal(logits_NV, random_logits(1, len(contexts)))


def test_rows_without_edits_cost_nothing():
    logits_NV = random_logits(0, 3)
    plain = SamplingContext(replace(NOTHING, temperature=0.3, top_k=3, stop_token_ids=(1,)), (1, 2, 3), 1, (2,))
    assert edited_logits(logits_NV, [plain] * 3) is logits_NV
    assert edited_logits(logits_NV[:0], []).shape == (0, V)


def test_single_token_distribution_is_a_point_mass():
    context = SamplingContext(SamplingParams(allowed_token_ids=(4,), logit_bias=((4, -100.0),), top_p=0.5), (4,), 0)
    assert processed_probs(random_logits(0, 1), [context])[0].nonzero().tolist() == [[4]]


def with_contexts(change):
    return lambda logits_NV, contexts: edited_logits(logits_NV, [change(context) for context in contexts])


def path_of_the_first_node(logits_NV, contexts):
    return edited_logits(logits_NV, [replace(context, path_ids=contexts[0].path_ids) for context in contexts])


def edits_of_the_next_row(logits_NV, contexts):
    return edited_logits(logits_NV, [*contexts[1:], contexts[0]])


def in_two_steps(first):
    """Edit with the named parameters before all others."""

    def edit(logits_NV, contexts):
        early = [{name: getattr(context.sampling, name) for name in first} for context in contexts]
        late = {name: getattr(NOTHING, name) for name in first}
        before = [replace(context, sampling=replace(NOTHING, **named)) for context, named in zip(contexts, early, strict=True)]
        after = [replace(context, sampling=replace(context.sampling, **late)) for context in contexts]
        return edited_logits(edited_logits(logits_NV, before), after)

    return edit


def repetition_by_count(logits_NV, contexts):
    """Divide once for each time a token came."""
    rows = []
    for logits_V, context in zip(logits_NV, contexts, strict=True):
        only = replace(NOTHING, repetition_penalty=context.sampling.repetition_penalty)
        for token_id in (*context.history, *context.path_ids)[:-1]:
            logits_V = edited_logits(logits_V[None], [SamplingContext(only, (token_id,))])[0]
        rows.append(
            edited_logits(logits_V[None], [replace(context, sampling=replace(context.sampling, repetition_penalty=1.0))])[0]
        )
    return torch.stack(rows)


def words_by_their_ends(logits_NV, contexts):
    """Rule out the last token of a word whatever comes before it."""
    ends = [tuple(word[-1:] for word in context.sampling.bad_words) for context in contexts]
    return edited_logits(
        logits_NV,
        [
            replace(context, sampling=replace(context.sampling, bad_words=words))
            for context, words in zip(contexts, ends, strict=True)
        ],
    )


def words_within_the_path(logits_NV, contexts):
    """Forget that a word may begin before the path."""
    rows = []
    for logits_V, context in zip(logits_NV, contexts, strict=True):
        bare = edited_logits(logits_V[None], [replace(context, sampling=replace(context.sampling, bad_words=()))])
        only = replace(NOTHING, bad_words=context.sampling.bad_words)
        rows.append(edited_logits(bare, [SamplingContext(only, context.path_ids or (V - 1,))])[0])
    return torch.stack(rows)


def smaller_is_rarer(logits_NV, contexts):
    """Divide whatever the sign, so that negative logits grow."""
    shifted = edited_logits(logits_NV + 100, contexts) - 100
    return torch.where(logits_NV < 0, shifted, edited_logits(logits_NV, contexts))


def many_nodes() -> list[SamplingContext]:
    sampling = SamplingParams(
        presence_penalty=0.7,
        frequency_penalty=0.9,
        repetition_penalty=1.6,
        logit_bias=((1, 2.5), (7, -3.0), (12, 1.0)),
        allowed_token_ids=tuple(range(12)),
        bad_words=((11,), (1, 6), (7, 2, 8), (9, 1, 3, 4)),
        min_tokens=4,
        stop_token_ids=(0, 5),
    )
    paths = [(), (1,), (1, 1), (7, 2), (2, 3, 0, 1)]
    return [SamplingContext(sampling, (1, 2, 2, 9, 1, 3), 4, path) for path in paths]


@pytest.mark.parametrize(
    "mutant",
    [
        with_contexts(lambda one: replace(one, path_ids=())),
        with_contexts(lambda one: replace(one, path_ids=one.path_ids[:-1])),
        with_contexts(lambda one: replace(one, path_ids=tuple(set(one.path_ids)))),
        with_contexts(lambda one: replace(one, num_prompt_tokens=0)),
        with_contexts(lambda one: replace(one, history=one.history[one.num_prompt_tokens :], num_prompt_tokens=0)),
        with_contexts(lambda one: replace(one, num_prompt_tokens=one.num_prompt_tokens + 1)),
        path_of_the_first_node,
        edits_of_the_next_row,
        in_two_steps(["repetition_penalty"]),
        in_two_steps(["presence_penalty", "frequency_penalty"]),
        repetition_by_count,
        smaller_is_rarer,
        words_by_their_ends,
        words_within_the_path,
    ],
    ids=[
        *("path forgotten", "last node forgotten", "path counted once", "prompt counted as generated", "prompt forgotten"),
        *("first token not counted", "first path for all", "next row's edits", "repetition before bias", "penalties before bias"),
        *("repetition by count", "negative logits grow", "words by their ends", "words within the path"),
    ],
)
def test_edits_detect_mutants(mutant):
    contexts = many_nodes()
    check(edited_logits, contexts)
    with pytest.raises(AssertionError):
        check(mutant, contexts)


def edited_after_temperature(logits_NV, contexts):
    temperatures = torch.tensor([[context.sampling.temperature] for context in contexts])
    return torch.softmax(edited_logits(logits_NV / temperatures, contexts), -1)


def never_edited(logits_NV, contexts):
    return processed_probs(logits_NV, [SamplingContext(SamplingParams(context.sampling.temperature)) for context in contexts])


@pytest.mark.parametrize("mutant", [edited_after_temperature, never_edited])
def test_distributions_detect_mutants(mutant):
    contexts = [replace(one, sampling=replace(one.sampling, temperature=0.5)) for one in many_nodes()]
    check_distributions(processed_probs, contexts)
    with pytest.raises(AssertionError):
        check_distributions(mutant, contexts)
