"""The command line: `setup` installs peers, `run` measures, `report` makes the tables."""

import argparse
import logging
import os
import platform
import pydoc_data.topics
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.foreign import MAX_FOREIGN_CPUS
from benchmarks.peers.contenders import PRECISIONS, Subject, contenders_of, those_ready
from benchmarks.peers.measure import Design, Measurement, Prompt
from benchmarks.peers.report import report, write_ratios
from benchmarks.peers.setup import PEERS, PINS, SetupError, convert, set_up
from benchmarks.peers.stable import Stable
from engine.core.tree import parse_expansion
from engine.weights import WeightsError, resolve
from engine.weights.pretrained import load_tokenizer
from server.cli.bench_prompts import BENCH_PROMPTS, BenchError, read_prompts
from server.settings import Settings, SettingsError, load_settings
from server.text.chat_ids import chat_ids

_CONTEXT_STEP_TOKENS = 256
_LONG = "long"  # a kind of prompts that no file has


def main() -> None:
    """Run what is asked for; a mistake in it is one line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _parser().parse_args()
    try:
        {"setup": _setup, "run": _run, "report": _report}[args.command](args)
    except (SettingsError, BenchError, WeightsError, SetupError) as error:
        raise SystemExit(f"benchmarks.peers: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="compare with other engines")
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="install peers, each in an environment of its own")
    setup.add_argument("peers", nargs="*", type=_peer, metavar="PEER", help=f"of {', '.join(PEERS)}; by default all")
    run = commands.add_parser("run", help="measure, one JSON line for each contender and block, appended to a file")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML file of settings: our model and policy")
    run.add_argument("--draft", metavar="MODEL", help="draft model of peers; by default the configured one, if there is one")
    run.add_argument("--contenders", nargs="+", metavar="NAME", help="names, or how they begin; by default all")
    run.add_argument("--tree", type=parse_expansion, default="noise_aware.8.5.4", help="our fixed tree")
    run.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of ours")
    run.add_argument("--concurrency", nargs="+", type=int, default=[1])
    run.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    run.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    run.add_argument("--kinds", nargs="+", default=["code", "maths", "prose"])
    run.add_argument("--num-prompts", type=int, default=2, help="of each kind")
    run.add_argument("--long-tokens", type=int, metavar="N", default=7900, help="of the one prompt of kind `long`, about")
    run.add_argument("--max-tokens", type=int, default=128, help="of every answer, which end tokens do not end")
    run.add_argument("--rounds", type=int, default=5)
    run.add_argument("--threads", type=int, default=os.cpu_count(), help="of every contender")
    run.add_argument("--memory-gib", type=float, default=10.0, help="for contenders that are loaded at once")
    run.add_argument("--retries", type=int, default=1, help="of a measurement that others on the machine disturbed")
    run.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    make = commands.add_parser("report", help="print the tables of a file of measurements")
    make.add_argument("file", type=Path)
    make.add_argument("--short", action="store_true", help="two tables for all blocks, of ratios and of the rest")
    make.add_argument("--csv", action="store_true", help="the ratios alone, as benchmarks/results/ has them")
    make.add_argument("--ours", nargs="*", default=[], metavar="NAME", help="of ours whose ratios are told; by default all")
    for command in (run, make):
        command.add_argument(
            "--max-foreign",
            type=float,
            default=MAX_FOREIGN_CPUS,
            help="processors of others above which a measurement counts as disturbed",
        )
    return parser


def _peer(name: str) -> str:
    """Return the name of a peer: `choices` of a list that may be empty would refuse the empty one."""
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"there is no {name!r}")
    return name


def _setup(args: argparse.Namespace) -> None:
    for peer in args.peers or PEERS:
        set_up(peer)
        print(f"{peer}: {', '.join(PINS[peer])}")


def _report(args: argparse.Namespace) -> None:
    if args.csv:
        write_ratios(args.file, args.max_foreign, args.ours, sys.stdout)
        return
    print(report(args.file, args.max_foreign, args.ours, args.short))


def _run(args: argparse.Namespace) -> None:
    # 1. what everybody is given
    settings = load_settings(args.config, {})
    tokenizer = load_tokenizer(resolve(settings.model).folder)
    kinds = [kind for kind in args.kinds if kind != _LONG]
    texts = read_prompts(args.prompts, kinds, args.num_prompts) if kinds else {}
    if _LONG in args.kinds:
        texts[_LONG] = (_long_text(tokenizer, args.long_tokens),)
    prompts = {kind: [chat_ids(tokenizer, text) for text in of_kind] for kind, of_kind in texts.items()}
    subject = _subject(args, settings, [prompt for of_kind in prompts.values() for prompt in of_kind])
    # 2. who takes part
    asked = [one for one in contenders_of(subject) if not args.contenders or one.name.startswith(tuple(args.contenders))]
    if not asked:
        raise SetupError(f"no contender's name begins with {' or '.join(args.contenders)}")
    chosen, left_out = those_ready(asked)
    for why in left_out:
        logging.warning("left out: %s", why)
    for conversion in dict.fromkeys(conversion for one in chosen for conversion in one.conversions):
        convert(conversion)
    # 3. the rounds; whoever ends this process ends what it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    design = Design(
        concurrencies=tuple(args.concurrency),
        temperatures=tuple(args.temperatures),
        num_tokens=args.max_tokens,
        num_rounds=args.rounds,
        max_foreign_cpus=args.max_foreign,
        num_retries=args.retries,
    )
    with Stable(int(args.memory_gib * 2**30)) as stable:
        Measurement(design, chosen, stable, args.out).run(prompts, _facts(subject, left_out))


def _long_text(tokenizer: Any, num_tokens: int) -> str:
    """Return a question about a text of so many tokens: the topics of Python's own help."""
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    some: str = tokenizer.decode(tokenizer.encode(topics)[:num_tokens])
    return f"Say in a few sentences what this is about.\n\n{some}"


def _subject(args: argparse.Namespace, settings: Settings, prompts: list[Prompt]) -> Subject:
    draft = args.draft or settings.draft_model
    return Subject(
        model=resolve(settings.model),
        draft=resolve(draft) if draft else None,
        config=args.config,
        tree=args.tree,
        precisions=args.precisions,
        threads=args.threads,
        max_concurrency=max(args.concurrency),
        context_tokens=_context_tokens(prompts, args.max_tokens),
    )


def _context_tokens(prompts: list[Prompt], num_tokens: int) -> int:
    """Return room for the longest prompt and its answer."""
    return -(-(max(map(len, prompts)) + num_tokens) // _CONTEXT_STEP_TOKENS) * _CONTEXT_STEP_TOKENS


def _facts(subject: Subject, left_out: list[str]) -> dict[str, Any]:
    return {
        "model": subject.model.name,
        "draft": subject.draft.name if subject.draft else None,
        "tree": str(subject.tree),
        "threads": subject.threads,
        "machine": _processor(),
        "pins": PINS,
        "left_out": left_out,
        "command": f"python -m benchmarks.peers {' '.join(sys.argv[1:])}",
    }


def _processor() -> str:
    """Return the processor's name as the system tells it, and how many there are."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor()}"


if __name__ == "__main__":
    main()
