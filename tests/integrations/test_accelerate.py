"""A loop of accelerate is saved, killed and resumed to the bits of an undisturbed one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from own_loops import stored
from torchrun import Finished, clean_environment, torchrun

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from torchrelay.integrations.accelerate import AcceleratorCheckpointer

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

PROGRAM = Path(__file__).parents[1] / "programs" / "accelerate_loop.py"


def loop(folder: Path, *options: str, ranks: int = 2) -> Finished:
    """Run the program to its end."""
    return torchrun(PROGRAM, str(folder), *options, ranks=ranks, cwd=folder.parent, warm=True)


def lines(done: Finished, word: str) -> list[str]:
    """What the ranks printed behind a word, sorted."""
    assert done.rc == 0, done
    return sorted(re.findall(rf"{word} (.+)$", done.out + done.err, re.MULTILINE))


def samples(done: Finished) -> dict[tuple[str, str], list[str]]:
    """The samples of all ranks by epoch and step."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines(done, "batch"):
        epoch, step, *values = line.split()
        found[epoch, step] = sorted([*found.get((epoch, step), []), *values])
    return found


@pytest.mark.parametrize(
    ("ranks", "kill", "options"),
    [
        (2, "3.5", []),
        (2, "2.5", ["--every", "3"]),
        (2, "2.8", ["--every", "4", "--seedable"]),
        (1, "2.5", ["--every", "3"]),
        (2, "2.5", ["--every", "3", "--sharded"]),
        (2, "2.5", ["--every", "3", "--dispatch"]),
    ],
)
def test_a_killed_rank_is_resumed_exactly(ranks: int, kill: str, options: list[str], tmp_path: Path) -> None:
    """Killed by SIGKILL, at whole epochs and within one, the same command ends with the same bits."""
    killed = loop(tmp_path / "run", "--kill", kill, *options, ranks=ranks)
    assert killed.rc != 0 and "digest" not in killed.out
    resumed, whole = (loop(tmp_path / name, *options, ranks=ranks) for name in ("run", "whole"))
    assert "start None" not in resumed.out
    assert lines(resumed, "digest") == lines(whole, "digest")
    seen = lines(resumed, "batch")
    assert seen and set(seen) <= set(lines(whole, "batch"))
    assert dict(stored(tmp_path / "run")) == dict(stored(tmp_path / "whole"))


def test_another_number_of_ranks_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    """One rank with twice the batch takes up the epoch; a place between two batches is refused."""
    assert loop(tmp_path / "run", "--kill", "2.5", "--every", "3").rc != 0
    refused = loop(tmp_path / "run", "--batch", "5", ranks=1)
    assert refused.rc != 0
    assert "24 samples" in refused.err and "resume(epoch=1)" in refused.err
    resumed = loop(tmp_path / "run", "--batch", "8", ranks=1)
    assert "start 1+3" in resumed.out
    found, expected = samples(resumed), samples(loop(tmp_path / "whole"))
    full = [place for place in found if place[1] < "9"]  # the last batch is filled up on two ranks
    assert len(full) == 5 + 8
    assert [found[place] for place in full] == [expected[place] for place in full]


def test_the_folder_is_read_without_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs read it, and a process that never imports accelerate loads the model by its own names."""
    assert loop(tmp_path / "run", ranks=1).rc == 0
    page = tmp_path / "page.html"
    for verb in (["ls"], ["verify"], ["ckpt", "diff"], ["report", "-o", str(page)]):
        assert main([*verb, str(tmp_path / "run"), *([str(tmp_path / "run")] if "diff" in verb else [])]) == 0
    assert "3 of 3 epochs verified" in capsys.readouterr().out
    assert "run saved at epoch 3" in page.read_text()
    code = (
        "import sys, torch, torchrelay; model = torch.nn.Sequential(torch.nn.Linear(6, 8), "
        "torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)); "
        "torchrelay.open_checkpoint(sys.argv[1]).load({'model': model}); "
        "assert 'accelerate' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], env=clean_environment(), timeout=100, check=True
    )


class OwnOrder(torch.utils.data.Sampler[int]):
    """An order that a generator of NumPy draws."""

    def __init__(self) -> None:
        self.random = numpy.random.default_rng(4)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(12).tolist())


def test_a_sampler_with_a_generator_of_its_own_resumes(tmp_path: Path) -> None:
    """The rest of an interrupted epoch and later epochs have the order of an undisturbed run."""

    def seen_until(where: Path, last: int) -> list[int]:
        accelerator, seen = Accelerator(cpu=True), list[int]()
        loader = accelerator.prepare(
            torch.utils.data.DataLoader(torch.arange(12), sampler=OwnOrder())  # type: ignore[arg-type]
        )
        with AcceleratorCheckpointer(accelerator, where, {"loader": loader}) as ckpt:
            start = ckpt.resume()
            for epoch in range(start.epoch if start else 0, 3):
                for batch in ckpt.batches(loader):
                    seen.append(int(batch))
                    ckpt.save(epoch, ckpt.step)
                    if len(seen) == last:
                        return seen
                ckpt.save(epoch + 1)
        return seen

    whole, failed = seen_until(tmp_path / "whole", -1), seen_until(tmp_path / "failed", 17)
    assert whole == failed + seen_until(tmp_path / "failed", -1)


class Counter:
    """State that a user registers with the Accelerator."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_the_accelerator_has_is_saved_too(tmp_path: Path) -> None:
    """Registered objects, the gradient scaler and the count of accumulated steps come back."""
    counts = []
    for value in (7, 0):
        accelerator, counter = Accelerator(cpu=True), Counter()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if value else 2.0)
        accelerator.register_for_checkpointing(counter)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        counter.count, accelerator.step = value, value
        with AcceleratorCheckpointer(accelerator, tmp_path, {"model": model}) as ckpt:
            if ckpt.resume() is None:
                ckpt.save(1)
        counts.append((counter.count, accelerator.step, accelerator.scaler.state_dict()["scale"]))
    assert counts == [(7, 7, 8.0)] * 2


def test_misuse_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is no blob, a name that is taken, and states that lie elsewhere name the remedy."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    ckpt = AcceleratorCheckpointer(accelerator, tmp_path, {"model": model})
    with pytest.raises(UsageError, match="not one of the blobs"):
        next(ckpt.batches(torch.utils.data.DataLoader([1, 2])))
    taken: dict[str, Any] = {"model": model, "accumulation": 1}
    with pytest.raises(UsageError, match="blob name 'accumulation' is reserved"):
        AcceleratorCheckpointer(accelerator, tmp_path, taken)
    monkeypatch.setattr(AcceleratorState(), "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(UsageError, match="DeepSpeed keeps them"):
        AcceleratorCheckpointer(accelerator, tmp_path, {"model": model})


def test_the_integration_is_not_imported_by_others() -> None:
    """Importing torchrelay and its rooms imports no trainer."""
    code = (
        "import sys, torchrelay, torchrelay.integrations, torchrelay.runners; "
        "assert 'accelerate' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), timeout=100, check=True)
    assert torchrelay.Checkpointer in AcceleratorCheckpointer.__mro__
