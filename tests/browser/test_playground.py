"""The playground in a browser, against the default pair: it draws the server's answer, by keyboard, in dark, on a phone."""

import json
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
    page.locator("#settings summary").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Max tokens").fill(str(ANSWER["max_tokens"]))
    page.get_by_label("Temperature").fill(str(ANSWER["temperature"]))
    page.get_by_label("Top p").fill(str(ANSWER["top_p"]))
    page.get_by_label("Tree", exact=True).select_option("delayed")
    page.get_by_label("Plain decoding beside it").focus()
    page.keyboard.press("Space")
    page.get_by_role("radio", name="Text", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.get_by_label("Message").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
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


def test_a_step_has_its_roofline(answered: Page) -> None:
    """Bytes and operations of its pass, and their shares of the peaks that were measured at the start."""
    answered.locator("#drafted .step .token").first.click()
    shares = r"\d+\.\d\d GB read, [\d.]+ % of this machine’s bandwidth; [\d.]+ G operations, [\d.]+ % of its peak"
    expect(answered.locator("[data-place=detail]")).to_contain_text(re.compile(shares))


def test_page_works_by_keyboard(answered: Page) -> None:
    scrubber = answered.get_by_role("slider", name="Step")
    scrubber.focus()
    scrubber.press("End")
    last = int(scrubber.input_value())
    scrubber.press("ArrowLeft")
    expect(answered.locator("[data-place=title]")).to_have_text(f"Step {last - 1} of {last}")
    answered.locator("#drafted [data-place=text]").press("ArrowRight")
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
@pytest.mark.parametrize("width", [1320, 390])
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
    """A recorded step is drawn, its parts are named, and it is walked by keyboard.

    The bug: it showed the seconds of the machine that recorded it.
    """
    example = page.get_by_label("One step, as an example")
    expect(example.locator(".node")).to_have_count(13)
    expect(example.locator(".detail")).to_contain_text("6 tokens in one pass")
    expect(example.locator(".detail")).not_to_contain_text(" ms")
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
    page.locator("#settings summary").click()
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("100000 more are requested")


def answer_with(page: Page, *texts: str, done: bool = True) -> list[Any]:
    """Answer the page's requests with a stream of these texts in place of the server; return the bodies of the requests."""
    chunks = [
        {"choices": [{"delta": {"content": text}}], "usage": {"completion_tokens": 8 * (n + 1)}} for n, text in enumerate(texts)
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if done else "")
    bodies: list[Any] = []

    def fulfil(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def send(page: Page, text: str = "Hello") -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Generate")).to_be_visible(timeout=PATIENCE_MS)


HOSTILE = """<script>window.hit = 1</script> <img src=x onerror="window.hit = 2"> <b>no bold</b>
[a](javascript:window.hit=3) [b](data:text/html,<script>1</script>) [c]( JaVaScRiPt:1) [d](//evil.test/x) [e](/docs) <a:4>
![picture](http://evil.test/pixel.png) [good](https://good.test/a?b=1 "t") [f](vbscript:1) http://bare.test/x. [g](java\tscript:1)
```html
</code></pre><script>window.hit = 5</script>
```
"""


def test_hostile_answer_is_text(page: Page) -> None:
    """An answer opens no element of its own, loads nothing, and links only to http addresses."""
    answer_with(page, HOSTILE)
    send(page)
    read = page.locator("#drafted .read")
    expect(read).to_contain_text("<b>no bold</b>")
    expect(read.locator("pre")).to_contain_text("</code></pre><script>")
    assert read.locator("script, img, iframe, b, [onerror], [style]").count() == 0
    links = read.locator("a").evaluate_all("links => links.map(link => [link.getAttribute('href'), link.rel, link.textContent])")
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["http://evil.test/pixel.png", rel, "image: picture"],
        ["https://good.test/a?b=1", rel, "good"],
        ["http://bare.test/x", rel, "http://bare.test/x"],
    ]
    assert page.evaluate("window.hit") is None
    page.reload()
    assert page.locator("#turns script, #turns img, #turns b").count() == 0
    expect(page.locator("#turns .assistant a")).to_have_count(3)


MARKDOWN = """# Title
One **bold** and *slanted* `a*b*c`, snake_case_name, 2 * 3 * 4, \\*plain\\*.

1. first
   - inner
2. second

> quoted

| a | b |
|---|--:|
| 1 | 2 |

---
~~~python
def f():
    return "*x*"
~~~
"""


def test_answer_is_rendered_markdown(page: Page) -> None:
    answer_with(page, *MARKDOWN.splitlines(keepends=True))
    send(page)
    read = page.locator("#drafted .read")
    one = {
        "h3": "Title",
        "strong": "bold",
        "em": "slanted",
        "p code": "a*b*c",
        "ol > li > ul > li": "inner",
        "blockquote": "quoted",
    }
    for selector, text in {
        **one,
        "pre": 'def f():\n    return "*x*"',
        "figcaption": "pythonCopy",
        "tr:nth-child(2)": "12",
    }.items():
        assert read.locator(selector).text_content() == text
    expect(read.locator("ol > li")).to_have_count(2)
    expect(read).to_contain_text("snake_case_name, 2 * 3 * 4, *plain*")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    read.get_by_role("button", name="Copy").click()
    expect(read.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f():\n    return "*x*"'


@pytest.mark.parametrize("text", ["*a ", "[", "`" * 3 + " ", "![](", "**a", "_a", "> ", "- ", "http://", "|-", "~~~", "`a ``b "])
def test_marks_are_rendered_in_linear_time(page: Page, text: str) -> None:
    """A repeated mark that nothing closes must not be searched again from every place."""
    script = """async text => {
        const { render } = await import("/playground/markdown.js");
        const place = document.createElement("div"), begin = performance.now();
        render(place, text);
        render(place, text.replaceAll(" ", "\\n"));
        return performance.now() - begin;
    }"""
    length = 1_200_000 if "[" in text else 60_000  # elements take their time, brackets alone become none
    assert page.evaluate(script, text * (length // len(text))) < 5000


def test_default_request_is_untraced_and_free(page: Page) -> None:
    """The bug: every request was traced, with a forced tree, at a third of the speed."""
    bodies = answer_with(page, "Hello")
    send(page)
    assert bodies[0]["speculative"] == {"trace": False}
    page.get_by_text("Tokens and tree").click()
    expect(page.locator("#untraced")).to_be_visible()
    page.get_by_role("button", name="Generate it again").click()
    expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
    assert bodies[1]["speculative"] == {"trace": True}
    assert bodies[1]["messages"] == bodies[0]["messages"]


def test_conversation_is_kept_until_cleared(page: Page) -> None:
    bodies = answer_with(page, "An *answer*.")
    send(page, "First")
    page.reload()
    expect(page.locator("#turns .user")).to_have_text("First")
    expect(page.locator("#turns .assistant em")).to_have_text("answer")
    send(page, "Second")
    assert [one["content"] for one in bodies[1]["messages"]] == ["First", "An *answer*.", "Second"]
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    expect(page.locator("#hello")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("kept", ["{", "[1]", '[{"role": "system", "content": "x"}]', '{"role": "user"}', '[{"role": "user"}]'])
def test_foreign_storage_is_ignored(page: Page, kept: str) -> None:
    page.evaluate("kept => localStorage.setItem('latebranch.conversation', kept)", kept)
    page.reload()
    expect(page.locator("#hello .node")).to_have_count(13)


def test_keys_send_break_lines_and_stop(page: Page) -> None:
    page.locator("#settings summary").click()
    page.get_by_label("Max tokens").fill("2000")
    page.get_by_label("Message").fill("Count")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("from one to a thousand in words")
    page.keyboard.press("Enter")
    expect(page.locator("#turns .user")).to_have_text("Count\nfrom one to a thousand in words")
    expect(page.locator("#drafted [data-place=tokens]")).to_have_text(re.compile(r"^[1-9]\d+$"), timeout=PATIENCE_MS)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Generate")).to_be_visible()
    expect(page.locator("#speed-drafted")).to_have_text(re.compile(r"\d tokens/s"))
    assert "assistant" in page.evaluate("localStorage.getItem('latebranch.conversation')")
    expect(page.locator("#notice")).to_be_empty()


def test_plain_decoding_is_measured_on_demand(page: Page) -> None:
    page.locator("#settings summary").click()
    page.get_by_label("Max tokens").fill("24")
    send(page, PROMPT)
    page.get_by_role("button", name="Measure plain decoding").click()
    expect(page.locator("#verdict")).to_contain_text("in place of 24", timeout=PATIENCE_MS)
    expect(page.locator("#ratio")).to_have_text(re.compile(r"^\d+\.\d\d×$"))


def test_ceiling_is_measured_on_demand(page: Page, axe: str) -> None:
    """The share is of a repeat in which every guess is right. A new answer has its own ceiling."""
    page.locator("#settings summary").click()
    page.get_by_label("Max tokens").fill("96")
    send(page, PROMPT)
    expect(page.locator("#ceiling")).to_be_hidden()
    page.get_by_role("button", name="Measure the ceiling").click()
    expect(page.locator("#share")).to_contain_text(re.compile(r"^\d+ % of the ceiling"), timeout=PATIENCE_MS)
    drafted, ceiling = (float(page.locator(f"#speed-{name}").inner_text().split()[0]) for name in ("drafted", "ceiling"))
    shown = float(page.locator("#share").inner_text().split()[0])
    assert shown == pytest.approx(min(100.0, 100 * drafted / ceiling), abs=1)
    expect(page.get_by_role("button", name="Measure the ceiling")).to_be_hidden()
    assert serious(page, axe) == []
    send(page, "Another question")
    expect(page.locator("#share")).to_be_empty()
    expect(page.locator("#ceiling")).to_be_hidden()


@pytest.mark.parametrize(
    ("accepted", "repeated", "words"),
    [(0, "word " * 300, "did not draft"), (9, "other", "another text"), (9, "word " * 300, "too short")],
)
def test_unknown_ceiling_is_explained(page: Page, accepted: int, repeated: str, words: str) -> None:
    """A server without drafts, an answer that changes when it is generated again, and one that is over at once."""
    bodies = answer_with(page, *["word "] * 300)
    send(page)
    page.unroute("**/v1/chat/completions")
    usage = {"completion_tokens": 9, "completion_tokens_details": {"accepted_prediction_tokens": accepted}}
    chunk = json.dumps({"choices": [{"delta": {"content": repeated}}], "usage": usage})
    repeats: list[Any] = []

    def fulfil(route: Route) -> None:
        repeats.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", fulfil)
    page.get_by_role("button", name="Measure the ceiling").click()
    expect(page.locator("#share")).to_contain_text(words)
    (first,), repeat = bodies, repeats[0]
    assert repeat["prediction"] == {"type": "content", "content": "word " * 300}
    own = {"prediction", "speculative"}
    assert {name: repeat[name] for name in repeat.keys() - own} == {name: first[name] for name in first.keys() - own}


def test_drawn_answer_has_no_ceiling(page: Page) -> None:
    """Without a seed the repeat would be another answer."""
    page.locator("#settings summary").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("")
    answer_with(page, *["word "] * 300)
    send(page)
    expect(page.get_by_role("button", name="Measure plain decoding")).to_be_visible()
    expect(page.get_by_role("button", name="Measure the ceiling")).to_be_hidden()


def test_broken_connection_is_explained(page: Page) -> None:
    """A stream that ends early, a server that is away, and its return."""
    answer_with(page, "Half an", done=False)
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("connection ended before the answer did")
    expect(page.locator("#drafted .read")).to_have_text("Half an")
    expect(page.get_by_role("alert")).to_contain_text("ready again", timeout=10_000)
    page.route("**/v1/**", lambda route: route.abort())
    send(page, "Again")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.get_by_label("Message")).to_have_value("Again")
    page.unroute("**/v1/**")
    expect(page.get_by_role("alert")).to_contain_text("ready again", timeout=10_000)


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (503, "the engine restarts", "not ready: the engine restarts"),
        (429, "3 requests", "limit of this API key"),
        (401, "no", "API key"),
    ],
)
def test_refusals_are_explained(page: Page, status: int, message: str, words: str) -> None:
    refusal = {"error": {"message": message}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, json=refusal))
    send(page)
    expect(page.get_by_role("alert")).to_contain_text(words)


@pytest.mark.parametrize("width", [1320, 390])
def test_answer_is_above_folded_settings(page: Page, axe: str, width: int) -> None:
    """On a phone a screen of settings came before the answer."""
    page.set_viewport_size({"width": width, "height": 844})
    answer_with(page, MARKDOWN)
    send(page)
    expect(page.get_by_label("Max tokens")).to_be_hidden()
    answer, settings = (page.locator(name).bounding_box() for name in ("#drafted .words", "#settings"))
    assert answer
    assert settings
    assert answer["y"] + answer["height"] <= settings["y"] if width < 860 else settings["x"] < answer["x"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious(page, axe) == []
    tree = page.locator("main").aria_snapshot()
    for part in (
        'form "Request"',
        'textbox "Message"',
        'article "Answer with speculation"',
        'heading "Title" [level=3]',
        'button "Copy"',
    ):
        assert part in tree


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
