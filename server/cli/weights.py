"""`latebranch weights list | fetch | where`: lists models, fetches them, and prints their folders.

Knows arguments and text; engine.weights does the work. Each handler returns the exit status.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.weights import LocalWeights, Preset, WeightsCache, WeightsError, default_root, find_preset, load_presets, resolve


def add_weights_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `weights` command; each of its subcommands sets `handler`, a function from the arguments to the exit status."""
    weights = subparsers.add_parser("weights", help="list, fetch and find model weights")
    commands = weights.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="list the models that can be fetched by name")
    listing.set_defaults(handler=_one_line_errors(_list))

    fetch = commands.add_parser("fetch", help="download and convert models; a second time does nothing")
    fetch.add_argument("names", nargs="*", metavar="NAME", help="a name of `weights list`, a hub id, a folder or a .gguf file")
    fetch.add_argument("--all", action="store_true", help="every model of `weights list`")
    fetch.add_argument("--quiet", action="store_true", help="show no progress")
    fetch.set_defaults(handler=_one_line_errors(_fetch))

    where = commands.add_parser("where", help="print the folder of a fetched model; status 1 if it is not there")
    where.add_argument("name", metavar="NAME", help="a name of `weights list`")
    where.add_argument("--gguf", action="store_true", help="print the GGUF file it was converted from instead")
    where.set_defaults(handler=_one_line_errors(_where))


def _one_line_errors(handler: Callable[[argparse.Namespace], Iterable[str]]) -> Callable[[argparse.Namespace], int]:
    """Write a handler's lines as they come; turn a WeightsError into one line on stderr and status 1."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            for line in handler(arguments):
                sys.stdout.write(line + "\n")
        except WeightsError as error:
            sys.stderr.write(f"latebranch weights: {error}\n")
            return 1
        return 0

    return run


def _list(_: argparse.Namespace) -> Iterable[str]:
    cache = WeightsCache(default_root())
    rows: list[tuple[str, ...]] = [("NAME", "FAMILY", "SIZE", "LICENCE", "WEIGHTS", "DOWNLOAD", "ON DISK")]
    rows += [_row(preset, find_preset(preset, cache)) for preset in load_presets().values()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _row(preset: Preset, weights: LocalWeights | None) -> tuple[str, ...]:
    on_disk = "-" if weights is None else _megabytes(_disk_bytes(weights))
    about = (preset.name, preset.family, preset.parameters, preset.licence, preset.weights)
    return (*about, _megabytes(preset.size_bytes), on_disk)


def _disk_bytes(weights: LocalWeights) -> int:
    files = [path for path in weights.folder.iterdir() if path.is_file()]
    if weights.gguf is not None:
        files.append(weights.gguf)
    return sum(path.stat().st_size for path in files)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _fetch(arguments: argparse.Namespace) -> Iterable[str]:
    names = list(load_presets()) if arguments.all else arguments.names
    if not names:
        raise WeightsError("name a model or use --all; `latebranch weights list` shows the names")
    for name in names:
        yield f"{name}: {resolve(name, progress=not arguments.quiet).folder}"


def _where(arguments: argparse.Namespace) -> Iterable[str]:
    yield str(_find(arguments.name, arguments.gguf))


def _find(name: str, is_gguf: bool) -> Path:
    presets = load_presets()
    if name not in presets:
        raise WeightsError(f"no model is named {name!r}; the names are {', '.join(presets)}")
    weights = find_preset(presets[name], WeightsCache(default_root()))
    path = None if weights is None else weights.gguf if is_gguf else weights.folder
    if path is None:
        raise WeightsError(f"{name} is not in the cache {default_root()}; run `latebranch weights fetch {name}`")
    return path
