"""The page at / and its files: served without a key, from here alone, with what the server can do; off where it is not wanted."""

import re
from pathlib import Path

import pytest

from engine.core.tree import TREE_NAMES
from engine.core.verifier_table import VERIFIER_NAMES
from server.routes import playground
from tests.api.harness import in_process
from tests.fake_engine import FakeEngine


def options_of(page: str, name: str) -> list[str]:
    """Return the values of a select."""
    select = page[page.index(f'name="{name}"') :].partition("</select>")[0]
    return re.findall(r'<option value="(\w*)"', select)


async def test_page_and_files_need_no_key() -> None:
    async with in_process(FakeEngine(), api_keys=("secret",)) as client:
        for path in sorted(playground.PATHS):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/")).headers["content-type"].startswith("text/html")
        assert (await client.get("/playground/tree.js")).headers["content-type"].startswith("text/javascript")
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/playground/other.js")).status_code == 401


@pytest.mark.parametrize("name", ["other.js", "recorded.html", "..%2fauth.py", "%2e%2e/auth.py"])
async def test_no_other_file_is_served(name: str) -> None:
    async with in_process(FakeEngine()) as client:
        assert (await client.get(f"/playground/{name}")).status_code == 404


async def test_playground_can_be_disabled() -> None:
    async with in_process(FakeEngine(), playground=False) as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/playground/app.js")).status_code == 404
    async with in_process(FakeEngine(), playground=False, api_keys=("secret",)) as client:
        assert (await client.get("/")).status_code == 401


@pytest.mark.parametrize("file", sorted(playground.FOLDER.iterdir()), ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(file: Path) -> None:
    links = set(re.findall(r"https?://[^\"'\s]+", file.read_text()))
    assert links <= {"http://www.w3.org/2000/svg"}


def test_every_file_of_the_page_is_served() -> None:
    loaded = {
        name for path in playground.FOLDER.iterdir() for name in re.findall(r'(?:playground/|"\./)([\w.]+)"', path.read_text())
    }
    assert {f"/playground/{name}" for name in loaded} <= playground.PATHS


async def test_the_page_offers_trees_and_verifiers() -> None:
    """Neither is listed in the page: a new verifier is three files, none of them the page."""
    async with in_process(FakeEngine()) as client:
        page = (await client.get("/")).text
    assert options_of(page, "verifier") == ["", *VERIFIER_NAMES]
    assert options_of(page, "tree") == ["", *TREE_NAMES]
    assert " selected" not in page  # the first option is the server's own choice
