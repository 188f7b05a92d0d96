"""The figure of agreement by depth: what the paper's argument for delayed branching rests on."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_STYLES = ("-", "--", ":")  # of temperatures
_PANELS = ("accepted there", "overlap of all drafts")
_LEAST_CHANCE = 0.03  # to reach a depth: fewer arrivals have no mean


def draw_depths(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw acceptance and the overlap of all drafts by depth, at the largest top_p, if matplotlib is installed.

    A colour for each pair, a style for each temperature.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        sys.stderr.write("matplotlib is not installed: no figure\n")
        return
    mpl.use("agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "depths"})  # the same file from the same rows
    from matplotlib import pyplot as plt

    largest = max((row["top_p"] for row in rows), key=float, default="")
    shown = [row for row in rows if row["top_p"] == largest and float(row["chance"]) >= _LEAST_CHANCE]
    pairs, temperatures = ([*dict.fromkeys(row[key] for row in shown)] for key in ("pair", "temperature"))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, column in zip(axes, _PANELS, strict=True):
        for place, pair in enumerate(pairs):
            for temperature, style in zip(temperatures, _STYLES, strict=False):
                line = [row for row in shown if (row["pair"], row["temperature"]) == (pair, temperature)]
                depths, values = [int(row["depth"]) for row in line], [float(row[column]) for row in line]
                axis.plot(depths, values, style, color=f"C{place}", label=f"{pair}, T {temperature}")
        axis.set(xlabel="depth", ylabel=column, ylim=(0.0, 1.0))
    axes[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
