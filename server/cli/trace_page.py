"""The page of `latebranch trace html`: recorded steps in one self-contained file.

It uses the playground's code. Knows records and files of the page. Does not know arguments or tokenizers.
"""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from engine.trace.records import step_trace
from server.cli.trace_view import ShownStep, header_line
from server.generation.step_trace import Spell, step_trace_of
from server.text.codec import TokenText

_FOLDER = Path(__file__).parents[1] / "playground"
_MODULES = ("tree.js", "answer.js", "recorded.js")  # in the order of their imports


def named_by_id(token_id: int) -> TokenText:
    """Return the id as a token's text, for a page without a tokenizer."""
    return TokenText(f" {token_id}", f" {token_id}".encode())


def page_of(steps: Iterable[ShownStep], spell: Spell, title: str) -> str:
    """Return the page of the steps' rows, grouped by request; raise ValueError if there are no rows."""
    requests: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for shown in steps:
        for row in shown.rows:
            trace = step_trace_of(step_trace(shown.step.stats, row), spell)
            requests.setdefault((row.request_id, header_line(shown.header)), []).append(trace.model_dump(exclude_unset=True))
    if not requests:
        raise ValueError("no row of a request is among these steps")
    data = [{"id": name, "engine": engine, "steps": rows} for (name, engine), rows in requests.items()]
    return _filled(json.dumps(data, ensure_ascii=False, separators=(",", ":")), title)


def _filled(data: str, title: str) -> str:
    index, style, script = _read("index.html"), _read("style.css"), _script()
    return Template(_read("recorded.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data.replace("<", "\\u003c"),
        legend=_element(index, "ul", 'class="legend"'),
        template=_element(index, "template", 'id="with-tree"'),
    )


def _script() -> str:
    """Return the modules joined in the order of their imports, without import and export statements."""
    whole = "\n".join(map(_read, _MODULES))
    return re.sub(r"^import .*\n|^export ", "", whole, flags=re.MULTILINE)


def _element(html: str, tag: str, attribute: str) -> str:
    return html[(begin := html.index(f"<{tag} {attribute}")) : html.index(f"</{tag}>", begin)] + f"</{tag}>"


def _hash(text: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
