"""A plot for every workload: medians with their ranges, a panel for each action."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from bench.figures import OURS, Figure

KINDS = ("svg", "png")


def draw(folder: Path, figures: Sequence[Figure]) -> list[str]:
    """Write the plots; the names of the SVG files. None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "torchrelay"
    written = []
    for workload, found in groupby(figures, key=lambda one: one.workload):
        measured = [one for one in found if one.secs]
        if measured:
            written += _panels(folder, workload, measured)
    return written


def _panels(folder: Path, workload: str, figures: Sequence[Figure]) -> list[str]:
    from matplotlib import pyplot

    panels = [(action, list(found)) for action, found in groupby(figures, key=lambda one: one.action)]
    rows = sum(len(found) + 2 for _, found in panels)
    sheet, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(8, 0.28 * rows + 0.6),
        squeeze=False,
        height_ratios=[len(found) + 1 for _, found in panels],
    )
    for (action, unsorted), axis in zip(panels, axes[:, 0], strict=True):
        found = sorted(unsorted, key=lambda one: -(one.median or 0.0))
        middles = [one.median or 0.0 for one in found]
        below = [middle - min(one.secs) for one, middle in zip(found, middles, strict=True)]
        above = [max(one.secs) - middle for one, middle in zip(found, middles, strict=True)]
        colours = ["tab:blue" if one.engine.startswith(OURS) else "lightgrey" for one in found]
        names = [one.engine for one in found]
        axis.barh(names, middles, xerr=[below, above], color=colours, ecolor="black", capsize=2)
        axis.set_title(f"{workload} {action}, seconds", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    sheet.tight_layout()
    for kind in KINDS:
        sheet.savefig(folder / f"{workload}.{kind}", metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(sheet)
    return [f"{workload}.svg"]
