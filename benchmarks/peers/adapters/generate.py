"""transformers `generate`, plain or assisted: `python -m benchmarks.peers.adapters.generate FOLDER DTYPE THREADS [DRAFT]`.

Requests that are under way together are one padded batch, as `generate` takes them; with an assistant it takes one at a time.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from benchmarks.peers.jobs import Answer, Answers, Job, JobFailed, serve_jobs


class _Watch(StoppingCriteria):
    """Notes when the first tokens are there; stops nothing."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        """See a step's end."""
        self.first_s = self.first_s or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(folder: str, dtype: str, threads: str, draft: str | None = None) -> Callable[[Job], Answers]:
    """Return what answers jobs, with its models loaded."""
    torch.set_num_threads(int(threads))
    model = _model(folder, dtype)
    assistant = _model(draft, dtype) if draft else None

    def run_job(job: Job) -> Answers:
        if assistant is not None and job.concurrency > 1:
            raise JobFailed("assisted generation takes one request at a time")
        answers: list[Answer] = []
        begin_s = time.perf_counter()
        for first in range(0, len(job.prompts), job.concurrency):
            answers += _batch(model, assistant, job, slice(first, first + job.concurrency))
        return Answers(time.perf_counter() - begin_s, tuple(answers))

    return run_job


def _model(folder: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
    ).eval()


def _batch(model: Any, assistant: Any, job: Job, some: slice) -> list[Answer]:
    """Return the answers of requests that are sent together."""
    prompts = job.prompts[some]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    if job.temperature:
        torch.manual_seed(job.seeds[some][0] or 0)
    watch = _Watch()
    begin_s = time.perf_counter()
    with torch.inference_mode():
        texts = model.generate(
            ids,
            attention_mask=mask,
            generation_config=_config(model, job),
            assistant_model=assistant,
            stopping_criteria=[watch],
        )
    end_s = time.perf_counter()
    assert watch.first_s is not None
    new = [tuple(text[length:].tolist()) for text in texts]
    return [Answer(watch.first_s - begin_s, end_s - begin_s, len(one), one) for one in new]


def probs_of(job: Job) -> dict[str, Any]:
    """Return how transformers is told of temperature alone."""
    if not job.temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}


def _config(model: Any, job: Job) -> GenerationConfig:
    """Return plain sampling without an end token: what a model's own file says of sampling is not asked."""
    config = GenerationConfig(max_new_tokens=job.num_tokens, pad_token_id=0, **probs_of(job))
    model.generation_config = config  # what it has of its own would fill what is not said here
    return config


if __name__ == "__main__":
    serve_jobs(lambda: load(*sys.argv[1:]))
