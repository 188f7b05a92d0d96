"""Runs the comparison round by round: in each one every contender, in an order of its own, is given the same blocks.

A block is prompts of one kind at one temperature, so many at a time; ratios are taken within it. Appends one JSON line a
contender and block, so that a run cut short is a smaller run; a later run goes on with the rounds of its file.
"""

import json
import logging
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.foreign import ForeignCpu
from benchmarks.peers.contenders import Contender
from benchmarks.peers.jobs import Answers, Job, JobFailed
from benchmarks.peers.processes import Asked
from benchmarks.peers.stable import Stable

log = logging.getLogger(__name__)

MIXED = "mixed"  # kinds by turns, where requests run beside each other
_WARM_UP_TOKENS = 8
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Design:
    """How much to measure. At a concurrency of one a block is a kind's prompts, above that as many requests as run at once.

    A measurement during which others used more than `max_foreign_cpus` processors is repeated, `num_retries` times at most.
    """

    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_tokens: int
    num_rounds: int
    max_foreign_cpus: float
    num_retries: int


@dataclass(frozen=True, slots=True)
class Block:
    """What every contender is given in a round."""

    round: int
    kind: str
    concurrency: int
    temperature: float
    prompts: tuple[Prompt, ...]

    def job(self, num_tokens: int, fields: Mapping[str, Any]) -> Job:
        """Return it as a job. Seeds depend on round and prompt alone."""
        seeds = [None if self.temperature == 0 else 1000 * self.round + index for index in range(len(self.prompts))]
        return Job(self.prompts, num_tokens, self.temperature, tuple(seeds), self.concurrency, fields=dict(fields))


def blocks_of(design: Design, prompts: Mapping[str, Sequence[Prompt]], round_number: int) -> list[Block]:
    """Return a round's blocks in the order of this round."""
    by_turns = [prompt for some in zip(*prompts.values()) for prompt in some]
    blocks = []
    for concurrency in design.concurrencies:
        wide = tuple(by_turns[index % len(by_turns)] for index in range(concurrency))
        of_kind = {kind: tuple(some) for kind, some in prompts.items()} if concurrency == 1 else {MIXED: wide}
        for temperature in design.temperatures:
            blocks += [Block(round_number, kind, concurrency, temperature, some) for kind, some in of_kind.items()]
    random.Random(round_number).shuffle(blocks)
    return blocks


class Measurement:
    """One run of a design."""

    def __init__(self, design: Design, contenders: Sequence[Contender], stable: Stable, out: Path) -> None:
        self._design, self._stable, self._out = design, stable, out
        self._contenders = list(contenders)  # those that failed are taken off

    def run(self, prompts: Mapping[str, Sequence[Prompt]], facts: Mapping[str, Any]) -> None:
        """Measure. `facts` of machine and peers go into the file's header."""
        self._write({"type": "header", "at": time.strftime("%Y-%m-%dT%H:%M:%S"), **facts, **asdict(self._design)})
        first = num_rounds(self._out)
        for number in range(first, first + self._design.num_rounds):
            order = list(self._contenders)
            random.Random(number).shuffle(order)
            for contender in order:
                self._measure(contender, blocks_of(self._design, prompts, number))

    def _measure(self, contender: Contender, blocks: Iterable[Block]) -> None:
        """Give one contender a round's blocks; one that fails is out of the run, and the file says why."""
        try:
            for block in blocks:
                if contender.max_concurrency is None or block.concurrency <= contender.max_concurrency:
                    self._measure_block(contender, block)
        except JobFailed as error:
            log.warning("%s failed: %s", contender.name, error)
            self._write({"type": "failed", "contender": contender.name, "reason": str(error)})
            self._contenders.remove(contender)
            self._stable.end(contender.launch)

    def _measure_block(self, contender: Contender, block: Block) -> None:
        """Write what is measured, disturbed attempts too: the report leaves them out."""
        peer = self._peer(contender, block)
        for _ in range(1 + self._design.num_retries):
            line = self._line(contender, block, peer)
            self._write(line)
            if (line["foreign_cpus"] or 0.0) <= self._design.max_foreign_cpus:
                return

    def _peer(self, contender: Contender, block: Block) -> Asked:
        """Return the contender's process. One that was just started does a little work first, which is not measured."""
        peer, is_new = self._stable.peer(contender.launch)
        if is_new:
            peer.answer(replace(block, temperature=1.0).job(_WARM_UP_TOKENS, contender.fields))
        return peer

    def _line(self, contender: Contender, block: Block, peer: Asked) -> dict[str, Any]:
        measured = (peer.group, self._stable.client.group)
        watch = ForeignCpu(lambda: time.process_time() + sum(group.cpu_s() for group in measured))
        answers = peer.answer(block.job(self._design.num_tokens, contender.fields))
        foreign_cpus = watch.cpus()
        log.info("%s %s %d %g: %.1f/s", contender.name, block.kind, block.concurrency, block.temperature, answers.tokens_per_s)
        where = {name: getattr(block, name) for name in ("round", "kind", "concurrency", "temperature")}
        figures = {**_figures(answers, block), "peak_bytes": peer.group.peak_bytes(), "foreign_cpus": foreign_cpus}
        return {"type": "run", "contender": contender.name, **where, **figures}

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def num_rounds(path: Path) -> int:
    """Return how many rounds a file of measurements has seen begin."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return max((line["round"] + 1 for line in lines if line["type"] == "run"), default=0)


def _figures(answers: Answers, block: Block) -> dict[str, Any]:
    """Return what is kept of answers: medians over requests; greedy tokens, for they should be the reference's."""
    told = [answer.token_ids for answer in answers.answers]
    return {
        "tokens_per_s": answers.tokens_per_s,
        "first_s": statistics.median(answer.first_s for answer in answers.answers),
        "token_s": statistics.median(answer.token_s for answer in answers.answers),
        "token_ids": told if block.temperature == 0 and None not in told else None,
    }
