"""Pace of decoding requests beside a long prompt, and the prompt's first token, by the setting `decode_pace`.

python -m benchmarks.long_prompt --config configs/default.yaml --set dtype=compact

Engines of several paces take turns in one process. In each round a number of requests decode alone for some seconds, then a long
prompt joins, then they decode alone again. A request that ends is replaced by the next. `pace` is the tokens a second beside the
prompt over the tokens a second alone.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, cycle, islice
from pathlib import Path

from benchmarks.load import mixed_prompts
from benchmarks.markdown import table
from engine.core.types import Request, SamplingParams
from engine.engine import Engine
from server.adaptive_engine import tool_engine
from server.settings import load_settings

_ALONE_S = 3.0  # that requests decode alone, each time
_HEADS = ["decode_pace", "pace", "first token, s", "over the first row's", "longest step, ms"]


class Contender:
    """An engine with one pace, and its measurements: pace, seconds to the first token, longest step in seconds."""

    def __init__(self, engine: Engine, prompts: Sequence[tuple[int, ...]], num_streams: int) -> None:
        self._engine = engine
        self._prompts, self._num_streams = cycle(prompts), num_streams
        self._numbers = count()
        self._streams: set[str] = set()
        self.rounds: list[tuple[float, float, float]] = []

    def run_round(self, long_prompt: tuple[int, ...]) -> None:
        """Measure one round."""
        self._steps(None)  # prompts are read, and a policy learns
        before_s, before_tokens, _ = self._steps(None)
        beside_s, beside_tokens, longest_s = self._steps(self._add(long_prompt, SamplingParams(0.0, max_tokens=1)))
        after_s, after_tokens, _ = self._steps(None)
        alone = (before_tokens + after_tokens) / (before_s + after_s)
        self.rounds.append((beside_tokens / beside_s / alone, beside_s, longest_s))

    def _add(self, prompt: tuple[int, ...], sampling: SamplingParams) -> str:
        name = str(next(self._numbers))
        self._engine.add(Request(name, prompt, sampling))
        return name

    def _add_streams(self) -> None:
        while len(self._streams) < self._num_streams:
            number = len(self._streams)
            sampling = SamplingParams(number % 2, seed=number, max_tokens=128, ignore_eos=True)
            self._streams.add(self._add(next(self._prompts), sampling))

    def _steps(self, last: str | None) -> tuple[float, int, float]:
        """Run steps until a request ends, or for some seconds. Return seconds, tokens of the streams, the longest step."""
        seconds, num_tokens, longest_s, is_last = 0.0, 0, 0.0, False
        while not is_last:
            self._add_streams()
            begin_s = time.perf_counter()
            events = self._engine.step().events
            step_s = time.perf_counter() - begin_s
            seconds, longest_s = seconds + step_s, max(longest_s, step_s)
            num_tokens += sum(len(event.token_ids) for event in events if event.request_id in self._streams)
            ended = {event.request_id for event in events if event.finish is not None}
            self._streams -= ended
            is_last = seconds >= _ALONE_S if last is None else last in ended
        return seconds, num_tokens, longest_s


def main() -> None:
    """Print the table: medians of the rounds, and the least and largest pace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompt", description="decoding beside a long prompt")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings that replace the file's")
    parser.add_argument("--paces", nargs="+", type=float, default=[0.0, 0.65])
    parser.add_argument("--streams", type=int, default=4, help="requests that decode")
    parser.add_argument("--tokens", type=int, default=7600, help="of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = load_settings(args.config, dict(one.split("=", 1) for one in args.set)).to_tool_config()
    paced = {pace: replace(config, scheduler=replace(config.scheduler, decode_pace=pace)) for pace in args.paces}
    prompts = mixed_prompts(config.model, ["code", "maths", "prose"], 8)
    contenders = {pace: Contender(tool_engine(one), prompts, args.streams) for pace, one in paced.items()}
    for number in range(args.rounds):
        long_prompt = tuple(islice(cycle(chain.from_iterable(prompts[number:])), args.tokens))
        for contender in contenders.values():
            contender.run_round(long_prompt)
    rows: list[list[str]] = []
    first_s = 0.0
    for pace, contender in contenders.items():
        paces, firsts, longest = zip(*contender.rounds, strict=True)
        median_s = statistics.median(firsts)
        first_s = first_s or median_s
        spread = f"{statistics.median(paces):.2f} ({min(paces):.2f} to {max(paces):.2f})"
        rows.append([f"{pace:g}", spread, f"{median_s:.1f}", f"{median_s / first_s:.2f}", f"{1e3 * max(longest):.0f}"])
    print(table(_HEADS, rows))


if __name__ == "__main__":
    main()
