"""docs/parameters.md matches the found combinations: under each verifier each parameter keeps plain decoding's distribution."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from engine.core.rng_keys import Stream, stream_key
from engine.core.step_plan import Row
from engine.core.types import SamplingParams
from engine.core.verifier_table import VERIFIER_NAMES
from engine.sampling import logits_processors as logit_edits
from engine.scheduler.sequence import Sequence
from engine.verify import coupled
from engine.verify import dispatch as judge
from tests.model.parameters import tokens_and_logprobs
from tests.model.parameters.matrix import DOCUMENT, probs_row, probs_table, table_in, trees_table
from tests.model.parameters.subjects import DISTRIBUTIONS, EVERYTHING, GREEDY, NUMBERS, Subject

SUBJECTS = {subject.name: subject for subject in DISTRIBUTIONS}


def test_every_parameter_has_a_line():
    assert {*SUBJECTS, *NUMBERS} == {field.name for field in fields(SamplingParams)}


def test_document_matches_the_found_combinations():
    """If a changed result is intended, `python -m tests.model.parameters.matrix` rewrites the tables."""
    table = probs_table()
    cells = {cell for line in table.splitlines()[2:] for cell in line.strip("| ").split(" | ")[3:]}
    assert cells <= {"exact", "text", "own"}
    assert table_in(DOCUMENT.read_text(), "distributions") == table


def test_document_lists_the_enumerated_trees():
    assert table_in(DOCUMENT.read_text(), "trees") == trees_table()


_CONTEXT = Row.sampling_context


def path_forgotten(row: Row, path_ids: tuple[int, ...]) -> Any:
    """The root's distribution at every node below it."""
    return _CONTEXT(row, ())


def cut_after_the_step(sequence: Sequence, new_ids: list[int]) -> tuple[list[int], None]:
    """Ends are looked for at the end of a step's tokens alone."""
    return new_ids, None


def noise_of_the_root(key: Any, depth: int) -> int:
    return stream_key(key.seed, key.root_position + 1, Stream.TOKEN)


MUTANTS: list[tuple[str, object, str, Callable[..., Any]]] = [
    *(
        (name, Row, "sampling_context", path_forgotten)
        for name in ("presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "grammar")
    ),
    ("logit_bias", logit_edits, "_add_bias", lambda logits_MV, sampling: None),
    ("repetition_penalty", judge, "edited_logits", lambda logits_NV, *_: logits_NV),
    ("stop_token_ids", Sequence, "accept", cut_after_the_step),
    ("max_tokens", Sequence, "accept", cut_after_the_step),
    ("seed", coupled, "_noise_key", noise_of_the_root),
]


@pytest.mark.parametrize(("name", "where", "attribute", "mutant"), MUTANTS)
def test_table_detects_mutants(
    name: str, where: object, attribute: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(where, attribute, mutant)
    cells = _cells(SUBJECTS[name])
    assert cells["coupled"] != "text"
    assert name == "seed" or (cells["traversal"], cells["nss"]) != ("exact", "exact")


def test_table_detects_greedy_rows_ignoring_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Row, "sampling_context", path_forgotten)
    assert set(_cells(GREEDY).values()) & {"text", "exact"} == set()


def test_a_value_that_moves_nothing_is_noticed():
    with pytest.raises(AssertionError, match="moves nothing"):
        probs_row(Subject("none", "", EVERYTHING.sampling, EVERYTHING.sampling))


def _cells(subject: Subject) -> dict[str, str]:
    verifiers = ("nss", "traversal", "coupled")
    return dict(zip(verifiers, probs_row(subject, verifiers)[3:], strict=True))


@pytest.mark.parametrize("mutant", ["edited", "root"])
def test_logprobs_detect_mutants(mutant: str, monkeypatch: pytest.MonkeyPatch):
    """Log-probabilities after the request's edits, or all of a step's reported at its root."""
    logprobs_of = judge.logprobs_of

    def spoilt(logits_NV: Any, nodes: list[int], ids: list[int], num_top: int) -> Any:
        if mutant == "root":
            return logprobs_of(logits_NV, [nodes[0]] * len(nodes), ids, num_top)
        return logprobs_of(logits_NV / 0.8, nodes, ids, num_top)

    monkeypatch.setattr("engine.engine.logprobs_of", spoilt)
    for verifier in VERIFIER_NAMES[:3]:
        with pytest.raises(AssertionError):
            tokens_and_logprobs.check_numbers(verifier)
