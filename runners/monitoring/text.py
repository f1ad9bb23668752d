"""Log lines for users and programs: format, rates, and the log of each rank.

During a run Python's warnings have the same format: one line, with rank and host on all ranks but 0. A
program's own output is not redirected; use `torchrun --redirects` for that.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torchrelay.errors import UsageError
from torchrelay.metadata.fs import append_bytes, finite
from torchrelay.records import dataclass

LEVELS = {"info": 0, "warning": 1}
LEVEL = "TORCHRELAY_LOG_LEVEL"
EVERY = "TORCHRELAY_LOG_EVERY_N_SECS"
EVERY_SECS = 10.0
_UNITS = ("kB", "MB", "GB", "TB", "PB")


def stamped(text: str, *, level: str, who: str, when: float | None = None) -> str:
    """Format `2026-11-20 22:07:24 I r0/16 text`; in UTC, so that lines of all hosts compare."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() if when is None else when))
    return f"{clock} {level} {who} {plain(text)}"


def plain(text: str) -> str:
    """Return one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text.strip())


def level_wanted() -> int:
    """Return the level of TORCHRELAY_LOG_LEVEL for stderr; UsageError for an unknown word."""
    word = os.environ.get(LEVEL, "").strip().lower() or "info"
    if word not in LEVELS:
        raise UsageError(f"invalid {LEVEL}={word!r:.40}: expected info, or warning for warnings only")
    return LEVELS[word]


def interval_secs(wanted: float | None) -> float:
    """Return the seconds between two lines: TORCHRELAY_LOG_EVERY_N_SECS, else the program's value, else 10.

    0 means one line per epoch and none in between. Raises UsageError for an invalid value.
    """
    text = os.environ.get(EVERY, "").strip()
    name, given = (EVERY, text) if text else ("log_every_n_secs", wanted)
    if given is None:
        return EVERY_SECS
    try:
        secs = float(given) if not isinstance(given, bool) else -1.0
    except (TypeError, ValueError):
        secs = -1.0
    if not 0 <= secs < 1e9:
        raise UsageError(f"invalid {name}={given!r:.40}: expected a number of seconds, or 0 for each epoch")
    return secs


def human_bytes(count: int | None) -> str:
    """Format `1.5 MB`: powers of 1000, three digits."""
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def draws(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal on which text can be overwritten; it may be None or closed."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


class Moment(NamedTuple):
    """A time of the monotonic clock, and the work done by then."""

    secs: float
    done: float


def rate(moments: Sequence[Moment], over_secs: float, now_secs: float) -> float | None:
    """Return the work per second over the last `over_secs`, or longer if one unit takes longer.

    `moments` are in order of time, each with more work done. If the current unit already takes longer than
    the rate implies, the rate is lowered. None if there is too little data.
    """
    if len(moments) < 2:
        return None
    last = moments[-1]
    recent = bisect_left(moments, last.secs - over_secs, key=lambda one: one.secs)
    first = moments[min(recent, len(moments) - 2)]
    done = last.done - first.done
    if last.secs <= first.secs or done <= 0:
        return None
    return min(done / (last.secs - first.secs), (done + 1) / (now_secs - first.secs))


def steps_left(
    epoch: int, step: int, steps: int | None, last_epoch: int | None, total: int, last_step: int | None
) -> int | None:
    """Return the steps to the end of the run; None if its limits do not determine it.

    `step` of `steps` are done in epoch `epoch`, `total` in all; later epochs are assumed to be as long.
    """
    left = []
    if last_epoch is not None and steps is not None:
        left.append(max(steps - step, 0) + max(last_epoch - epoch, 0) * steps)
    if last_step is not None:
        left.append(max(last_step - total, 0))
    return min(left, default=None)


def eta_secs(left: float | None, per_sec: float | None, secs_left: float | None = None) -> float | None:
    """Return the seconds to the end at that rate, at most `secs_left` of a time limit."""
    if left is None or (left > 0 and not per_sec):
        return secs_left
    work = left / per_sec if per_sec else 0.0
    return work if secs_left is None else min(work, secs_left)


def duration(secs: float) -> str:
    """Format `00:12:33`, with days `2-00:12:33`; whole seconds, rounded up, so that 0 means done."""
    whole = max(0, -int(-secs // 1))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def per_second(value: float, unit: str) -> str:
    """Format `41.2 steps/s`; if slower than one in ten seconds, `12.5 s/step`."""
    if 0 < value < 0.1:
        return f"{1 / value:.3g} s/{unit.removesuffix('s')}"
    return f"{value:.3g} {unit}/s"


_METRICS = 8
"""Most metrics in a line; trackers get all."""


@dataclass(frozen=True)
class ProgressState:
    """Progress at one moment: `step` of `steps` in `epoch` of `last_epoch`, as far as known.

    `metrics` are the reduced ones of the previous epoch, or this rank's own of the running epoch. `ckpt`
    describes the newest save, `doing` a long operation; `done` marks a finished epoch.
    """

    epoch: int = 0
    last_epoch: int | None = None
    step: int = 0
    steps: int | None = None
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_sec: float | None = None
    eta_secs: float | None = None
    ckpt: str = ""
    doing: str = ""
    done: bool = False

    @property
    def unit(self) -> str:
        """The unit of the rate: steps if they are counted, else epochs."""
        return "steps" if self.total_steps else "epochs"

    @property
    def where(self) -> str:
        """Position, for example `epoch 3 step 1200/3900`."""
        words = [f"epoch {self.epoch}"]
        if self.total_steps:
            words.append(f"step {self.step}" + (f"/{self.steps}" if self.steps is not None else ""))
        elif self.last_epoch is not None:
            words[0] += f"/{self.last_epoch}"
        return " ".join([*words, "done"] if self.done else words)

    @property
    def values(self) -> str:
        """Metrics, for example `train/loss 0.1234 val/acc 0.9`."""
        return " ".join(self._pairs)

    def values_within(self, room: int) -> str:
        """Return as many metrics as fit into `room` columns, each whole."""
        shown = ""
        for pair in self._pairs:
            if len(longer := f"{shown} {pair}".lstrip()) > room:
                break
            shown = longer
        return shown

    @property
    def _pairs(self) -> list[str]:
        shown = sorted(self.metrics.items())
        return [f"{name} {value:.4g}" for name, value in shown[:_METRICS]] + ["..."] * bool(shown[_METRICS:])

    @property
    def line(self) -> str:
        """Everything in one line, without the time."""
        parts = [self.where, self.values]
        parts += [per_second(self.per_sec, self.unit)] if self.per_sec is not None else []
        parts += [self.ckpt, self.doing]
        parts += [f"eta {duration(self.eta_secs)}"] if self.eta_secs is not None else []
        return " | ".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """Return the content of `live.json`; non-finite numbers become text."""
        metrics = {name: finite(value) for name, value in self.metrics.items()}
        return {**vars(self), "metrics": metrics, "unit": self.unit}


MAX_BYTES = 8 << 20
"""Largest log file; one older file is kept, so a rank uses at most 16 MiB per attempt."""
_KEPT = 1000
"""Most lines buffered until the file is known."""
_OURS = Path(__file__).parents[2]
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}


class RankLog(logging.Handler):
    """The file `logs/attempt_N/rank_R.log` of this process, from `begin` to `end`; never raises or syncs.

    The file is opened for each line, so that its directory can be unmounted or replaced during a run.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        super().__init__(logging.INFO)
        self.who = f"r{rank}/{size}" if rank == 0 else f"r{rank}@{host}"
        self._rank = rank
        self._path: Path | None = None
        self._waiting: list[str] = []
        self._hooks: list[Callable[[], None]] = []

    # The file

    def open(self, logs: Path, attempt: int) -> None:
        """Write to this directory from now on, including buffered lines."""
        folder = logs / f"attempt_{attempt}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank_{self._rank}.log"
        waiting, self._waiting = self._waiting, []
        self._append(waiting)

    def line(self, text: str, level: str = "I") -> None:
        """Write a line."""
        line = stamped(text, level=level, who=self.who)
        if self._path is not None:
            self._append([line])
        elif len(self._waiting) < _KEPT:
            self._waiting.append(line)

    def _append(self, lines: list[str]) -> None:
        """Append lines to the file, and rotate it if it is too large."""
        if self._path is None or not lines:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        try:
            if append_bytes(self._path, data) > MAX_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
        except OSError:  # a full disk must not end a run for the sake of its log
            return

    # Sources

    def begin(self) -> None:
        """Capture the `torchrelay` logger and Python's warnings."""
        logger = logging.getLogger("torchrelay")
        logger.addHandler(self)
        before = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            if self._hooks:  # otherwise this hook was reinstalled after the end
                self.line(_warning(message, category, filename, lineno), "W")
            before(message, category, filename, lineno, *rest, **more)

        def form(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
            text = _warning(message, category, filename, lineno)
            return stamped(text, level="W", who=self.who) + "\n"

        hooks = [_replaced("showwarning", show), _replaced("formatwarning", form)]
        self._hooks = [lambda: logger.removeHandler(self), *hooks]

    def end(self) -> None:
        """Stop capturing; hooks that were replaced meanwhile stay. A second call does nothing."""
        hooks, self._hooks = self._hooks, []
        for undo in reversed(hooks):
            undo()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of torchrelay; also on stderr unless the program has configured logging."""
        letter = _LETTERS.get(record.levelno, "I")
        self.line(record.getMessage(), letter)
        if letter != "I" and not logging.getLogger().handlers:
            with suppress(Exception):
                sys.stderr.write(stamped(record.getMessage(), level=letter, who=self.who) + "\n")


def _replaced(name: str, own: Callable[..., Any]) -> Callable[[], None]:
    """Install a hook of `warnings`; return a function that removes it unless it was replaced."""
    before = getattr(warnings, name)
    setattr(warnings, name, own)
    return lambda: setattr(warnings, name, before) if getattr(warnings, name) is own else None


def _warning(message: Any, category: Any, filename: str, lineno: int) -> str:
    """Format a warning, with its location unless that is in torchrelay."""
    if Path(filename).is_relative_to(_OURS):  # where in our source says nothing to people
        return str(message)
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"
