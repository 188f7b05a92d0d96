"""Same seed, same tokens: with any drafter, batch or shortage of slots, and after a restart.

The expected tokens are plain decoding's by transformers' logits (`seeded_text`), computed without an engine.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.rng_keys import StepKey, Stream, stream_key
from engine.core.service import EngineState
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.core.verifier_table import is_exact
from engine.engine import Engine
from engine.sampling.distributions import warped_probs
from engine.sampling.noise import gumbels
from engine.testing import FAMILIES
from engine.verify import coupled
from engine.verify import dispatch as judging
from engine.worker.client import WorkerClient
from tests.clients import collect, running, tokens_of, until, worker_client
from tests.model.driving import greedy, run, sampled
from tests.model.engine.test_engine import DRAFTERS, LONG, engine_of, seeded_text
from tests.strategies import VOCAB_SIZE, any_expansions, sampling_params

TREE = Expansion(1, 2, 2)
ROOMY = SchedulerConfig(num_slots=1024, max_model_len=64)
CRAMPED = SchedulerConfig(max_running=6, max_step_tokens=12, num_slots=70, max_model_len=64)

prompts = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=24)
seeds = st.integers(0, 2**64 - 1) | st.integers(0, 3)
wishes = st.builds(Speculation, st.sampled_from([True, True, False]), st.none() | any_expansions())


@st.composite
def seeded_requests(draw: st.DrawFn) -> Request:
    """A coupled request of any parameters."""
    sampling = replace(draw(sampling_params(10)), seed=draw(seeds), ignore_eos=True)
    return Request("subject", tuple(draw(prompts)), sampling, draw(wishes))


def with_rule(wish: Speculation, rule: str | None) -> Speculation:
    """Return the wish with a rule, if that is exact on its tree."""
    fits = rule is None or wish.expansion is None or is_exact(wish.expansion.kind, rule)
    return replace(wish, verifier=rule) if fits else wish


@st.composite
def mates(draw: st.DrawFn) -> list[Request]:
    """Requests of any kind that share the batch: greedy, seeded, unseeded, with rules of their own."""
    kinds = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 0.7, 1.3]), seed=st.none() | seeds)
    rules = st.sampled_from([None, "traversal", "specinfer", "coupled"])
    return [
        Request(
            f"mate {number}",
            tuple(draw(prompts)),
            replace(draw(kinds), max_tokens=draw(st.integers(1, 10)), ignore_eos=True),
            with_rule(draw(wishes), draw(rules)),
        )
        for number in range(draw(st.integers(0, 5)))
    ]


configs = st.builds(
    SchedulerConfig,
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(6, 40),
    num_slots=st.integers(64, 160),
    max_model_len=st.just(64),
)


@settings(max_examples=40)
@given(st.sampled_from(FAMILIES), st.sampled_from(DRAFTERS), any_expansions(), configs, seeded_requests(), mates(), st.data())
def test_batch_of_a_request_changes_no_token(family, drafter, shape, config, subject, others, data):
    requests = data.draw(st.permutations([subject, *others]))
    texts = run(engine_of(family, drafter, shape, config), requests).texts()
    assert texts["subject"] == seeded_text(family, subject)


def crowd() -> list[Request]:
    """Eight seeded requests, two of one seed, among them a greedy one."""
    seeded = [sampled(str(row), LONG[row:] + [9 + row] * (2 * row), row // 2, 12, temperature=0.8) for row in range(8)]
    return [*seeded[:4], greedy("greedy", LONG), *seeded[4:]]


def check_crowd(engine: Engine, *, is_cramped: bool) -> None:
    """Run the crowd to its end. Each seeded sequence must equal its run alone."""
    session = run(engine, crowd())
    assert (sum(stats.num_preemptions for stats in session.stats) > 0) == is_cramped
    for request in crowd():
        if request.sampling.seed is not None:
            assert session.outcomes[request.request_id].ids == seeded_text("llama", request), request.request_id


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_crowd_keeps_its_sequences(drafter, config):
    """Cramped: prompts are fed in chunks of at most twelve tokens, and sequences lose their slots and begin again."""
    check_crowd(engine_of("llama", drafter, TREE, config), is_cramped=config is CRAMPED)


def test_two_engines_give_one_seeded_sequence():
    first, second = (run(engine_of("llama", "model", TREE), crowd()).texts() for _ in range(2))
    assert first == second


# Mutants: each must change a text in one of the two rooms.


def keyed_by_the_step(key: StepKey, depth: int) -> int:
    """One noise for all tokens of a step."""
    return stream_key(key.seed, key.root_position + 1, Stream.TOKEN)


def keyed_by_the_seed_alone(key: StepKey, depth: int) -> int:
    return stream_key(key.seed, 0, Stream.TOKEN)


class OneGenerator:
    """A stream that all requests draw from in turn."""

    def __init__(self) -> None:
        self._draws = count()

    def __call__(self, key: StepKey, depth: int) -> int:
        return stream_key(key.seed, next(self._draws), Stream.TOKEN)


@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
@pytest.mark.parametrize("mutant", [keyed_by_the_step, keyed_by_the_seed_alone, OneGenerator()])
def test_crowds_detect_noise_not_keyed_by_position(mutant, config, monkeypatch):
    monkeypatch.setattr(coupled, "_noise_key", mutant)
    with pytest.raises(AssertionError):
        check_crowd(engine_of("llama", "model", TREE, config), is_cramped=config is CRAMPED)


def test_crowds_detect_noise_of_another_position(monkeypatch):
    """The extra token after the path reuses the noise by which the path's last node was drafted."""

    def reusing(verdicts, trees, probs_NV, keys):
        offsets = accumulate((tree.num_nodes for tree in trees), initial=0)
        ends = [offset + verdict.path[-1] for offset, verdict in zip(offsets, verdicts)]
        places = [key.root_position + len(verdict.path) - 1 for key, verdict in zip(keys, verdicts, strict=True)]
        noise_keys = [stream_key(key.seed, place, Stream.TOKEN) for key, place in zip(keys, places, strict=True)]
        scores_BV = probs_NV[ends].log() + gumbels(noise_keys, probs_NV.shape[-1])
        extra_ids = scores_BV.argmax(-1).tolist()
        return [structs.replace(verdict, extra_id=extra_id) for verdict, extra_id in zip(verdicts, extra_ids, strict=True)]

    def by_probs(self, forest, probs_NV, keys):
        return reusing(honest(self, forest, probs_NV, keys), forest.trees, probs_NV, keys)

    def by_library(trees, logits_NV, rows, temperatures, truncations, keys):
        sampling = [
            SamplingParams(one, top_k=kept.top_k, top_p=kept.top_p, min_p=kept.min_p)
            for one, kept, tree in zip(temperatures, truncations, trees, strict=True)
            for _ in range(tree.num_nodes)
        ]
        probs_NV = warped_probs(logits_NV, sampling, rows)
        verdicts = coupled.judge_coupled_natively(trees, logits_NV, rows, temperatures, truncations, keys)
        return reusing(verdicts, trees, probs_NV, keys)

    honest = coupled.Coupled.judge
    monkeypatch.setattr(coupled.Coupled, "judge", by_probs)
    monkeypatch.setattr(judging, "judge_coupled_natively", by_library)
    with pytest.raises(AssertionError):
        check_crowd(engine_of("llama", "model", TREE, ROOMY), is_cramped=False)


# A restart: a worker process is killed, and the next one gets the request again.


def build(config: EngineConfig) -> Engine:
    return engine_of("llama", "model", TREE, config.scheduler)


def build_with_noise_of_the_process(config: EngineConfig) -> Engine:
    """The mutant: a seed means something else in every process."""
    coupled._noise_key = lambda key, depth: stream_key(key.seed + os.getpid(), key.root_position + depth + 1, Stream.TOKEN)
    return build(config)


async def kill_worker(client: WorkerClient, num_restarts: int) -> None:
    """Kill the worker and wait for the next, which is the `num_restarts`-th after the first."""
    (process,) = multiprocessing.active_children()
    os.kill(process.pid or 0, signal.SIGKILL)
    await until(lambda: client.health.num_restarts == num_restarts and client.health.state is EngineState.READY)


async def texts_of_workers(factory: Callable[[EngineConfig], Engine], request: Request, num_restarts: int) -> list[list[int]]:
    """Return the text that each of a row of workers gives, every one but the last killed afterwards."""
    client = worker_client(factory, scheduler=ROOMY)
    async with running(client):
        texts = [tokens_of(await collect(client, request))]
        for number in range(1, num_restarts + 1):
            await kill_worker(client, number)
            texts.append(tokens_of(await collect(client, request)))
        return texts


REQUEST = sampled("r", LONG, seed=11, max_tokens=12, temperature=0.9)


async def test_restarted_worker_gives_equal_tokens():
    assert await texts_of_workers(build, REQUEST, num_restarts=1) == [seeded_text("llama", REQUEST)] * 2


async def test_workers_detect_process_noise():
    assert await texts_of_workers(build_with_noise_of_the_process, REQUEST, num_restarts=0) != [seeded_text("llama", REQUEST)]
