"""What a killed writer of an archive or a blob file left goes with the next save, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrelay
from torchrelay.checkpoint.files import publish
from torchrelay.checkpoint.files.publish import sweep, temporary_beside

_WRITES = """
import sys, torch, torchrelay
from torchrelay.checkpoint.files import publish

def stop(*given, **options):
    print("there", flush=True)
    sys.stdin.readline()
    real(*given, **options)

real, publish._name = publish._name, stop
if sys.argv[1] == "archive":
    torchrelay.save_states(sys.argv[2], torch.nn.Linear(300, 300))
else:
    torchrelay.save_blobs(sys.argv[2], {"w": torch.ones(1000)})
"""


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".tmp-*"))


def writer(kind: str, path: Path) -> subprocess.Popen[str]:
    """A process that has written its file, and waits before it gives it its name."""
    made = subprocess.Popen(
        [sys.executable, "-c", _WRITES, kind, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stdout is not None and made.stdout.readline() == "there\n"
    return made


def save(kind: str, path: Path) -> None:
    if kind == "archive":
        torchrelay.save_states(path, torch.nn.Linear(2, 2), overwrite=True)
    else:
        torchrelay.save_blobs(path, {"w": torch.ones(2)}, overwrite=True)


@pytest.mark.parametrize("kind", ["archive", "blobs"])
def test_what_a_killed_writer_left_goes_with_the_next_save(tmp_path: Path, kind: str) -> None:
    """Kill -9 in a save leaves its hidden file; the next save of that path takes it away, of another not."""
    path = tmp_path / "model.file"
    killed, living = writer(kind, path), writer(kind, path)
    assert len(hidden(tmp_path)) == 2
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    save(kind, tmp_path / "another.file")
    assert len(hidden(tmp_path)) == 2, "what is of another path stays"
    save(kind, path)
    (left,) = hidden(tmp_path)
    assert f"-{living.pid}-" in left.name, "that of a living writer stays"
    path.unlink()
    living.communicate("go on\n", timeout=60)
    assert living.returncode == 0 and path.stat().st_size > 4000, "which ends its save"
    assert hidden(tmp_path) == []


def test_of_processes_that_cannot_be_seen_only_what_is_old_goes(tmp_path: Path) -> None:
    """A name of another host or boot, though no such process is here, goes after a week without a change."""
    path = tmp_path / "model.zip"
    mine = temporary_beside(path)
    parts = mine.name.split("-")
    unseen = [
        mine.with_name("-".join([*parts[:2], place, "1", "1", f"{n}a"])) for n, place in enumerate("0ab")
    ]
    folder = mine.with_name("-".join([*parts[:2], "c", "1", "1", "3a"]))
    folder.mkdir()
    (folder / "inside").touch()
    others = [tmp_path / name for name in (".tmp-0123456789abcdef", ".tmp-x-0-1-1-0a", "model.zip.1")]
    for one in (mine, *unseen, *others):
        one.touch()
    sweep(path)
    assert all(one.exists() for one in (mine, *unseen, folder, *others))
    old = tmp_path.stat().st_mtime - publish.UNSEEN_SECS - 60
    for one in (mine, unseen[0], folder / "inside", folder, *others):
        os.utime(one, (old, old))
    sweep(path)
    assert mine.exists(), "this process lives, however long it takes"
    assert [one.exists() for one in (*unseen, folder)] == [False, True, True, False]
    assert all(one.exists() for one in others)


def test_a_pid_that_another_process_has_by_now_is_seen(tmp_path: Path) -> None:
    """A process is its pid and when it started."""
    mine = temporary_beside(tmp_path / "model.zip")
    *begin, _, nonce = mine.name.split("-")
    another = mine.with_name("-".join([*begin, "1", nonce]))
    for one in (mine, another):
        one.touch()
    sweep(tmp_path / "model.zip")
    assert mine.exists() and not another.exists()
