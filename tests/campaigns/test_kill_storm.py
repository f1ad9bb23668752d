"""A small kill storm of every kind, and proof that its checks would notice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from launching import REPOSITORY, clean_environment
from samples import sample
from storm_checks import Findings, Watched, check_disk, check_end, check_start, fingerprints

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Watched:
    """A run of the storm's job in one process, in peace."""
    root = tmp_path_factory.mktemp("undisturbed")
    watched = Watched(root / "run", root)
    job = REPOSITORY / "scripts/trials/storm_job.py"
    command = [sys.executable, job, watched.run, watched.outside]
    subprocess.run(command, env=clean_environment(), check=True, capture_output=True, timeout=100)
    return watched


def storm(*options: str) -> str:
    command = [sys.executable, REPOSITORY / "scripts/trials/kill_storm.py", *options]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kills_lose_nothing(tmp_path):
    """SIGKILLs at random moments: 0 epochs lost, 0 mixtures, every restart continues the newest."""
    kills = sample(3, 6)
    out = storm("--kills", str(kills), "--seed", "5")
    assert f"kills {kills}, runs finished" in out and "committed epochs lost: 0" in out, out
    assert "mixtures: 0" in out and "not from the newest epoch: 0" in out, out
    assert int(re.search(r"epochs verified (\d+)", out)[1]) >= sample(2, 5), out


def test_kills_under_torchrun_and_its_restarts(tmp_path):
    """The same when torchrun restarts the ranks by itself."""
    kills = sample(1, 2)
    out = storm("--kills", str(kills), "--seed", "2", "--launcher", "torchrun", "--restarts", "3")
    assert f"kills {kills}, runs finished" in out and "committed epochs lost: 0" in out, out


def test_kills_across_two_hosts():
    """Kills of ranks, agents and whole hosts: nothing is lost, and the survivors end by themselves."""
    why = hosts.why_not()
    if why is not None:
        pytest.skip(why)
    kills = sample(2, 4)
    out = storm("--kills", str(kills), "--seed", "3", "--hosts", "2")
    assert f"kills {kills}, runs finished" in out and "committed epochs lost: 0" in out, out
    assert "mixtures: 0" in out and "not from the newest epoch: 0" in out, out


def test_an_undisturbed_run_has_no_findings(undisturbed):
    """The checks of the storm find nothing where nothing is wrong."""
    findings = findings_of(undisturbed, fingerprints(undisturbed))
    assert findings.good and findings.epochs_proved == 5 and findings.restarts == 1


def test_the_checks_notice_what_they_look_for(undisturbed, tmp_path):
    """A lost epoch, a flipped bit, other content and a wrong start are violations."""
    reference = fingerprints(undisturbed)
    ahead = Watched(undisturbed.run, tmp_path)
    (tmp_path / "oracle").write_text(json.dumps({"epoch": 9}) + "\n")
    (tmp_path / "starts").write_text(json.dumps({"pid": 1, "epoch": 3}) + "\n")
    found = findings_of(ahead, {**reference, 2: "other"})
    assert any("acknowledged up to 9" in text for text in found.lost)
    assert any("epoch 2 differs" in text for text in found.mixed)
    assert found.not_newest and found.other_end
    flip_a_bit(next((undisturbed.run / "checkpoints/data").glob("e00000003-*/trainer_0.3.main.safetensors")))
    assert any("epoch 3 is damaged" in text for text in findings_of(undisturbed, reference).mixed)


def findings_of(watched: Watched, reference: dict[int, str]) -> Findings:
    findings = Findings()
    check_disk(watched, reference, findings, set())
    check_start(watched, None, 0, findings)
    check_end(watched, reference, findings)
    return findings


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
