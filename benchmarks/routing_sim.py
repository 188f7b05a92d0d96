"""Does it pay to route a request where its text is drafted best? A simulation of routers before replicas.

python -m benchmarks.routing_sim --requests 10000

Speeds over plain decoding are the measured ones of benchmarks/results, by kind of text and drafter. A request belongs to a user
and a conversation. It either continues the conversation, whose tokens a replica may have cached, or begins another one. A share
of the answers repeats an earlier answer of the user: a replica that gave that answer drafts it from cached text. Every replica
decodes one request at a time, where drafts save most. Both routers know each replica's work and cached prefixes:

- prefix and load: the replica with the earliest end, at the mean speed over replicas;
- expected acceptance: the same with the speed at that replica, known without error.

So the ratios are bounds of what such routing could win.
"""

import argparse
import csv
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.markdown import table

RESULTS = Path(__file__).parent / "results"
REPLICAS = (2, 4, 8, 16, 32, 64)
_KINDS = ("code", "maths", "prose", "summary")
_SYSTEM_TOKENS, _QUESTION_TOKENS, _MAX_TURNS = 300, 60, 8
_CACHED_TOKENS = 32_768  # of prefixes in a replica
_RECENT_TOKENS = 16_384  # of a user's answers in a replica
_PROMPT_SPEED = 10.0  # prompt tokens fed in the time of a plain token
_USERS_PER_REPLICA = 16
_LOAD = 0.7  # of replicas that all have the first drafter


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speed over plain decoding: by drafter and kind, and of an answer that repeats a cached text or not."""

    by_kind: Mapping[str, Mapping[str, float]]
    repeating: float
    missing: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to draw: their number, the share that repeats an answer, and the user's seed."""

    num_requests: int
    share_repeated: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request: the tokens that its conversation had before, and the earlier request whose answer it repeats."""

    user: int
    conversation: int
    kind: str
    num_history: int
    num_answer: int
    gap: float  # to the request before it, in units of the mean
    repeats: int | None


@dataclass(slots=True)
class Replica:
    """What one replica has cached and when it is free."""

    drafter: str
    free_at: float = 0.0
    prefixes: "OrderedDict[int, int]" = field(default_factory=OrderedDict)  # tokens by conversation
    num_cached: int = 0
    texts: dict[int, "OrderedDict[int, int]"] = field(default_factory=dict)  # by user: tokens by request

    def prompt_tokens(self, job: Job) -> int:
        """Return the prompt tokens that would be fed. The system prompt is cached everywhere."""
        return job.num_history + _QUESTION_TOKENS - min(job.num_history, self.prefixes.get(job.conversation, 0))

    def has_text(self, job: Job) -> bool:
        """Return whether the answer that a request repeats is cached."""
        return job.repeats is not None and job.repeats in self.texts.get(job.user, ())

    def serve(self, number: int, job: Job) -> None:
        """Note what is cached after a request."""
        self.num_cached -= self.prefixes.pop(job.conversation, 0)
        self.prefixes[job.conversation] = job.num_history + _QUESTION_TOKENS + job.num_answer
        self.num_cached += self.prefixes[job.conversation]
        while self.num_cached > _CACHED_TOKENS:
            self.num_cached -= self.prefixes.popitem(last=False)[1]
        texts = self.texts.setdefault(job.user, OrderedDict())
        texts[number] = job.num_answer
        while sum(texts.values()) > _RECENT_TOKENS:
            texts.popitem(last=False)


Estimate = Callable[[Job, Replica], float]  # of a request's speed at a replica


def measured_speeds(temperature: str, results: Path = RESULTS) -> Speeds:
    """Return the recorded speeds of a temperature, under the adaptive policy."""

    def rows(name: str) -> list[dict[str, str]]:
        with (results / name).open() as file:
            return [row for row in csv.DictReader(file) if (row["temperature"], row["tree"]) == (temperature, "policy")]

    def ratio(cell: str) -> float:
        return float(cell.split(",")[1].split()[0])

    by_kind = {row["drafter"]: {kind: ratio(row[kind]) for kind in _KINDS} for row in rows("drafters_smollm2.csv")}
    edits = {row["prediction"]: ratio(row["edit"]) for row in rows("drafters_prediction.csv") if row["drafter"] == "head"}
    return Speeds(by_kind, repeating=edits["yes"], missing=edits["no"])


def drawn_jobs(traffic: Traffic, num_replicas: int) -> list[Job]:
    """Return requests of users that talk in turns and sometimes request an earlier answer again, in a new conversation."""
    draw = random.Random(traffic.seed)
    num_users = _USERS_PER_REPLICA * num_replicas
    kinds = [draw.choice(_KINDS) for _ in range(num_users)]
    talk: dict[int, tuple[int, int, int]] = {}  # by user: the conversation, its turns and tokens
    answers: dict[int, list[int]] = {}
    jobs: list[Job] = []
    for number in range(traffic.num_requests):
        user = min(int(draw.paretovariate(1.0)) - 1, num_users - 1) if draw.random() < 0.5 else draw.randrange(num_users)
        repeats = draw.choice(answers[user][-4:]) if user in answers and draw.random() < traffic.share_repeated else None
        conversation, turns, tokens = talk.get(user, (number, 0, 0))
        if repeats is not None or turns >= _MAX_TURNS or draw.random() < 0.2:
            conversation, turns, tokens = number, 0, 0
        num_answer = jobs[repeats].num_answer if repeats is not None else min(800, max(16, int(draw.lognormvariate(4.6, 0.8))))
        jobs.append(Job(user, conversation, kinds[user], tokens, num_answer, draw.expovariate(1.0), repeats))
        talk[user] = conversation, turns + 1, tokens + _QUESTION_TOKENS + num_answer
        answers.setdefault(user, []).append(number)
    return jobs


def speed_at(speeds: Speeds) -> Estimate:
    """Return the true speeds. A repeated answer that is not cached is drafted as an edit without its text."""

    def speed(job: Job, replica: Replica) -> float:
        if job.repeats is None:
            return speeds.by_kind[replica.drafter][job.kind]
        return speeds.repeating if replica.has_text(job) else speeds.missing

    return speed


def mean_speed(speeds: Speeds, drafters: Sequence[str]) -> Estimate:
    """Return the estimate of a router that does not know drafters and texts."""

    def speed(job: Job, _: Replica) -> float:
        if job.repeats is not None:
            return (speeds.repeating + speeds.missing) / 2
        return sum(speeds.by_kind[drafter][job.kind] for drafter in drafters) / len(drafters)

    return speed


def _seconds(job: Job, replica: Replica, speed: float) -> float:
    return replica.prompt_tokens(job) / _PROMPT_SPEED + job.num_answer / speed


def simulated(
    jobs: Sequence[Job], drafters: Sequence[str], estimate: Estimate, true: Estimate, gap: float
) -> tuple[float, float]:
    """Return the mean time from arrival to end, and the mean time of service, in plain tokens' time."""
    replicas = [Replica(drafter) for drafter in drafters]
    now = total = busy = 0.0
    for number, job in enumerate(jobs):
        now += gap * job.gap
        ends = [max(one.free_at, now) + _seconds(job, one, estimate(job, one)) for one in replicas]
        chosen = replicas[ends.index(min(ends))]
        seconds = _seconds(job, chosen, true(job, chosen))
        chosen.free_at = max(chosen.free_at, now) + seconds
        chosen.serve(number, job)
        total += chosen.free_at - now
        busy += seconds
    return total / len(jobs), busy / len(jobs)


def compared(traffic: Traffic, speeds: Speeds, drafters: Sequence[str]) -> tuple[float, float]:
    """Return how many times longer requests take, and service takes, under prefix and load than under expected acceptance."""
    jobs = drawn_jobs(traffic, len(drafters))
    true, blind = speed_at(speeds), mean_speed(speeds, drafters)
    _, busy = simulated(jobs, drafters, blind, true, gap=1e9)  # never a queue
    gap = busy / len(drafters) / _LOAD
    plain, informed = (simulated(jobs, drafters, estimate, true, gap) for estimate in (blind, true))
    return plain[0] / informed[0], plain[1] / informed[1]


def main() -> None:
    """Print the ratios by number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.0, 0.1, 0.3))
    parser.add_argument("--temperatures", nargs="+", default=("0", "0.7"))
    args = parser.parse_args()
    rows = []
    for temperature in args.temperatures:
        speeds = measured_speeds(temperature)
        for name, pattern in (("one drafter", ("head+ngram",)), ("two drafters", ("head+ngram", "ngram"))):
            for share in args.shares:
                cells = []
                for count in args.replicas:
                    drafters = (pattern * count)[:count]
                    longer, busier = compared(Traffic(args.requests, share), speeds, drafters)
                    cells.append(f"{longer:.2f}, {busier:.2f}")
                rows.append([temperature, name, f"{share:.0%}", *cells])
    print(table(["temperature", "replicas have", "repeated", *map(str, args.replicas)], rows))


if __name__ == "__main__":
    main()
