"""Runs `latebranch audit --url`: arguments in, report out, and the exit status."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from engine.audit.reference import load_reference
from engine.weights import UnsupportedModel, resolve
from engine.weights.facts import read_facts
from engine.weights.pretrained import load_tokenizer
from server.audit_url.audit import TEST_NAMES, ServerAudit
from server.audit_url.client import AuditedServerFailed, AuditedServerUnsuitable, CompletionClient
from server.audit_url.dialect import AuditPrompt
from server.audit_url.report import ServerReport, as_json, as_text
from server.audit_url.sources import ModelSource, ServerSource, Source
from server.cli.audit import AuditError, AuditFailed
from server.cli.audit_run import EXIT_STATUS


def audit_url(texts: Sequence[str], parsed: argparse.Namespace) -> int:
    """Run the audit with these prompts; return the exit status. Raises AuditError, AuditFailed."""
    report = report_of(texts, parsed)
    sys.stdout.write(as_text(report) + "\n")
    parsed.json_lines.write(as_json(report) + "\n")
    return EXIT_STATUS[report.verdict]


def report_of(texts: Sequence[str], parsed: argparse.Namespace) -> ServerReport:
    """Return the report of the audit. Raises AuditError, AuditFailed."""
    if unknown := [part for part in parsed.skip if not any(part in name for name in TEST_NAMES)]:
        raise AuditError(f"--skip {unknown[0]}: no test has this in its name; the names are: {'; '.join(TEST_NAMES)}")
    sizes = (parsed.requests, parsed.greedy_tokens, parsed.alpha, parsed.first_seed)
    server = (parsed.url, parsed.model, parsed.api_key, parsed.timeout, parsed.concurrency, parsed.chat)
    try:
        with closing(CompletionClient(*server)) as client:
            client.read_models()  # first: a wrong address is reported before weights are fetched
            return ServerAudit(client, *_source(texts, parsed), *sizes, parsed.tie_gap, parsed.skip, parsed.wait).run()
    except (AuditedServerUnsuitable, UnsupportedModel) as error:
        raise AuditError(str(error)) from error
    except AuditedServerFailed as error:
        raise AuditFailed(str(error)) from error
    except KeyboardInterrupt:
        raise AuditFailed("interrupted, so nothing is decided") from None


def _source(texts: Sequence[str], parsed: argparse.Namespace) -> tuple[Source, list[AuditPrompt]]:
    """Return the source of distributions, and the prompts with their ids; without a tokenizer a prompt's id is its number."""
    if parsed.weights is None:
        return ServerSource(), [AuditPrompt(text, (number,)) for number, text in enumerate(texts)]
    folder = resolve(parsed.weights).folder
    tokenizer = load_tokenizer(folder)
    if parsed.chat and not tokenizer.chat_template:
        raise AuditError("the model of --weights has no chat template: leave out --chat")
    reference = load_reference(folder, parsed.weights_dtype, "cpu")
    prompts = []
    for text in texts:
        chat = {"conversation": [{"role": "user", "content": text}], "tokenize": False, "add_generation_prompt": True}
        rendered = str(tokenizer.apply_chat_template(**chat)) if parsed.chat else text
        prompts.append(AuditPrompt(text, tuple(tokenizer(rendered, add_special_tokens=not parsed.chat)["input_ids"])))
    return ModelSource(reference, tokenizer, read_facts(folder).eos_token_ids), prompts
