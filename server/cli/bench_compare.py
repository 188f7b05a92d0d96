"""Compares plain decoding with every verifier and expansion, or with recorded answers, on the same prompts, in turns.

Knows an engine in this process and its clock; no HTTP, no command line. A ratio compares with plain decoding of the same round.
The median and the spread over rounds are reported.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.tree import PLAIN, Expansion
from engine.core.types import STAGES, FinishReason, Request, SamplingParams, Speculation, StepStats
from engine.core.verifier_table import is_exact
from engine.engine import Engine
from engine.utils.progress_bar import progress_bar

_STAGES = tuple(f"{stage}_s" for stage in STAGES)
CHAINS = tuple(Expansion(length, 1, 0) for length in (2, 4, 8, 16, 32))  # of recorded text


class OutputsDiffer(AssertionError):
    """Speculation changed a greedy text."""


class RequestFailed(RuntimeError):
    """The engine ended a request with an error, so there is no measurement."""


@dataclass(frozen=True, slots=True)
class Case:
    """A verifier and an expansion, or plain decoding."""

    verifier: str
    expansion: Expansion

    @property
    def name(self) -> str:
        """Short label."""
        return "plain" if self.expansion.is_plain else f"{self.verifier} {self.expansion}"

    @property
    def speculation(self) -> Speculation:
        """The engine's speculation parameters."""
        return Speculation(not self.expansion.is_plain, self.expansion, self.verifier)


_PLAIN = Case("coupled", PLAIN)


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """The requests that every case runs."""

    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    max_tokens: int
    concurrency: int

    def requests(self, case: Case, round_number: int) -> Iterator[Request]:
        """Yield one request per prompt; seeds depend on prompt and round, not on the case."""
        for index, prompt in enumerate(self.prompts):
            seed = None if self.temperature == 0 else 1000 * round_number + index
            sampling = SamplingParams(self.temperature, seed=seed, max_tokens=self.max_tokens, ignore_eos=True)
            yield Request(f"bench-{index}", prompt, sampling, case.speculation)


@dataclass
class Run:
    """One case's pass over the load."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time in the engine's steps."""
        return sum(step.step_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second; the time includes the prefill."""
        return sum(len(ids) for ids in self.texts.values()) / self.seconds

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens for each sequence and step."""
        return sum(step.num_generated_tokens for step in self.steps) / sum(step.num_row_steps for step in self.steps)

    @property
    def shares(self) -> dict[str, float]:
        """Part of the time spent in each stage."""
        return {stage: sum(getattr(step, stage) for step in self.steps) / self.seconds for stage in _STAGES}


@dataclass(frozen=True, slots=True)
class Result:
    """A case's figures over all rounds. Ratios are to plain decoding in the same round: median, lowest, highest."""

    case: str
    temperature: float
    kind: str
    num_tokens: int
    block_efficiency: float
    tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_different_texts: int | None  # at temperature 0
    shares: dict[str, float]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Tokens a second (medians) of plain decoding, the configured drafter and the fastest chain of recorded text.

    The shares are tokens a second over the ceiling's in the same round: medians, and the drafter's lowest and highest.
    """

    kind: str
    temperature: float
    plain: float
    own: float
    ceiling: float
    chain: str
    own_share: float
    own_share_low: float
    own_share_high: float
    plain_share: float

    def __str__(self) -> str:
        """Return one line."""
        own = f"{self.own:.1f} tokens a second, {self.own_share:.0%} ({self.own_share_low:.0%} to {self.own_share_high:.0%})"
        return (
            f"{self.kind}, temperature {self.temperature:g}: the drafter has {own} of the ceiling of {self.ceiling:.1f}"
            f" (chains of {self.chain}); plain decoding has {self.plain_share:.0%}"
        )


def run_case(engine: Engine, requests: Iterator[Request], concurrency: int) -> Run:
    """Keep `concurrency` requests in the engine until all are done. Raises RequestFailed if the engine fails on one."""
    run = Run()
    for _ in stepped(engine, requests, concurrency, run):
        pass
    return run


def stepped(engine: Engine, requests: Iterator[Request], concurrency: int, run: Run) -> Iterator[None]:
    """Run the requests one step per iteration, and record the steps in `run`. A caller can interleave several engines."""
    living, is_exhausted = 0, False
    while not is_exhausted or living:
        while not is_exhausted and living < concurrency:
            request = next(requests, None)
            is_exhausted = request is None
            if request is not None:
                engine.add(request)
                run.texts[request.request_id] = []
                living += 1
        if not living:
            break
        output = engine.step()
        run.steps.append(output.stats)
        for event in output.events:
            if event.finish is FinishReason.ERROR:
                raise RequestFailed(f"{event.request_id}: {event.error}")
            run.texts[event.request_id].extend(event.token_ids)
            living -= event.finish is not None
        yield
    engine.check_integrity()


def compare(engine: Engine, cases: Sequence[Case], load: BenchLoad, kind: str, num_rounds: int) -> list[Result]:
    """Run every case in every round, in turn; the first case must be plain decoding.

    A greedy text that differs from plain decoding's raises OutputsDiffer. In bfloat16, where wide and narrow passes round
    differently and near ties fall either way, the texts that differ are counted.
    """
    rounds = []
    bar = progress_bar(what=f"{kind}, temperature {load.temperature:g}", total=num_rounds * len(cases), unit="run")
    for number in range(num_rounds):
        runs = []
        for case in cases:
            bar.set_postfix_str(case.name)
            runs.append(run_case(engine, load.requests(case, number), load.concurrency))
            bar.update()
        if load.temperature == 0 and not engine.info.rounds_by_width:
            require_equal([case.name for case in cases], runs)
        rounds.append(runs)
    bar.close()
    return [result_of(index, case.name, rounds, load, kind) for index, case in enumerate(cases)]


def require_equal(names: Sequence[str], runs: Sequence[Run]) -> None:
    """Raise OutputsDiffer unless all runs of a round have the first one's texts."""
    for name, run in zip(names, runs, strict=True):
        if differing := _differing(run, runs[0]):
            raise OutputsDiffer(f"{name} differs from {names[0]} at temperature 0 on {', '.join(differing)}")


def _differing(run: Run, plain: Run) -> list[str]:
    return [name for name, ids in run.texts.items() if ids != plain.texts[name]]


def compare_with_oracle(own: Engine, oracle: Engine, load: BenchLoad, kind: str, num_rounds: int) -> tuple[list[Result], Ceiling]:
    """Run plain decoding, the configured drafter and chains of the recorded answers in every round: the ceiling of speculation.

    `oracle` drafts each request's prediction without errors and without passes. Seeded requests are verified by the coupled rule,
    so that every way of drafting generates the recorded answer. A greedy text that differs from the recorded one raises
    OutputsDiffer, except in bfloat16.
    """
    names = [_PLAIN.name, "own drafter", *(f"oracle {chain}" for chain in CHAINS)]
    rounds = []
    with progress_bar(what=f"{kind}, temperature {load.temperature:g}", total=num_rounds * len(names), unit="run") as bar:
        for number in range(num_rounds):
            runs: list[Run] = []
            for run in _runs(own, oracle, load, number):
                runs.append(run)
                bar.update()
            if load.temperature == 0 and not own.info.rounds_by_width:
                require_equal(names, runs)
            rounds.append(runs)
    results = [result_of(index, name, rounds, load, kind) for index, name in enumerate(names)]
    return results, _ceiling(results, rounds)


def _runs(own: Engine, oracle: Engine, load: BenchLoad, number: int) -> Iterator[Run]:
    plain = run_case(oracle, load.requests(_PLAIN, number), load.concurrency)
    yield plain
    free = (replace(request, speculation=Speculation()) for request in load.requests(_PLAIN, number))
    yield run_case(own, free, load.concurrency)
    for chain in CHAINS:
        yield run_case(oracle, _recorded(load.requests(Case("coupled", chain), number), plain.texts), load.concurrency)


def _recorded(requests: Iterator[Request], texts: Mapping[str, Sequence[int]]) -> Iterator[Request]:
    return (replace(request, prediction_ids=tuple(texts[request.request_id])) for request in requests)


def _ceiling(results: Sequence[Result], rounds: Sequence[Sequence[Run]]) -> Ceiling:
    plain, own, *oracles = results
    best = max(range(len(oracles)), key=lambda index: oracles[index].tokens_per_s)
    plain_shares, own_shares = ([one[index].tokens_per_s / one[2 + best].tokens_per_s for one in rounds] for index in (0, 1))
    return Ceiling(
        *(plain.kind, plain.temperature, plain.tokens_per_s, own.tokens_per_s, oracles[best].tokens_per_s),
        *(str(CHAINS[best].trunk), statistics.median(own_shares), min(own_shares), max(own_shares)),
        statistics.median(plain_shares),
    )


def result_of(index: int, name: str, rounds: Sequence[Sequence[Run]], load: BenchLoad, kind: str) -> Result:
    """Return the figures of the case at `index` of every round; the first case is plain decoding."""
    runs = [one[index] for one in rounds]
    ratios = [one[index].tokens_per_s / one[0].tokens_per_s for one in rounds]
    return Result(
        case=name,
        temperature=load.temperature,
        kind=kind,
        num_tokens=sum(len(ids) for run in runs for ids in run.texts.values()),
        block_efficiency=statistics.mean(run.block_efficiency for run in runs),
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        num_different_texts=sum(len(_differing(one[index], one[0])) for one in rounds) if load.temperature == 0 else None,
        shares={stage: statistics.mean(run.shares[stage] for run in runs) for stage in _STAGES},
    )


def table(results: Sequence[Result]) -> str:
    """Return the results as aligned text."""
    lines = [
        f"{'kind':<12}{'T':>5}  {'case':<22}{'tokens':>7}{'block eff.':>11}{'tok/s':>8}"
        f"{'ratio':>7}  {'spread':<13}{'draft':>6}{'verify':>7}{'judge':>6}{'policy':>7}{'host':>6}"
    ]
    for r in results:
        shares = "".join(f"{r.shares[stage]:>{width}.0%}" for stage, width in zip(_STAGES, (6, 7, 6, 7, 6), strict=True))
        spread = f"{r.ratio_low:.2f}..{r.ratio_high:.2f}"
        lines.append(
            f"{r.kind:<12}{r.temperature:>5.1f}  {r.case:<22}{r.num_tokens:>7}{r.block_efficiency:>11.2f}{r.tokens_per_s:>8.1f}"
            f"{r.ratio:>7.2f}  {spread:<13}{shares}"
        )
    return "\n".join(lines)


def cases_of(verifiers: Sequence[str], expansions: Sequence[Expansion], temperature: float) -> list[Case]:
    """Return plain decoding and then every verifier with every expansion that drafts something and that it is exact on.

    At temperature 0 every verifier is the same walk along the arg max, so one of them is enough.
    """
    drafting = [expansion for expansion in expansions if not expansion.is_plain]
    pairs = [(verifier, expansion) for expansion in drafting for verifier in verifiers if is_exact(expansion.kind, verifier)]
    if temperature == 0:
        pairs = list({expansion: (verifier, expansion) for verifier, expansion in reversed(pairs)}.values())[::-1]
    return [Case(verifiers[0], PLAIN), *(Case(verifier, expansion) for verifier, expansion in pairs)]
