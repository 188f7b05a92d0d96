"""Names of this program's processes."""

from contextlib import suppress
from pathlib import Path


def name_process(name: str) -> None:
    """Name this process in lists of processes. The kernel keeps 15 characters."""
    with suppress(OSError):  # Linux only
        Path("/proc/self/comm").write_text(name)
