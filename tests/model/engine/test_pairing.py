"""Rows of requests that name only a tree, only a verifier or only a number of nodes."""

import pytest

from engine.core.policy import FixedExpansion
from engine.core.step_plan import Row
from engine.core.tree import Expansion
from engine.core.types import Request, SamplingParams, Speculation
from engine.core.verifier_table import require_exact
from engine.engine import Engine
from engine.testing import tiny_engine
from tests.model.driving import run
from tests.model.tiny import pair

HEAP, CHAIN = Expansion(0, 3, 6, "heap", 9), Expansion(4, 1, 0)


def rows_of(monkeypatch: pytest.MonkeyPatch, policy: Expansion, speculation: Speculation, seed: int | None = None) -> list[Row]:
    """Serve one request by an engine whose policy always wishes for one tree; return its decoding rows."""
    rows: list[Row] = []
    grow = Engine._grow

    def seen(engine: Engine, plan):
        rows.extend(plan.decoding)
        return grow(engine, plan)

    monkeypatch.setattr(Engine, "_grow", seen)
    sampling = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
    run(tiny_engine(*pair("llama"), FixedExpansion(policy)), [Request("r", (5, 6, 7), sampling, speculation)])
    return rows


@pytest.mark.parametrize(
    ("policy", "speculation", "verifier", "tree"),
    [
        (HEAP, Speculation(), "traversal", "heap"),
        (HEAP, Speculation(verifier="specinfer"), "specinfer", "delayed"),
        (HEAP, Speculation(verifier="univer"), "univer", "greedy_sample"),
        (Expansion(0, 3, 4, "static", 6), Speculation(verifier="univer"), "univer", "static"),
        (HEAP, Speculation(expansion=Expansion(1, 2, 2, "delayed_distinct"), verifier="hu"), "hu", "delayed_distinct"),
        (HEAP, Speculation(verifier="nss"), "nss", "heap"),
        (CHAIN, Speculation(verifier="univer"), "univer", "delayed"),
        (Expansion(1, 3, 2), Speculation(verifier="univer"), "univer", "greedy_sample"),
        (CHAIN, Speculation(expansion=Expansion(0, 3, 4, "beam", 6)), "nss", "beam"),
        (CHAIN, Speculation(expansion=Expansion(0, 3, 4, "greedy_sample", 6)), "univer", "greedy_sample"),
        (CHAIN, Speculation(expansion=Expansion(0, 3, 4, "noise_aware", 6)), "coupled", "noise_aware"),
        (CHAIN, Speculation(expansion=Expansion(0, 3, 4, "static", 6)), "traversal", "static"),
    ],
)
def test_unpaired_choice_gets_an_exact_partner(policy, speculation, verifier, tree, monkeypatch):
    rows = rows_of(monkeypatch, policy, speculation)
    drafting = [row for row in rows if not row.expansion.is_plain]
    assert {(row.verifier, row.expansion.tree) for row in drafting} == {(verifier, tree)}
    for row in drafting:
        require_exact(row.expansion, row.verifier)


@pytest.mark.parametrize("tree", [HEAP, Expansion(0, 3, 4, "greedy_sample", 6), Expansion(1, 3, 2)])
def test_seeded_request_is_coupled_on_any_tree(tree, monkeypatch):
    assert {row.verifier for row in rows_of(monkeypatch, CHAIN, Speculation(expansion=tree), seed=3)} == {"coupled"}


@pytest.mark.parametrize("policy", [HEAP, CHAIN, Expansion(2, 3, 2)])
def test_max_nodes_bounds_whatever_tree_is_chosen(policy, monkeypatch):
    rows = rows_of(monkeypatch, policy, Speculation(max_nodes=3))
    assert max(row.expansion.num_draft_tokens for row in rows) <= 3
    assert max(row.expansion.num_draft_tokens for row in rows_of(monkeypatch, policy, Speculation())) > 3


def test_choices_without_drafter_are_plain_decoding():
    for tree in ("calibrated", "noise_aware", "static"):
        expansion = Expansion(0, 3, 4, tree, 6)
        engine = tiny_engine(pair("llama")[0], None, FixedExpansion(Expansion(0, 1, 0)))
        wish = Request("r", (5, 6, 7), SamplingParams(max_tokens=6, ignore_eos=True), Speculation(expansion=expansion))
        assert len(run(engine, [wish]).outcomes["r"].ids) == 6
