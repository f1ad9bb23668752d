"""What `growth` leaves in a folder: its lines, a page with a table of them, and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.table import hardware, versions

Line = dict[str, Any]
NOTES = {
    "coordinator": "The coordinator alone: the real code, the other ranks, the network and the device aside. "
    "Seconds are those of the processor. `beside_secs` is what rank 0 computes for the commit "
    "before it waits for the shards of the others, and no part of `commit_secs`.",
    "scale": "One process plays all ranks: the code is the real one, the network and the device aside. "
    "Rank 0 plans and commits into a real log (`commit_secs` has what it prepares of a new plan before it "
    "waits for the shards of the others); four ranks write their files, the others' are holes. "
    "`share_secs`: a rank's own part of the plan. `open_secs`: log, manifest and the sizes of all files. "
    "`load_plan_secs`: which bytes of which files one rank reads for its part. What was really read was "
    "compared.",
    "blobs": "One process; wall seconds until a save is durable, and of a load into live tensors.",
    "processes": "Real processes under torchrun with gloo, which all have 1,000 replicated tensors of 64 "
    "bytes. `save_secs` is what rank 0 waits from the call to the acknowledgement, `processor_secs` what its "
    "process computes in this time with all its threads, `all_processor_secs` what all processes compute: on "
    "few cores, rank 0 waits for that. `memory_mb` is of all processes, shared pages counted once.",
}
STYLES = ("o-", "s--", "^:", "d-.")
"""How the lines of a kind are drawn."""
MENTIONED = ("Python", "torch", "xxhash", "torchrelay")


def leave(folder: Path, name: str, lines: Sequence[Line], date: str, command: str) -> list[Path]:
    """Write `growth-<name>.jsonl`, `.md` and, where matplotlib is there, `.png`; the files written."""
    files = [folder / f"growth-{name}.jsonl", folder / f"growth-{name}.md"]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture = folder / f"growth-{name}.png"
    if drawn := plot(lines, picture):
        files.append(picture)
    files[1].write_text(page(name, lines, date, command, picture.name if drawn else ""))
    return files


def page(name: str, lines: Sequence[Line], date: str, command: str, picture: str) -> str:
    """The page of one kind of growth, load of the machine included: others may have computed beside it."""
    known = versions()
    made_with = ", ".join(f"{one} {known[one]}" for one in MENTIONED)
    told = [f"# Growth ({name}), measured {date}", "", f"`{command}`", ""]
    told.append(
        f"{hardware(Path.cwd())}; {made_with}; load average at the end {os.getloadavg()[1]:.1f} (5 minutes)."
    )
    told.append(
        "Columns with `first_` are the first save of a process, those without are medians of the later ones."
    )
    if any("processes" in line for line in lines):
        told.append("Medians over `processes` processes.")
    for what, found in _tables(lines).items():
        told += ["", NOTES[what], "", *_table(found)]
    for line in lines:
        if "exponents" in line:
            powers = ", ".join(f"`{key}` {power}" for key, power in line["exponents"].items())
            told += ["", f"Exponents of growth between the last two lines: {powers}."]
    return "\n".join([*told, *(["", f"![{name}]({picture})"] if picture else [])]) + "\n"


def _tables(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Points by kind of measurement."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if "exponents" not in line:
            found.setdefault(line["what"], []).append(line)
    return found


def _table(lines: Sequence[Line]) -> list[str]:
    keys = [key for key in lines[0] if key not in ("what", "cores", "flat")]
    rows = ["| " + " | ".join(_cell(line[key]) for key in keys) + " |" for line in lines]
    return ["| " + " | ".join(keys) + " |", "|---" * len(keys) + "|", *rows]


def _cell(value: object) -> str:
    return (
        f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def plot(lines: Iterable[Line], path: Path) -> bool:
    """Draw what was measured, one panel per kind of measurement; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = {what: found for what, found in _tables(lines).items() if what != "scale"}
    if not drawn:
        return False  # of one size
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(6 * len(drawn), 4), squeeze=False)
    for axis, (what, found) in zip(axes[0], drawn.items(), strict=True):
        by = "blobs" if what == "blobs" else "ranks"
        kinds = dict.fromkeys(line.get("kind", "") for line in found)
        for kind, style in zip(kinds, cycle(STYLES), strict=False):
            some = [line for line in found if line.get("kind", "") == kind]
            keys = [key for key in some[0] if key.endswith("_secs")]
            for number, key in enumerate(keys):  # a colour is a phase, a style a kind: ten colours are all
                values = [one[key] for one in some]
                axis.plot([one[by] for one in some], values, style, color=f"C{number}", label=f"{kind} {key}")
        axis.set(xscale="log", yscale="log", xlabel=by, ylabel="seconds", title=what)
        axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
