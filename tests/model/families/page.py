"""Makes docs/models.md from the table of families.

python -m tests.model.families.page [--out docs/models.md]
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.markdown import table
from tests.model.families.table import DIFFERENT, REFUSED, SERVED

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
_HEAD = """# Models

`python -m tests.model.families.page` makes this page. Its test tries each family with a tiny random model: greedy texts under
trees are `transformers.generate`'s.

## Served

`text` is cached text, `model` a draft model, `head` a head trained here, `checkpoint` EAGLE-3, DFlash or Medusa
([drafters.md](drafters.md)).
"""
_REFUSED = """## Refused

With exit status 2, mostly before weights are loaded.
"""


def models_page() -> str:
    """Return the whole page. Families that are served alike, or refused for one reason, share a line."""
    served = _grouped(((one.runs_by, ", ".join(one.drafters)), f"{one.name} (`{one.model_type}`)") for one in SERVED)
    refused = _grouped(((one.reason,), ", ".join(f"`{each}`" for each in one.model_types)) for one in (*REFUSED, *DIFFERENT))
    return "\n".join(
        [
            _HEAD,
            table(["runs by", "drafters that fit", "families"], served),
            "",
            _REFUSED,
            table(["reason", "model types"], refused),
            "",
        ]
    )


def _grouped(lines: Iterable[tuple[tuple[str, ...], str]]) -> list[list[str]]:
    """Return a row for each key, with the families that have it in their order."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for key, family in lines:
        rows.setdefault(key, []).append(family)
    return [[*key, ", ".join(families)] for key, families in rows.items()]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.families.page", description="make docs/models.md")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.parse_args().out.write_text(models_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
