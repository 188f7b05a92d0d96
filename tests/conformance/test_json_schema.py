"""The JSON-Schema-Test-Suite, draft 2020-12: a schema is kept to the letter or refused by the name of what cannot be kept.

The suite is the copy in the source distribution of `jsonschema`, which pip downloads. Its tests of formats are left out.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest

from engine.structured_output import grammars
from engine.structured_output.grammars import BadGrammar
from tests.json_grammars import accepts, compact, matcher_of

PINNED = "jsonschema==4.26.0"
NARROWED = ('"joe@bloggs"@example.com', "xn--4gbwdl.xn--wgbh1c")  # no @ in quotes; no label in Punycode
FOLDER = re.compile(r"[^/]+/json/tests/draft2020-12/(.+)\.json")
MAX_ORDERS = 300
AS_WRITTEN = "as written"
_ESCAPED = r'"\u{:04x}{}":'
# Words of reasons that name what cannot be kept otherwise than by a key of the schema.
_NAMED = ("nsatisfiable", "Unimplemented keys", "patternProperty", "regex parse error", "Resource", "object schema")

Suite = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def suite(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The groups of each file; skips the tests where no index of packages is reachable."""
    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path_factory.mktemp("suite") if cache is None else Path(cache.mkdir("json-schema-test-suite"))
    if not [*folder.glob("*.tar.gz")]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", str(folder), PINNED]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pip = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if pip.returncode:
            pytest.skip(f"pip finds no {PINNED}, which has the suite: {pip.stderr.strip().splitlines()[-1:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = [(found[1], member) for member in opened.getmembers() if (found := FOLDER.fullmatch(member.name))]
        return {name: json.load(opened.extractfile(member) or pytest.fail(name)) for name, member in sorted(files)}


def orders(value: Any) -> Iterator[Any]:
    """Yield a value with the keys of its objects in every order, its own first."""
    if isinstance(value, dict):
        for names in permutations(value):
            for items in product(*([*islice(orders(value[name]), 24)] for name in names)):
                yield dict(zip(names, items))
    elif isinstance(value, list):
        yield from map(list, product(*([*islice(orders(item), 24)] for item in value)))
    else:
        yield value


def texts(value: Any) -> list[str]:
    return [compact(one) for one in islice(orders(value), MAX_ORDERS)]


def other_spellings(value: Any) -> list[str]:
    """Return texts that a parser reads as the value: in any order, with an escape in each key, with a key twice."""
    found = texts(value)
    escaped = [re.sub(r'"([^"\\])([^"\\]*)":', lambda key: _ESCAPED.format(ord(key[1]), key[2]), text) for text in found]
    doubled = [f"{text[:-1]},{text[1:]}" for text in found if isinstance(value, dict) and value]
    return [*found, *escaped, *doubled]


def with_integers(value: Any) -> Any:
    """Return an equal value, in which an integer is not written as a float."""
    if isinstance(value, dict):
        return {name: with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def how_produced(matcher: Any, name: str, value: Any) -> str:
    """Return how a valid instance can come: as it is written, or in the one way of several equal ones; "" if it cannot."""
    if accepts(matcher, compact(value)):
        return AS_WRITTEN
    if any(accepts(matcher, text) for text in texts(value)):
        return "with its keys in the order of the schema"
    if any(accepts(matcher, text) for text in texts(with_integers(value))):
        return "with integers written without a fraction"
    if value in NARROWED:
        return "not: a narrowed form of docs/structured.md"
    return "not: a format is an assertion here" if name == "format" else ""


def judged(suite: Suite) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return counts of schemas, counts of valid instances by how they come, and what is wrong."""
    schemas, instances, wrong = Counter[str](), Counter[str](), list[str]()
    for name, groups in suite.items():
        for group in groups:
            label = f"{name}: {group['description']}"
            try:
                matcher = matcher_of(group["schema"])
            except BadGrammar as error:
                schemas["refused"] += 1
                keys = re.findall(r'"([^"]+)":', json.dumps(group["schema"]))
                if not any(word in str(error) for word in (*keys, *_NAMED)):
                    wrong.append(f"{label}: refused without a name: {error}")
                continue
            faults, hows = list[str](), set[str]()
            for case in group["tests"]:
                if not case["valid"]:
                    came = [text for text in other_spellings(case["data"]) if accepts(matcher, text)]
                    faults += [f"{label}: {text} comes and is invalid" for text in came[:1]]
                elif how := how_produced(matcher, name, case["data"]):
                    instances[how] += 1
                    hows.add(how)
                else:
                    faults.append(f"{label}: {compact(case['data'])} is valid and cannot come")
            schemas["wrong" if faults else "accepted" if hows <= {AS_WRITTEN} else "narrowed"] += 1
            wrong += faults
    return schemas, instances, wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemas_are_kept_or_refused(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """Some schemas let invalid instances come: keys under other spellings, patterns read as Rust's."""
    schemas, instances, wrong = judged(suite)
    summary = "schemas " + ", ".join(f"{kind}: {schemas[kind]}" for kind in ("accepted", "narrowed", "refused", "wrong"))
    summary += "; valid instances come " + ", ".join(f"{how}: {count}" for how, count in instances.most_common())
    with capsys.disabled():
        sys.stdout.write(f"\n{summary}\n")
    assert wrong == []
    assert schemas["accepted"] >= 200
    assert instances[AS_WRITTEN] > 0.9 * instances.total()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_library_alone_passes_less_of_suite(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "exact_schema", str)
    schemas, _, wrong = judged(suite)
    assert schemas["wrong"] >= 3
    assert any("comes and is invalid" in fault for fault in wrong)
