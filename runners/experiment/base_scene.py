"""What every verb begins with, whatever is run: what was asked, its runs, and whether anything changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.changes import NO_CHANGES, Changes, changes
from torchrelay.metadata.code.snapshot import Snapshot, of_manifest
from torchrelay.metadata.experiment.note import Identity
from torchrelay.metadata.experiment.results import evaluated
from torchrelay.metadata.experiment.run_store import ProgramRun, RunStore
from torchrelay.runners.experiment.choosing_runs import Known
from torchrelay.runners.experiment.origin import Origin
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.standing import standing


class BaseScene:
    """A request and the runs it is about; `archived` is the run whose archived code this process runs."""

    request: Request
    archived: str | None

    @property
    def title(self) -> str:
        """What is run, as messages call it."""
        raise NotImplementedError

    @property
    def rename(self) -> str:
        """How it gets another name, so that its runs lie elsewhere."""
        raise NotImplementedError

    @cached_property
    def origin(self) -> Origin:
        """Where its source and its runs lie."""
        raise NotImplementedError

    @cached_property
    def store(self) -> RunStore:
        """Its runs."""
        return self.origin.store(self.request.runs)

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The source as it was when this was first asked."""
        return self.origin.snapshot()

    @cached_property
    def config_id(self) -> str | None:
        """The id of what is configured; None without a configuration."""
        raise NotImplementedError

    def limits(self) -> dict[str, Any]:
        """The limits of a training, by name; None is no limit."""
        raise NotImplementedError

    @cached_property
    def identity(self) -> Identity:
        """Of the code and the configuration as they are now."""
        code = self.snapshot.manifest.code_id if self.snapshot is not None else None
        return Identity(code, self.config_id)

    def runs(self) -> list[ProgramRun]:
        """The runs; raises UsageError where they are those of something else of this name.

        Of one that is damaged people are told, once, and the others are what they are.
        """
        there = self.store.look()
        for path, error in there.unread.items():
            if path not in self._told:
                self._told.add(path)
                say(f"{path.name} is passed over: {error}", to=sys.stderr)
        found = list(there.runs)
        for run in found[-1:]:
            other = run.note.origin
            if other != str(self.origin.file) and Path(other).exists():
                raise UsageError(
                    f"the runs in {self.store.directory} are those of {other}, this is {self.origin.file}: "
                    f"give one of them another name ({self.rename}), or other --runs"
                )
        return found

    @cached_property
    def _told(self) -> set[Path]:
        """Damaged runs that people have heard of."""
        return set()

    def known(self) -> list[Known]:
        """The runs, as choices need them."""
        return [
            Known(
                run.id,
                self.identity_of(run),
                standing(run.path),
                run.note.launch,
                run.note.limits,
                run.note.created,
            )
            for run in self.runs()
        ]

    def identity_of(self, run: ProgramRun) -> Identity:
        """What a run is of; where nothing but files of `eval` differs, its code is that of now."""
        found = run.note.identity
        if self.evaluated and found.code_id != self.identity.code_id and self.changed(run) == NO_CHANGES:
            return Identity(self.identity.code_id, found.config_id)
        return found

    def changed(self, run: ProgramRun) -> Changes | None:
        """What source differs from that of a run, but for files of `eval`; None where that cannot be told."""
        if self.snapshot is None or run.note.code_id is None:
            return None
        try:
            with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
                found = changes(of_manifest(archive.manifest), of_manifest(self.snapshot.manifest))
        except (DamagedError, StorageError):
            return None
        return self._but_evaluated(found)

    def files_of(self, work: Iterable[tuple[Path, Path]]) -> dict[Path, bool]:
        """The files of an `eval` that lie where source lies, and whether it writes them."""
        files: dict[Path, bool] = {}
        for path, out in work:
            files.setdefault(path.resolve(), False)
            files[out.resolve()] = True
        roots = [root.path for root in self.snapshot.roots] if self.snapshot is not None else []
        if self.archived is not None:  # what is archived ran there
            roots.append(Path(self.store.find(self.archived).note.origin).parent)
        return {path: one for path, one in files.items() if any(path.is_relative_to(root) for root in roots)}

    @cached_property
    def evaluated(self) -> dict[Path, bool]:
        """The files that `eval` read, and those that it wrote (True): they are no source."""
        found: dict[Path, bool] = {}
        for run in self.store.runs():
            with suppress(StorageError):
                found |= {path: one or found.get(path, False) for path, one in evaluated(run.path).items()}
        return found

    def _but_evaluated(self, found: Changes) -> Changes:
        """What differs beyond files of `eval`."""
        if self.snapshot is None or not (found and self.evaluated):
            return found
        named = [(self.snapshot.name_of(path), one) for path, one in self.evaluated.items()]
        read, written = ({name for name, one in named if name and one is which} for which in (False, True))
        return found.beyond(read, written)


def say(text: str, *, to: TextIO | None = None) -> None:
    """A line for the person who typed the verb: rank 0 alone says it."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=to or sys.stdout, flush=True)
