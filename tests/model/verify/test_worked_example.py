"""The code of docs/adding-a-verifier.md runs unchanged: its rule is exact, its mutant is not, and the engine serves it."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.core import verifier_table as pairs
from engine.core.policy import FixedExpansion
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.testing import tiny_engine, tiny_model
from engine.verify import registry as rules

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-verifier.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The definitions of the page's blocks, whose assertions passed."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_page_enumerates_its_rule_and_mutant(example: dict[str, Any]) -> None:
    assert sum("assert worst_loss" in block for block in BLOCKS) == 2
    assert example["worst_loss"](example["likeliest"]) < example["EXACT"]


def test_registered_it_judges_requests(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules._REGISTRY, "likeliest", lambda: example["likeliest"])
    monkeypatch.setitem(pairs._TABLE, "likeliest", pairs._Exactness("delayed", pairs._IID, (pairs._PATH,)))
    model = tiny_model()
    expansion = Expansion(1, 2, 2)
    engine = tiny_engine(model, model, FixedExpansion(expansion))
    engine.add(Request("one", (1, 2, 3), SamplingParams(max_tokens=12, ignore_eos=True), Speculation(verifier="likeliest")))
    num_tokens = num_accepted = 0
    while engine.has_work:
        output = engine.step()
        num_accepted += output.stats.num_accepted_tokens
        num_tokens += sum(len(event.token_ids) for event in output.events)
    assert num_tokens == 12
    assert num_accepted > 0
