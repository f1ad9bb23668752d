"""The arguments that mean the same for every verb: what names runs, epochs and blobs, and whole numbers.

A place is called `path` in what argparse returns; `remote_runs.resolve` finds what it means.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torchrelay.runners.monitoring.console import Output

Run = Callable[[argparse.Namespace, Output], int]
Add = Callable[[str, Run], argparse.ArgumentParser]
"""Adds a verb: its line in the help, what it does."""
_PLACE = "a run directory, a directory of checkpoints, or the URL of one"
_EPOCH = "@7, @last, @best, @tag=NAME, @epoch=7,branch=0"


def add_run(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """`RUN`: a run directory with its own notes; `RUN_OR_RUNS...` where there may be `many`."""
    if many:
        several = "run directories, or directories with runs in them; or the URLs of such"
        parser.add_argument("path", metavar="RUN_OR_RUNS", nargs="+", help=several)
    else:
        parser.add_argument("path", metavar="RUN", help="a run directory, or its URL")


def add_place(parser: argparse.ArgumentParser, *, runs: bool = False) -> None:
    """`RUN_OR_PREFIX`: whatever holds checkpoints; or a directory of `runs`."""
    if runs:
        parser.add_argument("path", metavar="RUN_OR_RUNS", help=f"{_PLACE}; or a directory with runs in it")
    else:
        parser.add_argument("path", metavar="RUN_OR_PREFIX", help=_PLACE)


def add_epoch(parser: argparse.ArgumentParser, *, default: str = "@last") -> None:
    """`RUN[@EPOCH]`: one epoch of whatever holds checkpoints; `default` says what is meant without one.

    `--epoch` says the same: when the verb runs it stands in `path`, behind an @.
    """
    parser.add_argument("path", metavar="RUN[@EPOCH]", help=f"{_PLACE}; {_EPOCH} (default: {default})")
    parser.add_argument(
        "--epoch", dest="at_epoch", metavar="N", help="the same as behind @: 7, last, best, or 7,branch=0"
    )


def add_blobs(parser: argparse.ArgumentParser) -> None:
    """`--blobs PATTERN`, any number of them: `blobs`, None where nothing was chosen."""
    parser.add_argument(
        "--blobs", "--only", metavar="PATTERN", action="append", help="only these: model, 'model.*.bias'"
    )


def add_single_writer(parser: argparse.ArgumentParser) -> None:
    """`--single-writer external`, of verbs that write to the log: `single_writer`, else None."""
    text = "you see to it that nobody else writes there now: for stores that create nothing exclusively"
    parser.add_argument("--single-writer", metavar="external", choices=["external"], help=text)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`-o KEY=VALUE`, any number of them: `overrides`."""
    text = "put a value in place of another: runner.train1.epochs=3"
    parser.add_argument("-o", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help=text)


def add_strict(parser: argparse.ArgumentParser) -> None:
    """`--strict-config`: keys of the configuration that nobody reads are an error."""
    text = "end with 2, before anything is trained, where a key of the configuration is never read"
    parser.add_argument("--strict-config", action="store_true", help=text)


def whole_number(least: int) -> Callable[[str], int]:
    """A whole number of at most nine digits from `least` on, as the type of an option."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number from {least} on")
        return int(text)

    return read


def add_model_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Define how the model of a run is made, and what it is called with."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="makes the model (runs of programs and configurations: their archived code does)",
    )
    parser.add_argument(
        "--input",
        metavar="NAME=TYPE[SIZES]",
        action="append",
        help="an example, such as image=float32[batch,3,32,32] (default: from the data of the run)",
    )
    parser.add_argument("--blob", metavar="NAME", help="the blob that has the weights (default: model)")
