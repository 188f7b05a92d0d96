"""What is remembered of finished outputs: within every bound, once each, and nothing too short to save a step."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.text import recent_texts
from engine.draft.text.recent_texts import RecentLimits, RecentTexts
from engine.draft.text.suffix_counts import ContextTree
from engine.draft.text.text_index import Indexer


def remembering(limits: RecentLimits, outputs: Sequence[tuple[str, Sequence[int]]], prompt: Sequence[int] = ()) -> RecentTexts:
    """Return what is remembered after these (tenant, output), indexed to the end."""
    indexer = Indexer(ContextTree)
    recent = RecentTexts(limits, indexer)
    for tenant, output in outputs:
        recent.add(tenant, prompt, output)
        indexer.advance(1_000_000)
    return recent


def trees_of(recent: RecentTexts, tenant: str) -> list[ContextTree]:
    return [tree for tree in recent.trees_of(tenant) if isinstance(tree, ContextTree)]


def num_stored(tree: ContextTree) -> int:
    return sum(token_id >= 0 for token_id in tree._text)


def stored(recent: RecentTexts, tenant: str) -> int:
    return sum(num_stored(tree) for tree in trees_of(recent, tenant))


names = st.sampled_from(["a/1", "a/2", "a/3", "b/1", "c/1", ""])


@given(st.lists(st.tuples(names, st.integers(0, 30)), max_size=30), st.integers(0, 90), st.integers(0, 150), st.integers(0, 40))
def test_limits_and_token_counts_hold(several, of_tenant, tokens, prompt_len):
    limits = RecentLimits(of_tenant, tokens, tenants_of_group=2, tenants=3)
    outputs = [(tenant, [1000 * number + i for i in range(length)]) for number, (tenant, length) in enumerate(several)]
    recent = remembering(limits, outputs, range(prompt_len))
    by_tenant = {tenant: stored(recent, tenant) for tenant in recent._tenants}
    assert max(by_tenant.values(), default=0) <= of_tenant
    assert sum(by_tenant.values()) == recent.num_tokens <= tokens
    assert len(by_tenant) <= 3
    assert sum(tenant.startswith("a/") for tenant in by_tenant) <= 2
    assert "" not in by_tenant


LIMITS = RecentLimits(100, 1000, tenants_of_group=2, tenants=3)


def known(*tenants: str, limits: RecentLimits = LIMITS) -> list[str]:
    outputs = [(tenant, [1000 * number + i for i in range(10)]) for number, tenant in enumerate(tenants)]
    return list(remembering(limits, outputs)._tenants)


def test_least_recently_used_tenant_is_evicted_first():
    assert known("a/1", "b/1", "a/2", "a/1", "a/3") == ["b/1", "a/1", "a/3"]
    assert known("a/1", "b/1", "c/1", "a/1", "d/1") == ["c/1", "a/1", "d/1"]
    assert known("a/1", "b/1", "c/1", limits=RecentLimits(100, 25)) == ["b/1", "c/1"]


def test_key_with_many_users_evicts_its_own():
    assert known("b/1", *(f"a/{user}" for user in range(50))) == ["b/1", "a/48", "a/49"]


def test_group_limits_kill_a_shared_group(monkeypatch):
    monkeypatch.setattr(recent_texts, "group_of", lambda tenant: "")
    with pytest.raises(AssertionError):
        test_key_with_many_users_evicts_its_own()


def test_touched_tenant_is_evicted_last():
    recent = RecentTexts(LIMITS, Indexer(ContextTree))
    for tenant in ("a/1", "b/1", "c/1"):
        recent.add(tenant, (), range(10))
    recent.touch("a/1")
    recent.touch("nobody/0")
    recent.add("d/1", (), range(10))
    assert list(recent._tenants) == ["c/1", "a/1", "d/1"]


def test_repeated_output_is_stored_once():
    """One-token answers of one prompt were stored with their contexts, 33 tokens each, and counted as one."""
    prompt = list(range(100, 140))
    assert remembering(RecentLimits(10_000), [("a", [7])] * 500, prompt).num_tokens == 0
    assert remembering(RecentLimits(10_000), [("a", [7, 8, 9, 10])] * 500, prompt).num_tokens == 32 + 4
    recent = remembering(RecentLimits(10_000), [("a", [7, 8, 9, number]) for number in range(500)], prompt)
    assert recent.num_tokens == stored(recent, "a") <= 10_000


def test_repeated_output_outlives_single_outputs():
    """An output among the elder is stored anew, so that it is not forgotten with them."""
    often, once = [1, 2, 3, 4, 5], [[10 * number + i for i in range(5)] for number in range(10, 40)]
    outputs = [("a", output) for one in once for output in (often, one)]
    recent = remembering(RecentLimits(50), outputs)
    assert any(tree.match(often[:-1]) for tree in trees_of(recent, "a"))
    assert not any(tree.match(once[0][:-1]) for tree in trees_of(recent, "a"))


def test_end_of_long_output_is_kept():
    recent = remembering(RecentLimits(20), [("a", range(50))], range(100, 110))
    (tree, _) = trees_of(recent, "a")
    assert num_stored(tree) == recent.num_tokens == 10
    assert tree.match([48]) is not None
    assert tree.match([39]) is None
