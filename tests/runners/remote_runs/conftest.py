"""What all tests of runs in stores need."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from stored_jobs import Hosts


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Hosts, of which this process is on one."""
    found = Hosts(tmp_path / "hosts", monkeypatch)
    found.on("one")
    return found


@pytest.fixture
def url() -> str:
    """The URL of a run that is not there yet."""
    return f"memory://bucket-{secrets.token_hex(4)}/runs/hello"
