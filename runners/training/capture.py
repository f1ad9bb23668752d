"""Record what an attempt of a run was: its source, configuration and environment.

Several ranks agree before any file is written: rank 0 reads its source, the others compare theirs by name,
and a rank with other code or configuration is rejected. A single process without `code=` and configuration
records all this in a thread during its first epoch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import Worker, WorkItem
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.metadata.code.archive import changes, open_archive, write_archive
from torchrelay.metadata.code.capture import (
    Given,
    captures,
    code_id_of,
    command,
    config_texts,
    params_of,
    surroundings,
    write_capture,
    write_config,
    write_diff,
)
from torchrelay.metadata.code.git import commit_hidden, repository
from torchrelay.metadata.code.snapshot import (
    GONE,
    Root,
    Snapshot,
    Sources,
    digests,
    main_script,
    of_manifest,
    sources_of,
    take,
)
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.training.journal import Journal

RESOLVED = "resolved.yaml"
"""The run's configuration with all values, including defaults."""
_NAMED = 4
_SHOWN = 40


def setting_changes(before: bytes, now: bytes) -> str:
    """Describe keys that differ with both values, `a.b 1 -> 2`; further ones are counted."""
    from torchrelay.jobs.config.yaml_reader import read_findings  # yaml is for runs of configurations alone

    old, new = dict(_leaves(read_findings(before).value)), dict(_leaves(read_findings(now).value))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    named = [
        f"{name} {_shown_value(old.get(name))} -> {_shown_value(new.get(name))}" for name in names[:_NAMED]
    ]
    named += [f"{len(names) - _NAMED} more"] if names[_NAMED:] else []
    return ", ".join(named) or "other files"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted paths and values; items of lists by their `name`, as in overrides."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        named = [one.get("name") if isinstance(one, dict) else None for one in value]
        items = [(name or at, one) for at, (name, one) in enumerate(zip(named, value, strict=True))]
    else:
        yield path, value
        return
    for name, one in items:
        yield from _leaves(one, f"{path}.{name}" if path else str(name))


def _shown_value(value: Any) -> str:
    return "unset" if value is None else f"{value}"[:_SHOWN]


_COMPARED = 16  # digits of a digest that are sent to other ranks
_NAMED_RANKS, _NAMED_FILES, _NAMED_LEFT_OUT = 8, 3, 100

_reading = threading.Lock()
"""Held by the thread. Forks wait for it: a loader's workers would inherit locks and pipes to git."""
os.register_at_fork(
    before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
)


class Capturing:
    """Captures the starts of one runner: `code` and `params` as in JobRunner, `given` its configuration."""

    def __init__(self, run: RunDirectory | None, code: Any, given: Given | None, params: Any = None) -> None:
        if run is None and (given is not None or params is not None or code not in (None, False)):
            raise UsageError(
                "code, params and configuration belong to a run directory: give JobRunner the path of one"
            )
        self._run, self._given = run, given or Given()
        self._params = params_of(params)
        self._asked = None if code is None or code is False else sources_of(code)
        self._off = code is False
        self._taken: Snapshot | str | None = None
        """The source of this attempt, or the reason why there is none."""
        self._pending: Callable[[], None] | None = None
        self._recording: WorkItem[None] | None = None
        self._warnings: list[str] = []

    def agree(self, peers: Peers) -> None:
        """Read the source and compare it between ranks; raises UsageError on all ranks if it differs."""
        self._taken = None
        if self._run is None or self._waits(peers):
            return

        def own_digests() -> dict[str, Any]:
            self._taken = taken = self._take()
            files = {} if isinstance(taken, str) else of_manifest(taken.manifest)
            found = {name: _short(digest) for name, digest in files.items()}
            return {"files": found, "config": self._given.config_id}

        digests = decide(peers, "code", own_digests)
        if peers.size == 1:
            return
        found = together(peers, "code of all ranks", lambda: self._differences(digests) if peers.rank else [])
        refused = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(found) if names]
        if refused:
            more = len(refused) - _NAMED_RANKS
            texts = "; ".join([*refused[:_NAMED_RANKS], *([f"{more} more ranks"] if more > 0 else [])])
            raise UsageError(
                f"ranks differ from rank 0 ({texts}): start all ranks with the same source and "
                "configuration; code=False skips the comparison of the source"
            )

    def prepare(self, journal: Journal, session: SessionBase) -> None:
        """After the log is held: record the attempt, or schedule that; on rank 0, called by all."""
        if self._run is None or not journal.writes:
            return
        hosts = dict(Counter(place.host for place in session.nodes))
        world = {"processes": session.peers.size, "nodes": len(session.nodes), "hosts": hosts}
        self._pending = partial(self._capture, self._run.path, journal, {**command(), "world": world})
        if not self._waits(session.peers):
            self.finish(journal)

    def _waits(self, peers: Peers) -> bool:
        """Return True if recording can wait: one process, and no code or configuration was given."""
        return peers.size == 1 and self._asked is None and self._given == Given()

    def begin(self) -> None:
        """At the first epoch: record in a thread what is not recorded yet. Later calls do nothing."""
        work, self._pending = self._pending, None
        if work is not None:
            self._recording = Worker("torchrelay-capture").submit(work)
            if self._recording is None:  # no more threads in this process
                self._recording = WorkItem(work)
                self._recording.run()
                self._recording.over.set()

    def finish(self, journal: Journal) -> None:
        """Wait until everything is recorded. What cannot be stored is a warning."""
        self.begin()
        item, self._recording = self._recording, None
        if item is not None:
            item.over.wait()
        warnings, self._warnings = self._warnings, []
        for text in warnings:
            journal.warn(text)
        if item is not None and isinstance(item.error, RelayError):
            journal.warn(f"source and environment of this attempt are not recorded: {item.error}")
        elif item is not None:
            item.result()

    def _capture(self, run: Path, journal: Journal, called: Mapping[str, Any]) -> None:
        """Archive source and configuration, and log what changed since the previous attempt."""
        with _reading:
            taken = self._taken = self._taken or self._take()
            # the last attempt whose source was archived
            before = next((one for one in reversed(captures(run)) if code_id_of(one) is not None), None)
            content = {
                **called,
                **surroundings(),
                "torch": torch_facts(),
                "code": self.record_code(run, taken, self._warnings.append),
                "config": write_config(run, self._given, journal.attempt),
                "config_files": sorted(self._given.config),
                "config_id": self._given.config_id,
                "overrides": list(self._given.overrides),
                "params": self._params,
            }
            write_capture(run, journal.attempt, content)
            self._log_changes(run, journal, None if isinstance(taken, str) else taken, before)

    # Agreeing

    def _take(self) -> Snapshot | str:
        if self._off:
            return "code=False"
        if self._asked is not None:
            return take(self._asked)
        script = main_script()
        if script is None:
            return "no user script was found, as in a notebook; name the source with code="
        try:
            return take(Sources([script.root.path]), roots=(script.root,))
        except UsageError as error:
            self._warnings.append(f"the source is not archived; the run continues: {error}")
            return str(error)

    def _differences(self, first: Mapping[str, Any]) -> list[str]:
        """Describe differences between this rank and the `first`."""
        found = []
        if first["config"] != self._given.config_id:
            found.append("the configuration differs")
        roots: tuple[Root, ...] | None = None
        if first["files"] and not self._off:
            script = main_script() if self._asked is None else None
            roots = (script.root,) if script else self._asked.labelled() if self._asked else None
        if roots is not None:
            own = digests(roots, first["files"])
            for name, theirs in first["files"].items():
                if _short(own[name]) != theirs:
                    found.append(f"{name} {'is missing' if own[name] == GONE else 'differs'}")
        more = len(found) - _NAMED_FILES
        return [*found[:_NAMED_FILES], *([f"{more} more"] if more > 0 else [])]

    # Writing

    def record_code(self, run: Path, snapshot: Snapshot | str, warn: Callable[[str], None]) -> dict[str, Any]:
        """Archive source in the run and return its record; raises StorageError."""
        if isinstance(snapshot, str):
            return {"id": None, "why": snapshot}
        manifest = snapshot.manifest
        write_archive(run / "code", manifest, snapshot.contents)
        git, refs = {}, []
        try:
            if self._asked is not None and self._asked.git_ref:
                refs = [_hidden_ref(root, snapshot) for root in snapshot.roots]
        except StorageError as error:  # git creates no ref; the archive exists
            warn(str(error))
        script = main_script()
        script_name = None if script is None else snapshot.name_of(script.root.path / script.name)
        on_path = [snapshot.name_of(Path(entry or ".")) for entry in sys.path]
        for label, found in snapshot.git.items():
            git[label] = found.json() | ({"diff": write_diff(run, found.diff)} if found.diff else {})
        return {
            "id": manifest.code_id,
            "files": len(manifest.files),
            "bytes": manifest.nbytes,
            "roots": {root.label: str(root.path) for root in snapshot.roots},
            "script": script_name if script_name in snapshot.contents else None,
            "import_path": [  # the archive's folders on this process's import path, in order
                inside
                for inside in dict.fromkeys(on_path)
                if inside is not None
                and any(not inside or name.startswith(f"{inside}/") for name in snapshot.contents)
            ],
            "left_out": [
                {"name": name.encode("utf-8", "backslashreplace").decode(), "why": why}
                for name, why in sorted(snapshot.left_out.items())[:_NAMED_LEFT_OUT]
            ],
            "submodules": dict(snapshot.submodules),
            "git": git,
            "refs": refs,
        }

    def _log_changes(
        self, run: Path, journal: Journal, snapshot: Snapshot | None, before: Mapping[str, Any] | None
    ) -> None:
        """Log changes of source and configuration since the previous attempt with each of them."""
        old_id = None if before is None else code_id_of(before)
        if before is not None and snapshot is not None and old_id != snapshot.manifest.code_id:
            try:
                with open_archive(run / "code" / f"{old_id}.zip") as archive:
                    found = str(changes(of_manifest(archive.manifest), of_manifest(snapshot.manifest)))
            except StorageError as error:
                found = f"its archive cannot be compared ({error})"
            journal.tell("code changed", f"code changed since attempt {before['number']}: {found}")
        older = [one for one in captures(run) if one["number"] < journal.attempt and one.get("config_id")]
        if not older or older[-1]["config_id"] == self._given.config_id:
            return
        texts = config_texts(run, older[-1])
        named = setting_changes(texts.get(RESOLVED, b""), self._given.config.get(RESOLVED, b""))
        text = f"configuration changed since attempt {older[-1]['number']}: {named}"
        journal.tell(
            "configuration changed", f"{text}; values in the checkpoint (such as learning rates) are kept"
        )


def torch_facts() -> dict[str, Any]:
    """Return versions of torch and its libraries; devices only if they are in use."""
    version = torch.version
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": version.cuda, "hip": version.hip}
    facts["driver"] = None
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()
        facts["driver"] = text[0].strip() if text else None
    if torch.cuda.is_initialized():
        facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _hidden_ref(root: Root, snapshot: Snapshot) -> str:
    """Store the source as a hidden git ref; submodules are recorded separately."""
    inner = tuple(f"{one}/" for one in snapshot.submodules)
    top = f"{root.label}/" if root.label else ""
    manifest = snapshot.manifest
    names = [one for one in sorted((*manifest.files, *manifest.links)) if one.startswith(top)]
    with repository(root.path) as repo:
        if repo is None:
            raise StorageError(f"{root.path} is not in a git repository, which git_ref=True needs")
        own = [one.removeprefix(top) for one in names if not one.startswith(inner)]
        return commit_hidden(repo, manifest.code_id, own, root.label)


def _short(digest: str) -> str:
    return digest if digest.startswith("-> ") else digest[:_COMPARED]
