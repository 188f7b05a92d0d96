"""`latebranch bench --oracle`: the ceiling of speculation on this machine, and the share of it that the configured drafter has.

Plain decoding records each answer. A drafter without errors and without passes then drafts it, in chains of several lengths.
Seeded requests are verified by the coupled rule, so that every way of drafting generates the recorded answer.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.build import Models
from engine.core.config import EngineConfig
from engine.core.policy import FixedExpansion
from engine.core.tree import PLAIN, Expansion
from engine.core.types import Request, Speculation
from engine.draft.recorded_text import RecordedText
from engine.engine import Engine
from engine.utils.progress_bar import progress_bar
from server.adaptive_engine import tool_engine
from server.cli.bench_compare import BenchLoad, Case, Result, Run, require_equal, result_of, run_case

CHAINS = tuple(Expansion(length, 1, 0) for length in (2, 4, 8, 16, 32))
_PLAIN = Case("coupled", PLAIN)
_OWN = "own drafter"


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


def oracle_engine(config: EngineConfig, models: Models) -> Engine:
    """Return an engine that drafts each request's prediction, over the loaded `models` and a cache of its own."""
    bare = replace(
        config, drafter="none", draft_model=None, lens=None, head=None, checkpoint=None, cached_text=False, selector=None
    )
    engine = tool_engine(bare, models)
    drafter = RecordedText(engine.info.vocab_size, engine.target.model.device)
    return Engine(engine.info, config.scheduler, engine.target, drafter, FixedExpansion(PLAIN))


def compare_with_oracle(own: Engine, oracle: Engine, load: BenchLoad, kind: str, num_rounds: int) -> tuple[list[Result], Ceiling]:
    """Run plain decoding, the configured drafter and the oracle's chains in every round.

    A greedy text that differs from the recorded one raises OutputsDiffer, except in bfloat16.
    """
    names = [_PLAIN.name, _OWN, *(f"oracle {chain}" for chain in CHAINS)]
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
