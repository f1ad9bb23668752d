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
from torchrelay.runners.monitoring.console import Output, arg, flag, verb
from torchrelay.tools.cli.arguments import whole_number

FOUND = 1
"""Exit code where a trial did not survive, or nothing could be tried."""
_SHOWN = 20


def _usage(parser: argparse.ArgumentParser) -> None:
    parser.usage = "torchrelay chaos [options] [DIRECTORY | URL | -- COMMAND ... {run} ...]"


@verb(
    "inject faults into a run repeatedly and verify what survives",
    _usage,
    arg(
        "target",
        "where the built-in run saves (default: memory), or a command that trains into {run}",
        "DIRECTORY | URL | COMMAND",
        nargs="*",
    ),
    arg("--kinds", f"faults: {','.join(builtin.KINDS)} (default: all)", "K,K"),
    arg("--trials", "number of trials of each kind", "N", type=whole_number(1)),
    flag("--every", "kill, errno, stall: test every boundary instead of a sample"),
    arg("--seed", "random seed (default: 0)", "S", type=int, default=0),
    arg("--only", "repeat one trial by its reported name", "TRIAL"),
    arg("--keep", "directory that keeps the files of failing trials", "DIR"),
    arg("--scenarios", f"built-in run only: {','.join(one.name for one in SCENARIOS)}", "S,S"),
    arg("--file-systems", "for power: ext4,xfs,btrfs (default: ext4)", "F,F", default="ext4"),
    arg(
        "--single-writer",
        "for a URL whose store has no exclusive create, as in the managers",
        "external",
        choices=["external"],
    ),
    arg("--workers", "trials in parallel (default: 2)", "N", type=whole_number(1), default=2),
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
