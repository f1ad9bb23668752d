"""The script of a process, and the directory that is taken for its source."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from source_trees import fill

from torchrelay.metadata.code import snapshot
from torchrelay.metadata.code.snapshot import Script


def seen(
    monkeypatch: pytest.MonkeyPatch, file: Path | str | None, module: str | None = None
) -> Script | None:
    """What is found in a process that was started so."""
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = str(file)
    main.__spec__ = ModuleSpec(module, None) if module else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    return snapshot.main_script()


def test_scripts_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's directory; of a module that of its outermost package."""
    fill(tmp_path, {"train.py": "", "pkg/train.py": "", "pkg/__main__.py": "", "pkg/a/b.py": ""})
    for file, module, name in (
        ("train.py", None, "train.py"),
        ("train.py", "train", "train.py"),
        ("pkg/train.py", "pkg.train", "pkg/train.py"),
        ("pkg/__main__.py", "pkg.__main__", "pkg/__main__.py"),
        ("pkg/a/b.py", "pkg.a.b", "pkg/a/b.py"),
    ):
        found = seen(monkeypatch, tmp_path / file, module)
        assert found is not None
        assert (found.root.path, found.root.only, found.name) == (tmp_path, None, name)


def test_a_script_in_the_home_directory_is_its_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home is nobody's project: the script alone is taken."""
    fill(tmp_path, {"train.py": "", "other.py": ""})
    monkeypatch.setenv("HOME", str(tmp_path))
    found = seen(monkeypatch, tmp_path / "train.py")
    assert found is not None
    assert found.root.only == ("train.py",)


def test_no_script_of_a_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, standard input, an installed program and one of our own have none."""
    for file in (None, "<stdin>", tmp_path / "gone.py", pytest.__file__, snapshot.__file__):
        assert seen(monkeypatch, file) is None
