"""What a measured process is asked and what it answers: one line of JSON each.

A line process says `{"ready": true}` once it can work; then every job on its standard input is answered by one line: of its
answers, or of the error that kept it from them. Runs in every peer's own environment: standard library alone.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

READY = '{"ready": true}'


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts (token ids) to be answered with `num_tokens` each whatever the model would end, `concurrency` at a time.

    A request's seed is that of its prompt, None where nothing is drawn. `url`, `fields` and `models` are for the HTTP client
    alone: which server, what to send beside prompt and sampling, and a model for each prompt, if it is not in `fields`.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    temperature: float
    seeds: tuple[int | None, ...]
    concurrency: int = 1
    url: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the job that a line is."""
        value = json.loads(line)
        tuples = {name: tuple(value[name]) for name in ("seeds", "models")}
        return cls(**{**value, **tuples, "prompts": tuple(tuple(prompt) for prompt in value["prompts"])})

    def to_json(self) -> str:
        """Return the job as a line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer. Seconds since its request was sent: `first_s` to its first token, `last_s` to its last.

    `token_ids` is None where the peer does not tell them.
    """

    first_s: float
    last_s: float
    num_tokens: int
    token_ids: tuple[int, ...] | None = None

    @property
    def token_s(self) -> float:
        """Seconds a token after the first one."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers of a job in the order of its prompts, and the seconds from the first request sent to the last token."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all answers together, reading of the prompts included."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the answers that a line is. Raises JobFailed if it is an error's."""
        value = json.loads(line)
        if "error" in value:
            raise JobFailed(value["error"])
        return cls(value["seconds"], tuple(_answer(one) for one in value["answers"]))

    def to_json(self) -> str:
        """Return the answers as a line."""
        return json.dumps(asdict(self))


class JobFailed(RuntimeError):
    """A peer could not do a job, or did another."""


def _answer(value: dict[str, Any]) -> Answer:
    ids = value["token_ids"]
    return Answer(**{**value, "token_ids": None if ids is None else tuple(ids)})


def require_length(job: Job, answers: Sequence[Answer]) -> None:
    """Raise JobFailed unless every answer has as many tokens as were asked for."""
    lengths = {answer.num_tokens for answer in answers} | {len(a.token_ids) for a in answers if a.token_ids is not None}
    if lengths != {job.num_tokens}:
        raise JobFailed(f"asked for {job.num_tokens} tokens each, got {sorted(lengths)}")


def serve_jobs(load: Callable[[], Callable[[Job], Answers]]) -> None:
    """Load what does the jobs, say that it is ready, and answer them until there are no more.

    Standard output is the answers' alone: what a library prints goes where errors go.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        work = load()
        print(READY, file=answers, flush=True)
        for line in sys.stdin:
            print(_worked(work, line), file=answers, flush=True)


def _worked(work: Callable[[Job], Answers], line: str) -> str:
    """Return the line that answers a job's; an error ends the job, not the process."""
    try:
        job = Job.from_json(line)
        answers = work(job)
        require_length(job, answers.answers)
        return answers.to_json()
    except Exception as error:  # noqa: BLE001 - whatever a peer's library raises is the job's answer
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
