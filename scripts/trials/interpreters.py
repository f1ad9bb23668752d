"""Find the Python interpreters of this machine: those named, those on PATH, those of pyenv."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


def find(version: str, named: Mapping[str, Path]) -> Path | None:
    """An interpreter that says it is of a version such as `3.13`; None where there is none."""
    if version in named:
        return named[version] if version_of(named[version]) == version else None
    return next((path for path in _places(version) if version_of(path) == version), None)


def version_of(python: Path) -> str:
    """What an interpreter says of itself; empty for what does not start."""
    try:
        told = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def _places(version: str) -> Iterator[Path]:
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # The newest patch first; pyenv's own shims answer only for versions that were chosen.
    numbered = sorted(root.glob(f"versions/{version}.*"), key=_patch, reverse=True)
    yield from (one / "bin/python" for one in numbered)


def _patch(folder: Path) -> int:
    patch = folder.name.rpartition(".")[2]
    return int(patch) if patch.isdigit() else -1
