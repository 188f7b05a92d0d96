"""All that a GPU is to show, in the order of its use, in one command that ends in time and can be continued.

    python -m benchmarks.gpu session --minutes 12 --out session

appends to session.jsonl, a figure a line, and writes session.md, one table, after each part. A worker runs the parts one after
another. If it dies or hangs, its part has failed and another worker goes on with the next. A part that has ended is not run
again, unless `--again` names it. A part whose time was over goes on in the next session over the same file, without the figures
that it has. So a lease in pieces is several sessions, each with the minutes of its piece. Models have random weights, made on
the spot. `--device cpu --tiny` runs all in a minute, with other times.

Besides torch, triton and transformers it needs a few packages, which a machine without a package index lacks. The command that
collects them is printed where one is missing (CARRY). `PYTHONPATH=carried:.` then finds them there.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import begin_line, read_figures
from benchmarks.markdown import table

PARTS = {  # seconds at most, of twelve minutes
    "tests": 90,
    "exact": 20,
    "decode": 150,
    "verify": 70,
    "where": 40,
    "policy": 130,
    "waits": 30,
    "pages": 30,
    "fused": 50,
    "formats": 70,
    "races": 40,
}
NEEDED = ("torch", "transformers", "numpy", "jaxtyping", "safetensors", "msgspec", "llguidance", "yaml")
CARRIED = ("msgspec", "llguidance", "jaxtyping", "wadler-lindig", "pyyaml", "pytest", "pluggy", "iniconfig", "pygments")
CARRY = (
    "pip install --no-deps --only-binary :all: --python-version {python} --platform manylinux_2_28_x86_64"
    f" --platform manylinux2014_x86_64 --platform any --target carried {' '.join(CARRIED)}"
)
LATE = "its time is over"
_GRACE_S = 30.0  # that a worker may need beyond its part's time
_COLUMNS = ("part", "model", "case", "value", "unit", "ratio", "to", "aim")


def main(arguments: list[str]) -> None:
    """Run what is left of the session, and print the table of all that was found so far."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu session", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=Path("session"), help="path of what is written, without its ending")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a processor")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--again", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    path = args.out.with_suffix(".jsonl")
    if args.worker:
        from benchmarks.gpu.session_parts import run_parts

        run_parts(path, _open_parts(path, args.only), PARTS, args.device, args.tiny, args.minutes * 60)
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        command = CARRY.format(python=f"{sys.version_info.major}.{sys.version_info.minor}")
        raise SystemExit(f"missing: {', '.join(missing)}; collect them with a package index:\n{command}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, {"part": "session"})
    for name in args.again:
        _append(path, {"part": "again", "name": name})
    try:
        _supervise(path, args)
    finally:
        print(_written(path))


def _supervise(path: Path, args: argparse.Namespace) -> None:
    """Run workers until all parts have ended or the time is over."""
    end_s = time.monotonic() + args.minutes * 60
    while (left_s := end_s - time.monotonic()) > 0 and [*_open_parts(path, args.only)]:
        command = [sys.executable, "-m", "benchmarks.gpu", "session", "--worker", "--out", str(args.out), "--device", args.device]
        command += ["--minutes", str(left_s / 60), *(["--tiny"] if args.tiny else []), "--only", *args.only]
        before = _open_parts(path, args.only)
        worker = subprocess.Popen(command)
        try:
            reason = _watched(worker, path, end_s)
        finally:
            worker.kill()
        if (begun := _begun(path)) is not None:
            _append(path, {"part": "ended", "name": begun, "left_out": reason})
        if before == _open_parts(path, args.only) and time.monotonic() < end_s:
            raise SystemExit(f"no part began: {reason}")


def _watched(worker: "subprocess.Popen[bytes]", path: Path, end_s: float) -> str:
    """Wait for a worker, and end it if its part takes too long; return how it ended."""
    current, since_s = _begun(path), time.monotonic()
    while worker.poll() is None:
        time.sleep(0.2)
        if (begun := _begun(path)) != current:
            current, since_s = begun, time.monotonic()
            _written(path)
        limit_s = since_s + PARTS.get(current or "", 120) + _GRACE_S
        if time.monotonic() > min(limit_s, end_s + _GRACE_S):
            worker.kill()
            worker.wait()
            return "it took too long" if limit_s <= end_s + _GRACE_S else LATE
    return f"its worker ended with {worker.returncode}"


def _written(path: Path) -> str:
    """Write the table, and return it."""
    text = table([*_COLUMNS], _rows(read_figures(path)))
    path.with_suffix(".md").write_text(text + "\n")
    return text


def _append(path: Path, figure: dict[str, Any]) -> None:
    begin_line(path)
    with path.open("a") as file:
        file.write(json.dumps(figure) + "\n")


def _open_parts(path: Path, only: Sequence[str]) -> list[str]:
    """Return the parts that have not ended, in order. Those that were late in an earlier session are open again."""
    ended: dict[str, str | None] = {}
    for figure in read_figures(path):
        if figure["part"] == "session":
            ended = {name: reason for name, reason in ended.items() if reason != LATE}
        elif figure["part"] == "ended":
            ended[figure["name"]] = figure.get("left_out")
        elif figure["part"] == "again":
            ended.pop(figure["name"], None)
    return [name for name in PARTS if name in only and name not in ended]


def _begun(path: Path) -> str | None:
    """Return the part that has begun and not ended."""
    begun = None
    for figure in read_figures(path):
        if figure["part"] == "begun":
            begun = figure["name"]
        elif figure["part"] == "ended":
            begun = None
    return begun


def _rows(figures: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each case, of several runs the latest."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for figure in figures:
        name = figure.get("name", figure["part"])
        if "case" in figure:
            rows[figure["part"], figure.get("model"), figure["case"], figure.get("to")] = figure
        elif "left_out" in figure:
            rows[name, None, "left out", None] = {"part": name, "case": f"left out: {figure['left_out']}"}
        elif figure["part"] == "begun":
            rows.pop((name, None, "left out", None), None)
    return [[_cell(figure.get(name, "")) for name in _COLUMNS] for figure in rows.values()]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
