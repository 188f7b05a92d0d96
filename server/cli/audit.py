"""`latebranch audit`: its arguments, checked before a model is loaded. server.cli.audit_run does the rest."""

import argparse
import math
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from engine.core.sampling_limits import NoDistribution, require_probs
from engine.core.tree import Expansion, parse_expansion
from engine.core.types import SamplingParams
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from engine.weights import WeightsError
from server.cli.bench_prompts import BENCH_PROMPTS, BenchError, add_prompt_flags, read_prompts
from server.cli.parser import non_negative_int, number_within, positive_int, tree_shape
from server.settings import SHIPPED, Settings, SettingsError, load_settings

AUDIT_PROMPTS = SHIPPED / "audit_prompts.yaml"
LEAST_REQUESTS = 200  # fewer have no test of the tokens after the first


class AuditError(Exception):
    """A mistake in the arguments of the audit; the message is one line."""


class AuditFailed(Exception):
    """The audited engine failed; the message is one line."""


# Options that only one of the two audits reads: of this engine, or by --url.
_OF_ENGINE = (
    *("config", "num_prompts", "temperatures", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "verifiers", "expansions", "samples", "max_tokens", "seeds"),
)
_BY_URL = ("weights", "weights_dtype", "chat", "api_key", "requests", "concurrency", "timeout", "tie_gap", "skip", "wait")


def add_audit_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `audit`: its settings, prompts and level of significance."""
    command = subparsers.add_parser("audit", help="prove that speculation does not change the target's distribution")
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings: models, drafter, verifier, threads")
    command.add_argument("--model", help="the target, in place of the configured one; with --url its name in requests")
    add_prompt_flags(command, num_prompts=1)
    _add_sampling(command)
    command.add_argument("--verifiers", nargs="+", metavar="NAME", help="rules to audit; by default the configured one")
    command.add_argument(
        "--expansions", nargs="+", type=tree_shape, metavar="TREE", help="trees to audit; by default the configured one"
    )
    command.add_argument("--samples", type=positive_int, default=150, help="answers drawn for each prompt and setting")
    command.add_argument("--max-tokens", type=positive_int, default=8, help="tokens of such an answer")
    command.add_argument("--greedy-tokens", type=positive_int, default=48, help="tokens of each greedy and of each seeded text")
    command.add_argument("--seeds", type=positive_int, default=2, help="seeds tried with and without speculation")
    command.add_argument(
        "--alpha", type=number_within(0.0, 1.0), default=1e-3, help="chance that a lossless engine fails a statistical test"
    )
    command.add_argument("--first-seed", type=non_negative_int, default=None, help="repeats an audit; the report names its own")
    command.add_argument("--json", type=Path, metavar="FILE", help="append the report's line of JSON there, not to the output")
    _add_url(command)
    defaults = {name: command.get_default(name) for name in (*_OF_ENGINE, *_BY_URL)}
    # None: not given. Other prompts are for chats than for --url.
    command.set_defaults(handler=_audit, defaults=defaults, prompts=None, **dict.fromkeys(defaults))


def _add_url(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("another server, from outside (all settings are chosen by the audit)")
    group.add_argument("--url", help="audit the OpenAI-compatible server at this address")
    group.add_argument("--weights", metavar="MODEL", help="its model: a preset, a folder, a GGUF file or a hub id")
    group.add_argument("--weights-dtype", default="float32", choices=("float32", "bfloat16", "int8", "compact"))
    group.add_argument("--chat", action="store_true", help="by /v1/chat/completions; /v1/completions by default")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--requests", type=positive_int, default=2000, help="bound of the number of requests")
    group.add_argument("--concurrency", type=positive_int, default=4, help="requests at a time")
    group.add_argument("--timeout", type=number_within(0.0, math.inf), default=120.0, metavar="SECONDS", help="of one request")
    group.add_argument(
        "--tie-gap", type=number_within(0.0, math.inf), help="gap of logits that rounding may reverse; measured by default"
    )
    group.add_argument("--skip", nargs="+", default=(), metavar="NAME", help="tests to leave out, by a part of their names")
    group.add_argument(
        "--wait",
        type=number_within(0.0, math.inf, "[)"),
        default=60.0,
        metavar="SECONDS",
        help="for a server that failed in a test",
    )


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperatures", nargs="+", type=number_within(0.0, math.inf), default=[1.0, 0.7], help="above 0")
    command.add_argument("--top-p", type=number_within(0.0, 1.0, "(]"), default=1.0)
    command.add_argument("--top-k", type=non_negative_int, default=0, help="0 is off")
    command.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    for name in ("presence", "frequency"):
        command.add_argument(f"--{name}-penalty", type=float, default=0.0)
    command.add_argument("--repetition-penalty", type=float, default=1.0)


def _audit(parsed: argparse.Namespace) -> int:
    """Run the audit and return its status: 1 also if the engine fails or weights are not available, 2 for wrong arguments."""
    try:
        _take_defaults(parsed)
        with _json_lines(parsed.json) as parsed.json_lines:
            return _audit_engine(parsed) if parsed.url is None else _audit_url(parsed)
    except (SettingsError, BenchError, AuditError, AuditFailed, WeightsError) as error:
        sys.stderr.write(f"latebranch audit: {error}\n")
        return 1 if isinstance(error, (WeightsError, AuditFailed)) else 2


@contextmanager
def _json_lines(path: Path | None) -> Iterator[TextIO]:
    """Open the file of --json before anything is audited. Raises AuditError."""
    try:
        with nullcontext(sys.stdout) if path is None else path.open("a+", encoding="utf-8") as lines:
            yield lines
    except OSError as error:
        raise AuditError(f"--json {path} cannot be written: {error.strerror}") from error


def _audit_engine(parsed: argparse.Namespace) -> int:
    settings = load_settings(parsed.config, {} if parsed.model is None else {"model": parsed.model})
    texts = read_prompts(parsed.prompts or BENCH_PROMPTS, parsed.kinds, parsed.num_prompts)
    parsed.verifiers = parsed.verifiers or [settings.verifier]
    parsed.expansions = parsed.expansions or _configured(settings)
    parsed.first_seed = secrets.randbits(62) if parsed.first_seed is None else parsed.first_seed
    _check(settings, parsed.verifiers, parsed.expansions)
    _check_probs(parsed)
    from server.cli.audit_run import audit  # here, because it brings torch

    return audit(settings, texts, parsed)


def _take_defaults(parsed: argparse.Namespace) -> None:
    """Fill in the options that are not given. Raises AuditError for one that this kind of audit does not read."""
    is_by_url = parsed.url is not None
    for name in _OF_ENGINE if is_by_url else _BY_URL:
        if getattr(parsed, name) is not None:
            reason = "cannot be combined with --url: there the audit chooses it" if is_by_url else "needs --url"
            raise AuditError(f"--{name.replace('_', '-')} {reason}")
    for name, value in parsed.defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _audit_url(parsed: argparse.Namespace) -> int:
    if parsed.requests < LEAST_REQUESTS:
        raise AuditError(f"--requests must be at least {LEAST_REQUESTS}")
    by_kind = read_prompts(parsed.prompts or AUDIT_PROMPTS, parsed.kinds, sys.maxsize)
    parsed.first_seed = secrets.randbits(30) if parsed.first_seed is None else parsed.first_seed
    from server.cli.audit_url import audit_url  # here, because it brings torch

    return audit_url([text for texts in by_kind.values() for text in texts], parsed)


def _configured(settings: Settings) -> list[Expansion | None]:
    """Return the configured tree; with policy adaptive also None, which means the policy's choice."""
    tree = parse_expansion(settings.expansion)
    return [tree, None] if settings.policy == "adaptive" else [tree]


def probs_parameters(parsed: argparse.Namespace) -> list[SamplingParams]:
    """Return the requested sampling parameters, one for each temperature."""
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    others = {name: getattr(parsed, name) for name in names}
    return [SamplingParams(temperature, **others) for temperature in parsed.temperatures]


def _check_probs(parsed: argparse.Namespace) -> None:
    try:
        for sampling in probs_parameters(parsed):
            require_probs(sampling, vocab_size=0, eos_token_ids=())  # no token is named
    except NoDistribution as error:
        raise AuditError(str(error)) from error


def _check(settings: Settings, names: list[str], expansions: list[Expansion | None]) -> None:
    """Refuse names that do not exist, pairs that are not lossless, and an audit of nothing."""
    if unknown := [name for name in names if name not in VERIFIER_NAMES]:
        raise AuditError(f"no verifier is named {', '.join(unknown)}; the names are {', '.join(VERIFIER_NAMES)}")
    if settings.drafter == "none":
        raise AuditError("without a drafter there is no speculation to be audited")
    for expansion in filter(None, expansions):
        if lossy := [name for name in names if not is_exact(expansion.kind, name)]:
            raise AuditError(f"{', '.join(lossy)} is not lossless on {expansion.tree} trees, so there is nothing to prove")
