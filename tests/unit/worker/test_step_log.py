"""What a worker notes is read after its death; what it wrote in part is not taken for a note."""

from pathlib import Path

import pytest

from engine.worker.step_log import RowNote, StepNote, last_note, open_step_log

NOTE = StepNote(7, (RowNote("a", 0, 12, None), RowNote("b", 40, 1, "4.1.0")))


def test_last_note_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert last_note(path) is None
    with open_step_log(path) as box:
        assert last_note(path) is None
        box.note(StepNote(6, (RowNote("a long name" * 9, 0, 500, None),)))
        box.note(NOTE)
        assert last_note(path) == NOTE, "it is there while the worker has the file mapped, whatever becomes of it"
    assert last_note(path) == NOTE
    assert NOTE.request_ids == {"a", "b"}


@pytest.mark.parametrize("at", [4, 8, 20])
def test_incomplete_note_is_none(tmp_path: Path, at: int) -> None:
    path = tmp_path / "steps"
    with open_step_log(path) as box:
        box.note(NOTE)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert last_note(path) is None


def test_oversized_note_is_none(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with open_step_log(path) as box:
        box.note(NOTE)
        box.note(StepNote(8, (RowNote("x" * 2**20, 0, 1, None),)))
    assert last_note(path) is None
