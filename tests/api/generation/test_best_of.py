"""best_of: the texts whose tokens were likeliest on average, of each prompt apart; all of them are counted."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import server.routes.generation
from engine.core.types import Request
from server.generation.best_of import best_of
from tests.api.harness import completion, in_process
from tests.fake_engine import FakeEngine

URL = "/v1/completions"
# The likelier a token, the lower its id. The first text has the highest sum, the second the highest mean.
TEXTS = [[60], [20] * 9, [90, 15], [40] * 3]
Rank = Callable[[Sequence[float], int, int], list[int]]


def _script(request: Request) -> list[int]:
    """Emit the texts in turn; the second prompt gets them in reverse order."""
    index = int(request.request_id.rpartition("-")[2])
    return TEXTS[index % 4] if request.prompt_ids == (5,) else TEXTS[::-1][index % 4]


async def _check_ranking(**fields: object) -> None:
    body = completion(prompt=[[5], [6]], max_tokens=50, **fields)
    async with in_process(FakeEngine(script=_script, chunks=(1, 3))) as client:
        every = (await client.post(URL, json={**body, "n": 4, "logprobs": 1})).json()
        best = (await client.post(URL, json={**body, "n": 2, "best_of": 4})).json()
    expected = []
    for choices in (every["choices"][:4], every["choices"][4:]):
        means = {i: math.fsum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for i, c in enumerate(choices)}
        expected += [choices[i] for i in sorted(means, key=lambda i: -means[i])[:2]]
    wished = "logprobs" in fields
    assert best["choices"] == [
        {**choice, "index": i, "logprobs": choice["logprobs"] if wished else None} for i, choice in enumerate(expected)
    ]
    assert (best["usage"], best["metrics"]) == (every["usage"], every["metrics"])


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
async def test_the_likeliest_on_average_are_returned(fields: dict[str, object]):
    await _check_ranking(**fields)


def _over_all_prompts(means: Sequence[float], num_samples: int, num_answers: int) -> list[int]:
    num_kept = len(means) // num_samples * num_answers
    return sorted(range(len(means)), key=lambda at: -means[at])[:num_kept]


def _worst(means: Sequence[float], num_samples: int, num_answers: int) -> list[int]:
    return best_of([-mean for mean in means], num_samples, num_answers)


def _first(means: Sequence[float], num_samples: int, num_answers: int) -> list[int]:
    return best_of([0.0] * len(means), num_samples, num_answers)


@pytest.mark.parametrize("mutant", [_over_all_prompts, _worst, _first])
async def test_mutants_die(mutant: Rank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.routes.generation, "best_of", mutant)
    with pytest.raises(AssertionError):
        await _check_ranking()


async def test_the_sum_is_detected(monkeypatch: pytest.MonkeyPatch):
    """The mutant: the sum of log-probabilities, which prefers what ends first."""
    monkeypatch.setattr("server.generation.sample.Choice.mean_logprob", property(lambda choice: choice._sum_logprobs))
    with pytest.raises(AssertionError):
        await _check_ranking()


@given(st.lists(st.floats(-9, 0) | st.just(-math.inf), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_best_samples_are_kept(means: list[float], num_prompts: int, data: st.DataObject):
    num_samples = len(means)
    num_answers = data.draw(st.integers(1, num_samples))
    kept = best_of(means * num_prompts, num_samples, num_answers)
    assert len(set(kept)) == len(kept) == num_answers * num_prompts
    assert kept[:num_answers] == [at - num_samples * (num_prompts - 1) for at in kept[-num_answers:]]
    worst = min(means[at] for at in kept[:num_answers])
    assert all(means[at] <= worst for at in set(range(num_samples)) - set(kept[:num_answers]))


async def test_invalid_best_of_is_refused_by_name():
    async with in_process(FakeEngine(), max_choices=8) as client:
        for fields in (
            {"best_of": 2, "stream": True},
            {"best_of": 2, "n": 3},
            {"best_of": 9},
            {"best_of": 5, "prompt": ["a", "b"]},
        ):
            response = await client.post(URL, json=completion(**fields))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        same = await client.post(URL, json=completion(best_of=3, n=3, stream=True))
    assert same.status_code == 200


async def test_log_probabilities_are_requested_only_to_rank():
    engine = FakeEngine()
    async with in_process(engine) as client:
        for fields in ({"best_of": 1}, {"best_of": 2}, {"best_of": 2, "logprobs": 3}, {"best_of": 2, "n": 2}):
            await client.post(URL, json=completion(**fields))
    assert [request.sampling.num_logprobs for request in engine.requests] == [None, 0, 0, 3, 3, None, None]
