"""The parts of scripts/release-check that decide, on wheels and interpreters made here."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import interpreters
import pytest
import wheels

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
FIELDS = "\n".join(f"{field}: some" for field in wheels.FIELDS)
GOOD = {
    "torchrelay/py.typed": "",
    **{f"torchrelay/{room}/__init__.py": "" for room in wheels.OURS},
    "torchrelay-1.dist-info/licenses/LICENSE": "text",
    "torchrelay-1.dist-info/METADATA": f"Metadata-Version: 2.4\n{FIELDS}\n\n" + "described " * 60,
    "torchrelay-1.dist-info/RECORD": "",
}


def made(path: Path, files: dict[str, str]) -> Path:
    """A wheel with these files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_good_wheel_has_no_complaints(tmp_path: Path) -> None:
    """Typed, licensed, described, all rooms and nothing else."""
    assert list(wheels.complaints(made(tmp_path / "good.whl", GOOD))) == []


@pytest.mark.parametrize(
    ("less", "more", "told"),
    [
        ("torchrelay/py.typed", "", "py.typed"),
        ("torchrelay/jobs/__init__.py", "", "room jobs"),
        ("torchrelay-1.dist-info/licenses/LICENSE", "", "licence"),
        ("", "tests/test_one.py", "'tests'"),
        ("", "benchmarks/run", "'benchmarks'"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told(tmp_path: Path, less: str, more: str, told: str) -> None:
    """A file that is missing, and one that would land in site-packages."""
    files = {name: text for name, text in GOOD.items() if name != less} | ({more: ""} if more else {})
    (complaint,) = wheels.complaints(made(tmp_path / "bad.whl", files))
    assert told in complaint


def test_wheels_are_compared_by_their_bytes(tmp_path: Path) -> None:
    """One changed byte of a module is another wheel; RECORD, which follows from the rest, is none."""
    one = wheels.contents(made(tmp_path / "one.whl", GOOD))
    assert wheels.contents(made(tmp_path / "two.whl", GOOD | {"torchrelay-1.dist-info/RECORD": "x"})) == one
    assert wheels.contents(made(tmp_path / "three.whl", GOOD | {"torchrelay/py.typed": "x"})) != one


def test_an_interpreter_is_what_it_says_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named one of another version is not taken, pyenv's newest patch is, and what is not there is None."""
    assert interpreters.find(HERE, {HERE: Path(sys.executable)}) == Path(sys.executable)
    assert interpreters.find("3.99", {"3.99": Path(sys.executable)}) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for patch in ("2", "10"):
        folder = tmp_path / f"versions/{HERE}.{patch}/bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    assert interpreters.find(HERE, {}) == tmp_path / f"versions/{HERE}.10/bin/python"
    assert interpreters.find("3.99", {}) is None
