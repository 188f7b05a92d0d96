"""Has an engine say what an audit will judge. Knows the engine and its requests; no law and no statistics."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.audit.plan import AuditPlan, Setting
from engine.core.rng_keys import derived_seed
from engine.core.types import FinishReason, Request, Speculation, TokenEvent
from engine.engine import Engine
from engine.utils.progress_bar import progress_bar

_logger = logging.getLogger(__name__)


class RequestFailed(RuntimeError):
    """The engine gave up on a request, so that nothing can be said."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the engine said after a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Said:
    """All texts under one setting, and how much of them came from drafts: without any there was nothing to be audited."""

    setting: Setting
    texts: tuple[Text, ...]
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """Everything the engine said for a plan. `plain` are the coupled texts once more, without speculation, setting by setting."""

    plan: AuditPlan
    sampled: tuple[Said, ...]
    greedy: tuple[Said, ...]
    coupled: tuple[Said, ...]
    plain: tuple[Said, ...]


def collect(engine: Engine, plan: AuditPlan) -> Collected:
    """Run the whole plan. Raises RequestFailed, or RequestRefused if the engine cannot do what the plan asks for."""
    sampled = tuple(_said(engine, setting, setting.speculation, _draws(plan, setting)) for setting in plan.settings)
    choices = list(plan.choice_settings())
    greedy = [setting for setting in choices if setting.sampling.is_greedy]
    coupled = [setting for setting in choices if not setting.sampling.is_greedy]
    off = Speculation(False, None, "coupled")
    return Collected(
        plan,
        sampled,
        tuple(_said(engine, setting, setting.speculation, _choices(plan, 1)) for setting in greedy),
        tuple(_said(engine, setting, setting.speculation, _choices(plan, plan.num_seeds)) for setting in coupled),
        tuple(_said(engine, setting, off, _choices(plan, plan.num_seeds)) for setting in coupled),
    )


@dataclass(frozen=True, slots=True)
class _Order:
    """One text to be made."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int


def _draws(plan: AuditPlan, setting: Setting) -> Iterator[_Order]:
    """Yield the samples of a setting, each with a seed that no other one of the whole audit has."""
    first = derived_seed(plan.first_seed, 1 + plan.settings.index(setting))
    for index in range(plan.num_samples):
        for place, prompt in enumerate(plan.prompts):
            yield _Order(prompt, _seed(first, index * len(plan.prompts) + place), plan.max_tokens)


def _choices(plan: AuditPlan, num_seeds: int) -> Iterator[_Order]:
    """Yield texts that leave no choice; every setting has the same seeds."""
    for index in range(num_seeds):
        for prompt in plan.prompts:
            yield _Order(prompt, _seed(plan.first_seed, index), plan.num_choice_tokens)


def _seed(first: int, index: int) -> int:
    return derived_seed(first, 1 + index) >> 1  # a request's seed has 63 bits


def _said(engine: Engine, setting: Setting, speculation: Speculation, orders: Iterator[_Order]) -> Said:
    """Have the engine make every text."""
    placed = {f"audit-{index}": order for index, order in enumerate(orders)}
    texts: dict[str, list[int]] = {request_id: [] for request_id in placed}
    num_drafted = num_accepted = 0
    for request_id, order in placed.items():
        engine.add(_request(request_id, order, setting, speculation))
    name = setting.name if speculation.is_enabled else f"{setting.sampling_name}, without speculation"
    with progress_bar(what=name, total=len(placed), unit="text", leave=False) as bar:
        while engine.has_work:
            output = engine.step()
            num_drafted += output.stats.num_draft_tokens
            num_accepted += output.stats.num_accepted_tokens
            for event in output.events:
                texts[event.request_id].extend(_said_in(event))
                bar.update(event.finish is not None)
    engine.check_integrity()
    _logger.info("%s: %d texts, %d drafted tokens, %d accepted", name, len(texts), num_drafted, num_accepted)
    whole = (Text(order.prompt_ids, tuple(texts[request_id]), order.seed) for request_id, order in placed.items())
    return Said(setting, tuple(whole), num_drafted, num_accepted)


def _request(request_id: str, order: _Order, setting: Setting, speculation: Speculation) -> Request:
    # The length must not depend on what is drawn, so nothing ends a text but its length.
    sampling = replace(setting.sampling, seed=order.seed, max_tokens=order.max_tokens, ignore_eos=True)
    return Request(request_id, order.prompt_ids, sampling, speculation)


def _said_in(event: TokenEvent) -> tuple[int, ...]:
    if event.finish is FinishReason.ERROR:
        raise RequestFailed(f"{event.request_id}: {event.error}")
    return event.token_ids
