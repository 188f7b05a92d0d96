"""A temporary folder of a process for as long as it lives, and the removal of those whose owners were killed.

An owner holds a lock on its folder, which the kernel releases however the process ends. Process ids would not do: they are used
again, and differ between containers that share a folder for temporary files.
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
    """Make a folder with mode 700, and remove it at the end. Folders of dead owners are removed first."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user whose locks nobody holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's folder, or one that its owner removes now
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    _logger.info("removing %s, whose owner is dead", folder)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder and the descriptor of its lock. Before it is locked, another process may take it for abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # without locks on its file system no folder is ever removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)
