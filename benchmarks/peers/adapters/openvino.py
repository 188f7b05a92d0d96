"""OpenVINO GenAI reading a GGUF: `python -m benchmarks.peers.adapters.openvino GGUF THREADS CACHE_GB`.

Its continuous batching, turned step by step, so that each token is seen when it is there.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.jobs import Answer, Answers, Job, serve_jobs


class _Request:
    """A request that was sent, and what has come of it."""

    def __init__(self, handle: openvino_genai.py_openvino_genai.GenerationHandle) -> None:
        self._handle = handle
        self._begin_s = time.perf_counter()
        self._times_s: list[float] = []
        self._ids: list[int] = []

    def read(self) -> None:
        """Take what has come."""
        while self._handle.can_read():
            for output in self._handle.read().values():
                self._ids += output.generated_ids
                self._times_s.append(time.perf_counter())

    @property
    def is_done(self) -> bool:
        """Whether all of it has come."""
        return self._handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not self._handle.can_read()

    def answer(self) -> Answer:
        """Return it, once it is done."""
        first_s, last_s = (at_s - self._begin_s for at_s in (self._times_s[0], self._times_s[-1]))
        return Answer(first_s, last_s, len(self._ids), tuple(self._ids))


def load(gguf: str, threads: str, cache_gb: str) -> Callable[[Job], Answers]:
    """Return what answers jobs, with its model loaded."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(cache_gb)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", properties)

    def run_job(job: Job) -> Answers:
        waiting = list(range(len(job.prompts)))[::-1]
        running: dict[int, _Request] = {}
        answers: dict[int, Answer] = {}
        begin_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < job.concurrency:
                index = waiting.pop()
                ids = openvino.Tensor(np.array([job.prompts[index]], np.int64))
                running[index] = _Request(pipeline.add_request(index, ids, _config(job, index)))
            pipeline.step()
            for index, request in list(running.items()):
                request.read()
                if request.is_done:
                    answers[index] = running.pop(index).answer()
        return Answers(time.perf_counter() - begin_s, tuple(answers[index] for index in range(len(job.prompts))))

    return run_job


def _config(job: Job, index: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = job.num_tokens
    config.ignore_eos = True
    config.do_sample = job.temperature > 0
    if job.temperature:
        config.temperature, config.top_p, config.top_k = job.temperature, 1.0, 2**31 - 1
        config.rng_seed = job.seeds[index] or 0
    return config


if __name__ == "__main__":
    serve_jobs(lambda: load(*sys.argv[1:]))
