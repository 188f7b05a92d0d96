"""MNN's LLM engine on an exported folder: `python -m benchmarks.peers.adapters.mnn FOLDER THREADS`.

One request at a time. Its `generate` returns no tokens, and its `response` ends at end tokens: tokens are drawn here of
the logits of its `forward`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.jobs import Answer, Answers, Job, serve_jobs


def load(folder: str, threads: str) -> Callable[[Job], Answers]:
    """Return what answers jobs, with its model loaded."""
    library = import_module("MNN.llm")  # not above: it prints as it is imported
    model = library.create(str(Path(folder) / "config.json"))
    model.set_config({"thread_num": int(threads)})
    model.load()

    def run_job(job: Job) -> Answers:
        begin_s = time.perf_counter()
        answers = tuple(_answer(model, job, prompt, seed) for prompt, seed in zip(job.prompts, job.seeds, strict=True))
        return Answers(time.perf_counter() - begin_s, answers)

    return run_job


def _answer(model: Any, job: Job, prompt: Sequence[int], seed: int | None) -> Answer:
    begin_s = time.perf_counter()
    draws = np.random.default_rng(seed)
    model.reset()
    fed, ids, times_s = list(prompt), [], []
    for _ in range(job.num_tokens):
        logits = np.asarray(model.forward(fed).read()).reshape(-1)
        fed = [draw_token(logits, job.temperature, draws)]
        ids += fed
        times_s.append(time.perf_counter() - begin_s)
    return Answer(times_s[0], times_s[-1], len(ids), tuple(ids))


def draw_token(logits: np.ndarray, temperature: float, draws: np.random.Generator) -> int:
    """Return the likeliest token, or one drawn by its probability."""
    if not temperature:
        return int(logits.argmax())
    shares = np.cumsum(np.exp((logits - logits.max()) / temperature), dtype=np.float64)
    return int(np.searchsorted(shares, draws.random() * shares[-1], side="right"))


if __name__ == "__main__":
    serve_jobs(lambda: load(*sys.argv[1:]))
