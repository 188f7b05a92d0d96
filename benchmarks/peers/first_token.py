"""Seconds to the first token of a long prompt, of other checkouts and of this one by turns, and the processor's bound.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.peers.first_token ../before --model smollm2-135m --set dtype=float32 --rounds 3

Each turn starts a server, computes one prompt to warm up, and times prompts of `--tokens` tokens that share no prefix. The bound
is the multiply-adds of the prompt's linear layers and attention, divided by the float32 multiply-adds a second of the processor.
A loop over registers measures these before each turn, with as many threads. It needs a C compiler. In compact and int8 an
instruction of AVX-512 VNNI or BF16 has more products. A busy machine changes the servers' processor time less than the seconds
that pass. Prints medians with the lowest and the highest value, and ratios of the medians; the last line is JSON.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign import ForeignCpu
from benchmarks.markdown import table
from benchmarks.peers.groups import ProcessGroup
from benchmarks.peers.processes import free_port
from benchmarks.start import is_up, pair_of, program_of
from engine.weights import resolve

_HERE = Path(__file__).resolve().parents[2]
_LIMIT_S = 900.0
# Products of a lane in the time of one of float32, by dtype: in linear layers, and in attention.
_PRODUCTS = {"compact": (4, 2), "int8": (2, 1)}
_PEAK_S, _PEAK_TRIES = 0.03, 20
# Twelve sums hide the latency of two multiply-adds a cycle; `lanes` numbers are one register.
_LOOP = """
typedef float reg __attribute__((vector_size(LANES * 4)));
double multiply_adds(long count) {
  reg sum[12], x, y;
  for (int l = 0; l < LANES; l++) x[l] = 1.0f, y[l] = 1e-9f * l;
  for (int i = 0; i < 12; i++) sum[i] = y;
  for (long n = 0; n < count; n++) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
    for (int i = 0; i < 12; i++) sum[i] = x * y + sum[i];
  }
  for (int i = 1; i < 12; i++) sum[0] += sum[i];
  double all = 0;
  for (int l = 0; l < LANES; l++) all += sum[0][l];
  return all;
}
"""


class Peak:
    """Measures the float32 multiply-adds a second that registers allow."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        flags = Path("/proc/cpuinfo").read_text()
        self._lanes, self._num_threads = (16 if "avx512f" in flags else 8), num_threads
        source, binary = folder / "loop.c", folder / "loop.so"
        source.write_text(_LOOP)
        options = ["-O3", "-march=native", "-funroll-loops", "-mprefer-vector-width=512", f"-DLANES={self._lanes}"]
        subprocess.run(["cc", *options, "-shared", "-fPIC", "-o", binary, source], check=True)
        self._loop = ctypes.CDLL(str(binary)).multiply_adds
        self._loop.argtypes, self._loop.restype = [ctypes.c_long], ctypes.c_double

    def measured(self) -> float:
        """Return the multiply-adds a second of all threads: the most of short tries, because others delay some of them."""
        count, best = 1 << 20, 0.0
        while (seconds := self._seconds(count)) < _PEAK_S:
            count *= 2
        for _ in range(_PEAK_TRIES):
            best = max(best, 12 * self._lanes * count * self._num_threads / seconds)
            seconds = self._seconds(count)
        return best

    def _seconds(self, count: int) -> float:
        threads = [threading.Thread(target=self._loop, args=(count,)) for _ in range(self._num_threads)]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin_s


def multiply_adds_of(config: Mapping[str, Any], num_tokens: int) -> tuple[int, int]:
    """Return the multiply-adds of a prompt: of linear layers without the output head, and of attention to all earlier tokens."""
    width, inner, num_layers, num_heads = (
        int(config[name]) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    head_size = int(config.get("head_dim") or width // num_heads)
    of_queries = num_heads * head_size
    of_keys = int(config.get("num_key_value_heads") or num_heads) * head_size
    linear = 2 * width * of_queries + 2 * width * of_keys + 3 * width * inner
    return num_layers * linear * num_tokens, num_layers * of_queries * num_tokens * (num_tokens + 1)


@contextlib.contextmanager
def _serving(checkout: Path, args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ProcessGroup]]:
    """Run a checkout's server; yield its address and its processes once it is ready."""
    port = free_port()
    words = ["serve", "--model", args.model, *(f"--{name}={value}" for name, value in args.set), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, str(program_of(folder / f"latebranch-{checkout.name}", checkout)), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)},
        start_new_session=True,
    )
    try:
        begin_s = time.monotonic()
        while not is_up(f"http://127.0.0.1:{port}/ready"):
            if process.poll() is not None or time.monotonic() - begin_s > _LIMIT_S:
                raise SystemExit(f"the server of {checkout} did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", ProcessGroup(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_token_s(address: str, model: str, ids: Sequence[int]) -> float:
    body = json.dumps({"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    begin_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        answer.read()
    return time.perf_counter() - begin_s


def main() -> None:
    """Print a table of checkouts, then one line of JSON."""
    args = _arguments()
    num_threads = torch.get_num_threads()
    counts = multiply_adds_of(json.loads((resolve(args.model).folder / "config.json").read_text()), args.tokens)
    products = _PRODUCTS.get(dict(args.set).get("dtype", "float32"), (1, 1))
    count = sum(one / many for one, many in zip(counts, products, strict=True))  # as many float32 ones take the time
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu_s: dict[str, list[float]] = defaultdict(list)
    bounds: list[float] = []
    foreign_cpus: list[float] = []
    with tempfile.TemporaryDirectory(prefix="latebranch-first-token-") as name:
        folder = Path(name)
        peak = Peak(folder, num_threads)
        for number in range(args.rounds):
            for checkout in [*args.checkouts, _HERE]:
                bounds.append(count / peak.measured())
                with _serving(checkout.resolve(), args, folder) as (address, processes):
                    _first_token_s(address, args.model, range(100, 400))
                    foreign = ForeignCpu(processes.cpu_s)
                    for turn in range(args.prompts):
                        first = 1000 + number * args.prompts + turn  # no prefix is shared
                        ids = [first, *(100 + 7919 * place % 40000 for place in range(args.tokens - 1))]
                        begin_s = processes.cpu_s()
                        seconds[checkout.name].append(_first_token_s(address, args.model, ids))
                        cpu_s[checkout.name].append(processes.cpu_s() - begin_s)
                        latest = f"{seconds[checkout.name][-1]:.2f} s, {cpu_s[checkout.name][-1]:.2f} of the processors"
                        print(f"{checkout.name}: {latest}", file=sys.stderr, flush=True)
                    foreign_cpus.append(foreign.cpus() or 0.0)
    here, here_cpu = statistics.median(seconds[_HERE.name]), statistics.median(cpu_s[_HERE.name])
    rows = []
    for checkout_name, found in seconds.items():
        middle = statistics.median(found)
        used = statistics.median(cpu_s[checkout_name])
        ratios = [f"{one:.2f}" for one in (here / middle, middle / min(bounds), used, here_cpu / used)]
        cells = [f"{middle:.2f} ({min(found):.2f}–{max(found):.2f})", *ratios]
        rows.append(["this checkout" if checkout_name == _HERE.name else checkout_name, *cells])
    rows.append(
        ["bound", f"{min(bounds):.2f} ({min(bounds):.2f}–{max(bounds):.2f})", f"{here / min(bounds):.2f}", "1.00", "", ""]
    )
    heads = ["first token, s", "this checkout over it", "over the bound", "processor time, s", "this checkout over it"]
    print(table([f"{args.tokens} tokens", *heads], rows))
    settings = " ".join(f"{name}={value}" for name, value in args.set)
    speed = f"{num_threads} threads at {count / min(bounds) / 1e9:.0f} billion a second"
    others = f"others used {statistics.median(foreign_cpus):.1f} processors"
    parts = zip(("linear layers", "attention"), counts, products, strict=True)
    work = ", ".join(f"{one:.3g} multiply-adds of {part}, {many} at a time" for part, one, many in parts)
    print(f"{args.model} {settings}; {work}; {speed}; {others}")
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_s": cpu_s,
                "bound_s": bounds,
                "foreign_cpus": foreign_cpus,
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="folders of other checkouts, each with its library compiled")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", nargs="+", type=pair_of, default=[], metavar="NAME=VALUE", help="settings of the servers")
    parser.add_argument("--tokens", type=int, default=7900, help="of the prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
