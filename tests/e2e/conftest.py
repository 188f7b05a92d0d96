"""One server for every test that speaks to one with the settings users begin with."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import RunningServer, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server; its tests stay in one process (tests/scheduling.py), so that it is started once."""
    with running_server(tmp_path_factory.mktemp("serve") / "log") as running:
        yield running
