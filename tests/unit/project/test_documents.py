"""The documents hang together: links lead somewhere, commands parse, drawings are today's."""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results.__main__ import benchmarks_page
from engine.weights import load_presets
from server.cli.main import _parser, main
from server.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # of runpy

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md"))]
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


class Parsed(BaseException):
    """The command line was understood; the program is to do no more."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """The words without comment and variables of the environment."""
        words = shlex.split(self.line, comments=True)
        return words[next(place for place, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)) :]

    @property
    def settings(self) -> set[str]:
        """The settings that the line gives by variables of the environment."""
        return {name.lower() for name in re.findall(r"(?<!\S)LATEBRANCH_([A-Z_]+)=", self.line)}


PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:latebranch(?= )|python3? -m (?:benchmarks|tests)\.|make(?= ))")


def commands() -> Iterator[Command]:
    """Yield every command of ours in a page, whether in a block of code or in a sentence."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *(" ".join(span.split()) for span in spans)]:
            if PROGRAM.match(line):
                yield Command(page.name, line)


def parse(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program read its command line and do no more; raise SystemExit if it does not understand it."""
    understood = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> None:
        understood(parser, *given)
        raise Parsed

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patched.setattr(sys, "argv", [words[0], *words[3 if words[1:2] == ["-m"] else 1 :]])
        with pytest.raises(Parsed):
            run(words)


def run(words: Sequence[str]) -> None:
    """Run a program, whose arguments are in sys.argv."""
    if words[0] == "latebranch":
        main()
    else:
        assert has_parser(words[2]), f"{words[2]} reads no command line: --help would start its work"
        runpy.run_module(words[2], run_name="__main__")


def has_parser(module: str) -> bool:
    """Return whether a program has a parser, without running it."""
    spec = find_spec(module)
    assert spec is not None, module
    package = f"{module}.__main__" if spec.submodule_search_locations is not None else module
    origin = getattr(find_spec(package), "origin", None)
    return origin is not None and "ArgumentParser(" in Path(origin).read_text()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def made(words: Sequence[str]) -> None:
    """Check a line of make: its target, and flags of serve in ARGS."""
    assert words[1] in targets(), words
    for word in words[2:]:
        if word.startswith("ARGS=") and words[1] == "serve":
            _parser().parse_args(["serve", *shlex.split(word.removeprefix("ARGS="))])


def test_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: commands of the documents lacked a flag that they need, or named one that there is not."""
    found = list(commands())
    assert len(found) > 120
    failed = []
    for command in found:
        words = command.words
        try:
            assert command.settings <= Settings.model_fields.keys()
            if words[0] == "make":
                made(words)
            else:
                parse(words, monkeypatch)
        except (SystemExit, AssertionError, ValueError) as error:
            failed.append(f"{command.page}: {command.line}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_read_a_command_line(path: Path) -> None:
    """The bug: `--help` started the work of a program without a parser."""
    assert "__main__" not in path.read_text() or has_parser(f"benchmarks.{path.stem}")


@pytest.mark.parametrize(
    "line",
    [
        "latebranch serve --no-such 1",
        "latebranch drafter train",
        "python -m benchmarks.load run",
        "python -m benchmarks.markdown",
        "python -m benchmarks.drafters run --config c.yaml --drafters",
        "make no-such",
        'make serve ARGS="--no-such"',
    ],
)
def test_a_wrong_command_is_detected(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROGRAM.match(line)
    words = Command("", line).words
    with pytest.raises((SystemExit, AssertionError)):
        made(words) if words[0] == "make" else parse(words, monkeypatch)


def test_sizes_are_those_of_the_presets() -> None:
    """The bug: three pages gave three sizes of one download."""
    size = f"{load_presets()['smollm2-135m'].size_bytes / 1e6:.0f} MB"
    for page in (ROOT / "README.md", DOCS / "quickstart.md", ROOT / "Dockerfile"):
        assert set(re.findall(r"\b\d+ MB", page.read_text())) == {size}, page


def test_pages_activate_the_environment_once() -> None:
    for page in PAGES:
        assert ".venv/bin/" not in page.read_text().replace("source .venv/bin/activate", ""), page
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()


def test_programs_of_the_suite_name_the_extra(tmp_path: Path) -> None:
    """The bug: `python -m tests.stress.soak` without the extra dev ended in a ModuleNotFoundError."""
    block = "import sys; sys.modules['httpx'] = None; sys.argv = ['soak']; import runpy; runpy.run_module('tests.stress.soak')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == "tests need the extra dev, pip install -e '.[dev]': httpx cannot be imported\n"


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
def test_drawings_are_self_contained_in_both_themes(path: Path) -> None:
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert f"drawings/{path.name}" in links(DOCS / "how-it-works.md")
