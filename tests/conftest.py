"""What all tests need before anything imports torch."""

from __future__ import annotations

import os

# One thread, as in the launched programs whose results are compared with this process's, bit by bit.
os.environ["OMP_NUM_THREADS"] = "1"
# torch asks the name service about each connection of its store: an answer that is lost costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Have figures printed at the end of the run, whatever process the test ran in."""
    return lambda text: record_property("told", text)


@pytest.fixture(autouse=True, scope="session")
def each_start_stands_for_a_process() -> None:
    """A test that trains again does so as a new process would: no signal of an earlier start is known."""
    from torchrelay.runners.session import stop_requests

    stop_requests._announced = deque(maxlen=0)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a verb in this process; returns its code, stdout and stderr."""
    from torchrelay.tools.cli.main import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def durations() -> dict[str, float]:
    """Seconds by test or file, as durations.txt has them."""
    lines = Path(__file__).with_name("durations.txt").read_text().splitlines()
    rows = (line.split() for line in lines if not line.startswith("#"))
    return {name: float(secs) for secs, name in rows}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long as slow; the longest files first: a late one would keep one worker busy alone."""
    known, secs = durations(), Counter[str]()
    for name, taken in known.items():
        secs[name.partition("::")[0]] += taken
    for item in items:
        name = item.nodeid.partition("[")[0]
        if known.keys() & {item.nodeid, name, name.partition("::")[0]}:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -secs[item.nodeid.partition("::")[0]])


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
