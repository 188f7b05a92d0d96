"""A short soak finds nothing that grows; what does grow is found."""

from pathlib import Path

import pytest

from tests.stress.growth import Sample, leaks, more
from tests.stress.soak import soaked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_hundred_requests_leave_nothing(tmp_path: Path) -> None:
    soak = soaked(tmp_path, 100)
    assert leaks(soak.samples) == []
    assert soak.statuses == {"200": 60, "400": 10, "404": 20, "left": 10}
    assert {"memory of front end", "memory of worker", "files of worker", "threads of worker"} <= set(soak.samples[-1])


def _sample(step: int) -> Sample:
    """Return a sample of a server that fills its caches in the first quarter and then stays, but for some noise."""
    return {"memory of worker": 1e6 + 9e4 * min(step, 10) + 800.0 * (step % 3), "files of worker": 30.0 + step % 2}


def test_growing_resource_is_found() -> None:
    sound = [_sample(step) for step in range(40)]
    assert leaks(sound) == []
    leaky = [{**one, "memory of worker": one["memory of worker"] + 900.0 * step} for step, one in enumerate(sound)]
    assert [leak.split(" grew")[0] for leak in leaks(leaky)] == ["memory of worker"]
    forgetful = [{**one, "files of worker": one["files of worker"] + step // 9} for step, one in enumerate(sound)]
    assert [leak.split(" grew")[0] for leak in leaks(forgetful)] == ["files of worker"]


def test_growing_resources_are_reported() -> None:
    before = {**_sample(0), "series of metrics": 600.0}
    little = {"memory of worker": before["memory of worker"] + 900, "series of metrics": 610.0, "files of worker": 29.0}
    assert more(before, {**before, **little}, 1000.0) == []
    after = {**before, "memory of worker": before["memory of worker"] + 1100, "files of worker": 31.0, "files of helpers": 1.0}
    grown = more(before, after, 1000.0)
    assert [line.split(":")[0] for line in grown] == ["memory of worker", "files of worker", "files of helpers"]
