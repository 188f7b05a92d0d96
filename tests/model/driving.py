"""Runs an engine to the end of its work and collects what each request got."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.types import FinishReason, Request, SamplingParams, Speculation, StepStats, TokenEvent, TokenLogprobs
from engine.draft.drafter import Drafter, RequestFollower
from engine.draft.trees.grow import growers_of
from engine.engine import Engine, StepOutput

MAX_STEPS = 2000


@dataclass
class Outcome:
    """All events of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Session:
    """The results of a run: outcomes by request, and the numbers of each step."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stats: list[StepStats] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.stats.append(output.stats)
        for event in output.events:
            outcome = self.outcomes.setdefault(event.request_id, Outcome())
            assert outcome.finish is None, f"{event.request_id} spoke after its end"
            outcome.ids.extend(event.token_ids)
            outcome.logprobs.extend(event.logprobs)
            outcome.events.append(event)
            outcome.finish = event.finish

    def texts(self) -> dict[str, list[int]]:
        return {request_id: outcome.ids for request_id, outcome in self.outcomes.items()}


def run(engine: Engine, requests: Sequence[Request], after_step: Callable[[Engine], None] = lambda _: None) -> Session:
    """Add the requests and step until nothing is left; every request must have ended, with sound books at each step."""
    for request in requests:
        engine.add(request)
    session = Session()
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        session.take(engine.step())
        engine.check_integrity()
        after_step(engine)
    assert not engine.has_work
    assert all(session.outcomes[request.request_id].finish for request in requests)
    return session


def run_arriving(engine: Engine, requests: Sequence[Request], rng: random.Random, aborted: str) -> Session:
    """Run requests that arrive a few at a time, and abort one of them at any time."""
    session, waiting = Session(), [*requests]
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                engine.add(waiting.pop(0))
        if rng.random() < 0.1:
            engine.abort(aborted)
        session.take(engine.step())
        engine.check_integrity()
    return session


def give_drafter(engine: Engine, drafter: Drafter) -> None:
    """Have the engine draft with another drafter."""
    model = engine.target.model
    engine._drafter, engine._growers = drafter, growers_of(drafter, model.vocab_size, model.device)
    engine._follower = drafter if isinstance(drafter, RequestFollower) else None


def greedy(name: str, prompt: Sequence[int], max_tokens: int = 12, **speculation) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(prompt), sampling, Speculation(**speculation))


def sampled(
    name: str, prompt: Sequence[int], seed: int, max_tokens: int = 12, verifier: str | None = None, **sampling
) -> Request:
    """Return a seeded request; without a named verifier it is coupled, with one its trees are i.i.d."""
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return Request(name, tuple(prompt), SamplingParams(**sampling), Speculation(verifier=verifier))
