"""`torchrelay find-bad RUN`: the first epoch with NaN or Inf, or the first jump of a metric.

Needs no torch; numpy is imported when it runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.inspect.anomalies import FACTOR, first_bad
from torchrelay.checkpoint.inspect.contents import check_chosen, open_epoch
from torchrelay.errors import DamagedError, UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_blobs, add_epoch
from torchrelay.runners.commands.command_line_find_jump import FOUND, find_jump
from torchrelay.runners.commands.command_line_going_on import Resume, resume_before
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.resolve import Place, Selected, select

if TYPE_CHECKING:
    from torchrelay.checkpoint.inspect.bad_elements import BadLeaf, Looker

_SHOWN = 20


def add_find_bad(add: Add) -> None:
    """Define `find-bad`."""
    parser = add("find-bad", "find the first epoch with NaN or Inf, or the first jump of a metric", find_bad)
    add_epoch(parser, default="@last: epochs up to this one are looked at")
    add_blobs(parser)
    parser.add_argument("--nan-only", action="store_true", help="an Inf is no sign: masks have some")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="read every epoch instead of bisecting")
    how.add_argument("--metric", metavar="NAME", help="look for a jump of this metric, not into blobs")
    parser.add_argument(
        "--jump", metavar="FACTOR", type=_factor,
        help=f"with --metric: a change so many spreads from the usual one is a jump (default: {FACTOR:g})",
    )  # fmt: skip


def find_bad(chosen: argparse.Namespace, output: Output) -> int:
    """Look and tell; 1 if something bad was found, else 0."""
    if chosen.metric is not None:
        return find_jump(chosen, output)
    if chosen.jump is not None:
        raise UsageError("--jump is about a metric: name it with --metric")
    return _find_nan(chosen, output)


def _find_nan(chosen: argparse.Namespace, output: Output) -> int:
    from torchrelay.checkpoint.inspect.bad_elements import Looker

    selected = select(chosen.path)
    entries = _whole_epochs(selected, output)
    looker = Looker(tuple(chosen.blobs or ()), nan_only=chosen.nan_only)
    check_chosen([open_epoch(selected.place.storage, entries[-1])], chosen.blobs or ())
    seen: dict[int, list[BadLeaf]] = {}

    def is_bad(number: int) -> bool:
        entry = entries[number]
        output.progress(f"reading epoch {entry.position}, {looker.loads + 1}. of {len(entries)}")
        seen[number] = _look(looker, selected.place, entry)
        output.progress("")
        return bool(seen[number])

    if chosen.all:
        at = next((number for number in [n for n in range(len(entries)) if is_bad(n)]), None)
    else:
        at = first_bad(len(entries), is_bad)
    bad = [] if at is None else seen[at]
    resume = None if at is None else resume_before(selected, entries[:at])
    again = [] if at is None else [entries[n] for n in sorted(seen) if n > at and not seen[n]]
    if output.json:
        output.value(_nan_json(entries, at, bad, resume, sorted(seen)))
    else:
        _say_nan(output, chosen, entries, at, bad, resume, len(seen))
        for entry in again[:1]:
            output.line(f"epoch {entry.position} behind it is good again")
    return 0 if at is None else FOUND


def _whole_epochs(selected: Selected, output: Output) -> Sequence[Entry]:
    """Epochs up to the selected one, on its branch; those that the log calls damaged are left out."""
    seen = selected.view.line(selected.entry.branch)
    line = [one for one in seen if one.position.boundary and one.position <= selected.entry.position]
    for one in line:
        if not one.healthy:
            output.notice(f"epoch {one.position} is left out: the log says that it is damaged")
    return [one for one in line if one.healthy] or [selected.entry]


def _look(looker: Looker, place: Place, entry: Entry) -> list[BadLeaf]:
    try:
        return looker.bad_leaves(open_epoch(place.storage, entry))
    except DamagedError as error:
        raise DamagedError(f"epoch {entry.position} cannot be looked at: {error}") from error


def _say_nan(
    output: Output,
    chosen: argparse.Namespace,
    entries: Sequence[Entry],
    at: int | None,
    bad: Sequence[BadLeaf],
    resume: Resume | None,
    loads: int,
) -> None:
    what = "NaN" if chosen.nan_only else "NaN or Inf"
    read = f"{loads} of {len(entries)} epochs read"
    presumed = "" if chosen.all else "; presumed is that bad stays bad, --all reads every epoch"
    if at is None:
        of = "any epoch" if chosen.all else f"epoch {entries[-1].position}, the last one"
        output.line(f"no {what} in {of} ({read}{presumed})")
        return
    before = f", epoch {entries[at - 1].position} was read and is good" if at else ""
    output.line(
        f"epoch {entries[at].position} is the first with {what} ({read}{before}{presumed})", "damaged"
    )
    rows = [(one.name, one.dtype, str(one.nan), str(one.inf), _index(one.index)) for one in bad[:_SHOWN]]
    output.table(("leaf", "type", "NaN", "Inf", "first at"), rows)
    if len(bad) > _SHOWN:
        output.line(f"... and {len(bad) - _SHOWN} more leaves; --json has all")
    if at == 0:
        output.line(
            "it is the oldest epoch that is kept; what is so on purpose is left out by --nan-only and --only"
        )
    elif resume is not None:
        output.line(resume.line())


def _index(index: Sequence[int]) -> str:
    return f"[{','.join(map(str, index))}]"


def _nan_json(
    entries: Sequence[Entry],
    at: int | None,
    bad: Sequence[BadLeaf],
    resume: Resume | None,
    seen: Sequence[int],
) -> dict[str, Any]:
    return {
        "found": at is not None,
        "epoch": None if at is None else entries[at].position.epoch,
        "last_good": entries[at - 1].position.epoch if at else None,
        "read": [entries[number].position.epoch for number in seen],
        "epochs": len(entries),
        "leaves": [
            {
                "leaf": one.name,
                "blob": one.blob,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "nan": one.nan,
                "inf": one.inf,
                "first": list(one.index),
            }
            for one in bad
        ],
        "resume": None if resume is None else resume.json(),
    }


def _factor(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found
