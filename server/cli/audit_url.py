"""Runs `latebranch audit --url`: arguments in, report out, and the exit status."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from engine.audit.reference import load_reference
from engine.weights import UnsupportedModel, resolve
from engine.weights.facts import read_facts
from engine.weights.pretrained import load_tokenizer
from server.audit_url.audit import ServerAudit, UrlOptions
from server.audit_url.client import AuditedServerFailed, AuditedServerUnsuitable, CompletionClient
from server.audit_url.dialect import AuditPrompt
from server.audit_url.results import ServerReport
from server.audit_url.sources import ModelSource, ServerSource, Source
from server.audit_url.text import as_json, as_text
from server.cli.audit import AuditError, AuditFailed
from server.cli.audit_run import EXIT_STATUS


def audit_url(texts: Sequence[str], parsed: argparse.Namespace) -> int:
    """Run the audit with these prompts; return the exit status. Raises AuditError, AuditFailed."""
    with _json_file(parsed.json) as file:
        report = report_of(texts, parsed)
        sys.stdout.write(as_text(report) + "\n")
        (file or sys.stdout).write(as_json(report) + "\n")
    return EXIT_STATUS[report.verdict]


@contextmanager
def _json_file(path: Path | None) -> Iterator[TextIO | None]:
    """Open the file of --json, before requests are spent. Raises AuditError."""
    try:
        with nullcontext() if path is None else path.open("a+", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise AuditError(f"--json {path} cannot be written: {error.strerror}") from error


def report_of(texts: Sequence[str], parsed: argparse.Namespace) -> ServerReport:
    """Return the report of the audit. Raises AuditError, AuditFailed."""
    server = (parsed.url, parsed.model, parsed.api_key)
    try:
        with closing(CompletionClient(*server, parsed.timeout, parsed.concurrency, parsed.chat)) as client:
            client.read_models()  # first: a wrong address is reported before weights are fetched
            source, prompts = _source(texts, parsed)
            options = UrlOptions(parsed.requests, parsed.greedy_tokens, parsed.alpha, parsed.first_seed, parsed.tie_gap)
            return ServerAudit(client, source, prompts, options).run()
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
    reference = load_reference(folder, parsed.weights_dtype, "cpu")
    rendered = [_rendered(tokenizer, text) for text in texts] if parsed.chat else texts
    ids = [tuple(tokenizer(text, add_special_tokens=not parsed.chat)["input_ids"]) for text in rendered]
    prompts = [AuditPrompt(text, prompt_ids) for text, prompt_ids in zip(texts, ids, strict=True)]
    return ModelSource(reference, tokenizer, read_facts(folder).eos_token_ids), prompts


def _rendered(tokenizer: Any, text: str) -> str:
    """Return a chat's prompt by the model's template. Raises AuditError."""
    if not tokenizer.chat_template:
        raise AuditError("the model of --weights has no chat template: leave out --chat")
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
