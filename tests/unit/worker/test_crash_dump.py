"""A death leaves one private file, which has parameters, and texts only on request."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine.worker.crash_dump
from engine.core.types import Grammar, GrammarKind, Request, SamplingParams, StepStats
from engine.worker.crash_dump import CrashDumps, WorkerDeath
from engine.worker.request_table import Entry, Submission
from engine.worker.step_log import RowNote, StepNote

DEATH = WorkerDeath("it hung", 3, 12.5, StepNote(7, (RowNote("a", 2, 1, "4.1.0"),)), StepStats(6, 1, 0, 3, 64))
SECRET = 31337
SAMPLING = SamplingParams(seed=4, bad_words=((SECRET,),), grammar=Grammar(GrammarKind.REGEX, str(SECRET)))
ENTRY = Entry(Request("a", (SECRET, 2), SAMPLING, prediction_ids=(SECRET,)), Submission(), True, [SECRET, SECRET])


def written(folder: Path, has_texts: bool) -> tuple[dict[str, Any], str]:
    CrashDumps(folder, has_texts).write(DEATH, [ENTRY])
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    return json.loads(path.read_bytes()), path.read_text()


def test_dump_has_parameters_but_no_text(tmp_path: Path) -> None:
    dump, text = written(tmp_path / "new" / "folder", False)
    assert str(SECRET) not in text
    assert (dump["cause"], dump["worker"], dump["served_s"]) == ("it hung", 3, 12.5)
    assert dump["last_step_begun"]["rows"][0] == {"request_id": "a", "context_len": 2, "num_certain": 1, "expansion": "4.1.0"}
    assert dump["last_step_told"]["num_used_slots"] == 3
    (request,) = dump["requests"]
    assert (request["num_prompt_tokens"], request["num_output_tokens"], request["seed"]) == (2, 2, 4)


def test_dump_has_texts_on_request(tmp_path: Path) -> None:
    dump, _ = written(tmp_path, True)
    (request,) = dump["requests"]
    assert (request["prompt_ids"], request["output_ids"], request["prediction_ids"]) == ([SECRET, 2], [SECRET] * 2, [SECRET])
    assert request["sampling"]["bad_words"] == [[SECRET]]


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.worker.crash_dump, "_MOST_FILES", 2)
    dumps = CrashDumps(tmp_path)
    dumps.write(DEATH, [])
    first = set(tmp_path.iterdir())
    for _ in range(2):
        dumps.write(DEATH, [])
    assert len(set(tmp_path.iterdir())) == 2
    assert not first & set(tmp_path.iterdir())


def test_uncreatable_dump_folder_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR):
        CrashDumps(tmp_path / "file").write(DEATH, [ENTRY])
    assert "the crash dump cannot be written" in caplog.text


def test_unwritable_dump_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with a dump: the next worker must start."""
    with caplog.at_level(logging.ERROR):
        CrashDumps(tmp_path).write(replace(DEATH, cause="no weights at '\udcff'"), [ENTRY])
    assert "the crash dump cannot be written: UnicodeEncodeError" in caplog.text
