"""The tables of docs/parameters.md, each cell computed. `python -m tests.model.parameters.matrix` writes them.

exact  the distribution of whole texts is plain decoding's: largest difference below 1e-12, over every tree that can be drawn
text   the text is plain decoding's, for each seed and after every tree
own    log-probabilities are the target's own to 1e-4

Any other cell is the distance, which fails the suite.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from engine.core.sampling_limits import require_probs
from engine.core.verifier_table import VERIFIER_NAMES, is_exact
from tests.model.parameters.subjects import DISTRIBUTIONS, EVERYTHING, GREEDY, NUMBERS, Subject
from tests.model.parameters.texts import INFO, KINDS, Enumeration, RequestedModel, distance, plain_texts
from tests.model.parameters.tokens_and_logprobs import check_numbers, texts_differ
from tests.model.parameters.wire import default_rows, wire_rows
from tests.model.verify.rules_under_test import EXACT, RULES

DOCUMENT = Path(__file__).parents[3] / "docs" / "parameters.md"
LEAST_MOVE = 0.005  # a value that moves the distribution by less shows nothing


def probs_table() -> str:
    """Return the table of parameters and verifiers."""
    head = ["parameter", "value", "moves", *VERIFIER_NAMES]
    rows = [probs_row(subject) for subject in (GREEDY, *DISTRIBUTIONS, EVERYTHING)]
    return _table(head, [*rows, *([f"`{name}`", "3", "–", *map(_checked, VERIFIER_NAMES)] for name in NUMBERS)])


def trees_table() -> str:
    """Return the table of the trees that were enumerated."""
    return _table(
        ["verifier", *KINDS], [[name, *("x" if _suits(kind, name) else "" for kind in KINDS)] for name in VERIFIER_NAMES]
    )


def probs_row(subject: Subject, verifiers: Iterable[str] = VERIFIER_NAMES) -> list[str]:
    """Return a line of the table: what the parameter moves, and whether each verifier follows."""
    name = [f"`{subject.name}`" if subject is not EVERYTHING else subject.name, subject.value]
    require_probs(subject.sampling, INFO.vocab_size, INFO.eos_token_ids)
    model = RequestedModel(subject.sampling)
    moves = distance(plain_texts(model), plain_texts(RequestedModel(subject.base)))
    assert moves > LEAST_MOVE, f"{subject.name} {subject.value} moves nothing"
    same_text = "text" if not (num := texts_differ(model)) else f"{num} texts differ"
    if model.sampling.is_greedy:
        return [*name, f"{moves:.2f}", *(same_text for _ in verifiers)]
    enumeration = Enumeration(model)
    cells = [same_text if one == "coupled" else _probs(model, enumeration, one) for one in verifiers]
    return [*name, f"{moves:.2f}", *cells]


def _probs(model: RequestedModel, enumeration: Enumeration, verifier: str) -> str:
    plain = plain_texts(model)
    worst = max(distance(plain, texts) for texts in enumeration.texts(RULES[verifier]).values())
    return "exact" if worst < EXACT else f"{worst:.1e}"


@cache
def _checked(verifier: str) -> str:
    check_numbers(verifier)
    return "own"


def _suits(growth: str, verifier: str) -> bool:
    return is_exact(KINDS[growth], verifier)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


TABLES: dict[str, Callable[[], str]] = {
    "distributions": probs_table,
    "trees": trees_table,
    "wire": lambda: _table(*wire_rows()),
    "defaults": lambda: _table(*default_rows()),
}


def written(text: str, name: str, table: str) -> str:
    """Return the document with a table between its marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    assert begin in text, f"the document has no marks for {name}"
    return before + begin + table + "\n" + end + rest.partition(end)[2]


def table_in(text: str, name: str) -> str:
    """Return the table between its marks."""
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


if __name__ == "__main__":
    argparse.ArgumentParser(description="write the tables of docs/parameters.md anew").parse_args()
    document = DOCUMENT.read_text()
    for table_name, make in TABLES.items():
        document = written(document, table_name, make())
    DOCUMENT.write_text(document)
