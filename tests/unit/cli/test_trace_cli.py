"""`latebranch trace view` prints known trees exactly."""

from pathlib import Path

import pytest
from msgspec import structs

from engine.core.tree import TokenTree
from engine.trace.records import TracedStep, encoded_line
from server.cli import trace_view
from server.cli.main import main
from server.cli.trace_view import drawn_tree, spelt_as_ids
from tests.traces import HEADER, RECORDS, TREE, bushy_row, step

ENGINE = ["engine: tiny, drafter ngram, verifier traversal, policy fixed 1.2.2, float32 on cpu"]
STEP_1 = ["step 1: 2 decoding rows, 12 target tokens, 8.0 ms (draft 1.0, verify 5.0, judge 1.5, policy 0.0, host 0.5)"]
STEP_2 = ["step 2: 0 decoding rows, 0 target tokens, 8.0 ms (draft 1.0, verify 5.0, judge 1.5, policy 0.0, host 0.5)"]
STEP_3 = ["step 3: 2 decoding rows, 12 target tokens, 8.0 ms (draft 1.0, verify 5.0, judge 1.5, policy 0.0, host 0.5)"]
DRAWING = [
    "[5] -+- [17] x2 -+- 33 - 4",
    "     |           +- 8 x2",
    "     +- 9",
]
ROW_A = [
    "  a at 34: traversal on 0.3.2, temperature 0.8, top_p 0.95",
    *(f"    {line}" for line in DRAWING),
    "    accepted 1 of 5, 2.25 tokens expected; emitted 17 6",
]
ROW_B = [
    "  b at 7: coupled on 0.1.0, temperature 0, top_k 5, min_p 0.1, seeded",
    "    [2]",
    "    accepted 0 of 0; emitted 3, then ended (length)",
]
ROW_C = [
    "  c at 2: block on 1.1.0, temperature 1",
    "    60 - 1",
    "    the target's logits are not finite",
]
WHOLE = [*ENGINE, *STEP_1, *ROW_A, *ROW_B, *STEP_2, *STEP_3, *ROW_A, *ROW_C]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(b"".join(map(encoded_line, RECORDS)))
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["trace", "view", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_trace_is_shown_exactly(trace, capsys):
    assert shown(capsys, trace) == WHOLE


def test_one_request_is_shown_alone(trace, capsys):
    assert shown(capsys, trace, "--request", "c") == [*ENGINE, *STEP_3, *ROW_C]
    assert shown(capsys, trace, "--request", "b") == [*ENGINE, *STEP_1, *ROW_B]
    assert shown(capsys, trace, "--request", "nobody") == []


def test_last_steps_are_shown(trace, capsys):
    assert shown(capsys, trace, "--last", 1) == [*ENGINE, *STEP_3, *ROW_A, *ROW_C]
    assert shown(capsys, trace, "--last", 9) == WHOLE
    assert shown(capsys, trace, "--last", 1, "--request", "b") == [*ENGINE, *STEP_1, *ROW_B]


def test_every_engine_is_named(trace, capsys):
    trace.write_bytes(trace.read_bytes() + encoded_line(HEADER) + encoded_line(step(1)) + encoded_line(bushy_row(1, "a")))
    assert [line.split(":")[0] for line in shown(capsys, trace) if line.startswith("engine")] == ["engine"] * 2


@pytest.mark.parametrize(
    ("token_tree", "path", "drawing"),
    [
        (TokenTree.single(7), (0,), ["[7]"]),
        (TokenTree((-1, 0, 1), (1, 2, 3), ((1,), (2,), ())), (0, 1), ["[1] - [2] - 3"]),
        (
            TokenTree((-1, 0, 0, 0, 2), (1, 22, 3, 4, 5), ((1, 2, 3), (), (4,), (), ())),
            (0, 2, 4),
            ["[1] -+- 22", "     +- [3] - [5]", "     +- 4"],
        ),
        (
            TokenTree((-1, 0, 1, 2, 2), (5, 17, 33, 4, 8), ((1,), (2,), (4, 3), (), ())),
            (0,),
            ["[5] - 17 - 33 -+- 8", "               +- 4"],
        ),
    ],
)
def test_trees_are_drawn_exactly(token_tree, path, drawing):
    assert drawn_tree(token_tree, path, spelt_as_ids) == drawing


def test_drawing_kills_children_sorted_by_number(monkeypatch):
    """The mutant forgets in which order children were drawn."""
    monkeypatch.setattr(TokenTree, "children", property(lambda tree: tuple(tuple(sorted(set(kids))) for kids in tree.draws)))
    token_tree = TokenTree((-1, 0, 0), (1, 2, 3), ((2, 1), (), ()))
    assert drawn_tree(token_tree, (0,), spelt_as_ids) != ["[1] -+- 3", "     +- 2"]


def test_known_drawings_kill_a_bar_forgotten(monkeypatch):
    monkeypatch.setattr(trace_view, "_joint", lambda index, count: (" -+- " if index == 0 else "  +- ", "     "))
    assert drawn_tree(TREE, (0, 1), spelt_as_ids) != DRAWING


def test_a_long_chain_is_drawn():
    """A drawing that calls itself for each child ends at a thousand."""
    num = 3000
    chain = TokenTree.chain((1,) * (num + 1))
    assert drawn_tree(chain, (), spelt_as_ids) == [" - ".join(["1"] * (num + 1))]


@pytest.mark.parametrize("content", [None, b"a poem\n"])
def test_mistakes_are_reported_in_one_line(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert main(["trace", "view", str(tmp_path / "file")]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("latebranch trace: ")
    assert streams.err.count("\n") == 1


def test_a_last_of_nothing_is_refused(trace, capsys):
    with pytest.raises(SystemExit):
        main(["trace", "view", str(trace), "--last", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_step_shows_expected_time_and_reason(tmp_path, capsys):
    stats = structs.replace(step(1).stats, policy_reason="speculation_pays", predicted_s=0.0075, predicted_speedup=1.5)
    path = tmp_path / "trace"
    path.write_bytes(encoded_line(HEADER) + encoded_line(TracedStep(stats)))
    assert shown(capsys, path)[1].endswith("host 0.5); speculation pays: 7.5 ms expected, x1.50 of plain")
