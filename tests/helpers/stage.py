"""Where an acceptance case plays: one node, several emulated ones, or the ranks of a real launch.

A case is a function of a Stage. It runs in every process; what only rank 0 does or hears (handlers,
warnings), it checks only where `stage.first` is true.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from toy import toy

from torchrelay import Job, LocalSession, MultiNodeCheckpointManager
from torchrelay.errors import RelayError
from torchrelay.jobs.job import SessionGroup
from torchrelay.runners.session.base import SessionBase


@dataclass
class Stage:
    """`size` nodes called trainer_0, ...; `root` is a directory that all processes see."""

    root: Path
    size: int = 1
    rank: int = 0
    fresh: Callable[[], SessionBase] = LocalSession

    @property
    def first(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"trainer_{number}" for number in range(self.size))

    def session(self) -> SessionBase:
        """A session whose workspaces are empty."""
        return self.fresh()

    def toy(self) -> Job:
        """The toy job on all nodes."""
        return toy(*range(self.size))


def totals(session: SessionBase) -> set[int]:
    """The toy's totals of the hosted nodes."""
    return {int(session.workspace(place.name)["total"]) for place in session.local_nodes}


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the texts of warnings, instead of failing on them."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught]


@contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    """What `pytest.raises` does, for processes without pytest; the text must be in the message."""
    try:
        yield
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error!r}"
    else:
        raise AssertionError(f"no {kind.__name__}")


@dataclass
class Log:
    """What happened in this process, in order; repetitions by several hosted nodes count once."""

    events: list[str] = field(default_factory=list)

    def __call__(self, event: str) -> None:
        if not self.events or self.events[-1] != event:
            self.events.append(event)


class RecordingHandler:
    """A metadata handler that writes down its calls; answers and failures are given."""

    def __init__(self, log: Log | None = None, last: object = "user", fails: str = "") -> None:
        self.log = log or Log()
        self.last = last
        self.fails = fails
        self.closed_at: set[int] = set()
        self.params: list[dict] = []
        self.written: list[int] = []
        self.reports: list[tuple[str, dict[str, float]]] = []
        self.asked = -1

    def set_params(self, **params: object) -> None:
        self._note("set_params")
        self.params.append(params)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        self._note("last_epoch")
        return user_epoch if self.last == "user" else self.last

    def write(self, epoch: int) -> None:
        self._note("write", f"write {epoch}")
        self.written.append(epoch)

    def report(self, action: str, stats: dict[str, float]) -> None:
        self._note("report", f"report {action}")
        self.reports.append((action, stats))

    def cp_accessible(self, epoch: int | None = None) -> bool:
        self._note("cp_accessible")
        assert epoch is None
        self.asked += 1
        return self.asked not in self.closed_at

    def _note(self, verb: str, event: str = "") -> None:
        self.log(event or verb)
        if verb == self.fails:
            raise RelayError(f"{verb} is out of order")


class RecordingManager(MultiNodeCheckpointManager):
    """A manager whose work is written down; `after_save(epoch, session)` runs when a save has ended."""

    def __init__(self, prefix: Path, handler: RecordingHandler, log: Log, after_save=None) -> None:
        super().__init__(prefix, handler)
        self.log = log
        self.after_save = after_save

    def init(self, *args, **options):
        return self._recorded("manager.init", super().init(*args, **options))

    def save(self, epoch: int):
        return self._recorded(f"save {epoch}", super().save(epoch), epoch)

    def load(self, epoch: int, *args, **options):
        return self._recorded(f"load {epoch}", super().load(epoch, *args, **options))

    def _recorded(self, event: str, group, saved: int | None = None) -> SessionGroup:
        def act(session: SessionBase) -> None:
            self.log(event)
            session.run(group)
            if saved is not None and self.after_save is not None:
                self.after_save(saved, session)

        return SessionGroup(event, act)
