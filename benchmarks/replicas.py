"""Tokens a second of replicas behind the gateway smg, beside one server of one thread and one of as many threads.

make .venv-cluster/.installed
python -m benchmarks.replicas --model smollm2-135m --replicas 2 --clients 16 --rounds 5

All servers stay loaded; each round measures every contender once, in an order of its own. A client sends one whole answer after
another. Every request has a prompt of its own, so no prefix is shared. Prints medians of a round's ratios to the first contender,
with the lowest and the highest.
"""

import argparse
import contextlib
import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.markdown import table
from benchmarks.peers.processes import free_port
from benchmarks.start import is_up

_LIMIT_S = 300.0
_SERVE = "import sys; from server.cli.main import main; sys.exit(main())"
_numbers = itertools.count()


def main() -> None:
    """Start the servers, measure by turns and print the table."""
    args = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="replicas."))
    many = str(args.replicas)
    with contextlib.ExitStack() as stack:

        def server(threads: str) -> str:
            command = [
                sys.executable,
                "-c",
                _SERVE,
                "serve",
                "--model",
                args.model,
                "--dtype",
                args.dtype,
                "--num-threads",
                threads,
            ]
            return stack.enter_context(_running(command, "--port", "/ready", folder))

        replicas = [server("1") for _ in range(args.replicas)]
        smg = [
            str(args.smg),
            "launch",
            "--host",
            "127.0.0.1",
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(free_port()),
        ]
        gateway = stack.enter_context(_running([*smg, "--worker-urls", *replicas], "--port", "/readiness", folder))
        contenders = {"one thread": replicas[0], f"{many} replicas of one thread": gateway, f"{many} threads": server(many)}
        for url in contenders.values():
            _tokens_per_s(url, args)  # measures costs, and fills caches
        speeds: dict[str, list[float]] = defaultdict(list)
        for round_number in range(args.rounds):
            for name in random.Random(round_number).sample(list(contenders), len(contenders)):
                speeds[name].append(_tokens_per_s(contenders[name], args))
        print(f"{args.model} {args.dtype}, {args.clients} clients, {args.rounds} rounds")
        print(
            table(
                ["contender", "tokens/s", "over one thread"],
                [[name, *_cells(found, speeds["one thread"])] for name, found in speeds.items()],
            )
        )


def _tokens_per_s(url: str, args: argparse.Namespace) -> float:
    """Return the tokens a second that clients receive together."""
    begin = time.monotonic()

    def client() -> int:
        num_tokens = 0
        with httpx.Client(timeout=_LIMIT_S) as session:
            while time.monotonic() < begin + args.seconds:
                number = next(_numbers)
                body = {
                    "model": args.model,
                    "prompt": f"{number}. A short story about the number {number}:",
                    "max_tokens": 64,
                    "seed": number,
                }
                answer = session.post(url + "/v1/completions", json={**body, "ignore_eos": True}).raise_for_status()
                num_tokens += int(answer.json()["usage"]["completion_tokens"])
        return num_tokens

    with ThreadPoolExecutor(args.clients) as pool:
        clients = [pool.submit(client) for _ in range(args.clients)]
        return sum(one.result() for one in clients) / (time.monotonic() - begin)


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


def _cells(speeds: Sequence[float], base: Sequence[float]) -> list[str]:
    ratios = [one / other for one, other in zip(speeds, base, strict=True)]
    return [f"{statistics.median(speeds):.0f}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smg", type=Path, default=Path(".venv-cluster/bin/smg"), metavar="FILE", help="the gateway of `make cluster-test`"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
