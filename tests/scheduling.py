"""Which tests stay in one process when the suite runs in several: those that share what is dear to load.

xdist's own `--dist loadgroup` writes groups into node ids, which are read-only in pytest 9. Groups come from the ids instead.
"""

import re

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_OF_ONE_SERVER = ("tests/e2e/test_readme.py", "tests/e2e/test_serve.py")
_PRESET = re.compile(r"tests/e2e/test_golden\.py::\w+\[(.+)\]")


def group_of(node_id: str) -> str:
    """Return the group of a test: its file, whose tests share tiny models; a golden preset; all tests of one server."""
    if preset := _PRESET.fullmatch(node_id):
        return preset[1]
    file = node_id.partition("::")[0]
    return "server" if file in _OF_ONE_SERVER else file


class GroupScheduling(LoadScopeScheduling):
    """Hands whole groups to processes as they become free, in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by number of tests, which is unrelated to their time

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
