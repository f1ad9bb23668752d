"""The few options that a training program understands by itself."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torchrelay.errors import UsageError
from torchrelay.runners.choosing import Resume


@dataclass(frozen=True)
class Options:
    """What the command line of `JobRunner.main` asked for."""

    epoch: int | None = None
    again: bool = False
    resume: Resume | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse_options(argv: list[str] | None) -> Options:
    """Read the known options; unknown arguments belong to the program and are left alone."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume-from-epoch", dest="epoch", type=_epoch)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--resume", choices=("auto", "must", "never"))
    known, _ = parser.parse_known_args(argv)
    return Options(known.epoch, known.again, known.resume)


def _epoch(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an epoch: write a whole number from 0")
    return int(text)
