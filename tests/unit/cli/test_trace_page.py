"""`latebranch trace html` writes one page that has all of a trace and needs nothing else."""

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path
from string import Template
from typing import Any

import pytest

from engine.trace.records import encoded_line, read_trace
from server.cli import trace_page
from server.cli.main import main
from server.cli.trace_page import named_by_id, page_of
from server.cli.trace_view import shown_steps
from server.text.codec import TokenText
from tests.traces import RECORDS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(b"".join(map(encoded_line, RECORDS)))
    return path


def data_in(page: str) -> Any:
    return json.loads(re.findall(r'<script type="application/json" id="recorded">(.*?)</script>', page, re.DOTALL)[0])


def test_page_has_every_row_of_requests(trace: Path, tmp_path: Path) -> None:
    assert main(["trace", "html", str(trace), "--out", str(tmp_path / "page.html")]) == 0
    by_request = {one["id"]: one["steps"] for one in data_in((tmp_path / "page.html").read_text())}
    assert {name: [step["step"] for step in steps] for name, steps in by_request.items()} == {"a": [1, 3], "b": [1], "c": [3]}
    root, *nodes = by_request["a"][0]["nodes"]
    assert (root["part"], root["accepted"]) == ("root", True)
    assert [node["parent"] for node in nodes] == [0, 1, 2, 1, 0]
    assert [node["num_draws"] for node in nodes] == [2, 1, 1, 2, 1]
    assert [node["accepted"] for node in nodes] == [True, False, False, False, False]
    assert by_request["a"][0]["extra"]["token_id"] == 6
    assert by_request["c"][0]["extra"] is None


@pytest.mark.parametrize(("flags", "names"), [(["--request", "b"], ["b"]), (["--last", "1"], ["a", "c"])])
def test_a_page_of_some_rows(trace: Path, tmp_path: Path, flags: list[str], names: list[str]) -> None:
    assert main(["trace", "html", str(trace), "--out", str(tmp_path / "page.html"), *flags]) == 0
    assert [one["id"] for one in data_in((tmp_path / "page.html").read_text())] == names


@pytest.mark.parametrize("flags", [["--request", "nobody"], ["--out", "/nowhere/page.html"]])
def test_mistakes_are_reported_in_one_line(
    trace: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "html", str(trace), "--out", str(tmp_path / "page.html"), *flags]) == 1
    streams = capsys.readouterr()
    assert streams.err.startswith("latebranch trace: ")
    assert streams.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def whole_page(title: str = "trace") -> str:
    return page_of(shown_steps(RECORDS, None), named_by_id, title)


def test_page_policy_names_its_script_and_style() -> None:
    """A browser runs a text whose digest the policy has, and no other."""
    page = whole_page()
    for kind, pattern in {"script": r'<script type="module">(.*?)</script>', "style": r"<style>(.*?)</style>"}.items():
        (text,) = re.findall(pattern, page, re.DOTALL)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_worked_example_is_todays_drawing() -> None:
    """docs/playground.md has the command that makes it anew; what its tokens spell is not looked at here."""
    example = DOCS / "example.html"
    steps = data_in(example.read_text())[0]["steps"]
    rows = [row for shown in shown_steps(read_trace(DOCS / "example.trace"), None) for row in shown.rows]
    assert [[node["token_id"] for node in step["nodes"]] for step in steps] == [list(row.tree.token_ids) for row in rows]
    data = json.dumps(data_in(example.read_text()), ensure_ascii=False, separators=(",", ":"))
    assert trace_page._filled(data, "example.trace") == example.read_text()


def test_playground_example_is_a_documented_step() -> None:
    step = json.loads((trace_page._FOLDER / "example.json").read_text())
    assert step in data_in((DOCS / "example.html").read_text())[0]["steps"]
    assert sum(node["accepted"] for node in step["nodes"]) == step["num_emitted"] == 6


def test_joined_modules_have_unique_names() -> None:
    """Two modules had a function `made` each, and the page stayed empty."""
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", trace_page._script(), re.MULTILINE)
    assert len(names) > 10
    assert len(names) == len(set(names))


def test_no_token_breaks_out_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's text is data: it opens no element and ends none."""
    evil = "</script><script>alert(1)</script>"
    page = page_of(shown_steps(RECORDS, None), lambda _: TokenText(evil, evil.encode()), "<title>")
    assert "alert(1)</script>" not in page
    assert "&lt;title>" in page
    assert data_in(page)[0]["steps"][0]["nodes"][0]["text"] == evil
    monkeypatch.setattr(trace_page, "_filled", lambda data, title: Template("$data").substitute(data=data))
    assert "alert(1)</script>" in page_of(shown_steps(RECORDS, None), lambda _: TokenText(evil, evil.encode()), "")
