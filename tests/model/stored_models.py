"""An empty cache of stored models for tests."""

from pathlib import Path

import pytest

from engine.model import stored_model


def stores_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take an empty cache, in which this process stores tiny models; return the precisions that are checked and stored."""
    done: list[str] = []

    def store(folder: Path, precision: str, target: Path) -> None:
        done.append(precision)
        stored_model.store(folder, precision, target)

    monkeypatch.setenv("LATEBRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_model, "_FEWEST_PARAMETERS", 0)
    monkeypatch.setattr(stored_model, "_SPARE_BYTES", 0)
    monkeypatch.setattr(stored_model, "_store_in_process", store)
    return done
