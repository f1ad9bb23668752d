"""`torchrelay report`: a page about runs, in one file."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchrelay.checkpoint.storage.open import is_remote, object_at
from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import write_new
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import locate_run
from torchrelay.runners.report.limits import Limits

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_report(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
    parser = verb("report", "write one page about runs, to be opened in a browser", report)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory or its URL; several are laid over each other"
    )
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    add_limits(parser)


def add_limits(parser: argparse.ArgumentParser, most_bytes: int = Limits.norm_bytes) -> None:
    """Add what bounds the bytes that are read of weights, by default `most_bytes`."""
    parser.add_argument("--no-norms", action="store_true", help="read no weights")
    parser.add_argument(
        "--max-bytes",
        type=_size,
        default=most_bytes,
        metavar="N",
        help=f"weights read for norms, of each run, such as 500M (default: {human_bytes(most_bytes)})",
    )


def limits_of(chosen: argparse.Namespace) -> Limits:
    """The limits that a command line asks for."""
    return Limits(norm_bytes=0 if chosen.no_norms else chosen.max_bytes)


def report(chosen: argparse.Namespace, output: Output) -> int:
    """Write the page; what could not be read of a run is said in it, and counted here."""
    from torchrelay.runners.report.gather import gather
    from torchrelay.runners.report.page import report_page

    runs = _runs(chosen.runs)
    target = None if is_remote(chosen.output) else Path(chosen.output)
    if target is not None:
        _check_target(target, runs)
    facts = [gather(run, limits_of(chosen)) for run in runs]
    page = report_page(facts).encode()
    if target is None:
        storage, name = object_at(chosen.output, "the page")
        storage.replace(name, page)
    else:
        _replace(target, page)
    trouble = [text for run in facts for text in run.trouble]
    if output.json:
        output.value(
            {
                "output": chosen.output if target is None else str(target),
                "bytes": len(page),
                "runs": [run.name for run in facts],
                "trouble": trouble,
            }
        )
        return 0
    for text in trouble:
        output.notice(text)
    output.line(f"wrote {chosen.output} ({human_bytes(len(page))}): {', '.join(run.name for run in facts)}")
    return 0


def _runs(paths: list[str]) -> list[RunDirectory]:
    found: dict[Path, RunDirectory] = {}
    for path in paths:
        run = locate_run(path, whole=False)
        found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _check_target(target: Path, runs: list[RunDirectory]) -> None:
    """Refuse, before anything is read, a place where the page cannot lie."""
    if target.is_dir():
        raise UsageError(f"{target} is a directory: give -o the name of a file")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.parent} is no directory: make it, or give -o another place")
    for run in runs:
        if target.resolve().is_relative_to((run.path / "checkpoints").resolve()):
            raise UsageError(f"{target} lies among the checkpoints of {run.where}: give -o another place")


def _replace(target: Path, page: bytes) -> None:
    """Old or new, never torn: a page that is being looked at may be written again."""
    temporary = target.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        write_new(temporary, page, durable=False)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(f"cannot write {target}: {error.strerror}; give -o another place") from error


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1].lower()) if text and text[-1].lower() in "kmgt" else (text, "")
    if not (number.isascii() and number.isdecimal()) or len(number) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 500M or 2G")
    return int(number) * _UNITS[unit]
