"""Shared fixtures of model tests: separate temporary folders, which show leftover files, and pools of NaN."""

from pathlib import Path

import pytest

from engine.kv_cache.kv_cache import KVCache


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def poisoned_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are not zeroed, so a slot gathered before it is written may hold anything; here it holds NaN.

    A mask is no protection: 0 times NaN is NaN.
    """
    empty = KVCache._empty
    monkeypatch.setattr(KVCache, "_empty", lambda cache, *how: empty(cache, *how).fill_(float("nan")))
