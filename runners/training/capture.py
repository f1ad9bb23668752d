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
from torchrelay.records import dataclass
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
    more = len(names) - _NAMED
    return ", ".join(named + ([f"{more} more"] if more > 0 else [])) or "other files"


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
    """Format a value, shortened."""
    return "unset" if value is None else f"{value}"[:_SHOWN]


_COMPARED = 16
"""Digits of a digest that are sent to other ranks."""
_NAMED_RANKS = 8
_NAMED_FILES = 3
_NAMED_LEFT_OUT = 100


_reading = threading.Lock()
"""Held by the thread. Forks wait for it: a loader's workers would inherit locks and pipes to git."""
os.register_at_fork(
    before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
)


@dataclass(frozen=True)
class CapturedSource:
    """The source of this attempt, or the reason why there is none."""

    snapshot: Snapshot | None
    why: str = ""


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
        self._taken: CapturedSource | None = None
        self._pending: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._warnings: list[str] = []
        self._failed: Exception | None = None

    def agree(self, peers: Peers, journal: Journal) -> None:
        """Read the source and compare it between ranks; raises UsageError on all ranks if it differs.

        Source that cannot be archived is an error if it was named by `code=`; otherwise rank 0 warns.
        """
        self._taken = None
        if self._run is None or self._waits(peers):
            return
        digests = decide(peers, "code", self._own_digests)
        if peers.size == 1:
            return
        found = together(peers, "code of all ranks", lambda: self._differences(digests) if peers.rank else [])
        if refused := {rank: names for rank, names in enumerate(found) if names}:
            raise UsageError(_refusal(refused))

    def prepare(self, journal: Journal, session: SessionBase) -> None:
        """After the log is held: record the attempt, or schedule that; on rank 0, called by all."""
        if self._run is None or not journal.writes:
            return
        self._pending = partial(self._capture, self._run.path, journal, command(), _world(session))
        if not self._waits(session.peers):
            self.finish(journal)

    def _waits(self, peers: Peers) -> bool:
        """Return True if recording can wait: one process, and no code or configuration was given."""
        return peers.size == 1 and self._asked is None and self._given == Given()

    def begin(self) -> None:
        """At the first epoch: record in a thread what is not recorded yet. Later calls do nothing."""
        work, self._pending = self._pending, None
        if work is None:
            return
        thread = threading.Thread(target=work, name="torchrelay-capture", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process
            work()
        else:
            self._thread = thread

    def finish(self, journal: Journal) -> None:
        """Wait until everything is recorded. What cannot be stored is a warning."""
        self.begin()
        if self._thread is not None:
            self._thread.join()
        warnings, failed = self._warnings, self._failed
        self._thread, self._warnings, self._failed = None, [], None
        for text in warnings:
            journal.warn(text)
        if failed is not None:
            raise failed

    def _capture(
        self, run: Path, journal: Journal, called: Mapping[str, Any], world: Mapping[str, Any]
    ) -> None:
        """Record everything; errors are kept for `finish`."""
        try:
            with _reading:
                self._write(run, journal, called, world)
        except RelayError as error:
            self._warnings.append(f"source and environment of this attempt are not recorded: {error}")
        except Exception as error:
            self._failed = error

    def _write(
        self, run: Path, journal: Journal, called: Mapping[str, Any], world: Mapping[str, Any]
    ) -> None:
        """Archive source and configuration, and log what changed since the previous attempt."""
        taken = self._taken = self._taken or self._take()
        # the last attempt whose source was archived
        before = next((one for one in reversed(captures(run)) if code_id_of(one) is not None), None)
        code = self._write_code(run, taken, self._warnings.append)
        config = write_config(run, self._given, journal.attempt)
        write_capture(
            run,
            journal.attempt,
            {
                **called,
                **surroundings(),
                "torch": torch_facts(),
                "world": world,
                "code": code,
                "config": config,
                "config_files": sorted(self._given.config),
                "config_id": self._given.config_id,
                "overrides": list(self._given.overrides),
                "params": self._params,
            },
        )
        self._say_changes(run, journal, taken.snapshot, before)
        self._say_config(run, journal)

    def record_code(self, snapshot: Snapshot, warn: Callable[[str], None]) -> dict[str, Any]:
        """Archive source in the run and return its record; raises StorageError."""
        if self._run is None:
            raise UsageError("archiving the source needs a run directory")
        return self._write_code(self._run.path, CapturedSource(snapshot), warn)

    # Agreeing

    def _own_digests(self) -> dict[str, Any]:
        """Return shortened digests of the source and the id of the configuration."""
        self._taken = self._take()
        snapshot = self._taken.snapshot
        files = of_manifest(snapshot.manifest) if snapshot is not None else {}
        return {
            "files": {name: _short(digest) for name, digest in files.items()},
            "config": self._given.config_id,
        }

    def _take(self) -> CapturedSource:
        """Take the source as configured by `code=`."""
        if self._off:
            return CapturedSource(None, "code=False")
        if self._asked is not None:
            return CapturedSource(take(self._asked))
        script = main_script()
        if script is None:
            return CapturedSource(
                None, "no user script was found, as in a notebook; name the source with code="
            )
        try:
            return CapturedSource(take(Sources([script.root.path]), roots=(script.root,)))
        except UsageError as error:
            self._warnings.append(f"the source is not archived; the run continues: {error}")
            return CapturedSource(None, str(error))

    def _differences(self, told: Mapping[str, Any]) -> list[str]:
        """Describe differences between this rank and rank 0."""
        found = []
        if told["config"] != self._given.config_id:
            found.append("the configuration differs")
        roots: tuple[Root, ...] | None = None
        if told["files"] and not self._off:
            script = main_script() if self._asked is None else None
            roots = (script.root,) if script else self._asked.labelled() if self._asked else None
        if roots is not None:
            own = digests(roots, told["files"])
            for name, theirs in told["files"].items():
                if _short(own[name]) != theirs:
                    found.append(f"{name} {'is missing' if own[name] == GONE else 'differs'}")
        more = len(found) - _NAMED_FILES
        return [*found[:_NAMED_FILES], *([f"{more} more"] if more > 0 else [])]

    # Writing

    def _write_code(self, run: Path, taken: CapturedSource, warn: Callable[[str], None]) -> dict[str, Any]:
        """Archive the source and return its record."""
        snapshot = taken.snapshot
        if snapshot is None:
            return {"id": None, "why": taken.why}
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
        for label, found in snapshot.git.items():
            git[label] = found.json() | ({"diff": write_diff(run, found.diff)} if found.diff else {})
        return {
            "id": manifest.code_id,
            "files": len(manifest.files),
            "bytes": manifest.nbytes,
            "roots": {root.label: str(root.path) for root in snapshot.roots},
            "script": script_name if script_name in snapshot.contents else None,
            "import_path": _import_path(snapshot),
            "left_out": [
                {"name": _shown(n), "why": why}
                for n, why in sorted(snapshot.left_out.items())[:_NAMED_LEFT_OUT]
            ],
            "submodules": dict(snapshot.submodules),
            "git": git,
            "refs": refs,
        }

    def _say_changes(
        self, run: Path, journal: Journal, snapshot: Snapshot | None, before: Mapping[str, Any] | None
    ) -> None:
        """Log changes of the source since the previous attempt."""
        if before is None or snapshot is None:
            return
        old_id = code_id_of(before)
        if old_id == snapshot.manifest.code_id:
            return
        try:
            with open_archive(run / "code" / f"{old_id}.zip") as archive:
                found = str(changes(of_manifest(archive.manifest), of_manifest(snapshot.manifest)))
        except StorageError as error:
            found = f"its archive cannot be compared ({error})"
        journal.tell("code changed", f"code changed since attempt {before['number']}: {found}")

    def _say_config(self, run: Path, journal: Journal) -> None:
        """Log changes of the configuration since the previous attempt."""
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


def _world(session: SessionBase) -> dict[str, Any]:
    """Return the numbers of processes and nodes, by host."""
    hosts = dict(Counter(place.host for place in session.nodes))
    return {"processes": session.peers.size, "nodes": len(session.nodes), "hosts": hosts}


def _import_path(snapshot: Snapshot) -> list[str]:
    """List the archive's folders on this process's import path, in order."""
    found = []
    for entry in sys.path:
        inside = snapshot.name_of(Path(entry or "."))
        if inside is not None and any(not inside or n.startswith(f"{inside}/") for n in snapshot.contents):
            found.append(inside)
    return list(dict.fromkeys(found))


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


def _shown(name: str) -> str:
    """Escape a file name for display."""
    return name.encode("utf-8", "backslashreplace").decode()


def _short(digest: str) -> str:
    """Shorten a digest."""
    return digest if digest.startswith("-> ") else digest[:_COMPARED]


def _refusal(refused: Mapping[int, list[str]]) -> str:
    """Describe the ranks that differ from rank 0."""
    texts = [f"rank {rank}: {', '.join(names)}" for rank, names in list(refused.items())[:_NAMED_RANKS]]
    more = f"; {len(refused) - _NAMED_RANKS} more ranks" if len(refused) > _NAMED_RANKS else ""
    return (
        f"ranks differ from rank 0 ({'; '.join(texts)}{more}): start all ranks with the same source and "
        "configuration; code=False skips the comparison of the source"
    )
