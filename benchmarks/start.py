"""Seconds from the command to `/ready` and memory after ten requests, of other checkouts and of this one by turns.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.start ../before --model smollm2-135m --set dtype=compact --rounds 5
    python -m benchmarks.start ../before --model smollm2-135m --first --rounds 1

Everything is cached, unless `--first` is given: then each start has an empty cache but for the GGUF file, and converts it.
Processor time is of all the server's processes; a busy machine changes it less than the seconds that pass. Memory is the sum of
the proportional set sizes of the server's processes, so that shared pages count once. A stage ends with the first log line that
has its words. llama-server is measured too where `python -m benchmarks.peers setup llama.cpp` has built it and the model has a
GGUF file. Prints medians with the lowest and the highest value, and the ratios of the medians of a round; the last line is JSON.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.foreign import ForeignCpu
from benchmarks.markdown import table
from benchmarks.peers import setup
from benchmarks.peers.groups import ProcessGroup
from benchmarks.peers.processes import free_port
from engine.weights import default_root, resolve

_HERE = Path(__file__).resolve().parents[1]
_LIMIT_S = 900.0
_NUM_REQUESTS, _NUM_TOKENS = 10, 16
_MIB = 1 << 20
_PROGRAM = "import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n"
_STAGES = {  # the words of the line that ends a stage
    "worker launched": "launched as process",
    "packing begun": "packing ",
    "worker ready": "is ready after",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A server to start: its command, with the port as the last word, and the paths that answer 200 once it is up and ready."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    live: str
    ready: str


@dataclass(slots=True)
class Start:
    """A measured start: seconds to each moment, the longest silence of its log, processor seconds, and bytes by process."""

    seconds: dict[str, float] = field(default_factory=dict)
    silence_s: float = 0.0
    cpu_s: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)


def main() -> None:
    """Print a table of starts, then one line of JSON."""
    args = _arguments(sys.argv[1:])
    model = resolve(args.model)
    starts: dict[str, list[Start]] = defaultdict(list)
    foreign_cpus = []
    with tempfile.TemporaryDirectory(prefix="latebranch-start-") as folder:
        checkouts = [*(Path(one).resolve() for one in args.checkouts), _HERE]
        for number in range(args.rounds + (not args.first)):
            for checkout in checkouts:
                cache = _empty_cache(Path(folder) / f"{number}-{checkout.name}", model.gguf) if args.first else default_root()
                words = ["serve", "--model", args.model, *(f"--{name}={value}" for name, value in args.set), "--port"]
                program = program_of(Path(folder) / f"latebranch-{checkout.name}", checkout)
                own = {"PYTHONPATH": str(checkout), "LATEBRANCH_CACHE": str(cache)}
                name = _name_of(checkout)
                subject = Subject(name, (sys.executable, str(program), *words), own, "/live", "/ready")
                foreign = ForeignCpu(lambda: sum(os.times()[:4]))
                found = measured(subject)
                if number or args.first:  # the first round fills caches
                    starts[name].append(found)
                    foreign_cpus.append(foreign.cpus() or 0.0)
            if model.gguf is not None and setup.is_set_up("llama.cpp") and not args.first and number:
                command = (str(setup.llama_program("llama-server")), "--model", str(model.gguf), "--ctx-size", "8192", "--port")
                starts["llama-server"].append(measured(Subject("llama-server", command, {}, "/health", "/health")))
    print(_report(starts, _name_of(checkouts[0])))
    settings = " ".join(f"{name}={value}" for name, value in args.set)
    print(f"{args.model} {settings}; {args.rounds} rounds; others used {statistics.median(foreign_cpus):.1f} processors")
    print(json.dumps({name: [vars_of(one) for one in found] for name, found in starts.items()}))


def _name_of(checkout: Path) -> str:
    return "this checkout" if checkout == _HERE else checkout.name


def program_of(file: Path, checkout: Path) -> Path:
    """Write what a checkout's installed command runs."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["latebranch"].partition(":")
    file.write_text(_PROGRAM.format(module=module, name=name))
    return file


def measured(subject: Subject) -> Start:
    """Start a server, measure it, and stop it."""
    found = Start()
    port = free_port()
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [*subject.command, str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **subject.environment},
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process, begin_s, found, lines))
    reader.start()
    try:
        for moment, path in (("/live", subject.live), ("/ready", subject.ready)):
            while not is_up(f"http://127.0.0.1:{port}{path}"):
                if process.poll() is not None or time.monotonic() - begin_s > _LIMIT_S:
                    raise SystemExit(f"{subject.name} did not start:\n{''.join(lines[-40:])}")
                time.sleep(0.02)
            found.seconds[moment] = time.monotonic() - begin_s
        found.cpu_s = ProcessGroup(process.pid).cpu_s()
        for index in range(_NUM_REQUESTS):
            _complete(port, f"{index}. The capital of France is")
        found.bytes = dict(_memory(process.pid))
    finally:
        begin_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        found.seconds["stop"] = time.monotonic() - begin_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
    return found


def _read(process: "subprocess.Popen[str]", begin_s: float, found: Start, lines: list[str]) -> None:
    """Note the time of each stage's line, and the longest silence until the server is ready."""
    assert process.stdout is not None
    latest_s = begin_s
    for line in process.stdout:
        lines.append(line)
        now_s = time.monotonic()
        if "/ready" not in found.seconds:
            found.silence_s = max(found.silence_s, now_s - latest_s)
        latest_s = now_s
        for stage, words in _STAGES.items():
            if words in line:
                found.seconds.setdefault(stage, now_s - begin_s)


def is_up(url: str) -> bool:
    """Return whether a GET of the address is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _complete(port: int, prompt: str) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": name, "prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def _memory(root: int) -> Iterator[tuple[str, int]]:
    """Yield the proportional set size of each process of a server; the first is its own."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [root]
    for pid in tree:
        tree.extend(child for child, parent in parents.items() if parent == pid)
    for place, pid in enumerate(tree):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            name = Path(f"/proc/{pid}/comm").read_text().strip() if place else "front end"
            yield f"{place} {name}", next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024


def _empty_cache(folder: Path, gguf: Path | None) -> Path:
    """Return a new cache that has only the model's GGUF file."""
    (folder / "gguf").mkdir(parents=True)
    if gguf is not None:
        (folder / "gguf" / gguf.name).symlink_to(gguf)
    return folder


def _report(starts: Mapping[str, Sequence[Start]], base: str) -> str:
    moments = [*_STAGES, "/live", "/ready", "stop"]
    seen = [one for one in moments if any(one in start.seconds for found in starts.values() for start in found)]
    rows = []
    for moment in seen:
        cells = [[start.seconds[moment] for start in found if moment in start.seconds] for found in starts.values()]
        rows.append([f"{moment}, s", *map(_cell, cells)])
    rows.append(["processor time to /ready, s", *(_cell([start.cpu_s for start in found]) for found in starts.values())])
    rows.append(["longest silence, s", *(_cell([start.silence_s for start in found]) for found in starts.values())])
    totals = {name: [sum(start.bytes.values()) / _MIB for start in found] for name, found in starts.items()}
    rows.append(["memory, MiB", *map(_cell, totals.values())])
    fronts = [[next(iter(start.bytes.values()), 0) / _MIB for start in found] for found in starts.values()]
    rows.append(["front end, MiB", *map(_cell, fronts)])
    if len(starts) == 1:
        return table(["", *starts], rows)
    ready = {name: [start.seconds["/ready"] for start in found] for name, found in starts.items()}
    rows.append([f"/ready over {base}", *(_ratio(found, ready[base]) for found in ready.values())])
    used = {name: [start.cpu_s for start in found] for name, found in starts.items()}
    rows.append([f"processor time over {base}", *(_ratio(found, used[base]) for found in used.values())])
    rows.append([f"memory over {base}", *(_ratio(found, totals[base]) for found in totals.values())])
    return table(["", *starts], rows)


def _ratio(found: Sequence[float], base: Sequence[float]) -> str:
    return _cell([one / other for one, other in zip(found, base, strict=True)], 2)


def _cell(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def vars_of(start: Start) -> dict[str, object]:
    """Return a start as JSON."""
    return {"seconds": start.seconds, "silence_s": start.silence_s, "cpu_s": start.cpu_s, "bytes": start.bytes}


def pair_of(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name.replace("_", "-"), value


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", help="folders of other checkouts, each with its library compiled")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", nargs="+", type=pair_of, default=[], metavar="NAME=VALUE", help="settings of the servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="start with an empty cache, but for the GGUF file")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
