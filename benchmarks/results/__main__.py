"""Makes docs/benchmarks.md from the results of this folder.

python -m benchmarks.results [--out docs/benchmarks.md]
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.markdown import table

_FOLDER = Path(__file__).parent
_HEAD = """# Benchmarks

`python -m benchmarks.results` makes this page from `benchmarks/results/`, which has the whole tables. Machines with two
virtual cores are noisy: read ratios, each of two things in the same round with their spread.
"""


def benchmarks_page() -> str:
    """Return the whole page."""
    entries = yaml.safe_load((_FOLDER / "index.yaml").read_text(encoding="utf-8"))
    return "\n".join([_HEAD, *("\n".join(_section(one)) for one in entries)])


def _section(entry: dict[str, Any]) -> Iterator[str]:
    yield f"## {entry['title']}\n"
    if "about" in entry:
        yield f"{entry['about']}\n"
    if "command" in entry:
        yield f"```\n{entry['command'].rstrip()}\n```\n"
    if "table" in entry:
        head, *rows = csv.reader((_FOLDER / entry["table"]).read_text(encoding="utf-8").splitlines())
        yield table(head, rows) + "\n"
    else:
        yield table(["what", "result", "command"], entry["rows"]) + "\n"
    if "figure" in entry:
        yield f"![{entry['shows']}](../benchmarks/results/{entry['figure']})\n"
    data = "".join(f", [{name}](../benchmarks/results/{name})" for name in entry.get("data", ()))
    yield f"Measured on {entry['machine']}{'. All cells: ' + data[2:] if data else ''}.\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description="make docs/benchmarks.md")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"))
    parser.parse_args().out.write_text(benchmarks_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
