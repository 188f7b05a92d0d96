"""Generates the sequences of an audit with an engine."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.audit.plan import AuditPlan, Setting
from engine.core.rng_keys import derived_seed
from engine.core.types import FinishReason, Request, Speculation, TokenEvent
from engine.engine import Engine
from engine.utils.progress_bar import progress_bar

_logger = logging.getLogger(__name__)


class AuditRequestFailed(RuntimeError):
    """The engine failed a request, so that the audit cannot be completed."""


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """The engine's output after a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class SettingOutput:
    """All sequences of one setting, with the numbers of drafted and accepted tokens."""

    setting: Setting
    texts: tuple[GeneratedSequence, ...]
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """The engine's whole output for a plan. `plain` repeats the coupled sequences without speculation, setting by setting."""

    plan: AuditPlan
    sampled: tuple[SettingOutput, ...]
    greedy: tuple[SettingOutput, ...]
    coupled: tuple[SettingOutput, ...]
    plain: tuple[SettingOutput, ...]


def collect(engine: Engine, plan: AuditPlan) -> Collected:
    """Run the whole plan. Raises AuditRequestFailed, or RequestRefused if the engine does not support a setting."""
    sampled = tuple(_generated(engine, setting, setting.speculation, _draws(plan, setting)) for setting in plan.settings)
    choices = list(plan.choice_settings())
    greedy = [setting for setting in choices if setting.sampling.is_greedy]
    coupled = [setting for setting in choices if not setting.sampling.is_greedy]
    off = Speculation(False, None, "coupled")
    return Collected(
        plan,
        sampled,
        tuple(_generated(engine, setting, setting.speculation, _choices(plan, 1)) for setting in greedy),
        tuple(_generated(engine, setting, setting.speculation, _choices(plan, plan.num_seeds)) for setting in coupled),
        tuple(_generated(engine, setting, off, _choices(plan, plan.num_seeds)) for setting in coupled),
    )


@dataclass(frozen=True, slots=True)
class _SequenceSpec:
    """A sequence to generate."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int


def _draws(plan: AuditPlan, setting: Setting) -> Iterator[_SequenceSpec]:
    """Yield the samples of a setting, each with a seed that is unique in the audit."""
    first = derived_seed(plan.first_seed, 1 + plan.settings.index(setting))
    for index in range(plan.num_samples):
        for place, prompt in enumerate(plan.prompts):
            yield _SequenceSpec(prompt, _seed(first, index * len(plan.prompts) + place), plan.max_tokens)


def _choices(plan: AuditPlan, num_seeds: int) -> Iterator[_SequenceSpec]:
    """Yield the deterministic sequences; every setting has the same seeds."""
    for index in range(num_seeds):
        for prompt in plan.prompts:
            yield _SequenceSpec(prompt, _seed(plan.first_seed, index), plan.num_choice_tokens)


def _seed(first: int, index: int) -> int:
    return derived_seed(first, 1 + index) >> 1  # a request's seed has 63 bits


def _generated(engine: Engine, setting: Setting, speculation: Speculation, specs: Iterator[_SequenceSpec]) -> SettingOutput:
    """Generate every sequence with the engine."""
    by_id = {f"audit-{index}": spec for index, spec in enumerate(specs)}
    texts: dict[str, list[int]] = {request_id: [] for request_id in by_id}
    num_drafted = num_accepted = 0
    for request_id, spec in by_id.items():
        engine.add(_request(request_id, spec, setting, speculation))
    name = setting.name if speculation.is_enabled else f"{setting.sampling_name}, without speculation"
    with progress_bar(what=name, total=len(by_id), unit="text", leave=False) as bar:
        while engine.has_work:
            output = engine.step()
            num_drafted += output.stats.num_draft_tokens
            num_accepted += output.stats.num_accepted_tokens
            for event in output.events:
                texts[event.request_id].extend(_token_ids_of(event))
                bar.update(event.finish is not None)
    engine.check_integrity()
    _logger.info("%s: %d texts, %d drafted tokens, %d accepted", name, len(texts), num_drafted, num_accepted)
    whole = (GeneratedSequence(spec.prompt_ids, tuple(texts[request_id]), spec.seed) for request_id, spec in by_id.items())
    return SettingOutput(setting, tuple(whole), num_drafted, num_accepted)


def _request(request_id: str, spec: _SequenceSpec, setting: Setting, speculation: Speculation) -> Request:
    # A length that depends on drawn tokens would bias the tests, so only `max_tokens` ends a sequence.
    sampling = replace(setting.sampling, seed=spec.seed, max_tokens=spec.max_tokens, ignore_eos=True)
    return Request(request_id, spec.prompt_ids, sampling, speculation)


def _token_ids_of(event: TokenEvent) -> tuple[int, ...]:
    if event.finish is FinishReason.ERROR:
        raise AuditRequestFailed(f"{event.request_id}: {event.error}")
    return event.token_ids
