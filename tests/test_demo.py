"""The demo, as a person starts it, with its output in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from launching import REPOSITORY, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.mark.timeout(200)
def test_the_demo_keeps_its_promises(tmp_path):
    """Killed, resumed, rewound and uninterrupted runs end in equal weights, and 97 % are read right."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts/trials/demo.py", tmp_path / "kept"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out), "control characters in a pipe"
    killed = re.search(r"rank 1 was killed after step (\d+) of 75 in epoch (\d+); torchrun ended with 1", out)
    assert killed and 0 < int(killed[1]) < 75, out
    assert f"resumed from {int(killed[2]) - 1}" in out and "rewound to 2" in out
    hashes = re.findall(r"SHA-256 of the final weights, .*: +([0-9a-f]{64})", out)
    assert len(hashes) == 3 and len(set(hashes)) == 1, out
    rows = re.findall(r"^(\w+) +(\d) +\d\.\d{4} +\d+\.\d\d% +\d+\.\d{3} +\w+", out, re.MULTILINE)
    assert [int(epoch) for run, epoch in rows if run == "uninterrupted"] == list(range(1, 9)), out
    assert [int(epoch) for run, epoch in rows if run == "interrupted"] == list(range(1, 9)), out
    assert [int(epoch) for run, epoch in rows if run == "rewound"] == list(range(3, 9)), out
    assert float(re.search(r"reads (\S+)% of the test digits right", out)[1]) >= 97
    read, model = re.search(r"evaluation read (\S+) bytes for (\S+) bytes of model", out).groups()
    assert int(read.replace(",", "")) <= 1.1 * int(model.replace(",", "")) + 16384, out


def test_the_demo_refuses_a_directory_that_holds_something(tmp_path):
    """Nothing is written where something is already."""
    (tmp_path / "mine").write_text("")
    command = [sys.executable, REPOSITORY / "scripts/trials/demo.py", tmp_path]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "is not empty" in done.stdout, done
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
