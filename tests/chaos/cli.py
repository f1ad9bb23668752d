"""`torchrelay chaos`: faults in a built-in run, or in the user's own job, and what they left.

torch is imported by the processes that are struck, never here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrelay.chaos import builtin, command
from torchrelay.chaos.scenarios import SCENARIOS, scenarios
from torchrelay.chaos.strikes import COLUMNS, Tally
from torchrelay.checkpoint.storage.open import FILE, is_url
from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.cli.arguments import Add, whole_number

FOUND = 1
"""Exit code where a trial did not survive, or nothing could be tried."""
_SHOWN = 20


def add_chaos(add: Add) -> None:
    """Define `chaos`."""
    parser = add("inject faults into a run repeatedly and verify what survives", chaos)
    parser.usage = "torchrelay chaos [options] [DIRECTORY | URL | -- COMMAND ... {run} ...]"
    parser.add_argument(
        "target", metavar="DIRECTORY | URL | COMMAND", nargs="*",
        help="where the built-in run saves (default: memory), or a command that trains into {run}",
    )  # fmt: skip
    parser.add_argument("--kinds", metavar="K,K", help=f"faults: {','.join(builtin.KINDS)} (default: all)")
    parser.add_argument("--trials", metavar="N", type=whole_number(1), help="number of trials of each kind")
    parser.add_argument(
        "--every", action="store_true", help="kill, errno, stall: test every boundary instead of a sample"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--only", metavar="TRIAL", help="repeat one trial by its reported name")
    parser.add_argument("--keep", metavar="DIR", help="directory that keeps the files of failing trials")
    parser.add_argument(
        "--scenarios", metavar="S,S", help=f"built-in run only: {','.join(one.name for one in SCENARIOS)}"
    )
    parser.add_argument(
        "--file-systems", metavar="F,F", default="ext4", help="for power: ext4,xfs,btrfs (default: ext4)"
    )
    parser.add_argument(
        "--single-writer", metavar="external", choices=["external"],
        help="for a URL whose store has no exclusive create, as in the managers",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="N", type=whole_number(1), default=2, help="trials in parallel (default: 2)"
    )


def chaos(chosen: argparse.Namespace, output: Output) -> int:
    """Run the trials and print the table; 1 unless all survived and every kind was really tried."""
    kinds = _kinds(chosen.kinds)
    wish = builtin.Wish(
        kinds, chosen.trials, chosen.seed, scenarios(_words(chosen.scenarios)),
        _words(chosen.file_systems) or (), chosen.every, Path(chosen.keep) if chosen.keep else None,
        chosen.workers, chosen.single_writer,
    )  # fmt: skip
    words = chosen.target
    if len(words) > 1 or (words and Path(words[0]).is_file()):
        job = command.UserJob(tuple(words), wish)
        tally = command.repeated(job, chosen.only) if chosen.only else command.run_all(job, output.notice)
    else:
        where = _where(words[0]) if words else None
        if chosen.only:
            tally = builtin.repeated(wish, chosen.only, where)
        else:
            tally = builtin.run_all(wish, where, output.notice)
    _print(tally, chosen, output)
    return 0 if not tally.bad and builtin.tried(tally) else FOUND


def _print(tally: Tally, chosen: argparse.Namespace, output: Output) -> None:
    for kind, reason in tally.skipped.items():
        output.notice(f"SKIPPED {kind}: {reason}")
    if output.json:
        output.value({**tally.json(), "seed": chosen.seed})
        return
    output.table(COLUMNS, tally.rows())
    for one in tally.bad[:_SHOWN]:
        output.line(f"{one.verdict.value}  --only {one.name}  {one.reason}")
    if len(tally.bad) > _SHOWN:
        output.line(f"... and {len(tally.bad) - _SHOWN} more; --json lists all")
    output.line(f"seed {chosen.seed}; the same command with --only TRIAL repeats one trial")


def _kinds(text: str | None) -> tuple[str, ...]:
    kinds = _words(text) or builtin.KINDS
    for kind in kinds:
        if kind not in builtin.KINDS:
            raise UsageError(f"--kinds {kind}: choose from {', '.join(builtin.KINDS)}")
    return kinds


def _where(text: str) -> Path | str:
    """A directory, or the URL of a store; a `file://` URL is a directory, as it is for managers."""
    if is_url(text) and not text.startswith(FILE):
        return text
    path = Path(text.removeprefix(FILE))
    if not path.is_dir():
        raise UsageError(f"{text} is not a directory: give one, a new one is made in it")
    return path


def _words(text: str | None) -> tuple[str, ...] | None:
    return tuple(one for one in text.split(",") if one) if text else None
