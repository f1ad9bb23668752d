"""Many epochs in one run: what the process and its directory hold does not grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import soak
from samples import sample
from screen import Screen


@pytest.mark.slow
def test_nothing_grows(tmp_path: Path, tell: Callable[[str], None], capsys) -> None:
    """Many epochs of which three stay, with one kill: nothing lost, no more tries, descriptors, threads."""
    epochs = sample(100, 300)
    wrong = soak.soak(tmp_path, epochs, 1, seed=3, asynchronous=True, screen=Screen())
    tell(f"soak, {epochs} epochs: " + capsys.readouterr().out.strip().splitlines()[-1])
    assert not wrong


def test_growth_is_seen() -> None:
    """Memory that grows by 3 MiB in 1,000 epochs, descriptors and tries that pile up are reported."""
    lines = [
        {"pid": 1, "epoch": epoch, "rss": 3 * epoch * soak.MIB // 1000, "files": epoch // 40, "threads": 1}
        for epoch in range(0, 1000, 20)
    ]
    (stay,) = soak.stays(lines)
    assert 2.9 < stay.rss_mib_per_1000 < 3.1 and stay.files == (2, 24) and stay.epochs == 900
