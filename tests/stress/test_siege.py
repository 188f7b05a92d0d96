"""Connections that do no work leave streams, /health, memory and the log as they are: `python -m tests.stress.siege`."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.stress.siege import Plan, Siege, besieged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of connections that the server has closed
]

_BUSY_S = 10.0  # on a machine that runs other tests too /health may take longer than the program allows


def test_idle_connections_disturb_no_stream(tmp_path: Path) -> None:
    """The bug: 1,100 silent connections under a limit of 1,024 descriptors stopped /health for 55 s and wrote 188 MB of log."""
    siege = besieged(tmp_path, Plan())
    assert siege.num_health > 3
    assert siege.slowest_health_s < _BUSY_S
    assert replace(siege, slowest_health_s=0.0).faults == []


def test_faults_of_a_siege_are_reported() -> None:
    sound = Siege(0, 0.1, 0.05, 30, 0, 11_000.0, 14_000, 700, 4.0, 5.0)
    assert sound.faults == []
    broken = replace(
        sound, num_different=1, slowest_health_s=55.0, num_failed_health=1, grown_kib=70_000.0, num_log_bytes=188_000_000
    )
    assert len(broken.faults) == 5
