"""Writes one JSON file for each death of a worker: the cause, its last step and its live requests.

Sampling parameters are always written. Texts (prompts, outputs, predictions, bad words, grammars) are written only if enabled.
Failures are logged and do not delay the next worker.
"""

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.core.types import Request, SamplingParams, StepStats
from engine.worker.request_table import Entry
from engine.worker.step_log import StepNote

_logger = logging.getLogger(__name__)

_MOST_FILES = 100  # older files are deleted
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """How a worker died. `served_s`: seconds since it was ready, None if it never was. `note`: its last step."""

    cause: str
    number: int
    served_s: float | None
    note: StepNote | None
    last_stats: StepStats | None


class CrashDumps:
    """Writes to one folder, which is created at the first death. `has_texts`: texts are written too."""

    def __init__(self, folder: Path, has_texts: bool = False) -> None:
        self._folder = folder
        self._has_texts = has_texts

    def write(self, death: WorkerDeath, entries: Iterable[Entry]) -> None:
        """Write the file of a death. `entries` are the live requests."""
        try:
            self._write(death, entries)
        except Exception as error:  # noqa: BLE001 (the restart must not fail for lack of a dump)
            _logger.error("the crash dump cannot be written: %s: %s", type(error).__name__, error)

    def _write(self, death: WorkerDeath, entries: Iterable[Entry]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"crash-{time.time_ns()}-{os.getpid()}-{death.number}.json"
        report = {
            "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cause": death.cause,
            "worker": death.number,
            "served_s": death.served_s,
            "last_step_begun": death.note,
            "last_step_told": death.last_stats,
            "requests": [self._describe_request(entry) for entry in entries],
        }
        path = self._folder / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2))
        _logger.warning("crash dump written to %s", path)
        for old in sorted(self._folder.glob("crash-*.json"))[:-_MOST_FILES]:
            old.unlink(missing_ok=True)

    def _describe_request(self, entry: Entry) -> dict[str, Any]:
        request = entry.request
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "was_in_the_worker": entry.is_posted,
            "deaths_before": entry.num_deaths,
            "num_prompt_tokens": len(request.prompt_ids),
            "num_output_tokens": len(entry.token_ids),
            "num_prediction_tokens": len(request.prediction_ids),
            "sampling": request.sampling if self._has_texts else _without_texts(request.sampling),
            "seed": request.seed,
            "speculation": request.speculation,
        }
        return fields | self._texts(request, entry.token_ids) if self._has_texts else fields

    def _texts(self, request: Request, token_ids: list[int]) -> dict[str, Any]:
        return {"prompt_ids": request.prompt_ids, "output_ids": token_ids, "prediction_ids": request.prediction_ids}


def _without_texts(sampling: SamplingParams) -> SamplingParams:
    grammar = None if sampling.grammar is None else replace(sampling.grammar, text="")
    return replace(sampling, bad_words=(), grammar=grammar)
