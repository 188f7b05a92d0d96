"""The playground in a browser, against the default pair: it draws the server's answer, by keyboard, in dark, on a phone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from server.cli.main import main
from tests.e2e.server import RunningServer

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "Name five fruits and say in one short sentence what is good about each."
ANSWER = {"temperature": 0.7, "top_p": 0.95, "seed": 7, "max_tokens": 20}
PATIENCE_MS = 240_000


@pytest.fixture
def page(server: RunningServer, browser: Browser) -> Iterator[Page]:
    """The page as it comes; at the end nothing may have gone wrong in it or come from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(server.url) else wrong.append(one.url))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def answered(server: RunningServer, browser: Browser) -> Iterator[Page]:
    """The page with an answer on it, requested by keyboard alone, and plain decoding beside it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(server.url)
    page.get_by_label("Message").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    page.get_by_label("Max tokens").fill(str(ANSWER["max_tokens"]))
    page.get_by_label("Plain decoding beside it").focus()
    page.keyboard.press("Space")
    page.get_by_label("Message").focus()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#verdict")).not_to_be_empty(timeout=PATIENCE_MS)
    yield page
    context.close()


def shot(page: Page, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what it looked like beside the run's other files."""
    page.screenshot(path=tmp_path_factory.getbasetemp() / f"{name}.png", full_page=True)


def test_drafted_text_equals_plain_decoding(answered: Page, server: RunningServer) -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": PROMPT}], **ANSWER}
    expected = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=240).json()["choices"][0]["message"]["content"]
    for side in ("drafted", "plain"):
        assert answered.locator(f"#{side} [data-place=text]").text_content() == expected
    expect(answered.locator("#verdict")).to_contain_text("The same text, token for token")


def test_each_step_has_a_tree(answered: Page) -> None:
    steps = answered.locator("#drafted .step")
    numbers = {
        name: float(answered.locator(f"#drafted [data-place={name}]").inner_text()) for name in ("steps", "tokens", "per-step")
    }
    assert numbers["steps"] == steps.count() < numbers["tokens"] == ANSWER["max_tokens"]
    assert numbers["per-step"] == pytest.approx(numbers["tokens"] / numbers["steps"], abs=0.01)
    largest = 0
    for at in range(steps.count()):
        steps.nth(at).locator(".token").first.click()
        expect(answered.locator("[data-place=title]")).to_have_text(f"Step {at + 1} of {steps.count()}")
        nodes = answered.locator("svg.tree .node")
        largest = max(largest, nodes.count())
        accepted = answered.locator("svg.tree .node.accepted")
        assert accepted.count() - 1 >= steps.nth(at).locator(".token").count()  # the root aside; a limit may cut them
        assert answered.locator("svg.tree .node.extra").count() == 1
    assert largest > 5


def test_page_works_by_keyboard(answered: Page) -> None:
    scrubber = answered.get_by_role("slider", name="Step")
    scrubber.focus()
    scrubber.press("End")
    last = int(scrubber.input_value())
    scrubber.press("ArrowLeft")
    expect(answered.locator("[data-place=title]")).to_have_text(f"Step {last - 1} of {last}")
    answered.get_by_label("Text", exact=True).first.press("ArrowRight")
    expect(answered.locator("[data-place=title]")).to_have_text(f"Step {last} of {last}")
    answered.get_by_role("button", name="Step before").press("Enter")
    while answered.locator("svg.tree .node").count() < 4:
        answered.get_by_role("button", name="Step before").press("Enter")
    answered.locator("svg.tree .node").first.focus()
    answered.keyboard.press("ArrowRight")
    focused = answered.locator("svg.tree .node:focus")
    assert re.search(r"(trunk|branch|own token|earlier text)", focused.get_attribute("aria-label") or "")
    expect(answered.locator("[data-place=detail]")).to_contain_text(re.compile(r"model \d"))
    assert answered.locator("svg.tree .node[tabindex='0']").count() == 1
    answered.keyboard.press("ArrowLeft")
    assert "last token so far" in (focused.get_attribute("aria-label") or "")


def serious(page: Page, axe: str) -> list[Any]:
    """Return what axe finds that is serious or worse, with where it is."""
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run()).violations")
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_accessible(answered: Page, axe: str, scheme: Any, width: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No serious finding of axe, colours that follow the system's, and no sideways scrolling of the page."""
    answered.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    answered.set_viewport_size({"width": width, "height": 844})
    shot(answered, f"{scheme}-{width}", tmp_path_factory)
    red = int(re.findall(r"\d+", answered.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert red < 60 if scheme == "dark" else red > 200
    assert answered.evaluate("document.documentElement.scrollWidth") <= width
    assert serious(answered, axe) == []


def test_example_step_is_shown_before_use(page: Page, axe: str) -> None:
    """A recorded step is drawn, its parts are named, and it is walked by keyboard."""
    example = page.get_by_label("One step, as an example")
    expect(example.locator(".node")).to_have_count(13)
    expect(example.locator(".detail")).to_contain_text("6 tokens in one pass")
    example.locator(".node").first.press("ArrowRight")
    expect(example.locator(".detail")).to_contain_text("trunk")
    assert serious(page, axe) == []


def test_page_prompts_for_a_required_key(page: Page, server: RunningServer) -> None:
    opens: list[str | None] = []

    def gate(route: Route) -> None:
        key = route.request.headers.get("authorization")
        opens.append(key)
        if key == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no"}})

    expect(page.get_by_label("API key")).to_be_hidden()
    page.route("**/v1/**", gate)
    page.reload()
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    assert opens == [None, "Bearer secret"]


def test_server_refusal_is_shown(page: Page) -> None:
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("100000 more are requested")


def test_a_recorded_page_draws_the_same_trees(answered: Page, browser: Browser, trace: Path, tmp_path: Path) -> None:
    """It needs no server, and its policy lets its own script run."""
    assert main(["trace", "html", str(trace), "--model", "smollm2-135m", "--out", str(tmp_path / "page.html")]) == 0
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto((tmp_path / "page.html").as_uri())
    text = page.locator("[data-place=text]").first
    assert text.text_content() == answered.locator("#drafted [data-place=text]").text_content()
    assert page.locator("svg.tree .node").count() > 0
    assert wrong == []
    context.close()
