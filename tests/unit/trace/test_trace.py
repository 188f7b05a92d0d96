"""Trace files: what is written is read, torn lines are left out, wrong files are refused, and a full disk fails nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.trace import records as trace
from engine.trace.file import TraceFile
from engine.trace.records import TRACE_VERSION, TraceError, TraceHeader, TraceRecord, encoded_line, read_trace
from tests.traces import HEADER, RECORDS, TREE, bushy_row, step


def written(path: Path, records: list[TraceRecord]) -> list[TraceRecord]:
    """Write a header and records step by step; return what is read."""
    file = TraceFile(path, HEADER)
    for record in records:
        file.write([record])
    file.close()
    return list(read_trace(path))


def test_trace_survives_round_trip(tmp_path):
    """Equal records: trees with their draws, numbers, words, what is absent."""
    assert TREE.depths == (0, 1, 2, 3, 2, 1), "what a tree remembers is not written"
    assert written(tmp_path / "trace", RECORDS[1:]) == RECORDS
    assert len((tmp_path / "trace").read_text().splitlines()) == len(RECORDS)


@pytest.mark.parametrize("dropped", ["token_ids", "draws", "path", "extra_id", "expected_tokens", "finish", "root_position"])
def test_round_trip_kills_lost_fields(dropped, tmp_path, monkeypatch):
    """The mutant writes the field of every row as nothing, or as that of another row."""

    class Lossy:
        def encode(self, record: TraceRecord) -> bytes:
            raw = msgspec.to_builtins(record)
            part = raw.get("tree", {}) if dropped in ("token_ids", "draws") else raw
            if dropped in part:
                part[dropped] = LOST[dropped]
            return msgspec.json.encode(raw)

    monkeypatch.setattr(trace, "_encoder", Lossy())
    with pytest.raises((AssertionError, TraceError)):
        assert written(tmp_path / "trace", RECORDS[1:]) == RECORDS


LOST = {
    "token_ids": [1, 2, 3, 4, 5, 6],
    "draws": [[1, 5], [2, 4], [3], [], [], []],
    "path": [0],
    "extra_id": None,
    "expected_tokens": None,
    "finish": None,
    "root_position": 0,
}


def test_trace_is_on_disk_after_write(tmp_path):
    """A worker is killed without a chance to close anything."""
    file = TraceFile(tmp_path / "trace", HEADER)
    file.write(RECORDS[1:4])
    assert list(read_trace(tmp_path / "trace")) == RECORDS[:4]
    file.close()
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def torn_files(path: Path) -> Iterator[int]:
    """Cut a trace at places of its last line, the first and last bytes among them, yielding how many bytes are left of it."""
    whole = b"".join(map(encoded_line, RECORDS))
    last = len(encoded_line(RECORDS[-1]))
    for left in sorted({*range(9), *range(0, last, 7), *range(last - 9, last)}):
        path.write_bytes(whole[: len(whole) - last + left])
        yield left


def check_torn(path: Path) -> None:
    for left in torn_files(path):
        is_whole = left == len(encoded_line(RECORDS[-1])) - 1  # only the end of the line is missing
        assert list(read_trace(path)) == (RECORDS if is_whole else RECORDS[:-1])


def test_a_torn_last_line_is_left_out(tmp_path):
    check_torn(tmp_path / "trace")


def test_torn_lines_kill_a_credulous_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_decoded", lambda line, place: trace._decoder.decode(line))
    with pytest.raises(msgspec.DecodeError):
        check_torn(tmp_path / "trace")


def test_next_engine_appends_after_torn_line(tmp_path):
    for _ in torn_files(tmp_path / "trace"):
        assert written(tmp_path / "trace", [step(1)])[-2:] == [HEADER, step(1)]
    assert TraceHeader not in map(type, written(tmp_path / "other", RECORDS[1:])[1:])


def test_broken_line_in_middle_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(encoded_line(HEADER) + b'{"type":"st\n' + encoded_line(step(2)) + encoded_line(step(3)))
    with pytest.raises(TraceError, match="line 2 is no JSON"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encoded_line(step(1)), "does not begin with a header"),
        (b"a poem\n", "does not begin with a header"),
        (encoded_line(HEADER).replace(b'"version":1', b'"version":99'), "of version 99; only 1 can be read"),
        (encoded_line(HEADER) + encoded_line(HEADER).replace(b'"version":1', b'"version":2'), "of version 2; only 1 can be read"),
        (encoded_line(HEADER) + b'{"type":"poem"}\n', "line 2 is no record"),
        (encoded_line(HEADER) + encoded_line(bushy_row(1, "a")).replace(b"[-1,0,", b"[-1,7,"), "parents must precede"),
    ],
)
def test_invalid_trace_is_refused_in_one_line(content, reason, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        list(read_trace(tmp_path / "file"))


def test_unknown_fields_of_newer_traces_are_ignored(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(encoded_line(HEADER) + encoded_line(step(1)).replace(b'"stats":', b'"mood":"good","stats":'))
    assert list(read_trace(path)) == [HEADER, step(1)]
    assert HEADER.version == TRACE_VERSION


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "trace").touch()
    assert list(read_trace(tmp_path / "trace")) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_full_disk_is_logged_once(caplog):
    with caplog.at_level(logging.ERROR):
        file = TraceFile(Path("/dev/full"), HEADER)
        for number in range(5):
            file.write([step(number)])
        file.close()
    assert [record.message for record in caplog.records] == ["tracing to /dev/full ends: [Errno 28] No space left on device"]


def test_unopenable_file_is_an_immediate_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        TraceFile(tmp_path / "nowhere" / "trace", HEADER)
