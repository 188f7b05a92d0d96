"""All that a GPU is to show, in the order of its use, in one command that ends in time and goes on where it was cut off.

    python -m benchmarks.gpu session --minutes 12 --out session

appends to session.jsonl, a figure a line, and writes session.md, one table. A worker runs the parts one after another. If it
dies or hangs, its part has failed and another worker goes on with the next. A part that has ended is not run again, unless
`--again` names it. Models have random weights, made on the spot. `--device cpu --tiny` runs all in a minute, with other times.

It needs torch, triton, transformers, numpy, jaxtyping, safetensors, msgspec and llguidance.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

PARTS = {  # seconds at most, of twelve minutes
    "tests": 100,
    "exact": 20,
    "decode": 150,
    "verify": 80,
    "where": 50,
    "policy": 140,
    "fused": 50,
    "formats": 80,
    "races": 50,
}
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

        run_parts(path, [*_open_parts(path, args.only)], PARTS, args.device, args.tiny, args.minutes * 60)
        return
    for name in args.again:
        _append(path, {"part": "again", "name": name})
    _supervise(path, args)
    text = table([*_COLUMNS], _rows(_read(path)))
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


def _supervise(path: Path, args: argparse.Namespace) -> None:
    """Run workers until all parts have ended or the time is over."""
    end_s = time.monotonic() + args.minutes * 60
    while (left_s := end_s - time.monotonic()) > 0 and [*_open_parts(path, args.only)]:
        command = [sys.executable, "-m", "benchmarks.gpu", "session", "--worker", "--out", str(args.out), "--device", args.device]
        command += ["--minutes", str(left_s / 60), *(["--tiny"] if args.tiny else []), "--only", *args.only]
        worker = subprocess.Popen(command)
        reason = _watched(worker, path, end_s)
        if (begun := _begun(path)) is not None:
            _append(path, {"part": "ended", "name": begun, "left_out": reason})
        elif worker.returncode:
            raise SystemExit(f"the worker ended with {worker.returncode} before a part began")


def _watched(worker: "subprocess.Popen[bytes]", path: Path, end_s: float) -> str:
    """Wait for a worker, and end it if its part takes too long; return how it ended."""
    current, since_s = _begun(path), time.monotonic()
    while worker.poll() is None:
        time.sleep(0.2)
        if (begun := _begun(path)) != current:
            current, since_s = begun, time.monotonic()
        limit_s = min(since_s + PARTS.get(current or "", 120) + _GRACE_S, end_s + _GRACE_S)
        if time.monotonic() > limit_s:
            worker.kill()
            worker.wait()
            return "it took too long"
    return f"its worker ended with {worker.returncode}"


def _read(path: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def _append(path: Path, figure: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(figure) + "\n")


def _open_parts(path: Path, only: list[str]) -> list[str]:
    """Return the parts that have not ended, in order."""
    ended: dict[str, bool] = {}
    for figure in _read(path):
        if figure["part"] in ("ended", "again"):
            ended[figure["name"]] = figure["part"] == "ended"
    return [name for name in PARTS if name in only and not ended.get(name)]


def _begun(path: Path) -> str | None:
    """Return the part that has begun and not ended."""
    begun = None
    for figure in _read(path):
        if figure["part"] == "begun":
            begun = figure["name"]
        elif figure["part"] == "ended":
            begun = None
    return begun


def _rows(figures: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each case, of several runs the latest."""
    rows = {}
    for figure in figures:
        if "case" in figure:
            rows[figure["part"], figure.get("model"), figure["case"], figure.get("to")] = figure
        elif "left_out" in figure:
            name = figure.get("name", figure["part"])
            rows[name, None, "left out", None] = {"part": name, "case": f"left out: {figure['left_out']}"}
    return [[_cell(figure.get(name, "")) for name in _COLUMNS] for figure in rows.values()]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
