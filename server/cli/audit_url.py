"""Runs `latebranch audit --url`: arguments in, report out, and the exit status."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from engine.audit.reference import load_reference
from engine.weights import UnsupportedModel, resolve
from engine.weights.facts import read_facts
from engine.weights.pretrained import load_tokenizer
from server.audit_url.audit import ServerAudit, UrlOptions
from server.audit_url.client import AuditedServerFailed, CompletionClient
from server.audit_url.dialect import AuditPrompt
from server.audit_url.results import ServerReport
from server.audit_url.sources import ModelSource, ServerSource, Source
from server.audit_url.text import as_json, as_text
from server.cli.audit import AuditError, AuditFailed
from server.cli.audit_run import EXIT_STATUS


def audit_url(texts: Sequence[str], parsed: argparse.Namespace) -> int:
    """Run the audit with these prompts; return the exit status. Raises AuditError, AuditFailed."""
    report = report_of(texts, parsed)
    sys.stdout.write(as_text(report) + "\n" + as_json(report) + "\n")
    return EXIT_STATUS[report.verdict]


def report_of(texts: Sequence[str], parsed: argparse.Namespace) -> ServerReport:
    """Return the report of the audit. Raises AuditError, AuditFailed."""
    try:
        with closing(CompletionClient(parsed.url, parsed.model, parsed.api_key, parsed.timeout, parsed.concurrency)) as client:
            client.read_models()  # first: a wrong address is reported before weights are fetched
            source, prompts = _source(texts, parsed)
            options = UrlOptions(parsed.requests, parsed.greedy_tokens, parsed.alpha, parsed.first_seed, parsed.tie_gap)
            return ServerAudit(client, source, prompts, options).run()
    except AuditedServerFailed as error:
        raise AuditFailed(str(error)) from error
    except UnsupportedModel as error:
        raise AuditError(str(error)) from error


def _source(texts: Sequence[str], parsed: argparse.Namespace) -> tuple[Source, list[AuditPrompt]]:
    """Return the source of distributions, and the prompts with their ids; without a tokenizer a prompt's id is its number."""
    if parsed.weights is None:
        return ServerSource(), [AuditPrompt(text, (number,)) for number, text in enumerate(texts)]
    folder = resolve(parsed.weights).folder
    tokenizer = load_tokenizer(folder)
    reference = load_reference(folder, parsed.weights_dtype, "cpu")
    prompts = [AuditPrompt(text, tuple(tokenizer(text)["input_ids"])) for text in texts]
    return ModelSource(reference, tokenizer, read_facts(folder).eos_token_ids), prompts
