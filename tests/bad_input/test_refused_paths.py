"""A path that no file can have, or that leads into a file, is a mistake of the user: told by its own name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main

LONG = "a" * 300
ODD = {LONG: "File name too long", "loop": "Too many levels", "loop/x": "Too many levels"}
READS: dict[str, Callable[[str], Any]] = {
    "load_into": lambda path: torchrelay.load_into(path, {"w": torch.ones(3)}),
    "load_blobs": torchrelay.load_blobs,
    "load": torchrelay.load,
    "import": lambda path: torchrelay.import_checkpoint(path, "made", format="safetensors"),
    "open": torchrelay.open_checkpoint,
}
WRITES: dict[str, Callable[[str], Any]] = {
    "save_blobs": lambda path: torchrelay.save_blobs(path, {"w": torch.ones(3)}),
    "import": lambda path: torchrelay.import_checkpoint("there", path, format="safetensors"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to itself, a file, and what can be imported."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").write_text("mine")
    torchrelay.save_blobs("there", {"w": torch.ones(3)})


@pytest.mark.parametrize("path", ODD, ids=["long", "loop", "below a loop"])
@pytest.mark.parametrize("work", [*READS.values(), *WRITES.values()], ids=[*READS, "save_blobs", "import to"])
def test_what_no_path_can_be(work: Callable[[str], Any], path: str) -> None:
    """It is refused with the reason, and never with the name of a temporary file."""
    with pytest.raises(UsageError, match=ODD[path]) as told:
        work(path)
    assert ".tmp" not in str(told.value) and path in str(told.value)


@pytest.mark.parametrize("work", WRITES.values(), ids=WRITES)
def test_a_target_below_a_file(work: Callable[[str], Any]) -> None:
    """The file is named and kept."""
    with pytest.raises(UsageError, match=r"file is a file, not a directory"):
        work("file/x")
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "status"])
def test_verbs_end_with_2(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that nothing can have is a mistake of the command line, not of the disk."""
    assert main([verb, LONG]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told and "give another path" in told
