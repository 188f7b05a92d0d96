"""Swagger UI at /docs in a browser: it loads from this server alone, sends the key that was entered, and runs operations."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.test_playground import shot
from tests.conformance.folder import served_folder
from tests.e2e.server import RunningServer, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "a-key-for-the-browser"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def keyed_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server over a tiny model that needs a key."""
    folder = tmp_path_factory.mktemp("swagger")
    model = str(served_folder(folder / "model"))
    flags = ("--model", model, "--model-name", "tiny", "--api-keys", KEY, "--drafter", "ngram", "--spare-worker", "false")
    with running_server(folder / "log", *flags, key=KEY) as running:
        yield running


@pytest.fixture
def docs_page(keyed_server: RunningServer, browser: Browser) -> Iterator[Page]:
    """Yield the page; afterwards nothing may have come from another origin, and no error may have occurred but a 401."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda one: None if one.url.startswith((keyed_server.url, "data:")) else wrong.append(one.url))
    page.goto(keyed_server.url + "/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    yield page
    context.close()
    assert [text for text in wrong if "status of 401" not in text] == []


def executed(page: Page, path: str, body: object = None) -> Locator:
    """Run an operation from the page, and return the status and text of its answer."""
    block = page.locator(".opblock", has=page.locator(f'[data-path="{path}"]'))
    if block.locator(".opblock-body").count() == 0:
        block.locator(".opblock-summary-control").click()
        block.get_by_role("button", name="Try it out").click()
    if body is not None:
        block.locator("textarea.body-param__text").fill(json.dumps(body))
    block.get_by_role("button", name="Execute").click()
    return block.locator(".live-responses-table .response").first


def test_operations_run_with_the_entered_key(docs_page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    expect(executed(docs_page, "/v1/models").locator(".response-col_status")).to_contain_text("401")
    docs_page.locator(".auth-wrapper .authorize").click()
    docs_page.get_by_label("auth-bearer-value").fill(KEY)
    docs_page.locator(".auth-btn-wrapper .authorize").first.click()
    docs_page.locator(".auth-btn-wrapper .btn-done").first.click()
    expect(executed(docs_page, "/v1/models").locator(".response-col_status")).to_contain_text("200")
    answer = executed(docs_page, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4})
    expect(answer.locator(".response-col_status")).to_contain_text("200")
    expect(answer).to_contain_text("text_completion")
    shot(docs_page, "swagger", tmp_path_factory)
