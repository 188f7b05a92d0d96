"""Tokens a second of replicas of one thread behind the gateway smg, and of the same engines without gateway and HTTP.

make .venv-cluster/.installed
python -m benchmarks.replicas --model smollm2-135m --replicas 2 --clients 8 --rounds 3

What replicas can gain is what the machine gives several engines of one thread: they share its memory and caches. So the same
requests also run in one engine process and in as many as there are replicas, without HTTP. The loss of the gateway and of HTTP is
the quotient of both gains. The shares of processor time behind smg show it too, and depend less on other work of the machine.

All processes stay loaded; each round measures every contender once, in an order of its own. A client reads whole answers, each of
a prompt of its own, so no prefix is shared. Each replica has the same number of clients, so batches are equally large. Prints
medians of a round's ratios, with the lowest and the highest.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.markdown import table
from benchmarks.peers.processes import free_port
from benchmarks.start import is_up
from engine.core.types import Request, SamplingParams
from engine.weights import resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import served_engine
from server.settings import load_settings

_LIMIT_S = 300.0
_SERVE = "import sys; from server.cli.main import main; sys.exit(main())"
_ENGINE, _ENGINES = "an engine of one thread", "engines of one thread"
_REPLICA, _REPLICAS, _GATEWAY = "a replica", "replicas", "replicas behind smg"
_numbers = itertools.count()


def main() -> None:
    """Start the servers and engines, measure by turns and print the tables."""
    args = _arguments()
    if args.engine:
        _run_engine(args)
        return
    folder = Path(tempfile.mkdtemp(prefix="replicas."))
    with contextlib.ExitStack() as stack:

        def server(num_threads: int) -> str:
            flags = ["--model", args.model, "--dtype", args.dtype, "--num-threads", str(num_threads)]
            command = [sys.executable, "-c", _SERVE, "serve", *flags]
            return stack.enter_context(_running(command, "--port", "/ready", folder))

        engines = [stack.enter_context(_engine(args)) for _ in range(args.replicas)]
        replicas = [server(1) for _ in range(args.replicas)]
        flags = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        balance = ["--policy", "cache_aware", "--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1"]  # as in deploy/
        smg = [str(args.smg.absolute()), "launch", *flags, *balance]
        gateway = stack.enter_context(_running([*smg, "--worker-urls", *replicas], "--port", "/readiness", folder))
        many = server(args.replicas)
        contenders: dict[str, Callable[[], float]] = {
            _ENGINE: lambda: _of_engines(engines[:1], args),
            _ENGINES: lambda: _of_engines(engines, args),
            _REPLICA: lambda: _of_servers(replicas[:1], args),
            _REPLICAS: lambda: _of_servers(replicas, args),
            _GATEWAY: lambda: _of_servers([gateway] * args.replicas, args),
            f"a server of {args.replicas} threads": lambda: _of_servers([many] * args.replicas, args),
        }
        for measure in contenders.values():
            measure()  # measures costs, and fills caches
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        spent_s: dict[str, float] = defaultdict(float)
        for round_number in range(args.rounds):
            for name in random.Random(round_number).sample(list(contenders), len(contenders)):
                before_s = _processor_s()
                speeds[name].append(contenders[name]())
                if name == _GATEWAY:
                    for kind, seconds in _processor_s().items():
                        spent_s[kind] += seconds - before_s[kind]
    print(f"{args.model} {args.dtype}, {args.replicas} replicas, {args.clients} clients for each, {args.rounds} rounds")
    bases = {_ENGINE: _ENGINE, _ENGINES: _ENGINE}
    rows = [
        [name, f"{statistics.median(found):.0f}", _text(_ratios(found, speeds[bases.get(name, _REPLICA)]))]
        for name, found in speeds.items()
    ]
    print(table(["contender", "tokens/s", "over one of its kind"], rows))
    shares = ", ".join(f"{kind} {seconds / sum(spent_s.values()):.1%}" for kind, seconds in sorted(spent_s.items()))
    print(f"processor time behind smg: {shares}")
    of_machine = _ratios(speeds[_ENGINES], speeds[_ENGINE])
    for name in (_REPLICAS, _GATEWAY):
        print(f"gain of {name} over the gain of engines: {_text(_ratios(_ratios(speeds[name], speeds[_REPLICA]), of_machine))}")


def _ratios(speeds: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(speeds, base, strict=True)]


def _text(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def _processor_s() -> dict[str, float]:
    """Return the processor seconds so far of this process and all that it started, by kind."""
    ticks, names, children = {}, {}, defaultdict[int, list[int]](list)
    for file in Path("/proc").glob("[0-9]*/stat"):  # lists of children in /proc can miss some
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            start, _, rest = file.read_text().rpartition(")")
            pid, fields = int(file.parent.name), rest.split()
            names[pid], ticks[pid] = start.partition("(")[2], sum(map(int, fields[11:13]))
            children[int(fields[1])].append(pid)
    seconds, waiting = defaultdict[str, float](float), [os.getpid()]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        kind = {"latebranch-work": "engines", "smg::router": "smg"}.get(names[pid], "front ends")
        seconds["clients" if pid == os.getpid() else kind] += ticks[pid] / os.sysconf("SC_CLK_TCK")
    return seconds


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 1.0, "max_tokens": args.max_tokens, "ignore_eos": True}


def _prompt(number: int) -> str:
    return f"{number}. A short story about the number {number}:"


def _of_servers(urls: Sequence[str], args: argparse.Namespace) -> float:
    """Return the tokens a second that clients receive together, as many for each address."""

    def client(url: str) -> int:
        num_tokens = 0
        while time.monotonic() < begin + args.seconds:
            number = next(_numbers)
            body = {"model": args.model, "prompt": _prompt(number), "seed": number, **_sampling(args)}
            answer = session.post(url + "/v1/completions", json=body).raise_for_status()
            num_tokens += int(answer.json()["usage"]["completion_tokens"])
        return num_tokens

    num_clients = args.clients * len(urls)
    limits = httpx.Limits(max_connections=num_clients)
    with httpx.Client(timeout=_LIMIT_S, limits=limits) as session, ThreadPoolExecutor(num_clients) as pool:
        begin = time.monotonic()
        clients = [pool.submit(client, url) for url in urls for _ in range(args.clients)]
        return sum(one.result() for one in clients) / (time.monotonic() - begin)


def _of_engines(engines: "Sequence[subprocess.Popen[str]]", args: argparse.Namespace) -> float:
    """Return the tokens a second that engines generate together, without HTTP."""
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(f"{next(_numbers) << 20} {args.seconds}\n")
        engine.stdin.flush()
    return sum(float(_line(engine)) for engine in engines)


@contextlib.contextmanager
def _engine(args: argparse.Namespace) -> "Iterator[subprocess.Popen[str]]":
    """Run an engine of one thread in a process of its own. Yield the process once it has loaded."""
    flags = [
        "--engine",
        "--model",
        args.model,
        "--dtype",
        args.dtype,
        "--clients",
        str(args.clients),
        "--max-tokens",
        str(args.max_tokens),
    ]
    command = [sys.executable, "-m", "benchmarks.replicas", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _line(process)
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline() or sys.exit("an engine ended")


def _run_engine(args: argparse.Namespace) -> None:
    """Be an engine of one thread. A line has a first number and seconds. The answer is the tokens a second of all clients."""
    settings = load_settings(None, {"model": args.model, "dtype": args.dtype, "num_threads": 1})
    engine = served_engine(settings.to_engine_config())
    tokenizer = load_tokenizer(resolve(args.model).folder)
    print("loaded", flush=True)
    for line in sys.stdin:
        first, seconds = line.split()
        numbers = itertools.count(int(first))

        def add() -> None:
            number = next(numbers)  # noqa: B023 - it is called in this round
            ids = tokenizer.encode(_prompt(number))
            engine.add(Request(str(number), tuple(ids), SamplingParams(seed=number, **_sampling(args))))

        begin, num_tokens = time.monotonic(), 0
        for _ in range(args.clients):
            add()
        while engine.has_work:
            for event in engine.step().events:
                num_tokens += len(event.token_ids)
                if event.finish is not None and time.monotonic() < begin + float(seconds):
                    add()
        print(num_tokens / (time.monotonic() - begin), flush=True)


@contextlib.contextmanager
def _running(command: Sequence[str], port_flag: str, path: str, folder: Path) -> Iterator[str]:
    """Run a server on a free port. Yield its address once `path` answers 200."""
    port = free_port()
    with (folder / f"{port}.log").open("w") as log:
        process = subprocess.Popen([*command, port_flag, str(port)], stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _LIMIT_S
    try:
        while not is_up(url + path):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{command[0]} did not start: {folder / f'{port}.log'}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smg", type=Path, default=Path(".venv-cluster/bin/smg"), metavar="FILE", help="the gateway of `make cluster-test`"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8, help="of one replica")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
