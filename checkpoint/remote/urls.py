"""From a URL to an fsspec file system: opened without any cache of listings."""

from __future__ import annotations

import unicodedata
from typing import Any

from torchrelay.errors import UsageError

_S3 = ("s3", "s3a")


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
    from fsspec.core import url_to_fs  # imported late: local paths need none of it

    try:
        # Not an instance of earlier: the environment may tell another endpoint by now.
        system, root = url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **_options(protocol)
        )
    except ImportError as error:
        extra = " (pip install 'torchrelay[s3]')" if protocol in _S3 else ""
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


def _options(protocol: str) -> dict[str, Any]:
    """Of S3 the repeating is ours alone: botocore's draws its pauses from Python's global random stream."""
    if protocol not in _S3:
        return {}
    from fsspec.config import conf

    given = conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {**given, "retries": {"max_attempts": 0}}}


def _without(url: str, error: Exception) -> str:
    return str(error).strip().replace(url, shown(url))
