"""`RUN`, `RUN@7`, `RUN@best`: from what people write to a place and one live epoch of its log.

    RUN    RUN@last    RUN@best    RUN@7    RUN@epoch=7,branch=0    RUN@tag=NAME

A path that exists as it stands is one, whatever is in its name. Nothing is proved here: the entry is what
the log says, and its files may be damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.load import open as opening
from torchrelay.checkpoint.log.view import LogView, Wanted, named_entry, wanted
from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.checkpoint.storage.urls import is_url, shown
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.runtime import split_run, undisturbed
from torchrelay.records import dataclass
from torchrelay.runners.commands.command_line_place import Place, locate

LAST = Wanted(None, "last")


@dataclass(frozen=True)
class Selector:
    """A text taken apart: a path or URL, and the epoch that is wanted of it (None: none was named).

    `epoch` is what was written of it, as `open_checkpoint` takes it too.
    """

    path: str
    wish: Wanted | None = None
    epoch: str = "last"


@dataclass(frozen=True)
class Selected:
    """One live epoch: where it lies, the log as it was read, and its entry in it."""

    place: Place
    view: LogView
    entry: Entry

    @property
    def name(self) -> str:
        """How people would write it again: the epoch by its number, and its branch unless it is current."""
        here = self.view.find(self.entry.position.epoch, step=self.entry.position.step)
        seen = here is not None and here.key == self.entry.key
        return f"{self.place.where}@{self.entry.position if seen else self.entry.key}"


def parse_selector(text: str, exists: Callable[[str], bool] | None = None) -> Selector:
    """Take a text apart; raises UsageError for a selector that means no epoch. Touches no checkpoint.

    `exists` says whether a path is there as it stands (by default: asks the file system).
    """
    path, said = split_run(text, exists or _there)
    if said is None:
        return Selector(text)
    try:
        return Selector(path, wanted(said), said)
    except UsageError as error:
        raise UsageError(f"{text}: {error}") from None


def with_epoch(text: str, epoch: str) -> str:
    """One text for a place and what an option says of it; raises UsageError where both name an epoch."""
    if parse_selector(text).wish is not None:
        raise UsageError(f"{text} and {epoch!r} both name an epoch: give one of them")
    return f"{text}@{epoch}"


def select(text: str, default: Wanted = LAST, *, single_writer: SingleWriter = None) -> Selected:
    """Find the epoch that a text means; `default` where it names none.

    `last` and `best` mean healthy whole epochs of the current branch. Raises UsageError for a place that
    is none and a `best` that nothing defines, UnknownEpochError saying what there is.
    """
    selector = parse_selector(text)
    place = locate(selector.path, single_writer=single_writer)
    with undisturbed():
        view = place.log()
        return Selected(place, view, find_entry(place, view, selector.wish or default))


def find_entry(place: Place, view: LogView, wish: Wanted) -> Entry:
    """The live entry that is meant; raises as `select` does."""
    where = shown(place.where)
    if view.empty:
        raise UnknownEpochError(f"nothing is committed in {where} yet")
    if wish.explicit:
        return named_entry(view, wish, where)
    opened = opening.Place(CountingStorage(place.storage), place.best)
    found = opening.candidates(opened, view, wish, None, lambda _: None)
    if not found:
        raise UnknownEpochError(
            f"no whole epoch in {where} is healthy: torchrelay ckpt why says what became of them"
        )
    return found[0]


def _there(text: str) -> bool:
    return not is_url(text) and Path(text).exists()
