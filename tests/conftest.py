"""What all tests need before anything imports torch."""

from __future__ import annotations

import os

# One thread, as in the launched programs whose results are compared with this process's, bit by bit.
os.environ["OMP_NUM_THREADS"] = "1"
# torch asks the name service about each connection of its store: an answer that is lost costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Have figures printed at the end of the run, whatever process the test ran in."""
    return lambda text: record_property("told", text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: the one that begins last would otherwise keep one worker busy after the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have told."""
    reports = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ()))
    told = [
        text for report in reports for name, text in getattr(report, "user_properties", ()) if name == "told"
    ]
    if told:
        terminalreporter.section("figures")
        for text in told:
            terminalreporter.write_line(text)
