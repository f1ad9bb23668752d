"""Lines for people and programs: their form, how quickly a run goes, what a rank says.

While a run is on, Python's warnings have that form, too: one line, with rank and host on all ranks but 0.
What a program prints itself stays where it goes; whoever wants that in files has `torchrun --redirects`.
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
    """`2026-11-20 22:07:24 I r0/16 text`; the time is UTC, so that the lines of all hosts compare."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() if when is None else when))
    return f"{clock} {level} {who} {plain(text)}"


def plain(text: str) -> str:
    """One line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text.strip())


def level_wanted() -> int:
    """What TORCHRELAY_LOG_LEVEL lets through to stderr; UsageError for a word that is none."""
    word = os.environ.get(LEVEL, "").strip().lower() or "info"
    if word not in LEVELS:
        raise UsageError(f"{LEVEL} is {word!r:.40}; it is info, or warning for warnings alone")
    return LEVELS[word]


def interval_secs(wanted: float | None) -> float:
    """Seconds between two lines: TORCHRELAY_LOG_EVERY_N_SECS, else what the program says, else 10.

    0 is a line for every epoch and none between. Raises UsageError for what is no such number.
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
        raise UsageError(f"{name} is {given!r:.40}; it is a number of seconds, 0 for a line per epoch")
    return secs


def human_bytes(count: int | None) -> str:
    """`1.5 MB`: powers of 1000, three figures."""
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def draws(stream: TextIO | None) -> bool:
    """Whether something may be drawn and written over there: a terminal, and one that can.

    Python has None for a stream that was closed before it began.
    """
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


class Moment(NamedTuple):
    """The time of the monotonic clock at which so much was done, or was first seen to be."""

    secs: float
    done: float


def rate(moments: Sequence[Moment], over_secs: float, now_secs: float) -> float | None:
    """How much was done per second over the last `over_secs`, or longer where one unit takes longer.

    The moments are in the order of time, and at each more was done than before. What runs on now is not done:
    where it takes longer than that rate tells, the rate is less. None while nothing tells.
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
    """Steps to the end of the run, where its limits tell; None where they do not.

    `step` of `steps` are done in epoch `epoch`, `total` in all; epochs to come are taken to be as long.
    """
    left = []
    if last_epoch is not None and steps is not None:
        left.append(max(steps - step, 0) + max(last_epoch - epoch, 0) * steps)
    if last_step is not None:
        left.append(max(last_step - total, 0))
    return min(left, default=None)


def eta_secs(left: float | None, per_sec: float | None, secs_left: float | None = None) -> float | None:
    """Seconds to the end: by what is left at that rate, at most `secs_left`, which a limit on time leaves."""
    if left is None or (left > 0 and not per_sec):
        return secs_left
    work = left / per_sec if per_sec else 0.0
    return work if secs_left is None else min(work, secs_left)


def duration(secs: float) -> str:
    """`00:12:33`, with days `2-00:12:33`; whole seconds, rounded up, so that 0 means over."""
    whole = max(0, -int(-secs // 1))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def per_second(value: float, unit: str) -> str:
    """`41.2 steps/s`; slower than one in ten seconds, `12.5 s/step`."""
    if 0 < value < 0.1:
        return f"{1 / value:.3g} s/{unit.removesuffix('s')}"
    return f"{value:.3g} {unit}/s"


_METRICS = 8
"""So many are in a line; a tracker has them all."""


@dataclass(frozen=True)
class Sight:
    """`step` of `steps` in `epoch` of `last_epoch`, as far as that is known; a job may count no steps at all.

    `metrics` are reduced ones of the epoch before, or, of what this rank has logged in the running epoch,
    its own. `ckpt` tells of the newest save, `doing` of work that takes long, `done` that the epoch is over.
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
        """What is counted."""
        return "steps" if self.total_steps else "epochs"

    @property
    def where(self) -> str:
        """`epoch 3 step 1200/3900`."""
        words = [f"epoch {self.epoch}"]
        if self.total_steps:
            words.append(f"step {self.step}" + (f"/{self.steps}" if self.steps is not None else ""))
        elif self.last_epoch is not None:
            words[0] += f"/{self.last_epoch}"
        return " ".join([*words, "done"] if self.done else words)

    @property
    def values(self) -> str:
        """`train/loss 0.1234 val/acc 0.9`."""
        return " ".join(self._pairs)

    def values_within(self, room: int) -> str:
        """As many of them as fit into so many columns, each whole."""
        shown = ""
        for pair in self._pairs:
            longer = f"{shown} {pair}".lstrip()
            if len(longer) > room:
                break
            shown = longer
        return shown

    @property
    def _pairs(self) -> list[str]:
        shown = sorted(self.metrics.items())
        return [f"{name} {value:.4g}" for name, value in shown[:_METRICS]] + ["..."] * bool(shown[_METRICS:])

    @property
    def line(self) -> str:
        """All of it, in one line without its time."""
        parts = [self.where, self.values]
        parts += [per_second(self.per_sec, self.unit)] if self.per_sec is not None else []
        parts += [self.ckpt, self.doing]
        parts += [f"eta {duration(self.eta_secs)}"] if self.eta_secs is not None else []
        return " | ".join(part for part in parts if part)

    def json(self) -> dict[str, Any]:
        """As `live.json` has it; what JSON has no number for is text."""
        metrics = {name: finite(value) for name, value in self.metrics.items()}
        return {**vars(self), "metrics": metrics, "unit": self.unit}


MAX_BYTES = 8 << 20
"""Of a file; one older file is kept beside it, so a rank takes at most 16 MiB in an attempt."""
_KEPT = 1000
"""So many lines wait for the file to be known."""
_OURS = Path(__file__).parents[2]
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}


class RankLog(logging.Handler):
    """`logs/attempt_N/rank_R.log` of this process, from `begin` to `end`; nothing here raises or syncs.

    The file is opened for each line, so that a directory can be unmounted or replaced beneath a run.
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
        """Write there from now on, also what was said before."""
        folder = logs / f"attempt_{attempt}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank_{self._rank}.log"
        waiting, self._waiting = self._waiting, []
        self._append(waiting)

    def line(self, text: str, level: str = "I") -> None:
        """Note a line."""
        line = stamped(text, level=level, who=self.who)
        if self._path is not None:
            self._append([line])
        elif len(self._waiting) < _KEPT:
            self._waiting.append(line)

    def _append(self, lines: list[str]) -> None:
        if self._path is None or not lines:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        try:
            if append_bytes(self._path, data) > MAX_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
        except OSError:  # a full disk must not end a run for the sake of its log
            return

    # What is listened to

    def begin(self) -> None:
        """Listen to the `torchrelay` logger and to warnings."""
        logger = logging.getLogger("torchrelay")
        logger.addHandler(self)
        before = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            if self._hooks:  # else somebody put this back after the end
                self.line(_warning(message, category, filename, lineno), "W")
            before(message, category, filename, lineno, *rest, **more)

        def form(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
            text = _warning(message, category, filename, lineno)
            return stamped(text, level="W", who=self.who) + "\n"

        hooks = [_replaced("showwarning", show), _replaced("formatwarning", form)]
        self._hooks = [lambda: logger.removeHandler(self), *hooks]

    def end(self) -> None:
        """Let go; what somebody else has put in the place of ours stays. A second call does nothing."""
        hooks, self._hooks = self._hooks, []
        for undo in reversed(hooks):
            undo()

    def emit(self, record: logging.LogRecord) -> None:
        """Take what our logger says; on stderr too, unless the program has set up logging by itself."""
        letter = _LETTERS.get(record.levelno, "I")
        self.line(record.getMessage(), letter)
        if letter != "I" and not logging.getLogger().handlers:
            with suppress(Exception):
                sys.stderr.write(stamped(record.getMessage(), level=letter, who=self.who) + "\n")


def _replaced(name: str, own: Callable[..., Any]) -> Callable[[], None]:
    """Put a hook of `warnings` in its place; return what undoes that, unless another one is there by then."""
    before = getattr(warnings, name)
    setattr(warnings, name, own)
    return lambda: setattr(warnings, name, before) if getattr(warnings, name) is own else None


def _warning(message: Any, category: Any, filename: str, lineno: int) -> str:
    if Path(filename).is_relative_to(_OURS):  # where in our source says nothing to people
        return str(message)
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"
