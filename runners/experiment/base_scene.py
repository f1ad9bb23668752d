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
from torchrelay.metadata.code.archive import NO_CHANGES, Changes, changes, open_archive
from torchrelay.metadata.code.selection import LARGEST_UNKNOWN_BYTES, Root
from torchrelay.metadata.code.snapshot import GONE, Snapshot, digest_in, of_manifest, place_of
from torchrelay.metadata.experiments import Evaluated, Identity, ProgramRun, RunStore, evaluated
from torchrelay.runners.experiment.archived_process import captured_code
from torchrelay.runners.experiment.choosing_runs import Known
from torchrelay.runners.experiment.origin import Origin
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.monitoring.status import standing


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
                run.note.code_id == self.identity.code_id,
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
        old = self.archived_source(run)
        if self.snapshot is None or old is None:
            return None
        new, noted = of_manifest(self.snapshot.manifest), self._noted()
        found = changes(old, new)
        if not (found and noted):
            return found

        def is_result(name: str, digest: str) -> bool:
            return noted.get(name, {}).get(digest, False)

        return Changes(
            tuple(name for name in found.added if new[name] not in noted.get(name, {})),
            tuple(n for n in found.changed if not (is_result(n, old[n]) and is_result(n, new[n]))),
            tuple(name for name in found.removed if not is_result(name, old[name])),
        )

    def archived_source(self, run: ProgramRun) -> dict[str, str] | None:
        """Names and digests of a run's source; None where it cannot be read."""
        try:
            with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
                return of_manifest(archive.manifest)
        except (DamagedError, StorageError):
            return None

    def contents_of(self, paths: Iterable[Path], *, written: bool) -> Evaluated:
        """Files of an `eval` that lie where source lies, with their digests; large ones are no source."""
        roots = list(self.snapshot.roots) if self.snapshot is not None else []
        if self.archived is not None:
            roots += archived_roots(self.store.find(self.archived))
        found: Evaluated = {}
        for path in {place for one in paths for place in (place_of(one), one.resolve())}:
            root = next((one for one in roots if path.is_relative_to(one.path)), None)
            if root is not None and path.suffix != ".py":
                with suppress(OSError):
                    if path.lstat().st_size <= LARGEST_UNKNOWN_BYTES:
                        digest = digest_in(root, path.relative_to(root.path).as_posix())
                        found |= {path: {digest: written}} if digest != GONE else {}
        return found

    def source_name(self, run: ProgramRun, path: Path) -> str | None:
        """What the archive of a run calls a path where its source lay; None elsewhere."""
        if self.archived is None:
            return None if self.snapshot is None else self.snapshot.name_of(path)
        path = place_of(path)
        for root in archived_roots(run):
            if path.is_relative_to(root.path):
                return "/".join(part for part in (root.label, path.relative_to(root.path).as_posix()) if part)
        return None

    @cached_property
    def evaluated(self) -> Evaluated:
        """What `eval` read and wrote by any of the runs."""
        found: Evaluated = {}
        for run in self.store.runs():
            with suppress(StorageError):
                self._take(found, evaluated(run.path))
        return found

    def take_evaluated(self, more: Evaluated) -> None:
        """What is evaluated now is no source either."""
        self._take(self.evaluated, more)

    @staticmethod
    def _take(found: Evaluated, more: Evaluated) -> None:
        for path, digests in more.items():
            known = found.setdefault(path, {})
            known |= {digest: one or known.get(digest, False) for digest, one in digests.items()}

    def _noted(self) -> dict[str, dict[str, bool]]:
        """The same by what the archive calls the files."""
        found: dict[str, dict[str, bool]] = {}
        snapshot = self.snapshot
        for path, digests in self.evaluated.items() if snapshot is not None else ():
            with suppress(OSError, RuntimeError, ValueError):  # a name that somebody wrote there
                name = snapshot.name_of(path) if snapshot is not None else None
                if name and path.suffix != ".py":
                    found[name] = digests
        return found


def archived_roots(run: ProgramRun) -> list[Root]:
    """Where the source of a run lay that was archived."""
    roots = captured_code(run)["code"].get("roots")
    return [
        Root(label, Path(path).resolve())
        for label, path in (roots.items() if isinstance(roots, dict) else ())
        if isinstance(path, str)
    ]


def say(text: str, *, to: TextIO | None = None) -> None:
    """A line for the person who typed the verb: rank 0 alone says it."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=to or sys.stdout, flush=True)
