"""Seconds of a step beside many queued requests over those beside few: a queue must not slow running requests.

Two engines on one tiny model step in turns, so that a machine that slows down slows both. Run as `python -m benchmarks.waiting`
(option: `--queued`); prints the median seconds of a step of each, and the ratio.
"""

import argparse
import statistics
import time

from engine.core.config import SchedulerConfig
from engine.core.types import Request, SamplingParams
from engine.draft.text.text_drafter import TextDrafter
from engine.engine import Engine
from engine.testing import tiny_engine, tiny_model

_FEW, _NUM_RUNNING, _NUM_STEPS = 10, 8, 200


def filled(num_queued: int) -> Engine:
    """Return an engine with a full batch and so many requests behind it, that has indexed what it drafts from."""
    model = tiny_model()
    config = SchedulerConfig(max_running=_NUM_RUNNING, num_slots=8192, max_model_len=1024)
    engine = tiny_engine(model, TextDrafter(model.vocab_size, model.device), config=config)
    for number in range(_NUM_RUNNING + num_queued):
        prompt = tuple(3 + (number + place) % 50 for place in range(8))
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=1000, seed=number, ignore_eos=True)))
    for _ in range(20):
        engine.step()
    return engine


def step_s(engine: Engine) -> float:
    """Return the seconds of one step."""
    begin_s = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin_s


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000)
    queued = parser.parse_args().queued
    few, many = filled(_FEW), filled(queued)
    pairs = [(step_s(few), step_s(many)) for _ in range(_NUM_STEPS)]
    few_s, many_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{_FEW} queued: {1e3 * few_s:.2f} ms a step; {queued}: {1e3 * many_s:.2f} ms; ratio {many_s / few_s:.2f}")


if __name__ == "__main__":
    main()
