"""Runs `latebranch audit`: the configured engine writes its texts and is freed, then the reference checks them."""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product

from engine.audit.collect import AuditRequestFailed, Collected, collect
from engine.audit.examine import examine
from engine.audit.plan import AuditPlan, Setting
from engine.audit.reference import load_reference
from engine.audit.report import AuditVerdict, Report
from engine.audit.report_text import as_text
from engine.build import BadConfiguration
from engine.core.types import ModelInfo
from engine.core.validation import RequestRefused
from engine.scheduler.slot_allocator import IntegrityError
from engine.utils.finite_json import finite_json
from engine.utils.progress_bar import long_work
from engine.weights import UnsupportedModel, resolve
from engine.weights.pretrained import load_tokenizer
from server.adaptive_engine import tool_engine
from server.cli.audit import AuditError, AuditFailed, probs_parameters
from server.settings import Settings
from server.text.chat_ids import chat_ids

EXIT_STATUS = {
    AuditVerdict.LOSSLESS: 0,
    AuditVerdict.VIOLATION: 1,
    AuditVerdict.INCONCLUSIVE: 3,
}  # 2 is a mistake in the arguments
Texts = Mapping[str, Sequence[str]]  # user messages by kind


def audit(settings: Settings, texts: Texts, parsed: argparse.Namespace) -> int:
    """Run the audit on messages by kind; return the exit status. Raises AuditError, AuditFailed."""
    try:
        return _audit(settings, texts, parsed)
    except (BadConfiguration, UnsupportedModel, RequestRefused) as error:
        raise AuditError(str(error)) from error
    except (AuditRequestFailed, IntegrityError) as error:
        raise AuditFailed(f"the engine failed: {error}") from error


def _audit(settings: Settings, texts: Texts, parsed: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("engine.audit").setLevel(logging.INFO)  # a line for each part that is done
    started_s = time.monotonic()
    plan = plan_of(parsed, encoded(settings.model, texts))
    info, collected = _collected(settings, plan)
    reference = load_reference(resolve(settings.model).folder, settings.dtype, info.device)
    report = examine(collected, reference)
    sys.stdout.write(as_text(report, info, time.monotonic() - started_s) + "\n")
    parsed.json_lines.write(as_json(report, info) + "\n")
    return EXIT_STATUS[report.verdict]


def _collected(settings: Settings, plan: AuditPlan) -> tuple[ModelInfo, Collected]:
    """Return the engine's facts and texts. The engine is freed on return, so that the reference can use its memory."""
    with long_work(f"loading {settings.model}"):
        engine = tool_engine(settings.to_tool_config())
    return engine.info, collect(engine, plan)


def encoded(model: str, texts: Texts) -> tuple[tuple[int, ...], ...]:
    """Return every message as a chat prompt of the model."""
    tokenizer = load_tokenizer(resolve(model).folder)
    return tuple(chat_ids(tokenizer, text) for of_kind in texts.values() for text in of_kind)


def plan_of(parsed: argparse.Namespace, prompts: tuple[tuple[int, ...], ...]) -> AuditPlan:
    """Return the plan of the arguments: every temperature with every verifier and tree."""
    settings = [Setting(*parts) for parts in product(probs_parameters(parsed), parsed.verifiers, parsed.expansions)]
    return AuditPlan(
        prompts=prompts,
        settings=tuple(dict.fromkeys(settings)),
        first_seed=parsed.first_seed,
        num_samples=parsed.samples,
        max_tokens=parsed.max_tokens,
        num_choice_tokens=parsed.greedy_tokens,
        num_seeds=parsed.seeds,
        alpha=parsed.alpha,
    )


def as_json(report: Report, info: ModelInfo) -> str:
    """Return one line with the engine's facts and the whole report."""
    verdict = {"verdict": report.verdict, "is_lossless": report.is_lossless, "inconclusive": report.inconclusive}
    everything = {"engine": asdict(info), **verdict, "level": report.level, "report": asdict(report)}
    return finite_json(everything)
