"""A temporary folder that lives as long as its process, and the removal of folders whose processes were killed.

A process holds a lock on its folder, which the kernel releases however the process ends. Process ids cannot replace it: they are
reused, and containers that share a temporary folder have ids of their own.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_logger = logging.getLogger(__name__)

_PREFIX = "latebranch-run-"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Create a folder with mode 700 and remove it at the end. Abandoned folders are removed first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user that are not locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a folder of another user, or one that is being removed
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    _logger.info("removing %s, whose process is dead", folder)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock. Before it is locked, another process may remove it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # a file system without locks: no folder is ever removed there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)
