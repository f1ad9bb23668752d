"""No file of a run is a single point of failure: each is damaged, and all verbs and starts do their work."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
import rot_hunt

from torchrelay.errors import DamagedError, FormatError
from torchrelay.metadata.run_directory import RunDirectory

SEED = 20261125
PER_KIND = 2
PER_JOB_FILE = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rot_hunt.make(tmp_path_factory.mktemp("rot") / "run")


def test_the_run_has_every_kind_of_file(made: Path) -> None:
    """What the table of the page names is there to be damaged."""
    found = {rot_hunt.kind_of(name) for name in rot_hunt.files_of(made)}
    assert found == set(rot_hunt.KINDS)


@pytest.mark.parametrize("kind", rot_hunt.KINDS)
def test_a_damaged_file_hinders_nobody(made: Path, kind: str) -> None:
    """Flipped, cut, empty, gone: no traceback, no refusal, nothing untrue; only saved bytes get lost."""
    draw = random.Random(f"{SEED} {kind}")
    names = [name for name in rot_hunt.files_of(made) if rot_hunt.kind_of(name) == kind]
    for harm in draw.sample(sorted(rot_hunt.HARMS), PER_KIND):
        name, at = draw.choice(names), draw.randrange(1 << 40)
        answers = rot_hunt.trial(made, name, harm, at, rot_hunt.QUICK)
        assert not list(answers.wrong(name)), (name, harm, at)


@pytest.mark.parametrize("name", ["run.json", "checkpoints/job.json"])
def test_each_damage_of_an_identity_is_seen(made: Path, name: str, tmp_path: Path) -> None:
    """Whatever bit of it flips, wherever it is cut: who the run is stays known, and damage is named."""
    draw = random.Random(SEED)
    run = Path(rot_hunt.copy_of(made, tmp_path))
    whole, identity = (run / name).read_bytes(), RunDirectory(made).identity()
    assert identity is not None
    for harm in ("flip", "cut"):
        for _ in range(PER_JOB_FILE // 2):
            rot_hunt.HARMS[harm](run / name, draw.randrange(1 << 40))
            answers = rot_hunt.ask(run, ("show", "ckpt verify"), start=False)
            told = answers.said["show" if name == "run.json" else "ckpt verify"]
            seen = Path(name).name in told or _same_text((run / name).read_bytes(), whole)
            assert not list(answers.wrong(name)) and seen, (harm, told)
            (run / name).write_bytes(whole)


def test_no_flipped_bit_of_an_identity_passes_for_another(made: Path, tmp_path: Path) -> None:
    """Each single bit of run.json, also those of the names of its entries: refused, or what was written."""
    run = RunDirectory(rot_hunt.copy_of(made, tmp_path))
    whole, identity = (run.path / "run.json").read_bytes(), run.identity()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (run.path / "run.json").write_bytes(data)
        with contextlib.suppress(DamagedError, FormatError):
            assert run.identity() == identity, bytes(data)


def _same_text(data: bytes, whole: bytes) -> bool:
    """Whether nothing but white space at the end was lost."""
    return data.rstrip() == whole.rstrip()
