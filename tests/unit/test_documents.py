"""The documents hang together: links lead somewhere, commands parse, drawings are today's."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.results.__main__ import benchmarks_page
from server.cli.main import _parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md"))]
DRAWINGS = DOCS / "drawings"


def links(page: Path) -> set[str]:
    """Return what a page links to here."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return {link for link in found if not link.startswith(("http://", "https://"))}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= index
    assert "docs/README.md" in links(ROOT / "README.md")


def test_benchmarks_page_is_made_from_results() -> None:
    assert (DOCS / "benchmarks.md").read_text() == benchmarks_page()


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command line) of everything that `latebranch` is asked for in a block of code."""
    for page in PAGES:
        for block in re.findall(r"```(?:bash)?\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?latebranch (.+)", line.strip()):
                    yield page.name, found[1]


def test_commands_are_understood() -> None:
    told = list(commands())
    assert len(told) > 15
    for page, line in told:
        try:
            _parser().parse_args(shlex.split(line, comments=True))
        except SystemExit:
            pytest.fail(f"{page}: latebranch {line}")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_drawings_are_made_by_the_code(tmp_path: Path) -> None:
    """docs/how-it-works.md has the command that makes them anew."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    facts = subprocess.run([sys.executable, DRAWINGS / "facts.py"], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(facts.stdout)["step"]["num_emitted"] == 6
    subprocess.run(["node", DRAWINGS / "draw.mjs", tmp_path], input=facts.stdout, text=True, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DRAWINGS.glob("*.svg")}
    for path in tmp_path.iterdir():
        assert path.read_text() == (DRAWINGS / path.name).read_text(), path.name


@pytest.mark.parametrize("path", sorted(DRAWINGS.glob("*.svg")), ids=lambda path: path.name)
def test_drawings_stand_alone_in_light_and_dark(path: Path) -> None:
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert f"drawings/{path.name}" in links(DOCS / "how-it-works.md")
