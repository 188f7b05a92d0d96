"""Each test's temporary folders lie apart, so that what is left behind can be seen."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
