"""Open a path or URL as a storage or file system; define the `Tier` option and a read counter."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass as python_dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.storage.base import (
    Memory,
    ReadHandle,
    SingleWriter,
    Storage,
    open_for_reading,
    worth_of_a_request,
)
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import UsageError, install_command
from torchrelay.jobs.runtime import local_directory

if TYPE_CHECKING:
    from torchrelay.checkpoint.storage.object_store import ObjectStorage


_S3 = ("s3", "s3a")
_SFTP = ("sftp", "ssh")
_AZURE = ("az", "abfs", "abfss")
_AZURE_SECS = {"connection_timeout": 10, "read_timeout": 20}
_FEATURES = {
    "s3": "s3", "s3a": "s3", "sftp": "sftp", "ssh": "sftp", "az": "azure", "abfs": "azure", "abfss": "azure",
    "gs": "gcs", "gcs": "gcs",
}  # fmt: skip
"""The feature of `errors.PACKAGES` that a protocol needs."""


def is_url(text: str) -> bool:
    """Whether a text is a URL."""
    return "://" in text


def shown(url: str) -> str:
    """A URL for display: without the part before an `@` in its host, which may contain a password."""
    protocol, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, name = host.rpartition("@")
    if not at:
        return url
    return f"{protocol}{mark}{user.partition(':')[0]}:***@{name}{slash}{path}"


def open_file_system(url: str, what: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it; sends no request.

    Endpoint and credentials come from the environment (`AWS_*`, `FSSPEC_*`) and fsspec's own files. Raises
    UsageError, naming the URL as `what`, for an invalid one, and for a missing package.
    """
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in url):
        raise UsageError(f"{what} {shown(url)!r} has control characters: choose another URL")
    if "::" in url:
        raise UsageError(f"{what} {shown(url)!r} chains file systems: give the store itself")
    protocol = url.partition("://")[0]
    try:
        system, root = _sftp(url) if protocol in _SFTP else _by_fsspec(url, protocol)
    except ImportError as error:
        feature = _FEATURES.get(protocol)
        remedy = f" ({install_command(feature)})" if feature else ""
        raise UsageError(
            f"{what} {shown(url)!r} needs a package that is not installed{remedy}: {_without(url, error)}"
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{what} {shown(url)!r} cannot be opened: {_without(url, error)}; give a path, or s3://bucket/..."
        ) from error
    root = str(root).rstrip("/")
    if not root.strip("/"):
        raise UsageError(
            f"{what} {shown(url)!r} names no place in the store: give {protocol}://bucket/directory"
        )
    return system, root


def _by_fsspec(url: str, protocol: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # imported late: local paths need none of it

    # not a cached instance: the environment may have changed
    system, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **_options(protocol))
    if protocol in _S3:
        system.retries = 1
    return system, str(root)


def _sftp(url: str) -> tuple[Any, str]:
    """The SFTP file system; variables set after fsspec's import, which reads them, are read here."""
    from fsspec.config import conf, set_conf_env
    from fsspec.utils import infer_storage_options

    from torchrelay.checkpoint.storage.sftp import SftpFileSystem

    stated = infer_storage_options(url)
    path = stated.pop("path")
    del stated["protocol"]
    now: dict[str, dict[str, Any]] = {}
    set_conf_env(now, {name: text for name, text in os.environ.items() if name.startswith("FSSPEC_SFTP")})
    options = {**now.get("sftp", {}), **conf.get("sftp", {}), **stated}
    if not options.get("host"):
        raise ValueError("it names no host")
    if "port" in options:
        options["port"] = int(options["port"])
    return SftpFileSystem(**options), path


def _options(protocol: str) -> dict[str, Any]:
    """Options of a client, unless the user's configuration sets them.

    Retries are made here only. Botocore's own use Python's global random stream, and retries in several
    layers multiply; Azure's client would wait for minutes.
    """
    from fsspec.config import conf

    if protocol in _S3:
        given = conf.get(protocol, {}).get("config_kwargs", {})
        return {"config_kwargs": {**given, "retries": {"max_attempts": 0}}}
    if protocol in _AZURE:
        given = {**conf.get("abfs", {}), **conf.get("az", {}), **conf.get(protocol, {})}
        return {name: secs for name, secs in _AZURE_SECS.items() if name not in given}
    return {}


def _without(url: str, error: Exception) -> str:
    return str(error).strip().replace(url, shown(url))


FILE = "file://"


def storage_of(
    where: str | os.PathLike[str], what: str, single_writer: SingleWriter = None
) -> LocalStorage | ObjectStorage:
    """The storage of a path or URL; accesses nothing. Raises UsageError, naming it as `what`."""
    if is_remote(where):
        from torchrelay.checkpoint.storage.object_store import ObjectStorage

        return ObjectStorage.open(str(where), what, single_writer)
    path = where.removeprefix(FILE) if isinstance(where, str) else where
    return LocalStorage(local_directory(path, what), single_writer=single_writer)


def is_remote(where: object) -> bool:
    """Whether a path or URL is in a store."""
    return isinstance(where, str) and is_url(where) and not where.startswith(FILE)


def object_at(url: str, what: str) -> tuple[ObjectStorage, str]:
    """The storage of a URL's parent, and the name in it. Raises UsageError, naming the URL as `what`."""
    parent, _, name = url.rpartition("/")
    if not name or parent.endswith((":/", ":")):
        raise UsageError(f"{shown(url)!r} names no file: give one below a bucket or directory")
    from torchrelay.checkpoint.storage.object_store import ObjectStorage

    return ObjectStorage.open(parent, what), name


def joined(place: str, name: str) -> str:
    """A name below a directory or URL, in the same form."""
    if is_url(place):
        return f"{place.rstrip('/')}/{name}"
    return os.path.join(place, name)  # noqa: PTH118 - as the user wrote it


class CountingStorage:
    """Passes all calls to `storage`; `bytes_read` and `reads` count what was read."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.url = storage, storage.url
        self.bytes_read = self.reads = 0
        self._lock = threading.Lock()
        self.open_exclusive, self.link_exclusive = storage.open_exclusive, storage.link_exclusive
        self.replace, self.mkdir, self.sync_dir = storage.replace, storage.mkdir, storage.sync_dir
        self.stat, self.delete, self.list = storage.stat, storage.delete, storage.list

    @property
    def request_bytes(self) -> int:
        """As of the storage itself."""
        return worth_of_a_request(self.storage)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read and count."""
        data = self.storage.read_range(path, offset, length)
        self.count(len(data))
        return data

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read in place and count."""
        count = self.storage.read_into(path, offset, destination)
        self.count(count)
        return count

    def open_read(self, path: str) -> ReadHandle:
        """A handle whose reads are counted."""
        return _CountedReads(self, open_for_reading(self.storage, path))

    def count(self, nbytes: int) -> None:
        """Count one read."""
        with self._lock:
            self.reads += 1
            self.bytes_read += nbytes


class _CountedReads:
    """An open file whose reads its storage counts."""

    def __init__(self, owner: CountingStorage, opening: AbstractContextManager[ReadHandle]) -> None:
        self._owner = owner
        self._opening = opening
        self._handle = opening.__enter__()

    def read_into(self, offset: int, destination: memoryview, *, once: bool = False) -> int:
        count = self._handle.read_into(offset, destination, once=once)
        self._owner.count(count)
        return count

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        count = self._handle.read_scattered(offset, destinations)
        self._owner.count(count)
        return count

    def close(self) -> None:
        self._opening.__exit__(None, None, None)


NOTES = "tier.json"
"""Name of the file in a local directory that identifies its remote."""


@python_dataclass(frozen=True)
class Tier:
    """Local directory for saves, with background upload to the checkpoints' own place (docs/tier.md).

    Saves are written to `near`, and acknowledged as `local`: they survive the death of the processes, not the
    loss of that disk. They are uploaded in the background, oldest first, and are `replicated` once the remote
    log has them. Hosts share the `near` directory, or have one each on their own disks: then a `local` save
    needs all of these disks.

    Args:
        near: the local directory.
        lag: number of saved positions that may be `local` only. A further save waits until one is replicated.
        patience_secs: seconds after which a waiting save fails. A save before an early exit does not wait.
        drain_secs: seconds that the end of a run waits for uploads; the rest is uploaded at the next launch.
        uploads: number of files that are sent in parallel.

    Raises:
        UsageError: an argument is not a path, a whole number from 1, or seconds from 0.

    Example:
        JobRunner(job, "runs/a", tier=Tier(near="/local/nvme/a", lag=4))
    """

    near: str | os.PathLike[str]
    lag: int = 2
    patience_secs: float = 600.0
    drain_secs: float = 600.0
    uploads: int = 4
    directory: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("lag", "uploads"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise UsageError(f"invalid Tier({name}={count!r:.80}): expected a whole number from 1")
        for name in ("patience_secs", "drain_secs"):
            secs = getattr(self, name)
            if isinstance(secs, bool) or not isinstance(secs, (int, float)) or not 0 <= secs < float("inf"):
                raise UsageError(f"invalid Tier({name}={secs!r:.80}): expected a number of seconds from 0")
        object.__setattr__(self, "directory", Path(local_directory(self.near, "Tier(near=...)")))


def check_tier(given: object) -> Tier | None:
    """The option, checked; raises UsageError."""
    if given is None or isinstance(given, Tier):
        return given
    raise UsageError(f"invalid tier={given!r:.80}: give torchrelay.Tier(near='/local/directory')")
