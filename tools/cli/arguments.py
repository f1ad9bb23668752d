"""Arguments that several subcommands share.

A run or directory is stored as `path` in the namespace; `remote_runs.resolve` looks it up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torchrelay.runners.monitoring.console import Argument, arg, flag

_PLACE = "a run directory, a checkpoint directory, or a URL of either"
RUN = arg("path", "a run directory or its URL", "RUN")
RUNS = arg("path", "run directories, directories that contain runs, or their URLs", "RUN_OR_RUNS", nargs="+")
PLACE = arg("path", _PLACE, "RUN_OR_PREFIX")
PLACE_OR_RUNS = arg("path", f"{_PLACE}, or a directory that contains runs", "RUN_OR_RUNS")
BLOBS = arg("--blobs --only", "only these blobs, such as model or 'model.*.bias'", "PATTERN", action="append")
SINGLE_WRITER = arg(
    "--single-writer",
    "you ensure that nothing else writes there: for stores without an exclusive create",
    "external",
    choices=["external"],
)
"""For subcommands that write to the log."""
OVERRIDES = arg(
    "-o",
    "override a value, such as runner.train1.epochs=3",
    "KEY=VALUE",
    dest="overrides",
    action="append",
    default=[],
)
STRICT = flag(
    "--strict-config", "fail with exit code 2, before training, if a configuration key is never read"
)
MODEL_OPTIONS = (
    arg(
        "--model", "function that builds the model (default: the archived code of the run)", "MODULE:FUNCTION"
    ),
    arg(
        "--input",
        "example input, such as image=float32[batch,3,32,32] (default: from the run's data)",
        "NAME=TYPE[SIZES]",
        action="append",
    ),
    arg("--blob", "blob that holds the weights (default: model)", "NAME"),
)
"""How the model of a run is built and called."""


def run_epoch(default: str = "@last") -> Argument:
    """Return `RUN[@EPOCH]`; `default` is the help text for the case without `@EPOCH`.

    `--epoch N` is the same as `@N`: it is appended to `path` before the subcommand runs.
    """
    text = f"{_PLACE}; @7, @last, @best, @tag=NAME, @epoch=7,branch=0 (default: {default})"

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", metavar="RUN[@EPOCH]", help=text)
        parser.add_argument(
            "--epoch", dest="at_epoch", metavar="N", help="same as @N after RUN: 7, last, best, or 7,branch=0"
        )

    return add


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at most nine digits, at least `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"invalid number {text!r:.40}: expected at least {least}")
        return int(text)

    return read
