"""Arguments shared by the subcommands: runs, epochs, blobs and whole numbers.

A run or directory is stored as `path` in the namespace; `remote_runs.resolve` looks it up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torchrelay.runners.monitoring.console import Output

Run = Callable[[argparse.Namespace, Output], int]
Add = Callable[[str, Run], argparse.ArgumentParser]
"""Adds a subcommand: its help line, and the function that runs it."""
_PLACE = "a run directory, a checkpoint directory, or a URL of either"
_EPOCH = "@7, @last, @best, @tag=NAME, @epoch=7,branch=0"


def add_run(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """Add `RUN`, a run directory; with `many`, `RUN_OR_RUNS...`."""
    if many:
        several = "run directories, directories that contain runs, or their URLs"
        parser.add_argument("path", metavar="RUN_OR_RUNS", nargs="+", help=several)
    else:
        parser.add_argument("path", metavar="RUN", help="a run directory or its URL")


def add_place(parser: argparse.ArgumentParser, *, runs: bool = False) -> None:
    """Add `RUN_OR_PREFIX`, a run or checkpoint directory; with `runs`, also a directory of runs."""
    if runs:
        parser.add_argument(
            "path", metavar="RUN_OR_RUNS", help=f"{_PLACE}, or a directory that contains runs"
        )
    else:
        parser.add_argument("path", metavar="RUN_OR_PREFIX", help=_PLACE)


def add_epoch(parser: argparse.ArgumentParser, *, default: str = "@last") -> None:
    """Add `RUN[@EPOCH]`; `default` is the help text for the case without `@EPOCH`.

    `--epoch N` is the same as `@N`: it is appended to `path` before the subcommand runs.
    """
    parser.add_argument("path", metavar="RUN[@EPOCH]", help=f"{_PLACE}; {_EPOCH} (default: {default})")
    parser.add_argument(
        "--epoch", dest="at_epoch", metavar="N", help="same as @N after RUN: 7, last, best, or 7,branch=0"
    )


def add_blobs(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable `--blobs PATTERN`; `blobs` is None if it is not given."""
    parser.add_argument(
        "--blobs",
        "--only",
        metavar="PATTERN",
        action="append",
        help="only these blobs, such as model or 'model.*.bias'",
    )


def add_single_writer(parser: argparse.ArgumentParser) -> None:
    """Add `--single-writer external`, for subcommands that write to the log."""
    text = "you ensure that nothing else writes there: for stores without an exclusive create"
    parser.add_argument("--single-writer", metavar="external", choices=["external"], help=text)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable `-o KEY=VALUE`, stored as `overrides`."""
    text = "override a value, such as runner.train1.epochs=3"
    parser.add_argument("-o", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=text)


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add `--strict-config`: unread configuration keys are an error."""
    text = "fail with exit code 2, before training, if a configuration key is never read"
    parser.add_argument("--strict-config", action="store_true", help=text)


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at most nine digits, at least `least`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"invalid number {text!r:.40}: expected at least {least}")
        return int(text)

    return read


def add_model_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options that say how the model of a run is built and called."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that builds the model (default: the archived code of the run)",
    )
    parser.add_argument(
        "--input",
        metavar="NAME=TYPE[SIZES]",
        action="append",
        help="example input, such as image=float32[batch,3,32,32] (default: from the run's data)",
    )
    parser.add_argument("--blob", metavar="NAME", help="blob that holds the weights (default: model)")
