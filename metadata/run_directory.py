"""Run directories: identity, status, metrics and events of a run.

    run.json                     identity, written once
    status.json                  state, replaced at every change; how the run ended
    metrics.<generation>.jsonl   reduced metrics, one line per epoch
    steps.<generation>.jsonl     metrics within epochs, one line per step that has some
    events.<generation>.jsonl    what happened, one line per event
    live.json                    progress of the running epoch, every two seconds
    logs/attempt_N/rank_R.log    log of each rank
    trackers/                    files of the built-in trackers
    lineage/                     the stages that the run was built on (lineage.1: of an earlier start)
    captured.<attempt>.json      environment of a launch: arguments, packages, hosts, code id
    code/<code id>.zip           the source, once per code id
    config/                      files of the configuration, if any
    program.json                 identity among the runs of a program, if any
    values.jsonl, results/       individual values and test results of such a run
    exports/                     ONNX files exported during the run
    checkpoints/                 checkpoint directory
    crash/                       state of a process when a task failed, if requested
    replay/                      recorded calls of modules with their outputs
    STOP                         creating this file ends the run

A generation is one holder of the checkpoint log, so files of different launches are separate.
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
from torchrelay.metadata.fs import SamePlace, append_lines, read_json, read_lines, write_json, write_new

State = Literal["RUNNING", "FINISHED", "STOPPED", "PREEMPTED", "FAILED"]
FORMAT = {"major": 1, "minor": 0, "features": []}
_DIGEST = "sha256"
_BEFORE_DIGESTS = {"format", "uuid", "job", "created", "best", "world_size", "command", "python"}
"""Known keys of a file without a digest; a damaged key `sha256` shows as an unknown key."""
_TEXT = 64 << 10
"""Longest reason in `status.json`, in characters."""
_PASSWORD = re.compile(r"(://[^/@:]*:).*@", re.DOTALL)
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^&]*")
MASK = "***"
_WORD = re.compile(r"[A-Z]*[a-z0-9]+|[A-Z]+")
_SECRET = re.compile(
    "_(password|passwd|passphrase|secrets?|credentials?|apikey|(api|access|private|account)_key)_"
)
_TOKENS_OF_TEXT = [[name] for name in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")]
# fmt: off
_OWN_NAMES = frozenset((
    "run.json", "status.json", "live.json", "trackers", "metadata.jsonl", "checkpoints", "logs", "config",
    "code", "exports", "lineage", "program.json", "results", "values.jsonl", "crash", "replay", "STOP",
))
# fmt: on
_GENERATION_FILE = re.compile(r"(metrics|steps|events)\.([0-9]+)\.jsonl")


class RunDirectory:
    """The files of one run; a remote run has a `url`, and its small files are mirrored at `path`."""

    def __init__(self, path: str | Path, url: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.url = url
        self._place = SamePlace(self.path)

    @property
    def where(self) -> Path | str:
        """Location of the run as shown to users: its directory, or its URL."""
        return self.url or self.path

    @property
    def checkpoints(self) -> Path | str:
        """Location of its checkpoints, a directory or a URL."""
        return self.path / "checkpoints" if self.url is None else f"{self.url}/checkpoints"

    @property
    def stop_file(self) -> Path:
        """File whose creation ends the run."""
        return self.path / "STOP"

    @property
    def name(self) -> str:
        """Name of the run, which is that of its directory."""
        return self.path.name

    def check_usable(self) -> None:
        """Raise UsageError for a path that cannot be a run directory, before creating anything."""
        if self.path == Path(self.path.anchor):
            raise UsageError(
                f"the run directory {self.path} is the root of the file system: choose a path below it"
            )
        for path in (self.path, *self.path.parents):
            try:
                is_file = not stat.S_ISDIR(path.stat().st_mode)
            except NotADirectoryError:  # a parent is a file
                continue
            except FileNotFoundError:
                if not path.is_symlink():
                    continue
                raise UsageError(
                    f"the run directory {self.path} cannot be created: {path} is a dangling link; remove it"
                ) from None
            except OSError as error:
                kind = UsageError if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else StorageError
                why = f"invalid run directory {self.path}: {error.strerror}; choose another path"
                raise kind(why) from error
            if is_file:
                which = "is" if path == self.path else f"cannot be created: {path} is"
                raise UsageError(f"the run directory {self.path} {which} a file: choose another path")
            return

    def create(
        self,
        job_name: str,
        best: tuple[str, str] | None,
        world_size: int,
        known: str | None = None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> dict[str, Any]:
        """Write `run.json` unless the run exists, and return its content; UsageError for another job.

        `best` is a metric and its direction. `known` is the run's id in its epochs, if any: a damaged file is
        rewritten with it, after a warning.
        """
        found, damage = None, f"{self.where}/run.json is missing" if known else ""
        try:
            found = self.identity()
        except DamagedError as error:
            damage = str(error)
        if found is not None:
            self._check_same_job(found, job_name)
            now = list(best) if best else None  # of the current program, not part of the identity
            if found.get("best") != now:
                found = {**found, "best": now}
                self.write_identity(found)
            return found
        identity = {
            "format": FORMAT,
            "uuid": known or uuid.uuid4().hex,
            "job": job_name,
            "created": round(time.time(), 3),
            "best": list(best) if best else None,
            "world_size": world_size,
            "command": command_words(),
            "python": platform.python_version(),
        }
        try:
            made = self.path / "checkpoints" if self.url is None else self.path
            made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot create the run directory {self.path}: {error.strerror}; "
                "choose a writable directory with free space"
            ) from error
        if damage:
            whose = "the id of its epochs" if known else "a new id"
            warn(f"{damage}; it was rewritten with {whose}")
        self.write_identity(identity)
        return identity

    def write_identity(self, identity: Mapping[str, Any]) -> None:
        """Write `run.json` with a digest of its content."""
        write_json(self.path / "run.json", {**identity, _DIGEST: _digest_of(identity)})

    def strangers(self) -> list[str]:
        """Return foreign names in the directory of a new run; empty for an existing run."""
        if not self.path.is_dir() or (self.path / "run.json").exists():
            return []
        begins = (".probe-", ".tmp-", ".torchrelay-", "captured.")
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if name not in _OWN_NAMES and not name.startswith(begins)]

    def identity(self) -> dict[str, Any] | None:
        """Read `run.json`; None if it does not exist."""
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
            raise DamagedError(f"{self.where}/run.json is damaged: it is not the identity of a run")
        return found

    def known_identity(self, warn: Callable[[str], object] = str) -> dict[str, Any]:
        """Read `run.json` for display: empty if it is missing, or damaged (calls `warn`)."""
        return _known(self.identity, warn)

    def check_job(self, job_name: str | None) -> None:
        """Raise UsageError if the directory holds a run of another job; None means the directory's name."""
        found = self.known_identity()
        if found:
            self._check_same_job(found, job_name or self.name)

    def _check_same_job(self, identity: Mapping[str, Any], job_name: str) -> None:
        if identity.get("job") != job_name:
            raise UsageError(
                f"{self.where} holds a run of job {identity.get('job')!r}, not {job_name!r}: "
                "use another run directory"
            )

    def status(self) -> dict[str, Any]:
        """Read `status.json`; empty if there is none."""
        return read_json(self.path / "status.json") or {}

    def known_status(self, warn: Callable[[str], object] = str) -> dict[str, Any]:
        """Read `status.json` for display: also empty if it is damaged (calls `warn`)."""
        return _known(self.status, warn)

    def write_status(self, state: State, *, durable: bool = True, **details: Any) -> None:
        """Write `status.json`; see `write_json` for `durable`."""
        self._place.check()
        short = {key: one[:_TEXT] if isinstance(one, str) else one for key, one in details.items()}
        status = {"state": state, "updated": round(time.time(), 3), **short}
        write_json(self.path / "status.json", status, durable=durable)

    def live(self) -> dict[str, Any]:
        """Read `live.json`; empty if there is none."""
        return read_json(self.path / "live.json") or {}

    def write_live(self, seen: Mapping[str, Any]) -> None:
        """Write `live.json`, which is only informative: never synced, without temporary files."""
        self._place.check()
        temporary = self.path / ".tmp-live"
        text = json.dumps({"time": round(time.time(), 3), **seen}, allow_nan=False) + "\n"
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()  # never write through an existing link
            write_new(temporary, text.encode(), durable=False)
            temporary.replace(self.path / "live.json")
        except OSError as error:
            raise StorageError(f"cannot write {self.path}/live.json: {error.strerror}") from error

    def log_metrics(self, generation: int, line: Mapping[str, Any]) -> None:
        """Append the reduced metrics of one epoch."""
        self._place.check()
        append_lines(self.path / f"metrics.{generation}.jsonl", dict(line))

    def log_steps(self, generation: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append points within an epoch, or the step from which older points are obsolete."""
        self._place.check()
        append_lines(self.path / f"steps.{generation}.jsonl", *lines)

    def log_event(self, generation: int, kind: str, **details: Any) -> None:
        """Append an event."""
        self._place.check()
        line = {"time": round(time.time(), 3), "kind": kind, **details}
        append_lines(self.path / f"events.{generation}.jsonl", line)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events in the order of generations."""
        for generation, path in self.generations("events"):
            for line in read_lines(path):
                yield {**line, "generation": generation}

    def metrics(self) -> list[dict[str, Any]]:
        """Return one line per epoch; a later generation makes older lines from its epoch on obsolete."""
        kept: list[dict[str, Any]] = []
        for generation, path in self.generations("metrics"):
            for line in read_lines(path):
                if type(line.get("epoch")) is not int:
                    continue
                while kept and kept[-1]["epoch"] >= line["epoch"]:  # in ascending order
                    kept.pop()
                kept.append({**line, "generation": generation})
        return kept

    def steps(self) -> list[dict[str, Any]]:
        """Return points within epochs by step, without those replaced by a later launch or a rewind."""
        kept: list[dict[str, Any]] = []
        for _, path in self.generations("steps"):
            for line in read_lines(path):
                after, step = line.get("after"), line.get("step")
                last = after if type(after) is int else step - 1 if type(step) is int else None
                while last is not None and kept and kept[-1]["step"] > last:  # in ascending order
                    kept.pop()
                if type(step) is int and isinstance(line.get("metrics"), dict):
                    kept.append(line)
        return kept

    def generations(self, kind: Literal["metrics", "steps", "events"]) -> list[tuple[int, Path]]:
        """Yield the lines of a kind of file by generation, in order, including replaced ones."""
        matches = {path: _GENERATION_FILE.fullmatch(path.name) for path in self.path.glob(f"{kind}.*.jsonl")}
        return sorted((int(match[2]), path) for path, match in matches.items() if match)


class CheckpointsAlone(RunDirectory):
    """Checkpoints that no run wrote, such as those of another trainer: only their epochs are known."""

    @property
    def checkpoints(self) -> Path | str:
        """The directory itself."""
        return self.where


def _digest_of(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def without_password(word: str) -> str:
    """Mask passwords of URLs in a text."""
    return _OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***@", word))


def names_secret(name: str) -> bool:
    """Return True for `password`, `apiKey` or `hub_token`; not for `max_tokens` or `eos_token`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _SECRET.search("_".join(["", *words, ""])):
        return True
    return words[-1:] == ["token"] and words[-2:-1] not in _TOKENS_OF_TEXT


def command_words() -> list[str]:
    """Return the command line of this process; passwords of URLs and values of secret options are masked."""
    found, hides = [], False
    for word in sys.argv:
        name, has_value, _ = word.partition("=")
        is_option = word.startswith("-")
        if has_value and names_secret(name):
            found.append(f"{name}={MASK}")
        else:
            found.append(MASK if hides and not is_option else without_password(word))
        hides = is_option and not has_value and names_secret(name)
    return found


def _known(read: Callable[[], dict[str, Any] | None], warn: Callable[[str], object]) -> dict[str, Any]:
    try:
        return read() or {}
    except DamagedError as error:
        warn(f"{error}; the next launch, or torchrelay ckpt repair, rewrites it")
        return {}
