"""The number of requests by which `latebranch audit --url` finds each planted fault, with every one of three first seeds.

python -m benchmarks.planted_faults
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.markdown import table
from server.audit_url.report import CheckVerdict
from server.cli.audit_url import report_of
from tests.model.audit import stand_in
from tests.model.audit.test_audit_url import FAULTS, OWN_FAULTS, TEXTS, arguments, words
from tests.model.folders import model_folder
from tests.model.tiny import own_module

SIZES = (200, 300, 500, 900, 1400, 2000)
SEEDS = (1, 2, 3)


def is_found(name: str, check: str, folder: Path | None, num_requests: int, first_seed: int) -> bool:
    """Return whether a check finds a fault."""
    with stand_in.served(getattr(stand_in, name)(own_module("llama")), words) as url:
        report = report_of(TEXTS, arguments(url, folder, num_requests, first_seed))
    return any(one.check == check and one.at(report.level) is CheckVerdict.VIOLATION for one in report.results)


def least(name: str, check: str, folder: Path | None) -> str:
    """Return the smallest bound of requests by which every seed finds a fault."""
    sizes = (size for size in SIZES if all(is_found(name, check, folder, size, seed) for seed in SEEDS))
    return str(next(sizes, f"more than {SIZES[-1]}"))


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name), own_module("llama"))
        rows = []
        for fault, (_, check) in FAULTS.items():
            _, own_check = OWN_FAULTS.get(fault, FAULTS[fault])
            rows.append([fault, check, least(fault, check, folder), least(fault, own_check, None)])
    print(table(["server", "check", "requests with weights", "without"], rows))


if __name__ == "__main__":
    main()
