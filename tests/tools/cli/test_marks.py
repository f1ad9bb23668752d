"""`torchrelay tag`, `pin`, `unpin`: names and reasons by which epochs stay, given at any time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kept_job
import pytest
from kept_job import train

from torchrelay import open_checkpoint
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 4."""
    run = tmp_path_factory.mktemp("made") / "run"
    train(run, [0.1, 0.5, 0.3, 0.2])
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_tag_names_an_epoch_until_it_is_taken_away(run: Path, told: Told) -> None:
    """Given, listed, used as a selector and by `open_checkpoint`, moved, which is said, and deleted."""
    assert told("ckpt", "tag", f"{run}@best", "paper")[:2] == (0, "epoch 2 is tagged paper\n")
    assert told("ckpt", "pin", f"{run}@1")[1] == "epoch 1 is pinned as epoch-1-branch-0\n"
    rows = [line.split() for line in told("ckpt", "tag", run)[1].splitlines()[1:]]
    assert rows == [["tag", "paper", "2", "0"], ["pin", "epoch-1-branch-0", "1", "0"]]
    assert open_checkpoint(run, epoch="tag=paper").epoch == 2
    assert told("ckpt", "tag", f"{run}@tag=paper", "camera-ready")[1] == "epoch 2 is tagged camera-ready\n"
    assert told("ckpt", "tag", run, "paper")[1] == "epoch 4 is tagged paper (it was epoch 2)\n"
    assert told("ckpt", "tag", "--delete", run, "paper")[1] == "tag paper is deleted\n"
    marks = json.loads(told("ckpt", "tag", run, "--json")[1])["marks"]
    assert [(one["kind"], one["name"], one["epoch"]) for one in marks] == [
        ("tag", "camera-ready", 2),
        ("pin", "epoch-1-branch-0", 1),
    ]


def test_names_are_taken_behind_options_too(run: Path, told: Told) -> None:
    """`--epoch` and options in the middle mean what they do elsewhere."""
    assert told("ckpt", "tag", run, "--epoch", "2", "paper")[1] == "epoch 2 is tagged paper\n"
    assert told("ckpt", "pin", f"{run}@1", "--json", "why")[0] == 0
    assert told("ckpt", "tag", run, "--delete", "paper")[1] == "tag paper is deleted\n"
    assert told("ckpt", "pin", "--delete", run, "--epoch", "1")[1] == "epoch 1 is no longer pinned as why\n"


def test_what_is_marked_survives_retention_and_prune(run: Path, told: Told) -> None:
    """Until the mark is gone."""
    told("ckpt", "tag", f"{run}@1", "paper")
    told("ckpt", "pin", f"{run}@2", "reader")
    told("ckpt", "pin", f"{run}@2", "colleague")
    assert train(run, [0.1, 0.5, 0.3, 0.2, 0.1], keep_last=1) == 5
    assert "kept: 1 to 2, 5" in told("ckpt", "prune", run, "--keep-last", "1")[1]
    assert told("ckpt", "pin", "--delete", run, "reader")[0] == 0
    assert "nothing to delete" in told("ckpt", "prune", run, "--keep-last", "1")[1]
    assert told("ckpt", "pin", "--delete", f"{run}@2")[1] == "epoch 2 is no longer pinned as colleague\n"
    assert told("ckpt", "tag", run, "paper", "--delete")[0] == 0
    assert "kept: 5\n" in told("ckpt", "prune", run, "--keep-last", "1")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ckpt", "tag", "RUN@1", "two words"), "cannot name a tag or pin"),
        (("ckpt", "pin", "RUN@1", "line\nbreak"), "cannot name a tag or pin"),
        (("ckpt", "pin", "RUN@1", "\u202egnp"), "cannot name a tag or pin"),
        (("ckpt", "tag", "RUN@1", "x" * 64), "cannot name a tag or pin"),
        (("ckpt", "tag", "RUN@9", "x"), ": there are epochs 0 to 4"),
        (("ckpt", "tag", "RUN@1"), "without an epoch"),
        (("ckpt", "tag", "--delete", "RUN"), "needs a name"),
        (("ckpt", "tag", "--delete", "RUN", "x"), "has no tag 'x'"),
        (("ckpt", "pin", "--delete", "RUN"), "needs an epoch or a reason"),
        (("ckpt", "pin", "--delete", "RUN@1"), "has no such pin; known are: none"),
        (("ckpt", "pin", "RUN/status.json"), "is a file"),
        (("ckpt", "tag", "RUN-not-there", "x"), "does not exist"),
    ],
)
def test_a_mistake_is_one_line(run: Path, told: Told, arguments: tuple[str, ...], words: str) -> None:
    """2, what is wrong, and the log is as it was."""
    slot = open_log(LocalStorage(run / "checkpoints")).slot
    code, out, err = told(*(one.replace("RUN", str(run)) for one in arguments))
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert open_log(LocalStorage(run / "checkpoints")).slot == slot


def test_a_running_job_is_not_disturbed(tmp_path: Path, told: Told) -> None:
    """Epochs of a job that keeps one are tagged, pinned and unpinned as it goes; it never notices."""
    run = tmp_path / "run"
    accuracies = json.dumps([0.1] * 5000)
    command = [sys.executable, kept_job.__file__, str(run), accuracies, "0.2", '{"keep_last": 1}']
    writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not list(run.glob("checkpoints/log/*5.json")):
            assert writer.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        for number in range(6):
            for words in (
                ("ckpt", "tag", f"{run}@last", f"t{number}"),
                ("ckpt", "pin", f"{run}@last", f"p{number}"),
            ):
                code, _, err = told(*words)
                assert code == 0, err
            assert told("ckpt", "pin", "--delete", run, f"p{number}")[0] == 0
        (run / "STOP").touch()
        _, err = writer.communicate(timeout=100)
    finally:
        writer.kill()
        writer.communicate()
    assert writer.returncode == 0 and "Warning" not in err, err
    storage = LocalStorage(run / "checkpoints")
    view = open_log(storage)
    tagged = [view.entry(mark.target) for mark in view.state.marks]
    assert [mark.name for mark in view.state.marks] == [f"t{number}" for number in range(6)]
    assert all(one is not None and verify_epoch(storage, one, level="full").verified for one in tagged)
    assert view.generation == 0 and view.state.released, (
        "it was the only writer from its first record to its last"
    )
