"""How large an object is, by one request where a client of fsspec makes several."""

from __future__ import annotations

from typing import Any


def size_of(system: Any, name: str) -> int | None:
    """The size of a file; None for a directory. Raises FileNotFoundError and what the client raises.

    s3fs, which looks for directories, too, lists what may lie below a name that nothing has; a store is
    asked for hundreds of these.
    """
    if hasattr(system, "call_s3"):
        bucket, key, _ = system.split_path(name)
        return int(system.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])
    found = system.info(name)
    return int(found["size"]) if found.get("type") == "file" else None
