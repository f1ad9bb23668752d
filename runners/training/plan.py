"""Arguments and results of a train call: start position, options, rebuilt models, the result.

Start position:

    user's handler  >  user's epoch  >  newest position of the current branch that verifies

An explicit epoch rewinds, unless the current branch was begun by the same request in an earlier process and
is not finished: then the same command continues that branch, so that an epoch in a script survives crashes
and restarts.

Options come from the command line and from TORCHRELAY_ARGS. Options that a parser of the program has read
belong to the program: they are taken from TORCHRELAY_ARGS only.
"""

from __future__ import annotations

import argparse
import gc
import operator
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PurePosixPath
from signal import Signals
from typing import Any, Literal

from torchrelay.checkpoint.format.position import MAX_EPOCH
from torchrelay.errors import NoProvableEpochError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.text import EVERY_SECS
from torchrelay.runners.session.stop_requests import seconds_typed

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class ResumeRequest:
    """The start that the caller of `train` or the metadata handler requests; identical on all ranks.

    With `decided` an epoch of None means "from scratch" instead of "newest". `automatic` is True for run
    directories.
    """

    epoch: int | None = None
    decided: bool = False
    resume: Resume = "auto"
    automatic: bool = True
    again: bool = False
    process: str = ""


@dataclass(frozen=True)
class Past:
    """State of the log and of its branch; `recorded` is the newest epoch in the run's metrics."""

    commits: bool = False
    recorded: int | None = None
    branch_request: Mapping[str, Any] | None = None
    epochs_over: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen start: `fresh`, `explicit` at `epoch`, or `newest`; `rewind` begins a new branch first."""

    start: Literal["fresh", "explicit", "newest"]
    epoch: int | None = None
    rewind: bool = False
    reason: str = ""


def choose(wish: ResumeRequest, past: Past) -> Choice:
    """Decide how to start; raises UsageError for an impossible request.

    Raises NoProvableEpochError for `must` without commits, and if it would start again although an epoch was
    saved: a file system may not be mounted.
    """
    if wish.epoch is not None and wish.resume != "never":
        begun = past.branch_request
        same = begun is not None and begun.get("epoch") == wish.epoch and begun.get("process") != wish.process
        if same and not wish.again and not past.epochs_over:
            return Choice(
                "newest",
                reason=f"the current branch was begun by the same request for epoch {wish.epoch}; "
                "--again rewinds once more",
            )
        return Choice("explicit", epoch=wish.epoch, rewind=True, reason=f"epoch {wish.epoch} was requested")
    if wish.epoch is not None:
        raise UsageError(f"resume='never' contradicts the request for epoch {wish.epoch}: remove one of them")
    if wish.resume == "must" and not past.commits:
        raise NoProvableEpochError("resume='must', but nothing was ever committed here: check the directory")
    if wish.automatic and wish.resume == "auto" and past.recorded is not None and not past.commits:
        raise NoProvableEpochError(
            f"the run records epoch {past.recorded} as saved, but its checkpoints have no epoch: if they "
            "were moved or are not mounted, restore them; to start again use resume='never' (--resume never)"
        )
    from_scratch = wish.decided or wish.resume == "never" or not (wish.automatic or wish.resume == "must")
    if from_scratch or not past.commits:
        why = "a fresh start in a used directory" if past.commits else "nothing was committed yet"
        return Choice("fresh", rewind=past.commits, reason=why)
    return Choice("newest", reason="the newest one")


def check_epoch(value: object, name: str = "resume_from_epoch", most: int = MAX_EPOCH) -> int | None:
    """Accept None or an integer from 0 to `most`, numpy's too. Raises UsageError otherwise."""
    if value is None:
        return None
    try:
        epoch = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"invalid {name}={value!r:.80}: expected a whole number or None") from None
    if isinstance(value, bool):
        raise UsageError(f"invalid {name}={value}: expected a whole number or None")
    if abs(epoch) > most:  # not shown: Python refuses to write out very long numbers
        raise UsageError(f"invalid {name}: expected 0 to {most}")
    if epoch < 0:
        raise UsageError(f"invalid {name}={epoch}: epochs start at 0, the state after init")
    return epoch


_EPOCH = "--resume-from-epoch"
_VARIABLE = "TORCHRELAY_ARGS"
_MISTYPED = 0.88  # similarity at which an unknown option is taken for a misspelt one


class RunnerOptions(argparse.Namespace):
    """The options of `JobRunner.main` on the command line."""

    epoch: int | None = None
    again: bool = False
    resume: Resume | None = None
    time_limit_secs: float | None = None
    max_attempts: int | None = None
    """0: no limit; None: the program's value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse_options(argv: list[str] | None, rewinds: bool = False) -> RunnerOptions:
    """Parse the known options; others belong to the program, but a misspelt rewind is an error.

    `--help` arrives here only if the program does not handle it; it prints the options and exits. `argv` is
    the command line without the program's name; None: that of this process. `rewinds`: the program itself has
    set an epoch to rewind to.
    """
    # a parser of the program has stored its options in a Namespace
    kept = [one for one in gc.get_objects() if type(one) is argparse.Namespace]
    read = frozenset(name for one in kept for name in vars(one))
    found = RunnerOptions()
    for words, theirs in ((shlex.split(os.environ.get(_VARIABLE, "")), frozenset[str]()), (argv, read)):
        parser = _Parser(add_help=False, allow_abbrev=False, epilog=f"They can also be set in {_VARIABLE}.")
        ours = {option: how for option, how in _OPTIONS.items() if _name(option) not in theirs}
        for option, how in ours.items():
            parser.add_argument(option, **how)
        found, others = parser.parse_known_args(words, found)
        _check_others([word for word in others if _name(word.partition("=")[0]) not in theirs], list(ours))
        taken = any(word.partition("=")[0] == _EPOCH for word in others)
        if taken and not rewinds and found.epoch is None:  # the program did not use it
            print(
                f"torchrelay: {_EPOCH} was read by the parser of this program, so nothing is rewound: pass "
                "JobRunner(..., resume_from_epoch=...), or remove the option from the parser",
                file=sys.stderr,
            )
    return found


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _check_others(others: list[str], ours: list[str]) -> None:
    """Raise UsageError for a misspelt rewind; print a hint for other misspelt options."""
    for word in others:
        option = word.partition("=")[0]
        for meant in get_close_matches(option, ours, n=1, cutoff=_MISTYPED):
            question = f"unknown option {option:.80}; did you mean {meant}?"
            if meant == _EPOCH:
                raise UsageError(question)
            print(f"torchrelay: {question}", file=sys.stderr)


def _whole_number(what: str, digits: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not {what}: expected a whole number from 0")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "--help": {"action": "help", "help": "show this help and exit"},
    _EPOCH: {
        "dest": "epoch",
        "metavar": "N",
        "type": partial(_whole_number, "an epoch", 8),
        "help": "rewind: resume from epoch N on a new branch",
    },
    "--again": {"action": "store_true", "help": "rewind once more, although the same request already did"},
    "--resume": {
        "choices": ("auto", "must", "never"),
        "help": "resume if possible (auto), fail otherwise (must), or start again (never)",
    },
    "--time-limit": {
        "dest": "time_limit_secs",
        "metavar": "T",
        "type": seconds_typed,
        "help": "save and exit within T (seconds, or 1h30m); the same command resumes",
    },
    "--max-attempts": {
        "metavar": "N",
        "type": partial(_whole_number, "a number of launches", 6),
        "help": "fail after N launches without progress; 0 for no limit",
    },
}


OnCrash = Literal["save", "none"]


@dataclass(frozen=True)
class Plan:
    """The options of a run as a whole."""

    resume: Resume = "auto"
    best: tuple[str, str] | None = None
    save_initial: bool = True
    max_failed_saves: int | None = None
    agree_every: int = 1
    time_limit_secs: float | None = None
    max_attempts: int = 0
    """0: no limit."""
    log_every_n_secs: float = EVERY_SECS
    save_signal: Signals | None = None
    on_crash: OnCrash = "none"
    from_program: tuple[str, ...] = ()

    def checked(self) -> Plan:
        """Return this plan; raises UsageError for an invalid value."""
        best, failures = self.best, self.max_failed_saves
        measure = isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str)
        for name, valid, expected in (
            ("resume", self.resume in ("auto", "must", "never"), "'auto', 'must' or 'never'"),
            (
                "best",
                best is None or (measure and best[1] in ("min", "max")),
                "a metric and a direction, such as ('val/acc', 'max')",
            ),
            ("max_failed_saves", failures is None or _is_whole(failures, 1), "a whole number from 1"),
            ("agree_every", _is_whole(self.agree_every, 1), "a whole number from 1"),
            ("max_attempts", _is_whole(self.max_attempts, 0), "a whole number, 0 for no limit"),
            ("on_crash", self.on_crash in ("save", "none"), "'save' or 'none'"),
        ):
            if not valid:
                raise UsageError(f"invalid {name}={getattr(self, name)!r:.80}: expected {expected}")
        return self


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


Kind = Literal["function", "program", "phase"]
_MAIN = "__main__"


@dataclass(frozen=True)
class Recipe:
    """A reference to the code that builds a model.

    `function`: `name` in `module`, called without arguments; `program`: a class there; `phase`: the phase
    `name` of the configuration, in the runner `module`.
    """

    kind: Kind
    module: str
    name: str

    def to_json(self) -> dict[str, Any]:
        """Encode as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Recipe:
        """Decode; raises UsageError for invalid content."""
        match found:
            case {"kind": ("function" | "program" | "phase") as kind, "module": str(one), "name": str(name)}:
                return cls(kind, one, name)
        raise UsageError(f"invalid record of how a model is built: {str(found)[:100]}")

    def in_archive(self, script: str | None) -> str:
        """Return the module's name in the archive with this script; UsageError if it has none."""
        if self.module != _MAIN:
            return self.module
        if script is None:
            raise UsageError("the script that built the model is not in the archive of the source")
        return PurePosixPath(script).stem


def recipes_of(given: Any) -> dict[str, Recipe]:
    """Parse JobRunner's `replay`; raises UsageError for models that cannot be rebuilt elsewhere."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f'invalid replay={given!r:.80}: expected functions by blob, {{"model": make_model}}')
    found = dict[str, Recipe]()
    for blob, make in given.items():
        module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", None)
        if isinstance(make, Recipe):
            found[str(blob)] = make
        elif callable(make) and isinstance(module, str) and isinstance(name, str) and "<" not in name:
            found[str(blob)] = Recipe("function", module, name)
        else:
            raise UsageError(
                f"invalid replay[{blob!r}]={make!r:.80}: expected a function or class in a file that builds "
                "the module without arguments, because it is imported by its name"
            )
    return found


@dataclass(frozen=True)
class WarmStart:
    """The result of one `init_from`; leaves have the job's names."""

    upstream: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __str__(self) -> str:
        skipped = {"missing": self.missing, "unexpected": self.unexpected, "of another form": self.misshapen}
        skipped_texts = [f"; {what}: {', '.join(names)}" for what, names in skipped.items() if names]
        return f"{len(self.loaded)} leaves of {self.upstream}{''.join(skipped_texts)}"


Status = Literal["FINISHED", "STOPPED", "PREEMPTED"]


class RunResult(int):
    """The last epoch, as Caffe2's runner returned it, with further values as attributes. Always true.

    Attributes:
        status: `FINISHED`, `STOPPED`, or `PREEMPTED` if the same command is to resume it.
        stop: Reasons of the end.
        metrics: The last value of each metric, from any epoch.
        run_dir: The run directory or its URL.
        committed: The newest saved epoch.
        warm_starts: The result of each `init_from`, if this call began the run.
        elsewhere: Only other hosts were preempted, so that this one may continue.
        resumed_from: The epoch that this call resumed from; None if it began the run.

    Example:
        result = JobRunner(job, "runs/hello").train()
        print(f"epoch {int(result)}: {result.status}, accuracy {result.metrics['val/acc']}")
    """

    status: Status
    stop: tuple[str, ...]
    metrics: Mapping[str, float]
    run_dir: Path | str | None
    committed: int | None
    warm_starts: tuple[WarmStart, ...]
    elsewhere: bool
    resumed_from: int | None

    def __new__(
        cls,
        epoch: int,
        *,
        status: Status = "FINISHED",
        stop: tuple[str, ...] = (),
        metrics: Mapping[str, float] | None = None,
        run_dir: Path | str | None = None,
        committed: int | None = None,
        warm_starts: tuple[WarmStart, ...] = (),
        elsewhere: bool = False,
        resumed_from: int | None = None,
    ) -> RunResult:
        """Create the result of a run whose last epoch is `epoch`."""
        self = super().__new__(cls, epoch)
        self.status, self.stop, self.metrics = status, stop, dict(metrics or {})
        self.run_dir, self.warm_starts = run_dir, warm_starts
        self.committed, self.elsewhere, self.resumed_from = committed, elsewhere, resumed_from
        return self

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"RunResult({int(self)}, status={self.status!r}, stop={self.stop!r}, "
            f"committed={self.committed!r}, run_dir={str(self.run_dir) if self.run_dir else None!r})"
        )
