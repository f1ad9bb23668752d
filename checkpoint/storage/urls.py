"""From a URL to an fsspec file system: opened without any cache of listings."""

from __future__ import annotations

import os
import unicodedata
from typing import Any

from torchrelay.errors import UsageError

_S3 = ("s3", "s3a")
_SFTP = ("sftp", "ssh")
_AZURE = ("az", "abfs", "abfss")
_AZURE_SECS = {"connection_timeout": 10, "read_timeout": 20}
_EXTRAS = {
    "s3": "s3", "s3a": "s3", "sftp": "sftp", "ssh": "sftp", "az": "azure", "abfs": "azure", "abfss": "azure",
    "gs": "gcs", "gcs": "gcs",
}  # fmt: skip
"""What of torchrelay brings the package of a protocol."""


def is_url(text: str) -> bool:
    """Whether a text names a place by a URL."""
    return "://" in text


def protocol_of(url: str) -> str:
    """What stands before `://`."""
    return url.partition("://")[0]


def shown(url: str) -> str:
    """A URL as it may be printed: without what stands before an `@` in its host, which may be a password."""
    protocol, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, name = host.rpartition("@")
    if not at:
        return url
    return f"{protocol}{mark}{user.partition(':')[0]}:***@{name}{slash}{path}"


def open_file_system(url: str, what: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it; asks the store nothing.

    Where it answers and who asks is told by the environment (`AWS_*`, `FSSPEC_*`) and fsspec's own files.
    Raises UsageError, naming the URL as `what`, for one that cannot be, and where its package is missing.
    """
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in url):
        raise UsageError(f"{what} {shown(url)!r} has control characters: choose another URL")
    if "::" in url:
        raise UsageError(f"{what} {shown(url)!r} chains file systems: give the store itself")
    protocol = protocol_of(url)
    try:
        system, root = _sftp(url) if protocol in _SFTP else _by_fsspec(url, protocol)
    except ImportError as error:
        name = _EXTRAS.get(protocol)
        extra = f" (pip install 'torchrelay[{name}]')" if name else ""
        raise UsageError(
            f"{what} {shown(url)!r} needs a package that is not installed{extra}: {_without(url, error)}"
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

    # Not an instance of earlier: the environment may tell another endpoint by now.
    system, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **_options(protocol))
    if protocol in _S3:
        system.retries = 1
    return system, str(root)


def _sftp(url: str) -> tuple[Any, str]:
    """What the URL does not say is in fsspec's configuration for `sftp`; names are those of asyncssh.

    fsspec reads the environment when it is imported, which any library may have done before a program has
    set its variables: what it did not see then is looked for now.
    """
    from fsspec.config import conf, set_conf_env
    from fsspec.utils import infer_storage_options

    from torchrelay.checkpoint.storage.sftp import SftpFileSystem

    told = infer_storage_options(url)
    path = told.pop("path")
    del told["protocol"]
    now: dict[str, dict[str, Any]] = {}
    set_conf_env(now, {name: text for name, text in os.environ.items() if name.startswith("FSSPEC_SFTP")})
    options = {**now.get("sftp", {}), **conf.get("sftp", {}), **told}
    if not options.get("host"):
        raise ValueError("it names no host")
    if "port" in options:
        options["port"] = int(options["port"])
    return SftpFileSystem(**options), path


def _options(protocol: str) -> dict[str, Any]:
    """What is asked of a client, where the user's configuration does not say something else.

    Of S3 the repeating is ours alone: botocore's draws its pauses from Python's global random stream, and
    what several layers repeat takes several times as long. Azure's client would wait for minutes.
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
