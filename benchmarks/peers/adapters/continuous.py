"""transformers' continuous batching: `python -m benchmarks.peers.adapters.continuous FOLDER DTYPE THREADS REQUESTS CONTEXT`.

Its cache has room for so many requests of so many tokens of context; a batch has as many requests as a job has at a time. What
a law and a batch need is set up before a job's clock starts.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from benchmarks.peers.adapters.generate import probs_of
from benchmarks.peers.jobs import Answer, Answers, Job, JobFailed, serve_jobs

_PAGE_TOKENS = 256  # its default
_NO_END_TOKEN = -1


class _Batches:
    """The model and the manager of the law and size that was asked for last."""

    def __init__(self, folder: str, dtype: str, num_requests: int, context_tokens: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
        ).eval()
        self._num_blocks = num_requests * -(-context_tokens // _PAGE_TOKENS)
        self._kept: tuple[tuple[float, int], ContinuousBatchingManager] | None = None

    def manager(self, job: Job) -> ContinuousBatchingManager:
        """Return a manager that runs."""
        asked = (job.temperature, job.concurrency)
        if self._kept is not None and self._kept[0] != asked:
            self.close()
        if self._kept is None:
            config = ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=self._num_blocks,
                max_batch_tokens=self._num_blocks * _PAGE_TOKENS,
                max_requests_per_batch=job.concurrency,
                allow_block_sharing=False,
                seed=job.seeds[0],
            )
            manager = self._model.init_continuous_batching(_config(job), config)
            manager.warmup()
            manager.start()
            self._kept = asked, manager
        return self._kept[1]

    def close(self) -> None:
        """End the manager's thread, if there is one: no process ends before it."""
        if self._kept is not None:
            self._kept[1].destroy()
            self._kept = None


def load(stack: ExitStack, folder: str, dtype: str, threads: str, requests: str, context_tokens: str) -> Callable[[Job], Answers]:
    """Return what answers jobs, with its model loaded; `stack` ends it."""
    torch.set_num_threads(int(threads))
    batches = _Batches(folder, dtype, int(requests), int(context_tokens))
    stack.callback(batches.close)

    def run_job(job: Job) -> Answers:
        manager = batches.manager(job)
        begin_s = time.perf_counter()
        ids = manager.add_requests(
            [list(prompt) for prompt in job.prompts], max_new_tokens=job.num_tokens, record_timestamps=True
        )
        done = _wait_for(manager, ids)
        answers = tuple(_answer(done[one], begin_s) for one in ids)
        return Answers(max(answer.last_s for answer in answers), answers)

    return run_job


def _wait_for(manager: ContinuousBatchingManager, ids: Sequence[str]) -> dict[str, GenerationOutput]:
    """Return what has come of requests, once all have ended. Raises JobFailed."""
    done: dict[str, GenerationOutput] = {}
    while len(done) < len(ids):
        output = manager.get_result(timeout=1.0)
        if output is None and not manager.is_running():
            raise JobFailed("the generation loop has ended")
        if output is not None and output.error is not None:
            raise JobFailed(output.error)
        if output is not None and output.request_id in ids:  # others are of a job that failed
            done[output.request_id] = output
    return done


def _answer(output: GenerationOutput, begin_s: float) -> Answer:
    assert output.timestamps is not None
    ids = tuple(output.generated_tokens)
    return Answer(output.timestamps[0] - begin_s, output.timestamps[-1] - begin_s, len(ids), ids)


def _config(job: Job) -> GenerationConfig:
    """Return plain sampling without an end token."""
    return GenerationConfig(max_new_tokens=job.num_tokens, pad_token_id=0, eos_token_id=_NO_END_TOKEN, **probs_of(job))


if __name__ == "__main__":
    with ExitStack() as at_end:
        serve_jobs(lambda: load(at_end, *sys.argv[1:]))
