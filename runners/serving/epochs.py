"""Epochs of a run as what is served: `last` and `best` follow what is committed, a number stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.open import candidates, place_of, read_log
from torchrelay.checkpoint.log.reader import read_hint
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView, find_tail, named_entry, wanted
from torchrelay.errors import DamagedError, NoProvableEpochError, UsageError
from torchrelay.runners.serving.served import Say, Served

Make = Callable[[Checkpoint], Served]
"""Loads the model of an opened epoch."""


class EpochSource:
    """The epochs at a place, made into models by `make`, each tried once.

    `wish` is what `open_checkpoint` takes as an epoch. Of `last` and `best` epoch 0 is never meant: nothing
    was trained by then.
    """

    def __init__(self, where: str, wish: str, make: Make, say: Say) -> None:
        self.where, self._make, self._say = where, make, say
        self._place, self._wish = place_of(where), wanted(wish)
        self._damaged: dict[str, str] = {}
        self._seen_slot: int | None = None

    @property
    def follows(self) -> bool:
        """Whether another epoch can come to be meant."""
        return not self._wish.explicit

    def first(self) -> Served:
        """Load what is meant; raises the errors of `open_checkpoint` and its `load`."""
        view = read_log(self._place)
        if self._wish.explicit:
            return self._made(named_entry(view, self._wish, self._place.url))
        found = self._newest(view, None)
        if found is None:
            why = "; ".join(self._damaged.values())
            raise NoProvableEpochError(f"no epoch in {self._place.url} is whole: {why}")
        return found

    def newer(self, served: Served) -> Served | None:
        """Load what is meant now, if that is another epoch; a log that has not grown is not read again."""
        if not self.follows:
            return None
        slot = self._slot()
        if slot is not None and slot == self._seen_slot:
            return None
        found = self._newest(read_log(self._place), served)
        self._seen_slot = slot
        return found

    def _newest(self, view: LogView, served: Served | None) -> Served | None:
        entries = [one for one in candidates(self._place, view, self._wish, None, self._say) if _trained(one)]
        if not entries and served is None:
            raise UsageError(f"{self._place.url} has no trained epoch yet: train it first")
        for entry in entries:
            if served is not None and self._is_reached(entry, served):
                return None
            if entry.try_name not in self._damaged:
                try:
                    return self._made(entry)
                except DamagedError as error:
                    self._damaged[entry.try_name] = f"{error}"
                    stays = f"epoch {served.epoch} is still served" if served else "an older one is tried"
                    self._say(f"epoch {entry.position.epoch} cannot be served, {stays}: {error}")
        return None

    def _is_reached(self, entry: Entry, served: Served) -> bool:
        """Whether nothing is left that is newer, or better: going back to older epochs is nobody's wish."""
        older = served.branch == entry.branch and entry.position.epoch <= (served.epoch or 0)
        return served.key == entry.try_name or (self._wish.word == "last" and older)

    def _made(self, entry: Entry) -> Served:
        return self._make(open_checkpoint(self.where, f"{entry.position.epoch},branch={entry.branch}"))

    def _slot(self) -> int | None:
        storage = self._place.storage
        return find_tail(lambda slot: storage.stat(slot_path(slot)) is not None, read_hint(storage))


def _trained(entry: Entry) -> bool:
    return entry.position.epoch > 0


def name_of(where: str) -> str:
    """What a run is called: the name of its directory."""
    return Path(where).resolve().name or where
