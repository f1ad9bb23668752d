"""A run's directory: who the run is, how it stands, what happened.

    run.json                     identity, written once
    status.json                  state, replaced at every change; the truth about how a run ended
    metrics.<generation>.jsonl   reduced metrics, one line per epoch
    steps.<generation>.jsonl     metrics within epochs, one line per step that has some
    events.<generation>.jsonl    what happened, one line per event
    live.json                    how far the running epoch is, every two seconds; for people who watch
    logs/attempt_N/rank_R.log    what each rank said
    trackers/                    files of the built-in trackers
    lineage/                     the stages that the run was built on (lineage.1: of an earlier beginning)
    captured.<attempt>.json      what that start was: arguments, packages, hosts, code id
    code/<code id>.zip           the source, once per code id
    config/                      texts of the configuration, where there was one
    program.json                 what the run is to the others of its program, where a program made it
    values.jsonl, results/       values kept one by one, and test results, of such a run
    exports/                     ONNX files that the run made of its epochs
    checkpoints/                 the checkpoint room's own directory
    crash/                       what a process held when a task failed, where that was asked for
    replay/                      calls of modules, with what they gave, to be played again
    STOP                         whoever makes it ends the run

A generation is one holder of the checkpoint log, so files of different starts never mix.
"""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import re
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torchrelay.errors import DamagedError, FormatError, StorageError, UsageError
from torchrelay.metadata.fs import (
    SamePlace,
    append_line,
    append_lines,
    read_json,
    read_lines,
    write_json,
    write_new,
)

State = Literal["RUNNING", "FINISHED", "STOPPED", "PREEMPTED", "FAILED"]
FORMAT = {"major": 1, "minor": 0, "features": []}
_DIGEST = "sha256"
_BEFORE_DIGESTS = {"format", "uuid", "job", "created", "best", "world_size", "command", "python"}
"""What a file without a digest may hold: where the key `sha256` itself is damaged there is another name."""
_MENDS = "the next start, or torchrelay ckpt repair, writes it again"
_TEXT = 64 << 10
"""Characters of a reason in `status.json`: an exception's text may be of any length."""
_PASSWORD = re.compile(r"(://[^/@:]*:).*@", re.DOTALL)
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^&]*")
_GENERATION_FILE = re.compile(r"(metrics|steps|events)\.([0-9]+)\.jsonl")


class RunDirectory:
    """The files of one run; creating the object touches nothing.

    Of a run in a store `url` says where, and `path` is where this host has its small files.
    """

    def __init__(self, path: str | Path, url: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.url = url
        self._place = SamePlace(self.path)

    @property
    def where(self) -> Path | str:
        """What users call the run: its directory, or its URL."""
        return self.url or self.path

    @property
    def checkpoints(self) -> Path | str:
        """Where its checkpoints lie, a directory or a URL."""
        return self.path / "checkpoints" if self.url is None else f"{self.url}/checkpoints"

    @property
    def stop_file(self) -> Path:
        """Where somebody puts a file, of any content, to end the run."""
        return self.path / "STOP"

    @property
    def name(self) -> str:
        """The run's name: its directory's."""
        return self.path.name

    def check_usable(self) -> None:
        """Refuse a path that cannot be a run directory, before anything is created."""
        if self.path == Path(self.path.anchor):
            raise UsageError(
                f"the run directory {self.path} is the root of the file system: choose a path below it"
            )
        for path in (self.path, *self.path.parents):
            if (found := _directory_at(path, self.path)) is not None:
                if not found:
                    which = "is" if path == self.path else f"cannot be made: {path} is"
                    raise UsageError(
                        f"the run directory {self.path} {which} a file: choose another path or remove it"
                    )
                return

    def create(
        self,
        job_name: str,
        best: tuple[str, str] | None,
        world_size: int,
        known: str | None = None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> dict[str, Any]:
        """Write `run.json` unless the run exists; returns its content.

        Args:
            job_name: whose run it is.
            best: the metric that "best" means, and its direction.
            world_size: how many nodes there are.
            known: the run's id as its epochs tell it, where there are any: a file that is lost or damaged
                is written again with it.
            warn: is told of that.

        Raises UsageError when the directory holds a run of another job.
        """
        found, damage = None, f"{self.where}/run.json is missing" if known else ""
        try:
            found = self.identity()
        except DamagedError as error:
            damage = str(error)
        if found is not None:
            self._check_same_job(found, job_name)
            return self._with_best(found, best)
        identity = {
            "format": FORMAT,
            "uuid": known or uuid.uuid4().hex,
            "job": job_name,
            "created": round(time.time(), 3),
            "best": list(best) if best else None,
            "world_size": world_size,
            "command": [without_password(word) for word in sys.argv],
            "python": platform.python_version(),
        }
        try:
            made = self.path / "checkpoints" if self.url is None else self.path
            made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot create the run directory {self.path}: {error.strerror}; "
                "choose a writable place with free space"
            ) from error
        if damage:
            whose = "the id that its epochs tell" if known else "a new id"
            warn(f"{damage}; it was written again, with {whose}")
        self.write_identity(identity)
        return identity

    def write_identity(self, identity: Mapping[str, Any]) -> None:
        """Replace `run.json`, which says the digest of what it holds."""
        write_json(self.path / "run.json", {**identity, _DIGEST: _digest_of(identity)})

    def _with_best(self, identity: dict[str, Any], best: tuple[str, str] | None) -> dict[str, Any]:
        """What "best" means is no part of the identity: today's program says it."""
        now = list(best) if best else None
        if identity.get("best") != now:
            identity = {**identity, "best": now}
            self.write_identity(identity)
        return identity

    def strangers(self) -> list[str]:
        """Names that lie where a new run is to begin and are none of a run's; empty for a known run."""
        if not self.path.is_dir() or (self.path / "run.json").exists():
            return []
        own = (
            "run.json",
            "status.json",
            "live.json",
            "trackers",
            "metadata.jsonl",
            "checkpoints",
            "logs",
            "config",
            "code",
            "exports",
            "lineage",
            "program.json",
            "results",
            "values.jsonl",
            "crash",
            "replay",
            "STOP",
        )
        names = sorted(path.name for path in self.path.iterdir())
        return [
            name
            for name in names
            if name not in own and not name.startswith((".probe-", ".tmp-", ".torchrelay-", "captured."))
        ]

    def identity(self) -> dict[str, Any] | None:
        """The content of `run.json`; None when there is no run here."""
        found = read_json(self.path / "run.json")
        if found is None:
            return None
        stamp = found.get("format")
        version = stamp.get("major") if isinstance(stamp, dict) else None
        if type(version) is int and version != FORMAT["major"]:
            raise FormatError(
                f"{self.where}/run.json was written by another version of torchrelay (format {version}, this "
                f"one reads {FORMAT['major']}): use the one that wrote it, or a newer one"
            )
        sealed, digest = _DIGEST in found, found.pop(_DIGEST, None)
        whole = digest == _digest_of(found) if sealed else found.keys() <= _BEFORE_DIGESTS
        named = version is not None and all(isinstance(found.get(key), str) for key in ("job", "uuid"))
        if not (named and whole):
            raise DamagedError(f"{self.where}/run.json is damaged: it is no identity of a run")
        return found

    def known_identity(self, warn: Callable[[str], object] = str) -> dict[str, Any]:
        """The same for who only shows it: empty where there is none, or it is damaged (`warn` is told)."""
        try:
            return self.identity() or {}
        except DamagedError as error:
            warn(f"{error}; {_MENDS}")
            return {}

    def check_job(self, job_name: str | None) -> None:
        """Refuse a directory that holds a run of another job (UsageError); None is the directory's name.

        Where `run.json` is damaged the log of its checkpoints says whose it is.
        """
        found = self.known_identity()
        if found:
            self._check_same_job(found, job_name or self.name)

    def _check_same_job(self, identity: Mapping[str, Any], job_name: str) -> None:
        if identity.get("job") != job_name:
            raise UsageError(
                f"{self.where} holds a run of job {identity.get('job')!r}, this is job {job_name!r}: "
                "give this job another run directory"
            )

    def status(self) -> dict[str, Any]:
        """The content of `status.json`; empty when there is none."""
        return read_json(self.path / "status.json") or {}

    def known_status(self, warn: Callable[[str], object] = str) -> dict[str, Any]:
        """The same for who only shows it: empty where it is damaged, too (`warn` is told)."""
        try:
            return self.status()
        except DamagedError as error:
            warn(f"{error}; {_MENDS}")
            return {}

    def write_status(self, state: State, *, durable: bool = True, **details: Any) -> None:
        """Replace `status.json`; see `write_json` for what is not `durable`."""
        self._place.check()
        short = {key: one[:_TEXT] if isinstance(one, str) else one for key, one in details.items()}
        status = {"state": state, "updated": round(time.time(), 3), **short}
        write_json(self.path / "status.json", status, durable=durable)

    def live(self) -> dict[str, Any]:
        """The content of `live.json`; empty when there is none."""
        return read_json(self.path / "live.json") or {}

    def write_live(self, seen: Mapping[str, Any]) -> None:
        """Replace `live.json`, which nothing depends on: it is never synced, and kills leave no litter."""
        self._place.check()
        temporary = self.path / ".tmp-live"
        text = json.dumps({"time": round(time.time(), 3), **seen}, allow_nan=False) + "\n"
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()  # what lies there may be a link, and is never written through
            write_new(temporary, text.encode(), durable=False)
            temporary.replace(self.path / "live.json")
        except OSError as error:
            raise StorageError(f"cannot write {self.path}/live.json: {error.strerror}") from error

    def log_metrics(self, generation: int, line: Mapping[str, Any]) -> None:
        """Append the reduced metrics of one epoch."""
        self._place.check()
        append_line(self.path / f"metrics.{generation}.jsonl", dict(line))

    def log_steps(self, generation: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append points within an epoch, or from which step on older ones do not count."""
        self._place.check()
        append_lines(self.path / f"steps.{generation}.jsonl", lines)

    def log_event(self, generation: int, kind: str, **details: Any) -> None:
        """Append what happened."""
        self._place.check()
        line = {"time": round(time.time(), 3), "kind": kind, **details}
        append_line(self.path / f"events.{generation}.jsonl", line)

    def events(self) -> Iterator[dict[str, Any]]:
        """All events in the order of generations."""
        for generation, path in self.generations("events"):
            for line in read_lines(path):
                yield {**line, "generation": generation}

    def metrics(self) -> list[dict[str, Any]]:
        """One line per epoch: what a later start or a rewind replaced is left out.

        A later generation that logs epoch k makes every older line from epoch k on obsolete.
        """
        kept: list[dict[str, Any]] = []
        for generation, path in self.generations("metrics"):
            for line in read_lines(path):
                if type(line.get("epoch")) is not int:
                    continue
                while kept and kept[-1]["epoch"] >= line["epoch"]:  # they are in ascending order
                    kept.pop()
                kept.append({**line, "generation": generation})
        return kept

    def steps(self) -> list[dict[str, Any]]:
        """Points within epochs by steps of the run: what a later start or a rewind replaced is left out."""
        kept: list[dict[str, Any]] = []
        for _, path in self.generations("steps"):
            for line in read_lines(path):
                after, step = line.get("after"), line.get("step")
                last = after if type(after) is int else step - 1 if type(step) is int else None
                while last is not None and kept and kept[-1]["step"] > last:  # they are in ascending order
                    kept.pop()
                if type(step) is int and isinstance(line.get("metrics"), dict):
                    kept.append(line)
        return kept

    def generations(self, kind: Literal["metrics", "steps", "events"]) -> list[tuple[int, Path]]:
        """The files of a kind by generation, in order: what one start wrote, replaced or not."""
        found = []
        for path in self.path.glob(f"{kind}.*.jsonl"):
            match = _GENERATION_FILE.fullmatch(path.name)
            if match:
                found.append((int(match[2]), path))
        return sorted(found)


def _digest_of(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def without_password(word: str) -> str:
    """A word of the command line, or a line of text, as anybody may read it: without a URL's passwords."""
    return _OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***@", word))


def _directory_at(path: Path, run: Path) -> bool | None:
    """Whether a directory is there (False: something else), None where nothing is."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        if path.is_symlink():
            raise UsageError(
                f"the run directory {run} cannot be made: {path} is a link that leads nowhere; remove the "
                "link or choose another path"
            ) from None
        return None
    except NotADirectoryError:  # a parent is a file, which is said when we come to it
        return None
    except OSError as error:
        kind = UsageError if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else StorageError
        raise kind(f"the run directory {run} cannot be: {error.strerror}; choose another path") from error
