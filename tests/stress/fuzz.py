"""Ten thousand bodies against a real server with a tiny model: `python -m tests.stress.fuzz --bodies 10000`.

No answer is a 5xx, except after a deadline in the body. All answers arrive, and no error is longer than a line or two.
Afterwards the server is healthy and idle, was never restarted, and answers as before.
`--seed` makes up other bodies.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import RunningServer, running_server
from tests.stress.fuzz_bodies import Shot, made_up

HANG_S = 60.0  # of one answer, on a machine that does much else
MAX_ERROR_CHARS = 1200  # of the message and the name of a field
_NUM_AT_ONCE = 4
_DEADLINE = 'code":"deadline_exceeded"'  # which the body set: this server has none of its own
_ENDS = ('"stop":true', *(f'"type":"{kind}"' for kind in ("response.completed", "response.incomplete", "message_stop", "error")))
_FAILURES = ('"type":"server_error"', '"type":"api_error"')
_TEXT = {"model": "tiny", "prompt": "the same as before", "temperature": 0, "max_tokens": 16}
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "latebranch_engine_restarts_total")


@dataclass
class Findings:
    """The results of the bodies: counts of statuses, and the faults."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        """Bodies that were answered."""
        return self.statuses.total()


def problem_of(answer: httpx.Response) -> str | None:
    """Return the faults of an answer."""
    text = answer.text
    if answer.status_code >= 500 and not (answer.status_code == 504 and _DEADLINE in text):
        return f"{answer.status_code}: {text[:300]}"
    if answer.status_code >= 400:
        error = answer.json().get("error") if text.startswith("{") else None
        if not isinstance(error, dict) or not error.get("message"):
            return f"{answer.status_code} without an error: {text[:300]}"
        num_chars = len(error["message"]) + len(error.get("param") or "")
        return f"an error of {num_chars} characters" if num_chars > MAX_ERROR_CHARS else None
    if answer.headers["content-type"].startswith("text/event-stream"):
        return _problem_of_stream(text)
    json.loads(text)
    return None


def _problem_of_stream(text: str) -> str | None:
    events = [event.rpartition("data: ")[2] for event in text.removesuffix("\n\n").split("\n\n")]
    if events[-1] != "[DONE]" and not any(end in events[-1] for end in _ENDS):
        return f"a stream without an end: {text[-300:]}"
    server_errors = [event for event in events if any(kind in event for kind in _FAILURES) and _DEADLINE not in event]
    return f"an error of the server in a stream: {server_errors[0][:300]}" if server_errors else None


def fuzz(url: str, num_bodies: int, number: int) -> Findings:
    """Send bodies, a few at a time; return what came of them. `number` chooses which."""
    findings = Findings()
    with httpx.Client(base_url=url, timeout=HANG_S) as client, ThreadPoolExecutor(_NUM_AT_ONCE) as pool:

        def outcome(shot: Shot) -> tuple[int | None, str | None]:
            headers = {} if shot.content_type is None else {"Content-Type": shot.content_type}
            try:
                answer = client.post(shot.path, content=shot.body, headers=headers)
                return answer.status_code, problem_of(answer)
            except (httpx.HTTPError, ValueError) as error:
                return None, repr(error)

        shots = list(made_up(num_bodies, number))
        for shot, (status, problem) in zip(shots, pool.map(outcome, shots), strict=True):
            if status is not None:
                findings.statuses[status] += 1
            if problem is not None:
                findings.problems.append(f"{problem}\n  after {shot.path} {shot.content_type} {shot.body[:2000]!r}")
    return findings


def text_of(url: str) -> Any:
    """Return the server's answer to a prompt whose answer is always the same."""
    return httpx.post(url + "/v1/completions", json=_TEXT, timeout=HANG_S).raise_for_status().json()["choices"]


def unrest_of(get: Callable[[str], httpx.Response]) -> list[str]:
    """Return in what a server that should be idle is not."""
    samples = [line.rsplit(" ", 1) for line in get("/metrics").text.splitlines() if line.startswith(_IDLE)]
    busy = [f"{name} is {value}" for name, value in samples if float(value) != 0.0]
    open_requests = get("/load").json()["server_load"]
    return [*busy, *(f"{path} is {get(path).status_code}" for path in ("/health", "/ready") if get(path).status_code != 200)] + (
        [f"{open_requests} requests are open"] if open_requests else []
    )


def fuzz_and_look(server: RunningServer, num_bodies: int, number: int) -> Findings:
    """Send bodies, and add to what came of them what has become of the server."""
    before = text_of(server.url)
    findings = fuzz(server.url, num_bodies, number)
    if text_of(server.url) != before:
        findings.problems.append("the server answers something else than before")
    findings.problems += unrest_of(server.get)
    return findings


def main() -> None:
    """Run it and print the result."""
    from tests.conformance.folder import served_folder  # here, because it brings torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(served_folder(folder / "model"))
        flags = (
            "--model",
            model,
            "--model-name",
            "tiny",
            "--drafter",
            "model",
            "--draft-model",
            model,
            "--max-model-len",
            "256",
            "--policy",
            "fixed",
        )
        with running_server(folder / "log", *flags) as server:
            findings = fuzz_and_look(server, arguments.bodies, arguments.seed)
        tracebacks = (folder / "log").read_text().count("Traceback")
    for problem in findings.problems[:20]:
        print(problem)  # noqa: T201
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(findings.statuses.items()))
    print(f"{findings.num_sent} bodies: {statuses}; {len(findings.problems)} problems, {tracebacks} tracebacks in the log")  # noqa: T201
    raise SystemExit(bool(findings.problems or tracebacks))


if __name__ == "__main__":
    main()
