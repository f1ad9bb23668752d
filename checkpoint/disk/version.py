"""The version stamp of every file, and what a reader does with one it does not know.

`{"major": 1, "minor": 0, "features": []}`: another major version, or a feature that this version
does not have, is refused; a higher minor version only adds keys, which are kept and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.errors import DamagedError, FormatError

MAJOR = 1
MINOR = 0
PLACES = "places"
"""In manifests of positions with a step: who ignores where the nodes were would train wrongly from there."""
GRADIENTS = "gradients"
"""In manifests with gradients of an open window: who ignores them would train wrongly from there."""
FEATURES: frozenset[str] = frozenset({PLACES, GRADIENTS})


def stamp(features: Iterable[str] = ()) -> Json:
    """The stamp for a file that needs these features to be read."""
    return {"major": MAJOR, "minor": MINOR, "features": sorted(features)}


def check_stamp(found: Json, *, what: str) -> None:
    """Refuse a stamp that this version cannot read: FormatError, or DamagedError if it is no stamp."""
    if not isinstance(found, dict):
        raise DamagedError(f"{what}: no format version")
    major, minor, features = found.get("major"), found.get("minor"), found.get("features")
    if type(major) is not int or type(minor) is not int or not _is_names(features):
        raise DamagedError(f"{what}: no valid format version: {found!r}")
    if major != MAJOR:
        raise FormatError(
            f"{what} has format version {major}.{minor}; this torchrelay reads {MAJOR}.x: {_REMEDY}"
        )
    if unknown := sorted(set(features or ()) - FEATURES):
        raise FormatError(
            f"{what} needs {', '.join(unknown)}, which this torchrelay does not know: {_REMEDY}"
        )


_REMEDY = "use the version that wrote it, or a newer one"


def _is_names(features: Json) -> bool:
    return isinstance(features, list) and all(isinstance(name, str) for name in features)
