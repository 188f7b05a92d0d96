"""`latebranch drafter check`: checks whether a drafter fits a target, and reports the differences."""

import argparse
import sys
from pathlib import Path

from engine.weights import WeightsError, resolve
from server.cli.parser import positive_int


def add_check_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check`."""
    check = commands.add_parser("check", help="compare a drafter with the target it is to draft for")
    check.add_argument("--model", required=True, help="reference of the target's weights")
    drafter = check.add_mutually_exclusive_group(required=True)
    drafter.add_argument("--draft-model", help="reference of a draft model's weights")
    drafter.add_argument("--lens", type=Path, metavar="FILE", help="lens of an early-exit drafter")
    drafter.add_argument("--head", type=Path, metavar="FILE", help="distilled head")
    drafter.add_argument("--drafter", type=Path, metavar="FOLDER", help="EAGLE-3, DFlash or Medusa checkpoint")
    check.add_argument("--max-model-len", type=positive_int, default=8192, help="longest text that is to be served, in tokens")
    check.set_defaults(handler=_check)


def _check(parsed: argparse.Namespace) -> int:
    """Print the comparison; return 0 if the drafter fits, 1 if not or if a file cannot be read."""
    from engine.draft.compatibility import (  # here, because they bring torch
        UnreadableDrafter,
        compare_checkpoint,
        compare_fingerprint,
        compare_models,
    )

    try:
        target = resolve(parsed.model).folder
        if parsed.draft_model is not None:
            found = compare_models(target, resolve(parsed.draft_model).folder, parsed.max_model_len)
        elif parsed.drafter is not None:
            found = compare_checkpoint(target, parsed.drafter)
        else:
            found = compare_fingerprint(target, parsed.lens or parsed.head)
    except (WeightsError, UnreadableDrafter) as error:
        sys.stderr.write(f"latebranch drafter check: {error}\n")
        return 1
    warnings = [f"warning: {warning}" for warning in found.warnings]
    refusals = [f"refused: {refusal}" for refusal in found.refusals]
    verdict = "they do not belong together" if refusals else "they belong together"
    sys.stdout.write("\n".join([*found.facts, *warnings, *refusals, verdict]) + "\n")
    return 1 if refusals else 0
