"""ONNX Runtime GenAI on an exported folder: `python -m benchmarks.peers.adapters.onnxruntime FOLDER THREADS`.

One request at a time, token by token. `min_length` keeps end tokens from ending an answer.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence

import onnxruntime_genai

from benchmarks.peers.jobs import Answer, Answers, Job, serve_jobs


def load(folder: str, threads: str) -> Callable[[Job], Answers]:
    """Return what answers jobs, with its model loaded."""
    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": int(threads)}}}}))
    model = onnxruntime_genai.Model(config)

    def run_job(job: Job) -> Answers:
        begin_s = time.perf_counter()
        answers = tuple(_answer(model, job, prompt, seed) for prompt, seed in zip(job.prompts, job.seeds, strict=True))
        return Answers(time.perf_counter() - begin_s, answers)

    return run_job


def _answer(model: onnxruntime_genai.Model, job: Job, prompt: Sequence[int], seed: int | None) -> Answer:
    begin_s = time.perf_counter()
    length = len(prompt) + job.num_tokens
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=length, min_length=length, **_sampling(job, seed))
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(list(prompt))
    times_s = []
    while not generator.is_done():
        generator.generate_next_token()
        times_s.append(time.perf_counter() - begin_s)
    ids = tuple(map(int, generator.get_sequence(0)[len(prompt) :]))
    return Answer(times_s[0], times_s[-1], len(ids), ids)


def _sampling(job: Job, seed: int | None) -> dict[str, float | bool]:
    """Return how it is told of temperature alone."""
    if not job.temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0, "random_seed": seed or 0}


if __name__ == "__main__":
    serve_jobs(lambda: load(*sys.argv[1:]))
