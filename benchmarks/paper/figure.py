"""The figure of agreement by depth: what the paper's argument for delayed branching rests on."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_depths(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw acceptance and the overlap of all drafts by depth, a line for each pair and sampling, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("matplotlib is not installed: no figure\n")
        return
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, column in zip(axes, ("accepted there", "overlap of all drafts"), strict=True):
        for name in dict.fromkeys(_label(row) for row in rows):
            of_name = [row for row in rows if _label(row) == name]
            axis.plot([int(row["depth"]) for row in of_name], [float(row[column]) for row in of_name], label=name)
        axis.set(xlabel="depth", ylabel=column, ylim=(0.0, 1.0))
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(row: Mapping[str, str]) -> str:
    return f"{row['pair']}, temperature {row['temperature']}, top_p {row['top_p']}"
