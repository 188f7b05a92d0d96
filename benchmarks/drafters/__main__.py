"""The command line: `run` measures, `report` makes the table."""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.drafters.contenders import MissingPart, Stable, contenders_of
from benchmarks.drafters.measure import Design, EncodedPrompt, Measurement
from benchmarks.drafters.report import UnlikeRuns, report
from benchmarks.foreign import MAX_FOREIGN_CPUS
from engine.build import BadConfiguration
from engine.core.tree import Expansion, parse_expansion
from engine.core.validation import RequestRefused
from engine.weights import UnsupportedModel, WeightsError, resolve
from engine.weights.pretrained import load_tokenizer
from server.cli.bench_prompts import BENCH_PROMPTS, BenchError, Prompt, load_prompts
from server.settings import SettingsError, load_settings
from server.text.chat_ids import chat_ids


def main() -> None:
    """Run the command; a mistake in it is one line."""
    args = _parser().parse_args()
    if args.command == "report":
        try:
            print(report(args.file, args.max_foreign))
        except (UnlikeRuns, OSError) as error:
            raise SystemExit(f"benchmarks.drafters: {error}") from error
        return
    logging.basicConfig(level=logging.WARNING)
    try:
        _run(args)
    except (SettingsError, BenchError, MissingPart, BadConfiguration, UnsupportedModel, RequestRefused, WeightsError) as error:
        raise SystemExit(f"benchmarks.drafters: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description="compare drafters with plain decoding")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, one JSON line for each contender and block, appended to a file")
    run.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings: target, verifier, policy, threads")
    run.add_argument("--drafters", nargs="+", required=True, help="for example: ngram early-exit model")
    run.add_argument("--draft-model", help="of drafter model; by default the configured one")
    run.add_argument("--lens", help="of drafter early-exit; by default the configured one")
    run.add_argument("--head", help="of drafter head; by default the configured one")
    run.add_argument(
        "--trees",
        nargs="+",
        type=_tree,
        metavar="TREE",
        help="trees to fill, or `policy`; by default the configured one",
    )
    run.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    run.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    run.add_argument("--kinds", nargs="*", default=[], help="kinds of prompts; all of the file by default")
    run.add_argument("--num-prompts", type=int, default=6, help="of each kind")
    run.add_argument("--predictions", action="store_true", help="send the predictions of prompts that have one")
    run.add_argument("--max-tokens", type=int, default=96, help="tokens of a text, if the model does not end it before")
    run.add_argument("--batch", type=int, default=1, help="prompts in the engine at a time")
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--out", type=Path, default=Path("drafters.jsonl"))
    make = commands.add_parser("report", help="print the table of a file of measurements")
    make.add_argument("file", type=Path)
    make.add_argument(
        "--max-foreign", type=float, default=MAX_FOREIGN_CPUS, help="processors of others above which a block is left out"
    )
    return parser


def _tree(text: str) -> Expansion | None:
    return None if text == "policy" else parse_expansion(text)


def _run(args: argparse.Namespace) -> None:
    settings = load_settings(args.config, {})
    config = settings.to_tool_config()
    trees = args.trees or [config.expansion]
    if None not in trees:  # no policy is used, so none need be made
        config = replace(config, policy="fixed")
    parts = {"draft_model": args.draft_model, "lens": args.lens, "head": args.head}
    parts = {name: value or getattr(config, name) for name, value in parts.items()}
    texts = load_prompts(args.prompts, args.kinds, args.num_prompts)
    design = Design(
        contenders=tuple(contenders_of(args.drafters, trees)),
        temperatures=tuple(args.temperatures),
        max_tokens=args.max_tokens,
        batch=args.batch,
        num_rounds=args.rounds,
        verifier=config.verifier,
        facts={
            "prompts": args.prompts.name,
            "predictions": "sent" if args.predictions else "none",
            "heads": ", ".join(sorted(Path(value).name for value in parts.values() if value)) or "none",
        },
    )
    tokenizer = load_tokenizer(resolve(config.model).folder)
    prompts = {kind: [_encoded(tokenizer, text, args.predictions) for text in of_kind] for kind, of_kind in texts.items()}
    Measurement(design, Stable(config, parts), args.out).run(prompts)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, has_predictions: bool) -> EncodedPrompt:
    predicted = prompt.prediction if has_predictions and prompt.prediction is not None else ""
    return EncodedPrompt(chat_ids(tokenizer, prompt.text), tuple(tokenizer.encode(predicted, add_special_tokens=False)))


if __name__ == "__main__":
    main()
