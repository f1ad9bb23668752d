"""The wheel: what lies in the rooms and nothing else, and it works where the tree is out of sight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without what this process inherited from the tree; its output, or a failed test."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def tracked() -> list[Path]:
    """The files of the repository, those that are not committed yet included."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git, and this is no git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    names = [Path(name) for name in listed.split("\0") if name]
    return [name for name in names if (ROOT / name).exists() or (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files, symbolic links kept."""
    copy = tmp_path_factory.mktemp("clean") / "torchrelay"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(clean: Path) -> Path:
    """A wheel built as a packager would: from a source distribution of the copy."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", clean.parent / "dist", cwd=clean)
    return next((clean.parent / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that has the wheel, and this one's dependencies but not its torchrelay."""
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    # A plain line in a .pth file adds the folder but not the .pth files in it, so no editable install.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def wanted_modules(copy: Path) -> set[str]:
    """The files of the package as they must lie in a wheel built from `copy`."""
    rooms = {f"torchrelay/{one.relative_to(copy)}" for room in ROOMS for one in (copy / room).rglob("*.*")}
    harness = [one for one in (copy / "tests/chaos").rglob("*.*") if one.name != "README.md"]
    rooms |= {f"torchrelay/{one.relative_to(copy / 'tests')}" for one in harness}
    front = {f"torchrelay/{one.name}" for one in (copy / "src/torchrelay").iterdir() if one.is_file()}
    return rooms | front


def test_the_wheel_holds_the_rooms_and_nothing_else(clean: Path, wheel: Path) -> None:
    """Every file of the rooms and of the front door is in the wheel, with py.typed, and nothing generic."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == wanted_modules(clean)
    assert "torchrelay/py.typed" in package
    assert {name.partition("/")[0] for name in package} == {"torchrelay"}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_a_wheel_straight_from_the_tree_is_the_same(clean: Path, wheel: Path) -> None:
    """Building without the source distribution between follows the links to the same files."""
    direct = clean.parent / "direct"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", direct, cwd=clean)
    with zipfile.ZipFile(next(direct.glob("*.whl"))) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_the_source_distribution_has_no_links(clean: Path, wheel: Path) -> None:
    """An unpacked source distribution works on systems without symbolic links."""
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {f"src/{name}" for name in wanted_modules(clean)} <= names


def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`torchrelay --help` and `python -m torchrelay` work where only the wheel is."""
    assert "verify" in run(installed.with_name("torchrelay"), "--help", cwd=tmp_path)
    assert run(installed, "-m", "torchrelay", "--version", cwd=tmp_path).startswith("torchrelay ")


JOB = """
import torch, torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs

assert torchrelay.__file__.startswith({home!r}), torchrelay.__file__
torchrelay.seed(0)
model = torch.nn.Linear(2, 1)
job = Job("wheel", blobs=dict(model=model))

@job.epoch
def train(ctx):
    ctx.log("loss", model(torch.ones(2)).sum())

job.stop_when(max_epochs(2))
with LocalSession() as session:
    result = JobRunner(job, "run").train(session)
print("epoch", int(result))
"""


def test_a_job_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """A small job trains, saves and is proved by what the wheel installed, out of sight of the tree."""
    script = tmp_path / "job.py"
    script.write_text(JOB.format(home=str(installed.parent.parent)))
    assert run(installed, script, cwd=tmp_path).splitlines()[-1] == "epoch 2"
    proved = run(installed.with_name("torchrelay"), "verify", "run", cwd=tmp_path)
    assert proved.splitlines()[-1] == "3 of 3 epochs verified"
