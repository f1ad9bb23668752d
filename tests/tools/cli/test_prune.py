"""`torchrelay prune`: what it says is what goes, whoever interrupts it; never from a run that is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter
from frozen_job import check_epoch
from frozen_job import train as train_frozen
from struck_prune import copied, pruned, pruned_again, tries, whole

from torchrelay.chaos.pytest_plugin import Chaos
from torchrelay.checkpoint.format.position import Facts, Key, Position
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.writer import LogWriter, pin_draft
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.metadata.run_directory import RunDirectory

Told = Callable[..., tuple[int, str, str]]
ACCURACY = [None, 0.5, 0.9, float("nan"), 0.9, 0.0, 0.2]
TRIALS = 12
RULES = ("--keep-last", "1", "--keep-best", "val/acc:max", "--keep-optimizer-last", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 6 with optimizers; 3 is pinned, 6 refers to the tries of 5."""
    run = RunDirectory(tmp_path_factory.mktemp("made") / "run")
    run.create("pruned", ("val/acc", "max"), 1)
    leaves = [parameter("w", torch.arange(3000.0)), moment("m", torch.arange(300.0))]
    with Writing(run.checkpoints, "pruned") as writing:
        for epoch, value in enumerate(ACCURACY):
            facts = Facts(metrics={} if value is None else {"val/acc": value, "loss": 1.0})
            before = (writing.manifests[Position(5)], ["w"]) if epoch == 6 else None
            writing.save(epoch, leaves, facts=facts, referenced=before)
        writing.log.append_draft(pin_draft("paper", Key(0, Position(3))))
    return run.path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def size(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "checkpoints/data").glob("*/*"))


def test_the_dry_run_says_what_the_real_one_does(run: Path, told: Told) -> None:
    """The same list, line by line, and the bytes that are gone afterwards; then nothing is left to do."""
    before = size(run)
    code, foretold, _ = told("ckpt", "prune", run, *RULES, "--dry-run")
    assert code == 0 and size(run) == before and tries(run) == list(range(7))
    code, said, err = told("ckpt", "prune", run, *RULES)
    assert code == 0 and not err
    assert said.replace(" freed", " would be freed (dry run)") == foretold
    assert [line.split()[0] for line in said.splitlines()[1:-2]] == ["0", "1", "2", "4"]
    assert "kept: 2 to 3, 5 to 6" in said
    assert tries(run) == whole(run) == [2, 3, 5, 6]
    assert not list((run / "checkpoints/data").glob("e00000002-*/*.optim.safetensors"))
    assert told("ckpt", "prune", run, *RULES)[1] == "kept: 2 to 3, 5 to 6\nnothing to delete\n"


def test_json_has_the_bytes_that_are_freed(run: Path, told: Told) -> None:
    """The objects of both runs differ in `dry_run` alone."""
    before = size(run)
    foretold = json.loads(told("ckpt", "prune", run, "--every", "3", "--json", "--dry-run")[1])
    said = json.loads(told("ckpt", "prune", run, "--every", "3", "--json")[1])
    assert {**foretold, "dry_run": False} == said
    assert [one["epoch"] for one in said["gone"]] == [1, 2, 4]
    assert [one["epoch"] for one in said["kept"]] == [0, 3, 5, 6]
    assert said["bytes"] == before - size(run) == sum(one["bytes"] for one in said["gone"])


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (("--keep-best", "val/acc:max:2"), [2, 3, 4, 5, 6]),
        (("--keep-best", "val/acc:min"), [3, 5, 6]),
        (("--keep-best", "loss:max"), [1, 3, 5, 6]),
        (("--keep-last", "9"), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_rules_of_the_command_are_those_of_a_run(
    run: Path, told: Told, rules: tuple[str, ...], kept: list[int]
) -> None:
    """The newest, the pinned and what they need stay beside what was asked for; of equal ones the earlier."""
    assert told("ckpt", "prune", run, *rules)[0] == 0
    assert tries(run) == whole(run) == kept


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "needs a rule"),
        (("--epoch", "3"), 2, "epoch 3 is tagged or pinned"),
        (("--epoch", "5"), 2, "epoch 5 stays: epoch 6 uses files of it"),
        (("--epoch", "6"), 2, "epoch 6 is the newest that can be resumed from"),
        (("--epoch", "7"), 2, "epoch 7 is not committed (epochs: 0 to 6)"),
        (("--epoch", "1", "--keep-last", "1"), 2, "cannot be combined"),
        (
            ("--keep-best", "val/ac:max"),
            2,
            "value of metric 'val/ac' (found: loss, val/acc)",
        ),
        (("--keep-best", "val/acc"), 2, "expected METRIC:max or METRIC:min"),
        (("--keep-best", "val/acc:max:0"), 2, "expected METRIC:max or METRIC:min"),
        (("--keep-last", "0"), 2, "expected at least 1"),
    ],
)
def test_a_mistake_deletes_nothing(
    run: Path,
    told: Told,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    """One line that says what is wrong, 2, and every epoch is still there."""
    ended, _, err = told("ckpt", "prune", run, *arguments)
    assert ended == code and words in err
    assert tries(run) == list(range(7))


def test_damage_that_nobody_has_met_costs_no_older_epoch(run: Path, told: Told) -> None:
    """The newest provable epoch stays with its optimizer, and it is said why; the damaged one as evidence."""
    for epoch in (5, 6):
        next((run / "checkpoints/data").glob(f"e{epoch:08d}-*/*.optim.safetensors")).write_bytes(b"")
    code, said, err = told("ckpt", "prune", run, "--keep-last", "1", "--keep-optimizer-last", "1")
    assert code == 0 and "kept: 3 to 6" in said
    assert "epoch 6 is damaged" in err and "older ones stay instead" in err
    storage = LocalStorage(run / "checkpoints")
    candidates = open_log(storage).candidates()
    assert [one.position.epoch for one in candidates if verify_epoch(storage, one).verified] == [4, 3]


def test_metrics_that_cannot_be_read_keep_their_epoch(run: Path, told: Told) -> None:
    """A manifest that is gone may have been the best one's."""
    next((run / "checkpoints/data").glob("e00000001-*/manifest.json")).unlink()
    code, said, err = told("ckpt", "prune", run, "--keep-best", "val/acc:max")
    assert code == 0 and "kept: 1 to 3, 5 to 6" in said
    assert "epoch 1 may be the best and stays" in err


def test_epochs_that_others_refer_to_stay(tmp_path: Path, told: Told) -> None:
    """Of a run of two nodes with frozen tensors the newest epoch is kept, its files, and no others."""
    changes = {2: ["head", "own"], 3: ["head"], 4: ["head", "own"], 5: ["own"]}
    train_frozen(tmp_path / "run", 5, changes, nodes=2)
    code, said, _ = told("ckpt", "prune", tmp_path / "run", "--keep-last", "1")
    assert code == 0
    left = whole(tmp_path / "run")
    assert 0 in left and 5 in left and len(left) < 6, said
    check_epoch(tmp_path / "run", 5, changes, nodes=2)
    train_frozen(tmp_path / "run", 6, changes, nodes=2)
    check_epoch(tmp_path / "run", 6, changes, nodes=2)


def test_a_run_that_is_written_is_left_alone(run: Path, told: Told) -> None:
    """4, with the remedy; what would go is told all the same."""
    writer = LogWriter.take(LocalStorage(run / "checkpoints"), "pruned", period_secs=0.1)
    try:
        command = [sys.executable, "-m", "torchrelay", "ckpt", "prune", str(run), "--keep-last", "1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 4 and "JobRunner(keep_last=...)" in ended.stderr
        assert told("ckpt", "prune", run, "--keep-last", "1", "--dry-run")[0] == 0
    finally:
        writer.release()
    assert tries(run) == list(range(7))
    assert told("ckpt", "prune", run, "--keep-last", "1")[0] == 0
    assert tries(run) == whole(run) == [3, 5, 6]


def test_it_needs_no_torch(run: Path) -> None:
    """Neither torch nor pickle is imported by prune, tag and pin."""
    program = (
        "import sys; from torchrelay.tools.cli.main import main\n"
        "for line in ('tag RUN@2 good', 'pin RUN@best', 'unpin RUN@best',\n"
        "    'prune RUN --keep-best val/acc:max'):\n"
        "    assert main(line.replace('RUN', sys.argv[1]).split()) == 0, line\n"
        "assert not {'torch', 'pickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(run)], check=True, timeout=100)


def test_killed_at_any_moment_it_is_repeated(run: Path, chaos: Chaos) -> None:
    """SIGKILL before, in and after calls to the file system: nothing live is lost, and the rest goes."""
    assert tries(run) == list(range(7))
    tally = chaos.kill_at_every_boundary(pruned, pruned_again, prepare=copied, trials=TRIALS, seed=5)
    lost = [f"{one.name}: {one.reason}" for one in tally.outcomes if one.bad]
    assert not lost and tally.count("kill") == TRIALS, lost


def test_named_epochs_go_and_nothing_else(run: Path, told: Told) -> None:
    """`prune --epoch N` deletes just that epoch, and `open_checkpoint(...).epochs` lists what is left."""
    code, foretold, _ = told("ckpt", "prune", run, "--epoch", "4", "--epoch", "1", "--dry-run")
    assert code == 0 and tries(run) == list(range(7))
    assert [line.split()[0] for line in foretold.splitlines()[1:-2]] == ["1", "4"]
    assert told("ckpt", "prune", run, "--epoch", "4", "--epoch", "1")[0] == 0
    assert tries(run) == whole(run) == [0, 2, 3, 5, 6]
    assert open_checkpoint(run).epochs == (0, 2, 3, 5, 6)
