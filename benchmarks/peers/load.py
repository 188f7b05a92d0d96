"""The HTTP client, a process of its own: completions streamed from an OpenAI-style server, so many at a time.

A thread for each request that is under way; what the events say is read when all have come, so that reading costs no server time.
"""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.jobs import Answer, Answers, Job, JobFailed, serve_jobs

_LIMIT_S = 600.0
_DATA = b"data: "
Arrivals = list[tuple[float, bytes]]  # the clock's seconds, an event's data


def run_job(job: Job) -> Answers:
    """Send a job's requests and gather their answers. Raises JobFailed."""
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(job.concurrency) as pool:
        answers = list(pool.map(lambda index: _ask(job, index), range(len(job.prompts))))
    end_s = max(last_s for last_s, _ in answers)
    return Answers(end_s - begin_s, tuple(answer for _, answer in answers))


def _ask(job: Job, index: int) -> tuple[float, Answer]:
    """Return the clock's time of the last token, and the answer."""
    place = urlsplit(job.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_LIMIT_S)
    begin_s = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(_body(job, index)), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise JobFailed(f"status {response.status}: {response.read(400).decode(errors='replace')}")
        arrivals = [(time.perf_counter(), line[len(_DATA) :]) for line in response if line.startswith(_DATA)]
    finally:
        connection.close()
    return _read(arrivals, begin_s)


def _body(job: Job, index: int) -> dict[str, Any]:
    seed = {} if job.seeds[index] is None else {"seed": job.seeds[index]}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    sampling = {"temperature": job.temperature, "top_p": 1.0, "max_tokens": job.num_tokens, "ignore_eos": True, **seed}
    model = {"model": job.models[index]} if job.models else {}
    return {"prompt": list(job.prompts[index]), **sampling, **stream, **model, **job.fields}


def _read(arrivals: Arrivals, begin_s: float) -> tuple[float, Answer]:
    """Return the same of the events of one answer."""
    times_s, ids, num_tokens = [], [], None
    for at_s, data in arrivals:
        event = {} if data.strip() == b"[DONE]" else json.loads(data)
        if "error" in event:
            raise JobFailed(str(event["error"]))
        choices = event.get("choices") or []
        if any(choice.get("text") or choice.get("token_ids") for choice in choices):
            times_s.append(at_s)
        ids += [token for choice in choices for token in choice.get("token_ids") or []]
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if num_tokens is None or not times_s:
        raise JobFailed("the stream has no text or no usage")
    return times_s[-1], Answer(times_s[0] - begin_s, times_s[-1] - begin_s, num_tokens, tuple(ids) or None)


if __name__ == "__main__":
    serve_jobs(lambda: run_job)
