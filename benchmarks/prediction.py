"""What a prediction saves: steps a token of one request that is to repeat a text with an edit, and of one that wrote it before.

Counts steps, not seconds, so that a busy machine does not matter; drawn texts have seeds, so that every way of drafting writes
the same. Drafts from cached text alone; `runs` lets long chains replace the fixed tree where the text is surely predicted. Run as
`python -m benchmarks.prediction`; docs/decisions/0007 has the table.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from engine.core.config import SchedulerConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams
from engine.draft.text.long_chains import LongChainPolicy
from engine.draft.text.text_cache import TextCache
from engine.draft.text.text_drafter import TextDrafter
from engine.model.causal_lm import CausalModel, load_model
from engine.testing import tiny_engine
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.text.chat_ids import chat_ids

_MODEL, _NUM_TOKENS, _NUM_SAMPLES, _EVERY = "smollm2-135m", 180, 3, 25
_LIMITS = SchedulerConfig(num_slots=2048, max_model_len=1024)
_CODE = """def load_users(path):
    users = []
    with open(path) as handle:
        for line in handle:
            name, age, city = line.strip().split(",")
            users.append({"name": name, "age": int(age), "city": city})
    return users


def oldest_user(users):
    oldest = None
    for user in users:
        if oldest is None or user["age"] > oldest["age"]:
            oldest = user
    return oldest


def users_by_city(users):
    cities = {}
    for user in users:
        cities.setdefault(user["city"], []).append(user["name"])
    return cities
"""
_EDIT = (
    "Rename the function `oldest_user` to `eldest` in this code and repeat the whole code, changing nothing else:\n\n"
    f"```python\n{_CODE}```"
)
_FREE = "Write a Python module with a function that loads users from a CSV file and one that finds the oldest user."


@dataclass(frozen=True)
class Counts:
    """Of one or several runs."""

    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    num_rejected: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """Return both together."""
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Case:
    """A request, and what is drafted from."""

    name: str
    request: Request
    has_own_texts: bool
    has_runs: bool


def ran(model: CausalModel, case: Case) -> tuple[list[int], Counts]:
    """Return the text of a case and its counts; the prompt's own steps bring no tokens and are not counted."""
    texts = TextCache(has_own_texts=case.has_own_texts)
    policy = FixedExpansion(Expansion(4, 1, 0))
    drafter = TextDrafter(model.vocab_size, model.device, texts)
    engine = tiny_engine(model, drafter, LongChainPolicy(policy, texts) if case.has_runs else policy, config=_LIMITS)
    engine.add(case.request)
    ids: list[int] = []
    counts = Counts()
    while engine.has_work:
        for event in engine.step().events:
            ids += event.token_ids
            accepted = len(event.predicted_places)
            counts += Counts(len(event.token_ids), bool(event.token_ids), accepted, event.num_predicted_tokens - accepted)
    return ids, counts


def cases(model: CausalModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Case]:
    """Yield every case; the second prompt's prediction is its own greedy answer with every 25th token another."""
    greedy = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS)
    edit, free = (Request("r", chat_ids(tokenizer, text), greedy) for text in (_EDIT, _FREE))
    answer, _ = ran(model, Case("", free, has_own_texts=True, has_runs=False))
    draws = random.Random(0)
    noised = tuple(draws.randrange(500, 5000) if i % _EVERY == _EVERY - 1 else token_id for i, token_id in enumerate(answer))
    code = tuple(tokenizer.encode(f"```python\n{_CODE}", add_special_tokens=False))
    for name, request, prediction in (("edit", edit, code), ("again", free, noised)):
        for temperature in (0.0, 0.7):
            sampled = replace(request, sampling=replace(greedy, temperature=temperature))
            predicted = replace(sampled, prediction_ids=prediction)
            for has_runs in (False, True):
                runs = " and runs" if has_runs else ""
                yield Case(f"{name}, T {temperature}, own text{runs}", sampled, True, has_runs)
                yield Case(f"{name}, T {temperature}, own text and prediction{runs}", predicted, True, has_runs)
                yield Case(f"{name}, T {temperature}, prediction alone{runs}", predicted, False, has_runs)


def samples(case: Case) -> list[Case]:
    """Return the runs of a case: one of a greedy request, else one a seed."""
    request = case.request
    seeds = (None,) if request.sampling.is_greedy else range(_NUM_SAMPLES)
    return [replace(case, request=replace(request, sampling=replace(request.sampling, seed=seed))) for seed in seeds]


def main() -> None:
    """Print a line for each case."""
    argparse.ArgumentParser(prog="python -m benchmarks.prediction", description="what a prediction saves").parse_args()
    folder = resolve(_MODEL).folder
    model = load_model(folder, "float32", torch.device("cpu"), "packed")
    print("| case | steps a token | block efficiency | predicted: accepted, rejected |\n| --- | --- | --- | --- |")
    for case in cases(model, load_tokenizer(folder)):
        total = sum((ran(model, one)[1] for one in samples(case)), Counts())
        share = total.num_steps / total.num_tokens
        print(f"| {case.name} | {share:.3f} | {1 / share:.2f} | {total.num_accepted}, {total.num_rejected} |", flush=True)


if __name__ == "__main__":
    main()
