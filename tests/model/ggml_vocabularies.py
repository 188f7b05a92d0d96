"""Vocabularies of llama.cpp with test texts and the tokens that the models' own tokenizers give, of a package's sources.

The source distribution is only unpacked: pip would run its build to learn its name.
"""

import hashlib
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.weights import WeightsCache, default_root

_FILE = "llama_cpp_python-0.3.36.tar.gz"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_MEMBER = re.compile(r".*/models/ggml-vocab-[^/]+\.gguf(\.inp|\.out)?")
_SEPARATOR = "\n__ggml_vocab_test__\n"
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class GgmlVocabulary:
    """A GGUF file without weights, and pairs of a text and its tokens; none come with some of them."""

    file: Path
    texts: tuple[tuple[str, list[int]], ...]


def vocabularies() -> dict[str, GgmlVocabulary]:
    """Return all of them by name, fetched once into the user's cache; skip the test where the index is not reachable."""
    cache = WeightsCache(default_root())
    try:
        folder = cache.obtain(cache.root / "tests" / _FILE.removesuffix(".tar.gz"), _fetch)
    except urllib.error.URLError as error:
        pytest.skip(f"the package index is not reachable: {error}")
    return {path.stem.removeprefix("ggml-vocab-"): _read(path) for path in sorted(folder.glob("*.gguf"))}


def _read(file: Path) -> GgmlVocabulary:
    if not file.with_suffix(".gguf.inp").exists():
        return GgmlVocabulary(file, ())
    texts = file.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(_SEPARATOR)
    lines = file.with_suffix(".gguf.out").read_text().split("\n")  # the last text is empty, and so is its line
    assert not any(lines[len(texts) :])
    pairs = zip(texts, lines[: len(texts)], strict=True)
    return GgmlVocabulary(file, tuple((text, [int(token_id) for token_id in line.split()]) for text, line in pairs))


def _fetch(target: Path, scratch: Path) -> None:
    archive = scratch / _FILE
    with urllib.request.urlopen(_address(), timeout=_TIMEOUT_S) as source, archive.open("wb") as out:
        shutil.copyfileobj(source, out)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == _SHA256
    target.mkdir()
    with tarfile.open(archive) as members:
        for member in members:
            if _MEMBER.fullmatch(member.name):
                content = members.extractfile(member)
                assert content is not None
                (target / Path(member.name).name).write_bytes(content.read())


def _address() -> str:
    """Return where the user's package index has the file."""
    page = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/llama-cpp-python/"
    with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as listing:
        found = re.search(rf'href="([^"#]*{re.escape(_FILE)})', listing.read().decode())
    if found is None:
        raise urllib.error.URLError(f"{page} has no {_FILE}")
    return str(urllib.parse.urljoin(page, found[1]))
