"""Two versions of a file, this host's and the store's: which of them goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError
from torchrelay.metadata.fs import open_regular, read_json
from torchrelay.runners.stored_runs.run_names import grows

_PIECE_BYTES = 1 << 20
STATUS = "status.json"


def local_goes_on(name: str, local: Path, brought: Path) -> bool:
    """Whether this host's version has what the store's has, and more, which a lost process had not put.

    Of a file that grows it does where the store's is its beginning; of the status, where it is of a later
    generation, or written later in the same. Of all others the store's counts.
    """
    if local.is_symlink() or not local.is_file():
        return False
    if name == STATUS:
        return _age(local) > _age(brought)
    return grows(name) and _begins_with(local, brought)


def _age(path: Path) -> tuple[float, float]:
    try:
        found: dict[str, Any] = read_json(path) or {}
    except RelayError:
        return (-2.0, 0.0)
    known = [found.get(name) for name in ("generation", "updated")]
    generation, updated = (one if type(one) in (int, float) else -1.0 for one in known)
    return float(generation), float(updated)  # type: ignore[arg-type]


def _begins_with(longer: Path, shorter: Path) -> bool:
    try:
        with open_regular(longer) as one, open_regular(shorter) as other:
            while piece := other.read(_PIECE_BYTES):
                if one.read(len(piece)) != piece:
                    return False
    except OSError:
        return False
    return True
