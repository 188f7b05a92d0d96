"""Time to first token of a prompt whose first 2,000 tokens are cached, over that of one that is fed whole.

Cold and warm requests alternate in one engine, so that a machine that slows down slows both; every cold prefix is another one.
Run as `python -m benchmarks.prefix` (options: `--model`, `--pairs`, `--prefix-tokens`); prints each ratio, then the median.
"""

import argparse
import random
import statistics
import time

import torch

from engine.core.config import SchedulerConfig
from engine.core.types import Request, SamplingParams
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.model.causal_lm import load_model
from engine.model.linear_backends import fastest_linears
from engine.testing import tiny_engine
from engine.weights import resolve

_TAIL_TOKENS = 40


def first_token_s(engine: Engine, name: str, prompt: tuple[int, ...]) -> float:
    """Return the seconds from a request's arrival to its first token; the request is run to its end."""
    begin_s = time.perf_counter()
    engine.add(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)))
    seconds = None
    while engine.has_work:
        if any(event.token_ids for event in engine.step().events) and seconds is None:
            seconds = time.perf_counter() - begin_s
    assert seconds is not None
    return seconds


def main() -> None:
    """Print a line a pair, and the median with the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    args = parser.parse_args()
    device = torch.device("cpu")
    model = load_model(resolve(args.model).folder, "float32", device, fastest_linears(device))
    config = SchedulerConfig(num_slots=8192, max_model_len=args.prefix_tokens + 100)
    engine = tiny_engine(model, TextDrafter(model.vocab_size, model.device), config=config)
    draws = random.Random(0)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(draws.randrange(500, 5000) for _ in range(count))

    first_token_s(engine, "first", drawn(args.prefix_tokens))  # pools and kernels are made
    ratios = []
    for pair in range(args.pairs):
        prefix = drawn(args.prefix_tokens)
        cold_s = first_token_s(engine, f"cold {pair}", prefix + drawn(_TAIL_TOKENS))
        warm_s = first_token_s(engine, f"warm {pair}", prefix + drawn(_TAIL_TOKENS))
        ratios.append(cold_s / warm_s)
        print(f"cold {cold_s:.3f} s, warm {warm_s:.3f} s: {ratios[-1]:.1f} times sooner", flush=True)
    print(f"median {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")


if __name__ == "__main__":
    main()
